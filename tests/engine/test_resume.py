"""Going on from a checkpoint: bit for bit in the same layout, at every step; in another layout with exact weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import write_texts
from saved_runs import LENGTH, LLAMA, SEQUENCES, STEPS, Shape, Told, recipe_of, run, whole

from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.engine.checkpoint import FOLDER, Start, open_checkpoint
from fedshard.engine.job import make_job
from fedshard.engine.resume import take_up
from fedshard.engine.step import take_step
from fedshard.engine.train import start_of_rank_0
from fedshard.testing import RankContext, RankPool

LAYOUTS: list[Shape] = [(1, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (2, 1, 1)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def one_step_from_each(context: RankContext, recipe: Recipe, folder: Path, cache: Path) -> tuple[Told, list[Told]]:
    """A straight run that saves after every step, and one step from each of its checkpoints, saved beside them."""
    straight = run(context, recipe, folder, cache)
    return straight, [run(context, recipe, folder, cache, at, at + 1, folder / "resumed") for at in range(1, STEPS)]


TEXTS = [f"document {number} " + "abc" * number for number in range(14)]
"""Two groups that deal them between each other have about ten sequences each: two epochs end in twelve steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ((1, 1, 2), {}),
        ((2, 1, 2), {}),
        ((2, 2, 1), {"train": {"precision": "pure-bfloat16"}, "sync": {"anchor": True, "outer": {"kind": "mean"}}}),
        ((2, 1, 1), {"data": {"kind": "text", "assignment": "by-source", "eval_fraction": 0.2}}),
    ],
)
def test_a_step_after_a_resume_is_the_straight_run_s_bit_for_bit(ranks: RankPool, tmp_path, cache, layout, sections):
    """G1, G3, G5, H1, H3, H5, A11: from every step, and so by induction a run resumed after any: all that is saved
    (weights, moments, anchor, momentum, place in the data), rows, rounds and evaluations, in mid-round too."""
    if "data" in sections:
        sources = [write_texts(tmp_path / name, TEXTS[start::2]) for start, name in enumerate("ab")]
        sections = {"data": sections["data"] | {"sources": [str(each) for each in sources]}}
    answers = ranks.run(one_step_from_each, Layout(*layout), recipe_of(layout, **sections), tmp_path, cache)
    for straight, resumed in answers:
        for at, told in enumerate(resumed, start=1):
            assert told.rows == [row for row in straight.rows if row[1]["step"] == at + 1], f"resumed after step {at}"
    for step in range(2, STEPS + 1):
        one, other = (open_checkpoint(run / FOLDER / f"step-{step:06}") for run in (tmp_path, tmp_path / "resumed"))
        assert replace(one.cursor(), training_seconds=0) == replace(other.cursor(), training_seconds=0)
        files, others = ({**each.files(), "cursor.json": None} for each in (one, other))
        assert files == others, f"resumed after step {step - 1}"


def test_a_run_resumed_in_mid_round_ends_as_the_straight_one(ranks: RankPool, tmp_path, cache):
    layout, recipe = Layout(2, 1, 2), recipe_of((2, 1, 2), checkpoint={"every": 8})
    straight = ranks.run(run, layout, recipe, tmp_path, cache)
    for one, other in zip(straight, ranks.run(run, layout, recipe, tmp_path, cache, 8), strict=True):
        assert other.rows == [row for row in one.rows if row[1]["step"] > 8]
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def begin_apart(context: RankContext) -> Start:
    return start_of_rank_0(context.world, Start(Path(f"run-{context.rank}"), resume=context.rank == 1))


def test_all_ranks_begin_where_the_first_one_does(ranks: RankPool):
    """Under torchrun each reads the clock and the folders by itself."""
    assert ranks.run(begin_apart, Layout(2, 1, 2)) == [Start(Path("run-0"))] * 4


def test_stopping_does_no_round_of_its_own(ranks: RankPool, tmp_path, cache):
    layout = (2, 1, 2)
    recipe = recipe_of(layout, checkpoint={"every": 0})
    told = ranks.run(run, Layout(*layout), recipe, tmp_path, cache, 0, 8)[0]
    assert [row["step"] for kind, row in told.rows if kind == "StepRow"] == list(range(1, 9))
    assert [row["step"] for kind, row in told.rows if kind == "RoundRow"] == [2, 6]
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-000008"]
    assert not open_checkpoint(tmp_path / FOLDER / "step-000008").cursor().together


def load(context: RankContext, recipe: Recipe, folders: list[Path], at: int, cache: Path) -> list[Told]:
    """The weights that a layout goes on with from each run, and the loss of its next step over all groups."""
    checkpoints = [open_checkpoint(folder / FOLDER / f"step-{at:06}") for folder in folders]
    job = make_job(recipe, context.world, cache, checkpoints[0].cursor().done)
    told = []
    for checkpoint in checkpoints:
        take_up(job, checkpoint)
        cursor, weights = job.feed.cursor, whole(job)
        done = take_step(job, at + 1, synchronous=False)
        job.inner.zero_grad()
        known = torch.tensor([done.nll_sum, done.label_tokens], dtype=torch.float64) / context.layout.group_ranks
        torch.distributed.all_reduce(known)
        told.append(Told([], weights, (known[0] / known[1]).item(), cursor))
    return told


