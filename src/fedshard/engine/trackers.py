"""Trackers that keep a run's rows as curves, where the recipe asks for them and they are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from fedshard.core.errors import Fault
from fedshard.core.recipe import Recipe
from fedshard.engine.rows import EvalRow, Progress, RoundRow, Row, StepRow, Summary, to_dict
from fedshard.engine.run_folder import RunFolder


def missing_trackers(recipe: Recipe) -> list[Fault]:
    """A fault for each tracker that the recipe asks for and that is not installed."""
    asked = [("tensorboard", recipe.log.tensorboard), ("wandb", recipe.log.wandb is not None)]
    return [
        Fault(f"log.{name}", f"{name} is not installed", f"Run pip install 'fedshard[{name}]'.")
        for name, wanted in asked
        if wanted and find_spec(name) is None
    ]


def scalars(prefix: str, row: Row | Summary) -> dict[str, float]:
    """A row as curves: `train/loss`, `train/group_losses/0`, …; a number that is not finite leaves a gap.

    >>> scalars("evals", EvalRow(10, 40960, 2.0, 7.39, 256))
    {'evals/tokens': 40960, 'evals/loss': 2.0, 'evals/perplexity': 7.39, 'evals/sequences': 256}
    """
    values = to_dict(row)
    values.pop("step", None)  # the axis
    if isinstance(row, RoundRow):
        values["excluded"] = len(row.excluded)  # how many: numbers of groups make no curve
    flat: dict[str, Any] = {}
    for key, value in values.items():
        each = {f"{key}/{index}": part for index, part in enumerate(value)} if isinstance(value, list) else {key: value}
        flat |= each
    return {f"{prefix}/{key}": value for key, value in flat.items() if isinstance(value, int | float)}


class Tracker(Protocol):
    """What keeps curves."""

    def write(self, values: dict[str, float], step: int) -> None:
        """Keep the scalars of one row; steps never go down."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class TrackerSink:
    """Rows as curves over steps."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker

    def progress(self, progress: Progress) -> None:
        """Curves show what all groups know."""

    def step(self, row: StepRow) -> None:
        self._tracker.write(scalars("train", row), row.step)

    def round(self, row: RoundRow) -> None:
        self._tracker.write(scalars("rounds", row), row.step)

    def evaluation(self, row: EvalRow) -> None:
        self._tracker.write(scalars("evals", row), row.step)

    def summary(self, summary: Summary) -> None:
        self._tracker.write(scalars("summary", summary), summary.steps)

    def close(self) -> None:
        self._tracker.close()


class TensorBoard:
    """TensorBoard events, in the run folder's `tensorboard/`."""

    def __init__(self, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter  # takes over a second

        self._writer = SummaryWriter(str(folder.path / "tensorboard"))

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run with the run folder's name; offline where wandb's own settings say so."""

    def __init__(self, project: str, recipe: Recipe, folder: RunFolder):
        wandb: Any = import_module("wandb")
        config = recipe.model_dump(mode="json")
        self._run = wandb.init(project=project, name=folder.path.name, dir=str(folder.path), config=config)

    def write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
