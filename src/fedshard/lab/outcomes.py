"""What came of runs, side by side: numbers for machines, and the same as tables for people."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedshard.core.recipe_file import write_recipe
from fedshard.core.units import format_bytes, format_count, format_seconds
from fedshard.lab.runs import Axis, Run, first_reach, perplexity, shared_end, value_at

NONE = "–"
"""In a cell that has nothing to say."""
AXES: tuple[Axis, ...] = ("tokens", "steps", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What came of one run, and how it compares. `None`: cannot be said, or does not apply."""

    name: str
    path: str
    strategy: str
    layout: str
    """G×R×S."""
    finished: bool
    tokens: int
    steps: int
    seconds: float
    tokens_per_second: float
    steady_tokens_per_second: float
    speedup_over_fsdp: float | None
    """Steady tokens per second, over those of the first run by FSDP."""
    speedup_over_hsdp: float | None
    sync_share_fraction: float
    """What training waited for rounds, of its time."""
    round_sent_bytes: float | None
    """What one rank sends to other groups in a round."""
    eval_perplexity: float | None
    """Of the last evaluation."""
    equal_tokens_perplexity: float | None
    """At the farthest place that every run was evaluated at or after."""
    equal_steps_perplexity: float | None
    equal_seconds_perplexity: float | None
    seconds_to_baseline: float | None
    """Until the evaluation loss that the baseline, FSDP or else HSDP, ended with."""
    predicted_tokens_per_second: float | None


@dataclass(frozen=True)
class Table:
    """A table as the terminal and the page show it. The first column is the run's name."""

    heading: str
    columns: list[str]
    rows: list[list[str]]


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """What came of each run, in their order."""
    speeds = {
        strategy: run.steady_tokens_per_second for strategy in ("FSDP", "HSDP") if (run := _first(runs, strategy))
    }
    target = _last_loss(baseline(runs))
    ends = {axis: shared_end(runs, axis) for axis in AXES}

    def perplexity_at(run: Run, axis: Axis) -> float | None:
        end = ends[axis]
        return None if end is None else _perplexity(value_at(run.eval_curve(axis), end))

    def outcome(run: Run) -> Outcome:
        steady = run.steady_tokens_per_second
        return Outcome(
            name=run.name,
            path=str(run.path),
            strategy=run.recipe.strategy,
            layout=str(run.recipe.shape),
            finished=run.summary is not None,
            tokens=run.steps[-1]["tokens"],
            steps=run.steps[-1]["step"],
            seconds=run.seconds,
            tokens_per_second=run.tokens_per_second,
            steady_tokens_per_second=steady,
            speedup_over_fsdp=steady / speeds["FSDP"] if "FSDP" in speeds else None,
            speedup_over_hsdp=steady / speeds["HSDP"] if "HSDP" in speeds else None,
            sync_share_fraction=run.sync_share_fraction,
            round_sent_bytes=run.round_sent_bytes,
            eval_perplexity=_perplexity(_last_loss(run)),
            equal_tokens_perplexity=perplexity_at(run, "tokens"),
            equal_steps_perplexity=perplexity_at(run, "steps"),
            equal_seconds_perplexity=perplexity_at(run, "seconds"),
            seconds_to_baseline=None if target is None else first_reach(run.eval_curve("seconds"), target),
            predicted_tokens_per_second=run.predicted.get("tokens_per_second"),
        )

    return [outcome(run) for run in runs]


def baseline(runs: Sequence[Run]) -> Run | None:
    """What the others are measured by: the first run by FSDP, else the first by HSDP."""
    return _first(runs, "FSDP") or _first(runs, "HSDP")


def tables(runs: Sequence[Run]) -> list[Table]:
    """Speed, quality, bytes, and what the runs differ by. What has nothing to say is left out: columns, and tables."""
    told = outcomes(runs)
    every = [_speed(told), _quality(told, runs), _bytes(runs), _differences(runs)]
    return [table for table in every if table.rows]


