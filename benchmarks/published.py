"""Training throughput that others published: reading their table into setups that the formulas can be asked about.

A row names a model, accelerators, a strategy and a batch. What it does not say is taken from what such machines and
frameworks usually do, by rules that hold for all rows; where a row says too little, it is left out with the reason.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from measured import LeftOut

from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster, Constant
from fedshard.study.architectures import architecture_of, known_models, read_architecture
from fedshard.study.setup import Setup
from fedshard.study.size import Architecture

Row = dict[str, str]

COLUMNS = (
    "source", "model", "params", "gpu", "n_gpus", "gpus_per_node", "internode_gbps_per_node", "strategy", "seq_len",
    "micro_batch", "global_batch_tokens", "tokens_per_s_per_gpu", "mfu_pct", "tflops_per_gpu", "notes",
)  # fmt: skip
"""What is read of a row; a column that a table lacks is empty."""


@dataclass(frozen=True)
class Accelerator:
    """What stands for a kind of accelerator: a cluster's file, and what differs from its device and its nodes."""

    cluster: str
    memory_bytes_per_second: float | None = None
    node_fraction: float = 1.0
    """Of the links inside a node."""


ACCELERATORS: tuple[tuple[str, Accelerator], ...] = (
    ("gh200", Accelerator("jupiter")),
    ("h200", Accelerator("dgx-h100", 4.8e12)),  # NVIDIA H200 data sheet
    ("h100.*hbm2e", Accelerator("dgx-h100", 2.4e12)),  # six stacks of HBM2e, as five give an H100 PCIe 2.0 TB/s
    ("h800", Accelerator("dgx-h100", node_fraction=400 / 900)),  # NVLink at 400 GB/s
    ("h100", Accelerator("dgx-h100")),
    ("a100.*p4d", Accelerator("p4d")),
    (r"a100.*(?<!\d)64 ?g", Accelerator("leonardo-nominal")),
    (r"a100.*(?<!\d)40 ?g", Accelerator("dgx-a100", 1.555e12)),  # NVIDIA A100 data sheet
    ("a800", Accelerator("dgx-a100", node_fraction=400 / 600)),  # NVLink at 400 GB/s
    ("a100", Accelerator("dgx-a100")),
    ("mi250", Accelerator("lumi")),
)
"""How a row's accelerator is called, and what stands for it; the first that fits is taken."""

LINE_FRACTION = 0.9
"""Of the line rate that a row states between nodes: what NCCL gets of it, as in the clusters' files."""

OTHER_PARALLELISM = r"\b(tp|pp|cp|tensor|pipeline|megatron|3d)\b"
GUESSED_VOCABULARY, GUESSED_POSITIONS = 50368, 2048


@dataclass(frozen=True)
class Published:
    """One row."""

    line: int
    source: str
    model: str
    accelerator: str
    strategy: str
    setup: Setup
    fused: bool
    """Whether the model was compiled."""
    near: Layout | None
    """Where parameters are gathered a second time from nearby, as in ZeRO++: the layout that they are gathered in."""
    rank_tokens_per_second: float
    """Tokens per second of one rank."""

    @property
    def ranks(self) -> int:
        """How many accelerators."""
        return self.setup.layout.ranks

    @property
    def seconds(self) -> float:
        """Of one optimizer step, as published."""
        return self.setup.rank_tokens * self.setup.accumulation / self.rank_tokens_per_second

    @property
    def family(self) -> tuple[str, str, str, str]:
        """Rows that differ in the number of accelerators, and the batch that goes with it."""
        return self.source, self.model, self.accelerator, self.strategy


def read_published(path: Path) -> Iterator[Published | LeftOut]:
    """Every row of a table of throughputs, or the reason why nothing can be said about it."""
    with path.open(encoding="utf-8", newline="") as file:
        for line, raw in enumerate(csv.DictReader(file), start=2):
            row = {column: (raw.get(column) or "").strip() for column in COLUMNS}
            name = f"line {line}: {row['model']} on {row['n_gpus']} {row['gpu']}, {row['strategy']}"
            try:
                yield _published(line, row)
            except InputError as error:
                yield LeftOut(name, "; ".join(fault.says for fault in error.faults))
            except ValueError as error:
                yield LeftOut(name, str(error))


