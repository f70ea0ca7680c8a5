"""Where rows go: the run folder always, the terminal, and trackers on request. Each a small class of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from fedshard.core.errors import InputError
from fedshard.core.recipe import Recipe
from fedshard.engine.live import LiveSink
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary
from fedshard.engine.run_folder import RunFolder
from fedshard.engine.trackers import TensorBoard, TrackerSink, Wandb, missing_trackers


class Sink(Protocol):
    """What takes the rows of a run. `progress` comes after every step; rows come when groups have met."""

    def progress(self, progress: Progress) -> None: ...
    def step(self, row: StepRow) -> None: ...
    def round(self, row: RoundRow) -> None: ...
    def evaluation(self, row: EvalRow) -> None: ...
    def summary(self, summary: Summary) -> None: ...
    def close(self) -> None: ...


@dataclass
class Sinks:
    """Hands every row to all sinks, in order. Ranks other than the first have none."""

    sinks: Sequence[Sink]

    def progress(self, progress: Progress) -> None:
        for sink in self.sinks:
            sink.progress(progress)

    def step(self, row: StepRow) -> None:
        for sink in self.sinks:
            sink.step(row)

    def round(self, row: RoundRow) -> None:
        for sink in self.sinks:
            sink.round(row)

    def evaluation(self, row: EvalRow) -> None:
        for sink in self.sinks:
            sink.evaluation(row)

    def summary(self, summary: Summary) -> None:
        for sink in self.sinks:
            sink.summary(summary)

    def close(self) -> None:
        """Close all, in order, also those after one that fails."""
        with ExitStack() as closing:
            for sink in reversed(self.sinks):
                closing.callback(sink.close)


class JsonlSink:
    """The run folder's files."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def progress(self, progress: Progress) -> None:
        """Files hold what all groups know."""

    def step(self, row: StepRow) -> None:
        self._folder.append(row)

    def round(self, row: RoundRow) -> None:
        self._folder.append(row)

    def evaluation(self, row: EvalRow) -> None:
        self._folder.append(row)

    def summary(self, summary: Summary) -> None:
        self._folder.write_summary(summary)

    def close(self) -> None:
        """No file is kept open."""


def open_sinks(recipe: Recipe, folder: RunFolder) -> Sinks:
    """The sinks that a recipe asks for. Raises InputError where a tracker is not installed."""
    if faults := missing_trackers(recipe):
        raise InputError(faults)
    sinks: list[Sink] = [JsonlSink(folder), LiveSink(recipe.log.every)]
    if recipe.log.tensorboard:
        sinks.append(TrackerSink(TensorBoard(folder)))
    if recipe.log.wandb is not None:
        sinks.append(TrackerSink(Wandb(recipe.log.wandb, recipe, folder)))
    return Sinks(sinks)