EXACT = {"model": LLAMA | {"attention_dropout": 0.0}, "sync": {"outer": {"kind": "mean"}}, "checkpoint": {"every": 0}}
"""Without dropout, which is another for each rank, and without rounds of a single group."""


@pytest.fixture(scope="session")
def saved(ranks: RankPool, tmp_path_factory, cache):
    """Runs that were stopped after step 6, which ends a round, and after step 4, which does not, by layout."""
    made: dict[tuple[Shape, int], Path] = {}

    def get(layout: Shape, at: int) -> Path:
        if (layout, at) not in made:
            folder = tmp_path_factory.mktemp("saved")
            ranks.run(run, Layout(*layout), recipe_of(layout, **EXACT), folder, cache, 0, at)
            made[layout, at] = folder
        return made[layout, at]

    return get


@pytest.fixture(scope="session")
def own(ranks: RankPool, saved, cache):
    """What the first rank of a layout goes on with from its own run, after step 6."""
    return functools.cache(lambda layout: load_all(ranks, layout, [saved(layout, 6)], 6, cache)[0][0])


def load_all(ranks: RankPool, layout: Shape, folders: list[Path], at: int, cache: Path):
    """What every rank of a layout is told by `load`, by rank and run."""
    return ranks.run(load, Layout(*layout), recipe_of(layout, **EXACT), folders, at, cache)


@pytest.mark.slow
@pytest.mark.parametrize("after", LAYOUTS)
def test_any_layout_goes_on_from_any_other(ranks: RankPool, saved, own, cache, after):
    """J7: weights exact, no sequence twice and none missed, the next loss the same."""
    at = 6
    for rank in load_all(ranks, after, [saved(before, at) for before in LAYOUTS], at, cache):
        for before, told in zip(LAYOUTS, rank, strict=True):
            same = own(before)
            assert all(torch.equal(told.weights[name], same.weights[name]) for name in same.weights), before
            assert told.cursor == at * SEQUENCES
            assert told.next_loss == pytest.approx(same.next_loss, rel=1e-6)


@pytest.mark.parametrize("after", [(1, 1, 4), (4, 1, 1), (1, 2, 2)])
def test_another_number_of_groups_first_does_the_round_that_was_pending(ranks: RankPool, saved, cache, after):
    before, at = (2, 1, 2), 4
    groups = load_all(ranks, before, [saved(before, at)], at, cache)
    first, second = groups[0][0].weights, groups[2][0].weights
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for (told,) in load_all(ranks, after, [saved(before, at)], at, cache):  # equal tokens, so equal weights
        assert all(torch.equal(told.weights[name], (first[name] + second[name]) / 2) for name in first)


def federation_of(context: RankContext, recipe: Recipe, folder: Path, at: int, cache: Path) -> Federated:
    checkpoint = open_checkpoint(folder / FOLDER / f"step-{at:06}")
    job = make_job(recipe, context.world, cache, checkpoint.cursor().done)
    cursor, state = take_up(job, checkpoint), job.federation.state_dict()
    weights = whole(job)
    parts = {name: weights[name].view(-1)[start : start + length] for name, (start, length) in state["parts"].items()}
    return Federated(
        all(torch.equal(parts[name], anchor) for name, anchor in state["anchor"].items()),
        sum(float(each.abs().sum()) for each in state["outer"].get("momentum", {}).values()),
        state["synchronous"],
        cursor.label_tokens,
    )


@dataclass(frozen=True)
class Federated:
    """What a resumed run goes into its next round with."""

    anchor_is_weights: bool
    momentum: float
    synchronous: bool
    label_tokens: list[int]


def test_what_the_next_round_begins_from(ranks: RankPool, tmp_path, cache):
    """Saved in the warm-up, whose gradients all groups share, after a round, and between two."""
    layout = Layout(2, 1, 2)
    ranks.run(run, layout, recipe_of((2, 1, 2), sync={"warmup_fraction": 0.5}), tmp_path, cache, 0, 11)

    def told(at: int, **sync: Any) -> Federated:
        recipe = recipe_of((2, 1, 2), sync={"warmup_fraction": 0.5} | sync)
        return ranks.run(federation_of, layout, recipe, tmp_path, at, cache)[0]

    per_step = SEQUENCES // 2 * (LENGTH - 1)
    assert told(4) == Federated(False, 0.0, True, [4 * per_step] * 2)
    # a warm-up that is over at once: what follows is local, and an outer step at the next round
    assert told(4, warmup_fraction=0.0) == Federated(True, 0.0, False, [0, 0])
    assert told(6) == Federated(True, 0.0, False, [0, 0])
    assert told(10).momentum > 0
    assert told(10, outer={"kind": "momentum"}) == Federated(True, 0.0, False, [0, 0])  # of another kind: without state
    assert told(11) == replace(told(10), anchor_is_weights=False, label_tokens=[per_step] * 2)


def test_one_group_becomes_two_between_its_own_rounds(ranks: RankPool, tmp_path, cache):
    """Its round is done while loading, for weights and anchor alike."""
    ranks.run(run, Layout(1, 1, 1), recipe_of((1, 1, 1)), tmp_path, cache, 0, 10)
    told = ranks.run(federation_of, Layout(2, 1, 1), recipe_of((2, 1, 1)), tmp_path, 10, cache)
    assert [each.anchor_is_weights for each in told] == [True, True]
    assert told[0] == told[1]
    assert told[0].momentum > 0