def _published(line: int, row: Row) -> Published:
    """Raises ValueError or InputError, with what is missing or unknown, where nothing can be said."""
    ranks, sequence_length = _count(row, "n_gpus"), _count(row, "seq_len")
    each = _count(row, "gpus_per_node") if row["gpus_per_node"] else min(8, ranks)
    strategy, told = row["strategy"].lower(), f"{row['strategy']} {row['notes']}".lower()
    layout, near = _layout(strategy, ranks, each)
    architecture, micro_batch = _architecture(row), _count(row, "micro_batch")
    setup = Setup(
        architecture=architecture,
        layout=layout,
        cluster=_cluster(row, ranks, each),
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        accumulation=_accumulation(row, ranks * micro_batch * sequence_length),
        recompute=_recomputes(row, architecture),
        gather_bytes=1.0 if "float8 all-gather" in told else 2.0,
        reduce_bytes=2.0 if re.search(r"\bpure\b|deepspeed|zero|mics", told) else 4.0,
        reshard_after_forward=not re.search(r"grad_op|zero-?2", strategy),
    )
    return Published(
        line=line,
        source=row["source"],
        model=row["model"],
        accelerator=row["gpu"],
        strategy=row["strategy"],
        setup=setup,
        fused="compile" in strategy,
        near=near,
        rank_tokens_per_second=_tokens_per_second(row, setup),
    )


def _count(row: Row, key: str) -> int:
    number = _number(row[key])
    if number is None or not number.is_integer():
        raise ValueError(f"{key} is {row[key]!r}, no positive whole number")
    return int(number)


