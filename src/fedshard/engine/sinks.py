"""Where rows go: the run folder always, the terminal, and trackers on request. Each a small class of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.engine.live import LiveSink
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary, as_dict
from fedshard.engine.run_folder import RunFolder


class Sink(Protocol):
    """What takes the rows of a run. `progress` comes with every step; rows come when groups have met."""

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
        for sink in self.sinks:
            sink.close()


class JsonlSink:
    """The run folder's files."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def progress(self, progress: Progress) -> None:
        pass

    def step(self, row: StepRow) -> None:
        self._folder.append("metrics", row)

    def round(self, row: RoundRow) -> None:
        self._folder.append("rounds", row)

    def evaluation(self, row: EvalRow) -> None:
        self._folder.append("evals", row)

    def summary(self, summary: Summary) -> None:
        self._folder.write_summary(summary)

    def close(self) -> None:
        pass


class TrackerSink:
    """Rows as scalars `train/loss`, `rounds/seconds`, `evals/perplexity`, …; lists as `train/group_losses/0`, ….

    A tracker says in `write(name, value, step)` how one scalar is kept.
    """

    def progress(self, progress: Progress) -> None:
        pass

    def step(self, row: StepRow) -> None:
        self._scalars("train", as_dict(row), row.step)

    def round(self, row: RoundRow) -> None:
        self._scalars("rounds", as_dict(row), row.step)

    def evaluation(self, row: EvalRow) -> None:
        self._scalars("evals", as_dict(row), row.step)

    def summary(self, summary: Summary) -> None:
        self._scalars("summary", as_dict(summary), summary.steps)

    def close(self) -> None:
        raise NotImplementedError

    def write(self, name: str, value: float, step: int) -> None:
        """Keep one scalar."""
        raise NotImplementedError

    def _scalars(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            for name, each in _flattened(f"{prefix}/{key}", value):
                self.write(name, each, step)


class TensorBoardSink(TrackerSink):
    """TensorBoard events in the run folder. Raises InputError where TensorBoard is not installed."""

    def __init__(self, path: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError([_missing("log.tensorboard", "tensorboard")]) from None
        self._writer = SummaryWriter(str(path))

    def write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink(TrackerSink):
    """A Weights & Biases run; offline where WANDB_MODE says so. Raises InputError where it is not installed."""

    def __init__(self, project: str, recipe: Recipe, path: Path):
        try:
            import wandb
        except ImportError:
            raise InputError([_missing("log.wandb", "wandb")]) from None
        self._run = wandb.init(project=project, config=recipe.model_dump(mode="json"), dir=str(path))

    def write(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value, "step": step})

    def close(self) -> None:
        self._run.finish()


def open_sinks(recipe: Recipe, folder: RunFolder) -> Sinks:
    """The sinks that a recipe asks for."""
    sinks: list[Sink] = [JsonlSink(folder), LiveSink(recipe.log.every)]
    if recipe.log.tensorboard:
        sinks.append(TensorBoardSink(folder.path / "tensorboard"))
    if recipe.log.wandb is not None:
        sinks.append(WandbSink(recipe.log.wandb, recipe, folder.path))
    return Sinks(sinks)


def _flattened(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [pair for index, each in enumerate(value) for pair in _flattened(f"{name}/{index}", each)]
    return [(name, value)] if isinstance(value, int | float) else []


def _missing(key: str, extra: str) -> Fault:
    return Fault(key, f"{extra} is not installed", f"Run pip install 'fedshard[{extra}]'.")
