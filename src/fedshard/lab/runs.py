"""Run folders as reports and comparisons see them: curves over tokens, steps and seconds, whatever wrote them.

Seconds are training time: steps, and what of rounds no group trained in; evaluation and saving are in nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe

Axis = Literal["tokens", "steps", "seconds"]
Curve = tuple[list[float], list[float]]
"""Places on an axis, rising, and values."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    path: Path
    recipe: Recipe
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    rounds: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None for a run that is not finished."""
    tier_bytes: dict[str, dict[str, float]]
    """`measured` and `formula`: tier → bytes of one step; empty where nobody counted."""
    predicted: dict[str, float]
    """What the cost model expected: `tokens_per_second`; empty where nobody asked."""

    @property
    def name(self) -> str:
        """As figures call it."""
        return f"{self.recipe.strategy} {self.recipe.shape}"

    @cached_property
    def seconds_at(self) -> dict[int, float]:
        """Step → training seconds up to it, its round included."""
        exposed = {row["step"]: row["exposed_seconds"] for row in self.rounds}
        total, at = 0.0, {0: 0.0}
        for row in self.steps:
            total += row["seconds"] + exposed.get(row["step"], 0.0)
            at[row["step"]] = total
        return at

    def place(self, row: dict[str, Any], axis: Axis) -> float:
        """Where a row stands on an axis."""
        if axis == "seconds":
            return self.seconds_at.get(row["step"], 0.0)
        return float(row["tokens"] if axis == "tokens" else row["step"])

    def curve(self, what: Literal["loss", "eval_loss", "tokens_per_second"], axis: Axis) -> Curve:
        """Values that are finite, over an axis."""
        rows, key = (self.evals, "loss") if what == "eval_loss" else (self.steps, what)
        points = [(self.place(row, axis), float(row[key])) for row in rows if row[key] is not None]
        return [place for place, _ in points], [value for _, value in points]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole training time."""
        if self.summary is not None:
            return self.summary["tokens_per_second"]
        return self.steps[-1]["tokens"] / self.seconds_at[self.steps[-1]["step"]]

    @property
    def steady_tokens_per_second(self) -> float:
        """Over whole rounds; of an unfinished run, over all of it."""
        return self.summary["steady_tokens_per_second"] if self.summary is not None else self.tokens_per_second

    @property
    def sync_share(self) -> float:
        """What rounds take of the training time."""
        return sum(row["exposed_seconds"] for row in self.rounds) / self.seconds_at[self.steps[-1]["step"]]

    @property
    def inner_share(self) -> float | None:
        """What communication inside a group takes of a step, by the steps that were sampled; None if none was."""
        sampled = [row for row in self.steps if row.get("inner_seconds") is not None]
        if not sampled:
            return None
        return min(1.0, sum(row["inner_seconds"] for row in sampled) / sum(row["seconds"] for row in sampled))


def read_run(path: Path) -> Run:
    """A run's folder. Raises InputError where it is none, or has no step yet."""
    if not (path / "recipe.toml").is_file():
        raise InputError([Fault(str(path), "is no run folder", "Give one that `fedshard train` made.")])
    summary = path / "summary.json"
    run = Run(
        path=path,
        recipe=read_recipe(path / "recipe.toml"),
        steps=_rows(path / "metrics.jsonl"),
        rounds=_rows(path / "rounds.jsonl"),
        evals=_rows(path / "evals.jsonl"),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
        tier_bytes=_tree(path / "bytes.json"),
        predicted=_tree(path / "predicted.json"),
    )
    if not run.steps:
        raise InputError([Fault(str(path), "has no step yet", "Wait for its first round.")])
    return run


def value_at(curve: Curve, place: float) -> float | None:
    """The curve's value at a place, straight between its points; None outside them.

    >>> value_at(([1.0, 3.0], [4.0, 2.0]), 2.0)
    3.0
    """
    places, values = curve
    for (before, low), (after, high) in zip(
        zip(places, values, strict=True), zip(places[1:], values[1:], strict=True), strict=False
    ):
        if before <= place <= after:
            return low + (high - low) * ((place - before) / (after - before) if after > before else 1.0)
    return values[places.index(place)] if place in places else None


def first_reach(curve: Curve, value: float) -> float | None:
    """The first place where the curve is at or below a value; None if it never is.

    >>> first_reach(([0.0, 10.0], [4.0, 2.0]), 3.0)
    5.0
    """
    places, values = curve
    for index, (place, at) in enumerate(zip(places, values, strict=True)):
        if at <= value:
            if index == 0:
                return place
            before, above = places[index - 1], values[index - 1]
            return before + (place - before) * (above - value) / (above - at)
    return None


def shared_end(runs: Sequence[Run], axis: Axis) -> float:
    """The farthest place on an axis at which every run was evaluated."""
    return min((run.curve("eval_loss", axis)[0] or [0.0])[-1] for run in runs)


def _rows(file: Path) -> list[dict[str, Any]]:
    """Lines of a file, without a last one that a killed run left unfinished."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _tree(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