def _number(text: str) -> float | None:
    """A number that stands by itself; `>54.5` and `up to 147` are none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _layout(strategy: str, ranks: int, each: int) -> tuple[Layout, Layout | None]:
    """What is sharded over what, and for ZeRO++ the layout of its second gather."""
    if re.search(OTHER_PARALLELISM, strategy):
        raise ValueError(f"{strategy!r} cuts the model in other ways, which are not modelled")
    if re.search(r"zero\+\+|hpz", strategy):
        return Layout(1, 1, ranks), Layout(1, -(-ranks // each), min(each, ranks))
    if re.search(r"hsdp|mics|hybrid", strategy):
        told = re.search(r"\((\d+)", strategy)
        shards = min(int(told[1]) if told else each, ranks)
        if ranks % shards:
            raise ValueError(f"{ranks} ranks are no whole number of {shards} shards")
        return Layout(1, ranks // shards, shards), None
    if re.search(r"fsdp|full_shard|grad_op|zero-?[23]", strategy):
        return Layout(1, 1, ranks), None
    if re.search(r"\bddp\b", strategy):
        return Layout(1, ranks, 1), None
    raise ValueError(f"no model of the strategy {strategy!r}")


def _recomputes(row: Row, architecture: Architecture) -> bool:
    """Whether most blocks compute their activations again; selective recomputation is left to the calibration."""
    if layers := re.search(r"ckpt_layers=(\d+)", row["notes"]):
        return 2 * int(layers[1]) > architecture.blocks
    return bool(re.search(r"(?<!no )\bac\b", row["strategy"].lower()))


def _accumulation(row: Row, tokens: int) -> int:
    """Micro-batches in a step of which all ranks take `tokens` at once: as told, or from the tokens of a whole step."""
    if told := re.search(r"grad_accum=(\d+)", row["notes"]):
        return max(1, int(told[1]))
    batch = row["global_batch_tokens"].upper()
    unit = {"K": 2**10, "M": 2**20}.get(batch[-1:], 1)
    total = _number(batch.rstrip("KM"))
    if total is None:
        return 1
    micro_batches = total * unit / tokens
    if micro_batches < 0.9 or abs(micro_batches - round(micro_batches)) > 0.1:
        raise ValueError(f"{batch} tokens in a step are no whole number of micro-batches of {tokens}")
    return round(micro_batches)


def _tokens_per_second(row: Row, setup: Setup) -> float:
    """Of one rank: as published, or from the seconds of a step, the MFU, or the FLOP/s that were."""
    if (told := _number(row["tokens_per_s_per_gpu"])) is not None:
        return told
    tokens = setup.rank_tokens * setup.accumulation
    if seconds := re.search(r"iteration_time_s=([\d.]+)", row["notes"]):
        return tokens / float(seconds[1])
    flops = setup.architecture.flops_per_token(setup.sequence_length)
    if (percent := _number(row["mfu_pct"])) is not None:
        return percent / 100 * setup.cluster.device.peak_flops_per_second.value / flops
    if (teraflops := _number(row["tflops_per_gpu"])) is not None:
        return teraflops * 1e12 / flops
    raise ValueError("no throughput that is one number")


def _cluster(row: Row, ranks: int, each: int) -> Cluster:
    """A cluster of nodes with so many accelerators, with the links that the row states or that such nodes have."""
    kind = next((kind for name, kind in ACCELERATORS if re.search(name, row["gpu"].lower())), None)
    if kind is None:
        raise ValueError(f"no cluster stands for {row['gpu']!r}")
    cluster = read_cluster(kind.cluster)
    device, inside, outside = cluster.device, cluster.tiers["node"], cluster.tiers["cell"]
    if kind.memory_bytes_per_second is not None:
        device = device.model_copy(update={"memory_bytes_per_second": _constant(kind.memory_bytes_per_second)})
    rate = outside.link_bytes_per_second.value * each / cluster.ranks_per_node
    if (gigabits := _number(row["internode_gbps_per_node"])) is not None:
        rate = LINE_FRACTION * gigabits * 1e9 / 8
    links = {
        "node": inside.model_copy(
            update={"link_bytes_per_second": _constant(inside.link_bytes_per_second.value * kind.node_fraction)}
        ),
        "cell": outside.model_copy(update={"link_bytes_per_second": _constant(rate)}),
    }
    nodes = -(-ranks // each)
    changes = {"device": device, "tiers": links, "ranks_per_node": each, "nodes": nodes, "nodes_per_cell": nodes}
    return cluster.model_copy(update=changes).job(ranks)


def _constant(value: float) -> Constant:
    return Constant(value=value, source="a row of the table, or what such machines have", confidence="assumed")


def _architecture(row: Row) -> Architecture:
    """The model with exactly so many parameters, the one of that name, or a plain one of that size."""
    total = _number(row["params"])
    known = {read_architecture(name).total: name for name in known_models()}
    if total is not None and int(total) in known:
        return read_architecture(known[int(total)])
    if total is None:
        near = difflib.get_close_matches(re.sub(r"[ _]+", "-", row["model"].lower()), known_models(), 1, cutoff=0.8)
        if not near:
            raise ValueError(f"neither the parameters of {row['model']!r} are told nor its architecture known")
        return read_architecture(near[0])
    return _plain(total)


def _plain(total: float) -> Architecture:
    """A GPT-2 of that size, as deep as such models are: MPT's sizes, which are of this kind, are met to the element."""
    best: tuple[float, int, int] | None = None
    for width in range(64, 2**15, 64):
        outside = (GUESSED_VOCABULARY + GUESSED_POSITIONS + 2) * width
        block = 12 * width * width + 13 * width
        blocks = max(1, round((total - outside) / block))
        if 8 * blocks <= width <= 256 * blocks:
            miss = abs(outside + blocks * block - total) / total
            best = min(best or (miss, width, blocks), (miss, width, blocks))
    if best is None or best[0] > 0.05:
        raise ValueError(f"no plain architecture has {total:.4g} parameters")
    _, width, blocks = best
    config = {"model_type": "gpt2", "vocab_size": GUESSED_VOCABULARY, "n_positions": GUESSED_POSITIONS}
    heads = width // 64
    return architecture_of(config | {"n_embd": width, "n_layer": blocks, "n_head": heads}, f"{total:.3g} parameters")
