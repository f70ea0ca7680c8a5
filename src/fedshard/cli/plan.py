"""`fedshard plan`: which layout, which batch, which H, does it fit, how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from fedshard.core.topology import Cluster
    from fedshard.study.plan import Choice, Plan

FLAGS = {
    "--model": "NAME|PATH",
    "--cluster": "NAME|C.toml",
    "--gpus": "N",
    "--sequence-length": "N",
    "--tokens": "N",
    "--max-batch-tokens": "N",
    "--min-rounds": "N",
    "--pure-bfloat16": "",
    "--rows": "N",
    "--write": "R.toml",
    "--json": "",
    "--help": "",
}
COUNTS = ("--gpus", "--sequence-length", "--tokens", "--max-batch-tokens", "--min-rounds", "--rows")
NEEDED = ("--model", "--cluster", "--gpus")

HELP = """\
usage: fedshard plan --model NAME|PATH --cluster NAME|C.toml --gpus N [options]

Tries every layout, micro-batch, accumulation, recomputation and H that fits the devices' memory, and ranks them by
tokens per second, with FSDP and HSDP at their best beside them. It ranks speed, not quality: say how large a batch may
be and how rare rounds.

  --model M             a known model's name, a config.json, or a folder that holds one
  --cluster C           a cluster's name, or its file
  --gpus N              ranks
  --sequence-length N   tokens of a sequence (default: 4096, or the model's positions if they are fewer)
  --tokens N            budget of the run (default: 20 for each parameter)
  --max-batch-tokens N  of one optimizer step of one group (default: 4 Mi)
  --min-rounds N        rounds that the run must have (default: 50)
  --pure-bfloat16       weights and moments in bfloat16 too: half the memory, and rounding in the weights
  --rows N              rows of the table (default: 8)
  --write R.toml        the fastest as a recipe for `fedshard train`
  --json                everything as JSON on stdout

Where nothing fits it says what is short, by how much, and the nearest thing that fits, and exits with 1.
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS, most_paths=0)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    faults = [Fault(word, "no such option", "See fedshard plan --help.") for word in given.overrides[::2]]
    if faults := [*faults, *_faults(given.flags)]:
        raise InputError(faults)
    from fedshard.core.cluster_file import read_cluster

    cluster = read_cluster(given.flags["--cluster"])
    plan = _plan(given.flags, cluster)
    if not plan.choices:
        raise RunError(_nothing_fits(plan, cluster))
    if "--write" in given.flags:
        _write(Path(given.flags["--write"]), plan.choices[0], plan.wanted.budget, given.flags["--model"])
    if "--json" in given.flags:
        print(json.dumps(_as_json(plan), indent=2))
        return
    _show(plan, int(given.flags.get("--rows", "8")))


def _plan(flags: dict[str, str], cluster: Cluster) -> Plan:
    """Raises InputError where model or cluster cannot be what is asked for."""
    from fedshard.study.architectures import read_architecture
    from fedshard.study.plan import DEFAULT_BATCH_TOKENS, DEFAULT_ROUNDS, Wanted, make_plan

    def count(name: str, otherwise: int) -> int:
        return int(flags.get(name, otherwise))

    model = read_architecture(flags["--model"])
    length = count("--sequence-length", min(4096, model.positions or 4096))
    if model.positions is not None and length > model.positions:
        says = f"{length} tokens, and the model has {model.positions} positions"
        raise InputError([Fault("--sequence-length", says, f"Give at most {model.positions}.")])
    wanted = Wanted(
        model,
        cluster.job(count("--gpus", 0)),
        length,
        count("--tokens", 0),
        count("--max-batch-tokens", DEFAULT_BATCH_TOKENS),
        count("--min-rounds", DEFAULT_ROUNDS),
        "--pure-bfloat16" in flags,
    )
    return make_plan(wanted)