def _speed(told: Sequence[Outcome]) -> Table:
    columns: dict[str, Callable[[Outcome], str]] = {
        "run": _name,
        "tokens/s": lambda each: format_count(each.tokens_per_second),
        "steady": lambda each: format_count(each.steady_tokens_per_second),
        "× FSDP": lambda each: _cell(each.speedup_over_fsdp, "{:.2f}".format),
        "× HSDP": lambda each: _cell(each.speedup_over_hsdp, "{:.2f}".format),
        "waiting for rounds": lambda each: _cell(each.sync_share_fraction or None, "{:.1%}".format),
        "sent per round": lambda each: _cell(each.round_sent_bytes, format_bytes),
        "predicted": lambda each: _cell(each.predicted_tokens_per_second, format_count),
        "measured / predicted": lambda each: _cell(
            each.predicted_tokens_per_second, lambda value: f"{each.steady_tokens_per_second / value:.2f}"
        ),
    }
    return _table("Speed", columns, told)


def _quality(told: Sequence[Outcome], runs: Sequence[Run]) -> Table:
    columns: dict[str, Callable[[Outcome], str]] = {
        "run": _name,
        "tokens": lambda each: format_count(each.tokens),
        "steps": lambda each: f"{each.steps:,}",
        "time": lambda each: format_seconds(each.seconds),
        "perplexity": lambda each: _cell(each.eval_perplexity, _four),
    }
    tokens, steps, seconds = (shared_end(runs, axis) for axis in AXES)
    if len(runs) > 1 and tokens and steps and seconds:
        columns |= {
            f"at {format_count(tokens)} tokens": lambda each: _cell(each.equal_tokens_perplexity, _four),
            f"at {steps:,.0f} steps": lambda each: _cell(each.equal_steps_perplexity, _four),
            f"at {format_seconds(seconds)}": lambda each: _cell(each.equal_seconds_perplexity, _four),
            "time to the baseline's loss": lambda each: _cell(each.seconds_to_baseline, format_seconds),
        }
    return _table("Quality", columns, told)


def _bytes(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        measured, formula = (run.tier_bytes.get(kind, {}) for kind in ("measured", "formula"))
        for tier in dict.fromkeys([*measured, *formula]):
            both = tier in measured and formula.get(tier)
            ratio = f"{measured[tier] / formula[tier]:.3f}" if both else NONE
            cells = [_cell(found.get(tier), format_bytes) for found in (measured, formula)]
            rows.append([run.name, tier, *cells, ratio])
    return Table("Bytes of a step", ["run", "tier", "measured", "formula", "measured / formula"], rows)


def _differences(runs: Sequence[Run]) -> Table:
    """The recipe's keys that have not the same value in all runs."""
    trees = [dict(_flat(tomllib.loads(write_recipe(run.recipe)))) for run in runs]
    keys = [key for key in dict.fromkeys(key for tree in trees for key in tree)
            if len({tree.get(key, NONE) for tree in trees}) > 1]  # fmt: skip
    rows = [[run.name, *(tree.get(key, NONE) for key in keys)] for run, tree in zip(runs, trees, strict=True)]
    return Table("What their recipes differ by", ["run", *keys], rows if keys else [])


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def _table(heading: str, columns: dict[str, Callable[[Outcome], str]], told: Sequence[Outcome]) -> Table:
    cells = {name: [cell(each) for each in told] for name, cell in columns.items()}
    known = {name: column for name, column in cells.items() if set(column) != {NONE}}
    return Table(heading, list(known), [list(row) for row in zip(*known.values(), strict=True)])


def _name(outcome: Outcome) -> str:
    return outcome.name if outcome.finished else f"{outcome.name}, unfinished"


def _first(runs: Sequence[Run], strategy: str) -> Run | None:
    return next((run for run in runs if run.recipe.strategy == strategy), None)


def _last_loss(run: Run | None) -> float | None:
    losses = run.eval_curve("steps")[1] if run else []
    return losses[-1] if losses else None


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)


def _four(value: float) -> str:
    """Four figures."""
    return f"{value:#.4g}"
