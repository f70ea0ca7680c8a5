"""The reference experiment of arXiv:2609.20359, predicted: Llama-3.1-8B on 512 A100 of Leonardo, four methods.

    python benchmarks/paper.py

Settings are those of the authors' public code and logs (alpha-unito/xffl): bf16 throughout, two sequences of 2,048
tokens a rank, H = 8, tied embeddings. The devices' efficiency comes from an earlier log of theirs, and nothing else is
fitted. What is said about the result stands in docs/formal/paper.md.

    nominal    links as the machine's makers describe them          tuned     gathers and reductions behind computing
    observed   as jobs find them: spread out, slower in long rings   untuned   nothing behind anything, as with
    noise      observed, with heavy-tailed collectives and ranks               prefetching off and a sync at each phase
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from common import save

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster, Constant, Tier
from fedshard.study.architectures import architecture_of, read_architecture
from fedshard.study.bounds import break_even_every, speedup_bound
from fedshard.study.calibrate import at_efficiency, calibrated_efficiency, loaded_work, predicted_step
from fedshard.study.cost import leaving_bytes, round_exposed_seconds, round_sent_bytes, step_seconds
from fedshard.study.known_models import MODELS
from fedshard.study.setup import Setup
from fedshard.study.size import Architecture
from fedshard.study.stragglers import waiting, with_jitter
from fedshard.study.work import StepWork

Links = Literal["nominal", "observed", "noise"]

CLUSTERS: dict[Links, str] = {
    "nominal": "leonardo-nominal",
    "observed": "leonardo-observed",
    "noise": "leonardo-observed",
}
METHODS = {
    "FSDP": Layout(1, 1, 512),
    "HSDP": Layout(1, 128, 4),
    "FL+FSDP": Layout(128, 1, 4),
    "FL+HSDP": Layout(16, 8, 4),
}
EVERY, SEQUENCE_LENGTH, MICRO_BATCH = 8, 2048, 2
PUBLISHED_SPEEDUP = 8.04
SLOWEST_SECONDS = 720 / 64
"""Of a step of the slowest method, inferred from where the plots' axis ends, and the number of steps."""

LOG_STEPS, LOG_MICRO_BATCH = 32, 8
LOGS: tuple[tuple[int, Layout, int, float], ...] = (
    (4, Layout(1, 4, 4), 1, 158.5),
    (8, Layout(1, 8, 4), 1, 158.9),
    (16, Layout(1, 16, 4), 1, 159.8),
    (32, Layout(1, 32, 4), 1, 161.2),
    (4, Layout(2, 2, 4), 8, 158.9),
    (8, Layout(4, 2, 4), 8, 159.8),
    (16, Layout(8, 2, 4), 8, 160.4),
    (4, Layout(2, 2, 4), 4, 161.6),
    (8, Layout(4, 2, 4), 4, 163.1),
    (16, Layout(8, 2, 4), 4, 163.8),
    (4, Layout(2, 2, 4), 1, 180.7),
    (8, Layout(4, 2, 4), 1, 182.4),
    (16, Layout(8, 2, 4), 1, 187.2),
)
"""Nodes, layout, H, seconds of 32 steps: alpha-unito/xffl, logs at c9ba115 (March 2025). Groups are of two nodes."""

TIED = architecture_of({**MODELS["llama-3.1-8b"], "tie_word_embeddings": True}, "llama-3.1-8b, tied")
UNTIED = read_architecture("llama-3.1-8b")


@dataclass(frozen=True)
class Assumption:
    """How links are, and whether communication hides behind computing."""

    links: Links
    tuned: bool

    def __str__(self) -> str:
        return f"{self.links}, {'tuned' if self.tuned else 'untuned'}"


ASSUMPTIONS = [Assumption(links, tuned) for links in CLUSTERS for tuned in (True, False)]


def setup_of(
    model: Architecture, layout: Layout, cluster: Cluster, micro_batch: int, every: int = EVERY, *, sliced: bool = False
) -> Setup:
    """All in bf16. The authors' round is naive: each replica averages its own copy."""
    return Setup(
        model,
        layout,
        cluster.job(layout.ranks),
        SEQUENCE_LENGTH,
        micro_batch=micro_batch,
        stored_bytes=2.0,
        reduce_bytes=2.0,
        round_bytes=2.0,
        every=every,
        sliced=sliced,
    )