def _nothing_fits(plan: Plan, cluster: Cluster) -> str:
    """What is short, by how much, and what would do."""
    from fedshard.study.plan import nearest
    from fedshard.study.reasons import shortage

    said = f"{plan.wanted.architecture.name} on {plan.wanted.cluster.ranks} ranks does not fit: {shortage(plan)}"
    found = nearest(plan.wanted, cluster) if plan.least_bytes else None
    if found is None:
        return said if not plan.least_bytes else f"{said}; nothing on {cluster.name} fits"
    ranks, length = found
    return f"{said}; {ranks} ranks with sequences of {length} tokens would do"


def _show(plan: Plan, rows: int) -> None:
    """The table, the reasons and the bands on stdout: a table on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.table import Table

    from fedshard.study.reasons import reasons

    console = Console()
    shown = _shown(plan, rows)
    if console.is_terminal:
        table = Table(title=_title(plan))
        for name in _cells(shown[0]):
            table.add_column(name, justify="left" if name == "layout" else "right")
        for choice in shown:
            table.add_row(*_cells(choice).values())
        console.print(table)
    else:
        console.out(_title(plan), highlight=False)
        console.out("  ".join(f"{name:>{WIDTHS[name]}}" for name in _cells(shown[0])), highlight=False)
        for choice in shown:
            console.out("  ".join(f"{cell:>{WIDTHS[name]}}" for name, cell in _cells(choice).items()), highlight=False)
    for line in [*_bands(plan), *reasons(plan), *_variants(plan), _budget(plan)]:
        console.out(line, highlight=False)


WIDTHS = {"layout": 19, "micro × acc": 11, "recompute": 9, "H": 5, "tokens/s": 9, "MFU": 6, "memory": 8, "sync": 6}
WIDTHS |= {"between/step": 12, "batch": 7}
"""Of the columns of plain lines, in characters."""


def _cells(choice: Choice) -> dict[str, str]:
    """A row of the table. `batch`: tokens of one optimizer step of one group."""
    setup = choice.setup
    return {
        "layout": f"{choice.strategy} {setup.layout}",
        "micro × acc": f"{setup.micro_batch} × {setup.accumulation}",
        "recompute": "full" if setup.recompute else "none",
        "H": str(setup.every) if setup.layout.groups > 1 else "–",
        "tokens/s": format_count(choice.tokens_per_second),
        "MFU": f"{choice.mfu:.1%}",
        "memory": format_bytes(choice.memory_bytes),
        "between/step": format_bytes(choice.between_bytes) if setup.layout.groups > 1 else "–",
        "batch": format_count(choice.group_tokens),
        "sync": f"{choice.sync_share:.1%}",
    }


def _shown(plan: Plan, rows: int) -> list[Choice]:
    """The fastest layouts, and FSDP and HSDP at their best wherever they stand."""
    baselines = [plan.best(strategy) for strategy in ("FSDP", "HSDP")]
    shown = plan.best_by_layout[:rows]
    return shown + [choice for choice in baselines if choice is not None and choice not in shown]


def _title(plan: Plan) -> str:
    wanted = plan.wanted
    stored = "bfloat16 throughout" if wanted.pure_bfloat16 else "bfloat16 over float32 weights and moments"
    return (
        f"{wanted.architecture.name} on {wanted.cluster.ranks} ranks of {wanted.cluster.name}, "
        f"sequences of {wanted.sequence_length} tokens, {stored}"
    )


def _bands(plan: Plan) -> Iterator[str]:
    """How much faster the fastest is than the baselines."""
    from fedshard.study.bands import speedup

    best = plan.choices[0]
    for strategy in ("FSDP", "HSDP"):
        baseline = plan.best(strategy)
        if baseline is not None and baseline is not best:
            yield f"{best.strategy} over {strategy} at its best: {speedup(best, baseline)}"


def _variants(plan: Plan) -> Iterator[str]:
    """What the fastest federated choice would give with rounds that this version does not have."""
    from fedshard.study.plan import variants

    best = next((choice for choice in plan.choices if choice.setup.layout.groups > 1), None)
    if best is not None:
        told = ", ".join(f"{name} {format_count(speed)} tokens/s" for name, speed in variants(best).items())
        yield f"{best.strategy} {best.setup.layout} with what this version does not train with: {told}"


def _budget(plan: Plan) -> str:
    """Days and GPU-hours."""
    seconds = plan.wanted.budget / plan.choices[0].tokens_per_second
    hours = seconds / 3600 * plan.wanted.cluster.ranks
    return f"{format_count(plan.wanted.budget)} tokens: {seconds / 86400:.3g} days, {format_count(hours)} GPU-hours"


def _as_json(plan: Plan) -> dict[str, Any]:
    """Seconds, bytes, tokens, fractions; choices by layout, the fastest first."""
    from fedshard.study.bands import speedup
    from fedshard.study.reasons import reasons

    best = plan.choices[0]
    baselines = {strategy: plan.best(strategy) for strategy in ("FSDP", "HSDP")}
    return {
        "model": plan.wanted.architecture.name,
        "cluster": plan.wanted.cluster.name,
        "ranks": plan.wanted.cluster.ranks,
        "budget_tokens": plan.wanted.budget,
        "choices": [_row(choice) for choice in plan.best_by_layout],
        "baselines": {name: _row(choice) for name, choice in baselines.items() if choice is not None},
        "speedups": {
            name: speedup(best, choice).by_assumption for name, choice in baselines.items() if choice is not None
        },
        "reasons": list(reasons(plan)),
        "days": plan.wanted.budget / best.tokens_per_second / 86400,
    }


def _row(choice: Choice) -> dict[str, Any]:
    setup = choice.setup
    return {
        "strategy": choice.strategy,
        "layout": {
            "groups": setup.layout.groups,
            "replicas": setup.layout.replicas,
            "shards": setup.layout.shards,
        },
        "micro_batch": setup.micro_batch,
        "accumulation": setup.accumulation,
        "recompute": setup.recompute,
        "every": setup.every,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "memory_bytes": choice.memory_bytes,
        "between_bytes_per_step": choice.between_bytes,
        "group_tokens": choice.group_tokens,
        "sync_share": choice.sync_share,
        "step_seconds": choice.time.total_seconds,
    }


def _write(file: Path, choice: Choice, budget: int, name: str) -> None:
    """The choice as a recipe for the model of that name or path. Raises InputError where the file exists."""
    from fedshard.core.recipe_file import make_recipe, write_recipe
    from fedshard.study.known_models import MODELS

    if file.exists():
        raise InputError([Fault(str(file), "exists already", "Give another file with --write R.toml.")])
    setup, layout = choice.setup, choice.setup.layout
    known = MODELS.get(name.lower())
    folder = str(Path(name).parent if name.endswith(".json") else Path(name))
    raw: dict[str, Any] = {
        "layout": {"groups": layout.groups, "replicas": layout.replicas, "shards": layout.shards},
        "model": {"kind": "config", **known} if known else {"kind": "folder", "path": folder},
        "data": {"sequence_length": setup.sequence_length},
        "train": {
            "micro_batch": setup.micro_batch,
            "accumulation": setup.accumulation,
            "recompute": "full" if setup.recompute else "none",
            "precision": "pure-bfloat16" if setup.stored_bytes == 2.0 else "auto",
            "reduce_dtype": "bfloat16" if setup.reduce_bytes == 2.0 else "float32",
        },
        "sync": {"every": setup.every},
        "budget": {"tokens": budget},
    }
    about = "# By `fedshard plan`. Give data of your own: data.kind, data.path and data.tokenizer.\n\n"
    file.write_text(about + write_recipe(make_recipe(raw)), encoding="utf-8")


def _faults(flags: dict[str, str]) -> Iterator[Fault]:
    """What is missing, and what is no count."""
    for name in NEEDED:
        if name not in flags:
            yield Fault(name, "missing", f"Write {name} {FLAGS[name]}.")
    for name in COUNTS:
        if name in flags and (not flags[name].replace("_", "").isdecimal() or int(flags[name]) < 1):
            yield Fault(name, f"{flags[name]!r} is no number from 1 on", f"Write {name} N.")
