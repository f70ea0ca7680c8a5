"""Where rows go: all sinks get all of them, and trackers keep them as curves."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from example_rows import EVALUATION, ROUND, STEP, SUMMARY

from fedshard.core.course import Course
from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.core.recipe import LayoutSection, LogSection, Recipe
from fedshard.engine.log import Log
from fedshard.engine.meter import Meter
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary, to_json
from fedshard.engine.run_folder import RunFolder
from fedshard.engine.sinks import JsonlSink, Sinks, open_sinks
from fedshard.engine.step import GroupStep
from fedshard.engine.trackers import scalars
from fedshard.testing import RankContext, RankPool

PROGRESS = Progress(step=7, steps=10, loss=2.0, tokens_per_second=4096.0, next_round=8, eta_seconds=3.0)


@dataclass
class Kept:
    """A sink that keeps what it is told."""

    told: list[Any] = field(default_factory=list)
    closed: bool = False

    def progress(self, progress: Progress) -> None:
        self.told.append(progress)

    def step(self, row: StepRow) -> None:
        self.told.append(row)

    def round(self, row: RoundRow) -> None:
        self.told.append(row)

    def evaluation(self, row: EvalRow) -> None:
        self.told.append(row)

    def summary(self, summary: Summary) -> None:
        self.told.append(summary)

    def close(self) -> None:
        self.closed = True


class Breaking(Kept):
    def close(self) -> None:
        raise ConnectionError("the tracker is gone")


def tell(sinks: Sinks) -> list[Any]:
    sinks.progress(PROGRESS)
    sinks.step(STEP)
    sinks.round(ROUND)
    sinks.evaluation(EVALUATION)
    sinks.summary(SUMMARY)
    return [PROGRESS, STEP, ROUND, EVALUATION, SUMMARY]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run-1", "", {})


def test_all_sinks_are_told_all():
    first, second = Kept(), Kept()
    told = tell(Sinks([first, second]))
    assert first.told == told
    assert second.told == told


def test_a_sink_that_cannot_close_does_not_keep_others_open():
    first, last = Kept(), Kept()
    with pytest.raises(ConnectionError):
        Sinks([first, Breaking(), last]).close()
    assert first.closed
    assert last.closed


def test_the_run_folder_gets_each_row_in_its_file(folder: RunFolder):
    tell(Sinks([JsonlSink(folder)]))
    assert (folder.path / "metrics.jsonl").read_text(encoding="utf-8") == to_json(STEP) + "\n"
    assert (folder.path / "rounds.jsonl").read_text(encoding="utf-8") == to_json(ROUND) + "\n"
    assert (folder.path / "evals.jsonl").read_text(encoding="utf-8") == to_json(EVALUATION) + "\n"
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))["steps"] == 196


def test_by_default_a_run_writes_files_and_talks_on_stderr(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    sinks = open_sinks(Recipe(), folder)
    tell(sinks)
    sinks.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 7/10" in err
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "environment.json", "evals.jsonl", "metrics.jsonl", "recipe.toml", "rounds.jsonl", "summary.json"
    ]  # fmt: skip


def test_trackers_that_are_not_installed_are_named_at_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    recipe = Recipe(log=LogSection(tensorboard=True, wandb="project"))
    with pytest.raises(InputError) as refused:
        open_sinks(recipe, folder)
    assert [fault.key for fault in refused.value.faults] == ["log.tensorboard", "log.wandb"]
    assert "pip install 'fedshard[tensorboard]'" in str(refused.value)
    assert "pip install 'fedshard[wandb]'" in str(refused.value)


def test_a_row_as_curves():
    row = replace(ROUND, excluded=[1, 3], spread=[0.5, math.nan])
    curves = scalars("rounds", row)
    assert curves["rounds/sent_bytes"] == 2_477_824
    assert curves["rounds/excluded"] == 2
    assert curves["rounds/spread/0"] == 0.5
    assert not {"rounds/step", "rounds/delta_norm", "rounds/spread/1"} & set(curves)
    assert set(scalars("summary", SUMMARY)) == {
        f"summary/{key}" for key in json.loads(to_json(SUMMARY)) if key not in ("strategy", "layout")
    }


@pytest.mark.slow
def test_tensorboard_reads_the_rows_back(folder: RunFolder):
    sinks = open_sinks(Recipe(log=LogSection(tensorboard=True)), folder)
    for step in (6, 7):
        sinks.step(replace(STEP, step=step, loss=step / 2))
    sinks.evaluation(EVALUATION)
    sinks.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(6, 3.0), (7, 3.5)]
    assert [each.value for each in events.Scalars("train/group_losses/1")] == [2.5, 2.5]
    assert [(each.step, each.value) for each in events.Scalars("evals/loss")] == [(7, 2.0)]


def test_wandb_gets_the_recipe_and_one_call_a_row(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    started: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, float]]] = []
    finished: list[bool] = []

    def init(**given: Any) -> SimpleNamespace:
        started.update(given)
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(True)
        )

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    sinks = open_sinks(Recipe(seed=3, log=LogSection(wandb="project")), folder)
    tell(sinks)
    sinks.close()
    assert (started["project"], started["name"], started["config"]["seed"]) == ("project", "run-1", 3)
    assert started["dir"] == str(folder.path)
    assert set(started) == {"project", "name", "dir", "config"}  # no mode: offline is wandb's own setting
    assert [step for step, _ in logged] == [7, 7, 7, 196]
    assert logged[0][1]["train/loss"] == 2.25
    assert finished == [True]


def rows_of_uneven_groups(context: RankContext) -> list[StepRow]:
    """Group 0: Σ 12 over 4 label tokens; group 1: Σ 6 over 6."""
    recipe = Recipe(layout=LayoutSection(groups=2, shards=1))
    kept = Kept()
    federation = SimpleNamespace(federates=True)
    job: Any = SimpleNamespace(recipe=recipe, course=Course.of(recipe), world=context.world, federation=federation)
    meter = Meter(torch.device("cpu"), profile_every=0, warmup_steps=0)
    log = Log(job, Sinks([kept]), meter)
    nll, labels = ((12.0, 4.0), (6.0, 6.0))[context.rank]
    with meter.step(1):
        done = GroupStep(nll, labels, 0.0, float(context.rank + 1), 0.003, int(labels))
    log.step(1, done)
    log.exchange(1, None)
    return [row for row in kept.told if isinstance(row, StepRow)]


def test_the_highest_loss_of_a_group_is_never_below_the_mean(ranks: RankPool):
    """Max 3.0 and mean 1.8; dividing both by all tokens gave a max of 1.2 elsewhere (torchtitan#2314)."""
    for (row,) in ranks.run(rows_of_uneven_groups, Layout(2, 1, 1)):
        assert row.loss == pytest.approx(1.8)
        assert max(row.group_losses) == pytest.approx(3.0)
        assert row.grad_norms == [1.0, 2.0]
