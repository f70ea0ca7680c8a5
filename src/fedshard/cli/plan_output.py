"""What `fedshard plan` prints: a table on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from fedshard.core.units import format_bytes, format_count
from fedshard.study.choice import Choice
from fedshard.study.plan import Plan
from fedshard.study.reasons import losers, reasons
from fedshard.study.shortage import Shortage
from fedshard.study.what_if import WhatIf, what_ifs

BASELINES = ("FSDP", "HSDP")

WIDTHS = {"layout": 20, "micro × acc": 11, "recompute": 9, "H": 4, "tokens/s": 8, "MFU": 5, "memory": 7}
WIDTHS |= {"between/step": 12, "batch": 6, "sync": 5, "days": 6}
"""Of the columns of plain lines, in characters."""


def show(plan: Plan, rows: int) -> None:
    """The table, the reasons and what else is worth knowing, on stdout. Lines too where a table would be cut off."""
    console, shown = Console(), shown_rows(plan, rows)
    if console.is_terminal and console.width >= sum(WIDTHS.values()) + 3 * len(WIDTHS) + 1:
        table = Table(title=title(plan))
        for name in WIDTHS:
            table.add_column(name, justify="left" if name == "layout" else "right")
        for choice in shown:
            table.add_row(*cells(choice).values())
        console.print(table)
    else:
        print(title(plan))
        print("  ".join(f"{name:>{width}}" for name, width in WIDTHS.items()))
        for choice in shown:
            print("  ".join(f"{cell:>{WIDTHS[name]}}" for name, cell in cells(choice).items()))
    for line in [*reasons(plan, losers(plan)), *map(what_if_line, what_ifs(plan)), budget_line(plan)]:
        console.out(line, highlight=False)


def shown_rows(plan: Plan, rows: int) -> list[Choice]:
    """The first rows, and FSDP and HSDP at their best wherever they stand."""
    shown = plan.rows[:rows]
    baselines = (plan.best(strategy) for strategy in BASELINES)
    return shown + [choice for choice in baselines if choice is not None and choice not in shown]


def cells(choice: Choice) -> dict[str, str]:
    """A row of the table. `batch`: tokens of one optimizer step of one group."""
    setup = choice.setup
    federates = setup.layout.groups > 1
    return {
        "layout": f"{choice.strategy} {setup.layout}",
        "micro × acc": f"{setup.micro_batch} × {setup.accumulation}",
        "recompute": "full" if setup.recompute else "none",
        "H": str(setup.every) if federates else "–",
        "tokens/s": format_count(choice.tokens_per_second),
        "MFU": f"{choice.mfu:.1%}",
        "memory": format_bytes(choice.memory_bytes),
        "between/step": format_bytes(choice.between_bytes) if federates else "–",
        "batch": format_count(choice.group_tokens),
        "sync": f"{choice.sync_share:.1%}",
        "days": f"{choice.days:.3g}",
    }


def title(plan: Plan) -> str:
    """What is trained on what."""
    wanted, ranks = plan.wanted, plan.wanted.cluster.ranks
    return (
        f"{wanted.architecture.name} on {ranks} rank{'s' * (ranks > 1)} of {wanted.cluster.name}, "
        f"sequences of {wanted.sequence_length} tokens, precision {wanted.precision}"
    )


def what_if_line(tried: WhatIf) -> str:
    """What a row would gain by what is not chosen unasked."""
    said = f"{tried.row.strategy} {tried.row.setup.layout} with {tried.name} ({tried.needs}): "
    if tried.choice is None:
        return said + "does not fit"
    again = tried.choice.setup.recompute and not tried.row.setup.recompute
    return f"{said}{tried.gain}" + ", computing activations again to make room" * again


def budget_line(plan: Plan) -> str:
    """Days and GPU-hours of the first row."""
    first = plan.rows[0]
    warmup = ", its synchronous warm-up included" * (first.timetable.warmup_steps > 0)
    return (
        f"{format_count(first.budget)} tokens with {first.strategy} {first.setup.layout}: {first.days:.3g} days, "
        f"{format_count(first.gpu_hours)} GPU-hours{warmup}"
    )


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Seconds, bytes, tokens, fractions; choices by layout, the fastest first."""
    baselines, lost = {strategy: plan.best(strategy) for strategy in BASELINES}, list(losers(plan))
    return {
        "fits": True,
        **_asked(plan),
        "choices": [_row(choice) for choice in plan.rows],
        "baselines": {name: _row(choice) for name, choice in baselines.items() if choice is not None},
        "speedups": {row.strategy: band.by_assumption for row, band in lost},
        "reasons": list(reasons(plan, lost)),
        "what_if": [
            {
                "name": tried.name,
                "needs": tried.needs,
                "choice": None if tried.choice is None else _row(tried.choice),
                "gain": None if tried.gain is None else tried.gain.by_assumption,
            }
            for tried in what_ifs(plan)
        ],
    }


def short_as_json(plan: Plan, short: Shortage) -> dict[str, Any]:
    """What is short where nothing fits: bytes of a rank, tokens of a batch, or rounds."""
    return {"fits": False, **_asked(plan), "short": {**asdict(short), "would_do": list(short.would_do)}}


def short_lines(plan: Plan, short: Shortage) -> Iterator[str]:
    """The same for a person."""
    yield f"{title(plan)}: nothing fits"
    yield short.says
    nothing = f"nothing that fits on {plan.wanted.cluster.name} was found"
    yield f"would do: {', or '.join(short.would_do)}" if short.would_do else nothing


def _asked(plan: Plan) -> dict[str, Any]:
    wanted = plan.wanted
    return {
        "model": wanted.architecture.name,
        "cluster": wanted.cluster.name,
        "ranks": wanted.cluster.ranks,
        "sequence_length": wanted.sequence_length,
        "precision": wanted.precision,
        "budget_tokens": wanted.budget,
        "max_batch_tokens": wanted.max_batch_tokens,
        "min_rounds": wanted.min_rounds,
    }


def _row(choice: Choice) -> dict[str, Any]:
    setup = choice.setup
    return {
        "strategy": choice.strategy,
        "layout": asdict(setup.layout),
        "micro_batch": setup.micro_batch,
        "accumulation": setup.accumulation,
        "recompute": setup.recompute,
        "every": setup.every if setup.layout.groups > 1 else None,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "memory_bytes": choice.memory_bytes,
        "between_bytes_per_step": choice.between_bytes,
        "group_tokens": choice.group_tokens,
        "sync_share": choice.sync_share,
        "step_seconds": choice.time.total_seconds,
        "days": choice.days,
        "gpu_hours": choice.gpu_hours,
    }