def seconds_of(setup: Setup, assumption: Assumption, efficiency: float) -> float:
    """Of one step, with its part of a round."""
    at = at_efficiency(setup, efficiency)
    work = loaded_work(at) if assumption.tuned else loaded_work(at, contention=0.0)
    if assumption.links == "noise":
        work = with_jitter(work, at)
    seconds = step_seconds(work, at).total_seconds if assumption.tuned else _untuned_seconds(work, at)
    return seconds + (waiting(at, work.compute_seconds).total_seconds if assumption.links == "noise" else 0.0)


def _untuned_seconds(work: StepWork, setup: Setup) -> float:
    """Every piece after the other."""
    root, *blocks = work.units
    gathers = root.gather_seconds + 2 * sum(block.gather_seconds for block in blocks)
    reductions = sum(unit.scatter_seconds + unit.replica_seconds for unit in work.units)
    inner = work.compute_seconds + gathers + reductions + work.clip_seconds + work.optimizer_seconds
    return inner + round_exposed_seconds(work, setup, inner) / setup.every


def efficiency_of(cluster: Cluster) -> float:
    """Calibrated on the first of the logs."""
    _, layout, every, seconds = LOGS[0]
    return calibrated_efficiency(setup_of(UNTIED, layout, cluster, LOG_MICRO_BATCH, every), seconds / LOG_STEPS)


def logs(cluster: Cluster, efficiency: float) -> list[dict[str, Any]]:
    """The earlier logs beside their predictions; the first is what was calibrated on."""
    told = []
    for nodes, layout, every, seconds in LOGS:
        setup = setup_of(UNTIED, layout, cluster, LOG_MICRO_BATCH, every)
        predicted = predicted_step(setup, efficiency=efficiency).total_seconds * LOG_STEPS
        told.append(
            {
                "nodes": nodes,
                "strategy": layout.strategy,
                "every": every,
                "logged_seconds": seconds,
                "predicted_seconds": round(predicted, 1),
                "error_percent": round(100 * (predicted / seconds - 1), 1),
            }
        )
    return told


def methods(assumption: Assumption, efficiency: float, scale: float = 1.0) -> dict[str, float]:
    """Seconds of a step of each method, with links between nodes at `scale` times their rate."""
    cluster = scaled(read_cluster(CLUSTERS[assumption.links]), scale)
    return {
        name: seconds_of(setup_of(TIED, layout, cluster, MICRO_BATCH), assumption, efficiency)
        for name, layout in METHODS.items()
    }


def scaled(cluster: Cluster, scale: float) -> Cluster:
    """The cluster with every link that leaves a node at this part of its rate."""

    def slower(tier: Tier) -> Tier:
        def part(rate: Constant) -> Constant:
            return rate.model_copy(update={"value": rate.value * scale})

        alone = tier.rank_bytes_per_second
        return tier.model_copy(
            update={
                "link_bytes_per_second": part(tier.link_bytes_per_second),
                "rank_bytes_per_second": None if alone is None else part(alone),
            }
        )

    tiers = {name: tier if name == "node" else slower(tier) for name, tier in cluster.tiers.items()}
    return cluster.model_copy(update={"tiers": tiers})


def speedup(seconds: dict[str, float]) -> float:
    """Of FL+FSDP over FSDP."""
    return seconds["FSDP"] / seconds["FL+FSDP"]


def needed_links(assumption: Assumption, efficiency: float) -> dict[str, Any]:
    """How slow links between nodes must be for the published speed-up, and what the four methods take then."""

    def at(scale: float) -> dict[str, float]:
        return methods(assumption, efficiency, scale)

    scale = _largest(lambda scale: speedup(at(scale)) >= PUBLISHED_SPEEDUP)
    rate = read_cluster(CLUSTERS[assumption.links]).tiers["global"].link_bytes_per_second.value
    return {"gigabytes_per_second": round(scale * rate / 1e9, 2), "step_seconds": _rounded(at(scale))}


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest factor up to 1 at which something holds that holds for small ones. Raises ValueError if none does."""
    low, high = 1e-3, 1.0
    if not holds(low):
        raise ValueError("holds nowhere")
    while high / low > 1 + 1e-4:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def needed_checks(seconds: dict[str, float]) -> dict[str, Any]:
    """How long a check before each collective must take, for each of its ranks, for the published speed-up.

    PyTorch's debug mode DETAIL, which the authors' logs show, has all ranks of a collective report to the first one.
    """
    checked = {name: ranks_checked(setup) for name, setup in setups("nominal").items()}
    slow, fast = "FSDP", "FL+FSDP"
    missing = PUBLISHED_SPEEDUP * seconds[fast] - seconds[slow]
    each = missing / (checked[slow] - PUBLISHED_SPEEDUP * checked[fast])
    return {
        "milliseconds_per_rank_and_collective": round(1e3 * each, 3),
        "step_seconds": _rounded({name: seconds[name] + each * checked[name] for name in seconds}),
    }


def ranks_checked(setup: Setup) -> float:
    """Ranks of all collectives of one step added up; the authors' round is one collective, of all tensors together."""
    layout, units = setup.layout, setup.architecture.blocks + 1
    counts = ((layout.shards, 3 * units - 1), (layout.replicas, units), (layout.groups, 1 / setup.every))
    return sum(ranks * count for ranks, count in counts if ranks > 1)


