"""Run folders as reports and comparisons see them: curves over tokens, steps and seconds.

Seconds are training time: steps, and the part of rounds in which no group trained. Starting, evaluating and saving are
in nobody's. Lines of steps have the seconds of the slowest group, but it is in rounds that groups wait for each other,
so their sum is a little too long; of a finished run the curves' seconds are scaled to end where the run did.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe

Axis = Literal["tokens", "steps", "seconds"]
Curve = tuple[list[float], list[float]]
"""Places on an axis, rising, and values."""
Line = dict[str, Any]
"""A line of a JSONL file, by the keys of docs/run-folder.md."""


LARGEST_EXPONENT = 700.0
"""Of e, for a finite float."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not, with one step at least."""

    path: Path
    name: str
    """As tables and figures call it: strategy and layout, and what tells it from its like."""
    recipe: Recipe
    steps: list[Line]
    rounds: list[Line]
    evals: list[Line]
    summary: Mapping[str, Any] | None
    """None for a run that is not finished."""
    environment: Mapping[str, Any]
    """What it ran on; empty where that is not known."""
    tier_bytes: Mapping[str, Mapping[str, float]]
    """`measured` and `formula`: tier → bytes of one step, of all ranks; empty where nobody counted."""
    predicted: Mapping[str, Any]
    """What the cost model expected: `tokens_per_second`; empty where nobody asked."""

    @cached_property
    def seconds_at(self) -> dict[int, float]:
        """Step → training seconds up to its end, its round included."""
        exposed = {row["step"]: row["exposed_seconds"] for row in self.rounds}
        total, at = 0.0, {0: 0.0}
        for row in self.steps:
            total += row["seconds"] + exposed.get(row["step"], 0.0)
            at[row["step"]] = total
        scale = self.summary["seconds"] / total if self.summary else 1.0
        return {step: seconds * scale for step, seconds in at.items()}

    @property
    def seconds(self) -> float:
        """All of the training time."""
        return self.seconds_at[self.steps[-1]["step"]]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole training time."""
        return self.summary["tokens_per_second"] if self.summary else self.steps[-1]["tokens"] / self.seconds

    @property
    def steady_tokens_per_second(self) -> float:
        """Over whole rounds after the warm-up; of an unfinished run, over its settled steps."""
        if self.summary:
            return self.summary["steady_tokens_per_second"]
        return len(self._settled) * self.recipe.tokens_per_step / self._settled_seconds

    @property
    def sync_share_fraction(self) -> float:
        """What training waits for rounds, of the training time."""
        return sum(row["exposed_seconds"] for row in self.rounds) / self.seconds

    @property
    def round_sent_bytes(self) -> float | None:
        """What one rank sends to other groups in a round, on average; None without rounds."""
        return sum(row["sent_bytes"] for row in self.rounds) / len(self.rounds) if self.rounds else None

    def curve(self, key: str, axis: Axis) -> Curve:
        """A key of `metrics.jsonl` over an axis, where it is finite."""
        return self._points(self.steps, key, axis)

    def eval_curve(self, axis: Axis) -> Curve:
        """The evaluation loss over an axis, where it is finite."""
        return self._points(self.evals, "loss", axis)

    def speed_curve(self) -> Curve:
        """Tokens per second over steps, rounds included: one point for each H steps, with the round that ends them."""
        every, warmup = self.recipe.sync.every, self.recipe.timetable.warmup_steps
        tokens = {0: 0} | {row["step"]: row["tokens"] for row in self.steps}
        ends = [step for step in tokens if step and (step - warmup) % every == 0] or [max(tokens)]
        places, speeds, begin = [], [], 0
        for end in ends:
            seconds = self.seconds_at[end] - self.seconds_at[begin]
            places, speeds = [*places, float(end)], [*speeds, (tokens[end] - tokens[begin]) / seconds]
            begin = end
        return places, speeds

    def step_parts(self) -> dict[str, float]:
        """Where the seconds of a mean settled step go.

        `computing`, `inner` (communication inside a group, by the steps that were sampled), `rounds` (what training
        waits for them); without a sample `steps` in place of the first two.
        """
        steps = self._settled
        exposed = sum(row["exposed_seconds"] for row in self.rounds if row["step"] >= steps[0]["step"])
        whole, rounds = (self._settled_seconds - exposed) / len(steps), exposed / len(steps)
        sampled = [row for row in steps if row.get("inner_seconds") is not None]
        if not sampled:
            return {"steps": whole, "rounds": rounds}
        inner = whole * sum(row["inner_seconds"] for row in sampled) / sum(row["seconds"] for row in sampled)
        return {"computing": max(0.0, whole - inner), "inner": inner, "rounds": rounds}

    @property
    def _settled(self) -> list[Line]:
        """The steps after the warm-up and the first tenth; all, where there are none."""
        start = max(self.recipe.timetable.warmup_steps, -(-len(self.steps) // 10))
        return self.steps[start:] or self.steps

    @property
    def _settled_seconds(self) -> float:
        """What they took, their rounds included."""
        return self.seconds - self.seconds_at[self._settled[0]["step"] - 1]

    def _points(self, rows: Sequence[Line], key: str, axis: Axis) -> Curve:
        known = [row for row in rows if row[key] is not None]
        return [self._place(row, axis) for row in known], [float(row[key]) for row in known]

    def _place(self, row: Line, axis: Axis) -> float:
        if axis == "seconds":
            return self.seconds_at[row["step"]]
        return float(row["tokens"] if axis == "tokens" else row["step"])


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Several runs, each with a name of its own. Raises InputError with what is wrong with any of them."""
    runs, faults = list[Run](), list[Fault]()
    for path, count in Counter(path.resolve() for path in paths).items():
        if count > 1:
            faults.append(Fault(str(path), f"is given {count} times", "Give each run once."))
    for path in paths:
        try:
            runs.append(read_run(path))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(faults)
    for tell in (lambda run: run.path.resolve().name, lambda run: str(run.path.resolve())):
        times = Counter(run.name for run in runs)
        runs = [replace(run, name=f"{run.name} ({tell(run)})") if times[run.name] > 1 else run for run in runs]
    return runs