def slicing() -> dict[str, Any]:
    """FL+HSDP with the naive round and with the sliced one, on nominal links."""
    cluster = read_cluster(CLUSTERS["nominal"])
    efficiency, layout = efficiency_of(cluster), METHODS["FL+HSDP"]
    told: dict[str, Any] = {}
    for name, sliced in (("naive", False), ("sliced", True)):
        setup = setup_of(TIED, layout, cluster, MICRO_BATCH, sliced=sliced)
        step = predicted_step(setup, efficiency=efficiency)
        told[name] = {
            "round_seconds": round(step.round_exposed_seconds * EVERY, 3),
            "step_seconds": round(step.total_seconds, 3),
            "between_groups_gigabytes": round(round_sent_bytes(setup) / 1e9, 3),
            "node_gigabytes_per_step": round(leaving_bytes(setup, "node") / 1e9, 1),
            "break_even_every": round(break_even_every(layout, sliced=sliced), 1),
        }
    hsdp = setups("nominal")["HSDP"]
    told["HSDP"] = {
        "step_seconds": round(predicted_step(hsdp, efficiency=efficiency).total_seconds, 3),
        "node_gigabytes_per_step": round(leaving_bytes(hsdp, "node") / 1e9, 1),
    }
    return told


def setups(links: Links) -> dict[str, Setup]:
    """The four methods as they were run."""
    cluster = read_cluster(CLUSTERS[links])
    return {name: setup_of(TIED, layout, cluster, MICRO_BATCH) for name, layout in METHODS.items()}


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in seconds.items()}


def figures() -> dict[str, Any]:
    """Everything that is said about the experiment."""
    efficiencies = {links: efficiency_of(read_cluster(name)) for links, name in CLUSTERS.items()}
    seconds = {each: methods(each, efficiencies[each.links]) for each in ASSUMPTIONS}
    untuned, tuned = Assumption("nominal", False), Assumption("nominal", True)
    nominal = setups("nominal")
    bound = speedup_bound(nominal["FSDP"], nominal["FL+FSDP"])
    return {
        "published": {
            "speedup": PUBLISHED_SPEEDUP,
            "slowest_step_seconds": SLOWEST_SECONDS,
            "fastest_step_seconds": round(SLOWEST_SECONDS / PUBLISHED_SPEEDUP, 2),
        },
        "efficiency": {links: round(value, 3) for links, value in efficiencies.items()},
        "logs": logs(read_cluster(CLUSTERS["nominal"]), efficiencies["nominal"]),
        "step_seconds": {str(each): _rounded(value) for each, value in seconds.items()},
        "speedups": {str(each): _speedups(value) for each, value in seconds.items()},
        "largest_by_traffic": round(bound.traffic, 2),
        "needed": {
            "links, tuned": needed_links(tuned, efficiencies["nominal"]),
            "links, untuned": needed_links(untuned, efficiencies["nominal"]),
            "checks, untuned": needed_checks(seconds[untuned]),
        },
        "slicing": slicing(),
    }


def _speedups(seconds: dict[str, float]) -> dict[str, float]:
    pairs = (("FL+FSDP", "FSDP"), ("FL+FSDP", "HSDP"), ("FL+HSDP", "FSDP"), ("FL+HSDP", "HSDP"))
    return {f"{fast} over {slow}": round(seconds[slow] / seconds[fast], 2) for fast, slow in pairs}


def main() -> None:
    told = figures()
    for name, value in told.items():
        print(name)
        for line in value if isinstance(value, list) else value.items() if isinstance(value, dict) else [value]:
            print("  ", line)
    save("paper", told)


if __name__ == "__main__":
    main()