def read_run(path: Path) -> Run:
    """A run's folder. Raises InputError where it is none, cannot be read, or has no step yet."""
    if not (path / "recipe.toml").is_file():
        raise InputError([Fault(str(path), "is no run folder", "Give one that `fedshard train` made.")])
    recipe, summary = read_recipe(path / "recipe.toml"), _tree(path / "summary.json")
    # A run that goes on writes steps first: read last, they are all there when a round or an evaluation is.
    evals, rounds, steps = (_rows(path / f"{name}.jsonl") for name in ("evals", "rounds", "metrics"))
    if not steps:
        raise InputError([Fault(str(path), "has no step yet", "Wait for its first round.")])
    last = steps[-1]["step"]  # a machine that failed may have kept later lines of one file than of another
    return Run(
        path=path,
        name=f"{recipe.strategy} {recipe.shape}",
        recipe=recipe,
        steps=steps,
        rounds=[row for row in rounds if row["step"] <= last],
        evals=[row for row in evals if row["step"] <= last],
        summary=summary or None,
        environment=_tree(path / "environment.json"),
        tier_bytes=_tree(path / "bytes.json"),
        predicted=_tree(path / "predicted.json"),
    )


def perplexity(loss: float) -> float:
    """e to the loss, and finite."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def value_at(curve: Curve, place: float) -> float | None:
    """The curve's value at a place, straight between its points; None outside them.

    >>> value_at(([1.0, 3.0], [4.0, 2.0]), 2.0)
    3.0
    """
    for index, (after, value) in enumerate(zip(*curve, strict=True)):
        if after == place:
            return value
        if after > place:
            if index == 0:
                return None
            before, known = curve[0][index - 1], curve[1][index - 1]
            return known + (value - known) * (place - before) / (after - before)
    return None


def first_reach(curve: Curve, value: float) -> float | None:
    """The first place where the curve is at or below a value, straight between its points; None if it never is.

    >>> first_reach(([0.0, 10.0], [4.0, 2.0]), 3.0)
    5.0
    """
    for index, (place, at) in enumerate(zip(*curve, strict=True)):
        if at <= value:
            if index == 0:
                return place
            before, above = curve[0][index - 1], curve[1][index - 1]
            return before + (place - before) * (above - value) / (above - at)
    return None


def shared_end(runs: Sequence[Run], axis: Axis) -> float | None:
    """The farthest place on an axis that every run with an evaluation was evaluated at or after; None without any."""
    return min((places[-1] for run in runs if (places := run.eval_curve(axis)[0])), default=None)


def _rows(file: Path) -> list[Line]:
    """The lines of a file, but for a last one that a killed run left unfinished. Raises InputError at a damaged one."""
    rows, lines = [], file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            rows.append(_object(line, f"{file}:{number}"))
    return rows


def _tree(file: Path) -> dict[str, Any]:
    """A JSON file's object; an empty one where there is no such file. Raises InputError at a damaged one."""
    return _object(file.read_bytes(), str(file)) if file.is_file() else {}


def _object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError([Fault(place, "is no JSON object", "The file is damaged: leave this run out, or mend it.")])
    return value
