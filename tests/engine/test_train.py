"""The training loop: what a run tells in every layout, what it reads, and what becomes of a group that is lost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from corpora import write_texts

from fedshard.core.layout import Layout, Place
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.engine.data import Feed
from fedshard.engine.evaluate import Evaluation, evaluate
from fedshard.engine.inner import schedule_factor
from fedshard.engine.job import Job, make_job
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary
from fedshard.engine.sinks import Sinks
from fedshard.engine.step import GroupStep, take_step
from fedshard.engine.train import evaluation_due, train
from fedshard.testing import RankContext, RankPool

SEQUENCES, LENGTH = 8, 32  # of one step of all groups; tokens in each
LLAMA = {
    "kind": "config", "model_type": "llama", "vocab_size": 257, "hidden_size": 24, "intermediate_size": 36,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def recipe_of(layout: Layout, **sections: dict[str, Any]) -> Recipe:
    """Seven steps of eight sequences, whatever the layout: two synchronous ones, then a round after every third."""
    raw: dict[str, Any] = {
        "layout": {"groups": layout.groups, "replicas": layout.replicas, "shards": layout.shards},
        "model": LLAMA,
        "data": {"sequence_length": LENGTH},
        "train": {"micro_batch": SEQUENCES // layout.ranks},
        "optimizer": {"learning_rate": 1e-2},
        "budget": {"steps": 7},
        "sync": {"every": 3, "warmup_fraction": 0.3},
        "evaluate": {"every": 4, "sequences": 6},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return make_recipe(raw)


class Kept:
    """A sink that keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

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
        """Nothing is open."""

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.told if isinstance(each, kind)]


@dataclass
class Run:
    """One rank's whole run."""

    kept: Kept
    summary: Summary
    cursor: int  # sequences consumed
    train_sequences: int  # of the corpus


def run(context: RankContext, recipe: Recipe, cache: Path) -> Run:
    kept = Kept()
    job = make_job(recipe, context.world, cache)
    summary = train(job, Sinks([kept]))
    return Run(kept, summary, job.feed.cursor, len(job.corpus.train))


# What a run tells

SHAPES = [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


@pytest.fixture(scope="module")
def run_of(ranks: RankPool, cache: Path) -> Callable[[tuple[int, int, int]], Run]:
    """`run_of(shape)`: what rank 0 has of the run in that layout, which is done once."""

    @functools.cache
    def run_once(shape: tuple[int, int, int]) -> Run:
        return ranks.run(run, Layout(*shape), recipe_of(Layout(*shape)), cache)[0]

    return run_once


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_round_and_evaluation_is_told_once_and_in_order(run_of, shape):
    """Neither warm-up, nor H, nor the evaluations divide the number of steps. Groups know nothing of each other between
    rounds, so steps are told with their round, and an evaluation that is due in mid-round waits for its end."""
    told, layout = run_of(shape), Layout(*shape)
    kept, summary = told.kept, told.summary
    assert [each.step for each in kept.of(Progress)] == list(range(1, 8))
    rows = [each for each in kept.told if not isinstance(each, Progress | Summary)]
    together = "S1 S2 R2 S3 S4 S5 R5 E5 S6 S7 R7 E7" if layout.groups > 1 else "S1 S2 S3 S4 E4 S5 S6 S7 E7"
    assert [f"{type(row).__name__[0]}{row.step}" for row in rows] == together.split()
    assert [row.tokens for row in rows] == [row.step * SEQUENCES * LENGTH for row in rows]
    rounds = kept.of(RoundRow)
    assert [row.round for row in rounds] == list(range(1, len(rounds) + 1))
    assert kept.told[-1] == summary
    assert (summary.strategy, summary.layout) == (layout.strategy, str(layout))
    assert (summary.tokens, summary.steps, summary.rounds) == (7 * SEQUENCES * LENGTH, 7, len(rounds))
    assert summary.train_loss == kept.of(StepRow)[-1].loss
    assert summary.eval_loss == kept.of(EvalRow)[-1].loss
    assert told.cursor == 7 * SEQUENCES


def test_all_layouts_train_on_the_same_tokens_and_learn(run_of):
    """The same sequences under the same weights: the first steps' losses are one number. Then they fall."""
    losses = [[row.loss for row in run_of(shape).kept.of(StepRow)] for shape in SHAPES]
    for loss in losses:
        assert loss[:2] == pytest.approx(losses[0][:2], abs=1e-4)  # synchronous: one big group
        assert loss[-1] < loss[0] - 0.4


def labels_of(context: RankContext, recipe: Recipe, cache: Path) -> list[list[int]]:
    """Label tokens of each step and group, read from the feeds of all places: (steps, groups)."""
    layout, train = context.layout, recipe.train
    corpus = make_job(recipe, context.world, cache).corpus
    places = [layout.place(rank) for rank in range(layout.ranks)]

    def feed_of(place: Place) -> Feed:
        return Feed(
            corpus, layout=layout, place=place, micro_batch=train.micro_batch, accumulation=train.accumulation,
            assignment="disjoint", seed=recipe.seed, isolate_documents=recipe.data.isolate_documents,
        )  # fmt: skip

    feeds = [(place.group, feed_of(place)) for place in places]
    table = [[0] * layout.groups for _ in range(recipe.steps)]
    for row in table:
        for group, feed in feeds:
            row[group] += sum(micro.label_tokens for micro in feed.next_step())
    return table


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_the_loss_is_weighted_by_the_groups_label_tokens(ranks: RankPool, cache, tmp_path, shape):
    """Short documents that are isolated: groups have unlike numbers of labels."""
    layout = Layout(*shape)
    folder = write_texts(tmp_path / "texts", [f"{number} " * (1 + number % 13) for number in range(400)])
    data = {"kind": "text", "path": str(folder), "isolate_documents": True, "eval_fraction": 0.2}
    recipe = recipe_of(layout, data=data)
    labels = ranks.run(labels_of, layout, recipe, cache)[0]
    kept = ranks.run(run, layout, recipe, cache)[0].kept
    steps = kept.of(StepRow)
    assert any(len(set(row)) > 1 for row in labels)
    for row, counts in zip(steps, labels, strict=True):
        nll = sum(loss * count for loss, count in zip(row.group_losses, counts, strict=True))
        assert row.loss == pytest.approx(nll / sum(counts), abs=1e-9)
        assert min(row.group_losses) <= row.loss <= max(row.group_losses)
    since = [labels[:2], labels[2:5], labels[5:]]
    for row, part in zip(kept.of(RoundRow), since, strict=True):  # and so are the rounds
        trained = [sum(counts) for counts in zip(*part, strict=True)]
        assert row.weights == pytest.approx([each / sum(trained) for each in trained])


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)])
def test_in_the_warm_up_all_groups_see_one_gradient(run_of, shape):
    alike = [math.isclose(*row.grad_norms, rel_tol=1e-6) for row in run_of(shape).kept.of(StepRow)]
    assert alike == [True, True, False, False, False, False, False]


def test_one_group_with_an_outer_optimizer_does_rounds_by_itself(ranks: RankPool, cache):
    recipe = recipe_of(Layout(1, 1, 2), sync={"outer": {"kind": "nesterov"}})
    told = ranks.run(run, Layout(1, 1, 2), recipe, cache)[0]
    rounds = [(row.step, row.sent_bytes, row.weights) for row in told.kept.of(RoundRow)]
    assert rounds == [(3, 0, [1.0]), (6, 0, [1.0]), (7, 0, [1.0])]
    assert [row.step for row in told.kept.of(StepRow)] == list(range(1, 8))
    assert (told.summary.strategy, told.summary.round_sent_bytes) == ("FSDP + outer", 0)


@pytest.mark.parametrize(
    ("every", "steps", "told", "expected"),
    [
        (4, 10, range(1, 11), [4, 8, 10]),
        (4, 10, [3, 6, 9, 10], [6, 9, 10]),  # due in mid-round: at the next round's end
        (2, 9, [6, 9], [6, 9]),  # several are due at once: evaluated once
        (1, 3, range(1, 4), [1, 2, 3]),
        (0, 9, [3, 6, 9], [9]),  # only the end
        (50, 9, [3, 6, 9], [9]),
    ],
)
def test_when_the_model_is_evaluated(every, steps, told, expected):
    recipe = recipe_of(Layout(1, 1, 1), budget={"steps": steps}, evaluate={"every": every})
    evaluated, last = [], 0
    for step in told:
        if evaluation_due(recipe, steps, last, step):
            evaluated.append(step)
            last = step
    assert evaluated == expected


# What a run reads


@pytest.mark.parametrize(("shape", "accumulation"), [((1, 1, 1), 4), ((1, 1, 2), 2), ((2, 1, 1), 4)])
def test_every_step_is_full_and_the_schedule_counts_them(ranks: RankPool, cache, tmp_path, shape, accumulation):
    """Trap D7: epochs run on, so no window of accumulation is incomplete, however many sequences there are."""
    layout = Layout(*shape)
    folder = write_texts(tmp_path / "texts", ["abcdefghi " * 7] * 8)
    data = {"kind": "text", "path": str(folder), "eval_fraction": 0.2}
    sequences = accumulation * layout.ranks
    recipe = recipe_of(layout, data=data, train={"micro_batch": 1, "accumulation": accumulation})
    told = ranks.run(run, layout, recipe, cache)[0]
    assert told.train_sequences % sequences != 0
    assert told.cursor == 7 * sequences > told.train_sequences
    steps = told.kept.of(StepRow)
    assert [row.tokens for row in steps] == [step * sequences * LENGTH for step in range(1, 8)]
    assert [row.learning_rate for row in steps] == pytest.approx(rates(recipe, 7, 7))


def test_a_budget_of_tokens_ends_with_the_step_that_reaches_it(ranks: RankPool, cache):
    """1,500 tokens are 5.86 steps of 256: six steps, and the schedule ends with the budget."""
    recipe = recipe_of(Layout(2, 1, 1), budget={"steps": None, "tokens": 1500})
    told = ranks.run(run, Layout(2, 1, 1), recipe, cache)[0]
    assert (told.summary.steps, told.summary.tokens) == (6, 1536)
    assert [row.learning_rate for row in told.kept.of(StepRow)] == pytest.approx(rates(recipe, 6, 1500 / 256))


def rates(recipe: Recipe, steps: int, budget: float) -> list[float]:
    """Learning rates of so many steps, under a budget of `budget` steps."""
    factors = [schedule_factor(recipe.schedule, step / budget, min((step + 1) / budget, 1.0)) for step in range(steps)]
    return [recipe.optimizer.learning_rate * factor for factor in factors]


def two_sources(folder: Path) -> list[str]:
    """Two silos: one of digits, one of letters, the second with fewer documents."""
    digits = write_texts(folder / "digits", ["0123456789" * 20] * 60)
    letters = write_texts(folder / "letters", ["abcdefghij klmno" * 12] * 20)
    return [str(digits), str(letters)]


def reads(context: RankContext, recipe: Recipe, cache: Path) -> tuple[set[int], int]:
    """The token ids that this rank trains on, and its cursor."""
    job = make_job(recipe, context.world, cache)
    seen: set[int] = set()

    def note(job: Job, step: int, *, synchronous: bool) -> GroupStep:
        place = job.feed.cursor
        for micro in job.feed.next_step():
            seen.update(micro.input_ids.unique().tolist())
        job.feed.cursor = place
        return take_step(job, step, synchronous=synchronous)

    with mock.patch("fedshard.engine.train.take_step", note):
        train(job, Sinks([]))
    return seen, job.feed.cursor


def test_by_source_each_group_trains_on_its_own(ranks: RankPool, cache, tmp_path):
    data = {"kind": "text", "assignment": "by-source", "sources": two_sources(tmp_path), "eval_fraction": 0.2}
    found = ranks.run(reads, Layout(2, 1, 2), recipe_of(Layout(2, 1, 2), data=data), cache)
    digits, letters = set(b"0123456789") | {256}, set(b"abcdefghijklmno ") | {256}
    assert [seen for seen, _ in found] == [digits, digits, letters, letters]
    assert {cursor for _, cursor in found} == {7 * SEQUENCES // 2}  # each counts its own


def test_replicated_every_group_sees_all_in_an_order_of_its_own(ranks: RankPool, cache, tmp_path):
    data = {"kind": "text", "assignment": "replicated", "path": two_sources(tmp_path)[0], "eval_fraction": 0.2}
    recipe = recipe_of(Layout(2, 1, 2), data=data)
    found = ranks.run(reads, Layout(2, 1, 2), recipe, cache)
    assert {cursor for _, cursor in found} == {7 * SEQUENCES // 2}
    told = ranks.run(run, Layout(2, 1, 2), recipe, cache)[0]
    assert all(len(set(row.group_losses)) == 2 for row in told.kept.of(StepRow))


def evaluation_of(context: RankContext, recipe: Recipe, cache: Path) -> Evaluation:
    job = make_job(recipe, context.world, cache)
    return evaluate(job.model, job.corpus, recipe, job.world)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_by_source_every_groups_held_out_sequences_count_once(ranks: RankPool, cache, tmp_path, shape, most):
    """An equal part of `evaluate.sequences` from each source, or all that it has."""
    sources, data = two_sources(tmp_path), {"kind": "text", "eval_fraction": 0.2}
    parts = []
    for source, share in zip(sources, [(most + 1) // 2, most // 2], strict=True):
        if share > 0:
            alone = recipe_of(Layout(1, 1, 1), data=data | {"path": source}, evaluate={"sequences": share})
            parts += ranks.run(evaluation_of, 1, alone, cache)
    sequences = sum(part.sequences for part in parts)
    loss = sum(part.loss * part.sequences for part in parts) / sequences  # all have as many label tokens
    layout, data = Layout(*shape), data | {"assignment": "by-source", "sources": sources}
    recipe = recipe_of(layout, data=data, evaluate={"sequences": most})
    for told in ranks.run(evaluation_of, layout, recipe, cache):
        assert told.sequences == sequences
        assert told.loss == pytest.approx(loss, abs=1e-5)
        assert told.perplexity == pytest.approx(math.exp(told.loss))


# A group that is lost


def lose_group_1(context: RankContext, recipe: Recipe, cache: Path) -> tuple[Kept, Summary, int]:
    """A run in which group 1's weights and moments are NaN after step 4; and how often this rank forgot its moments."""
    job = make_job(recipe, context.world, cache)
    kept, forgotten = Kept(), []
    real = job.inner.reset_moments

    def losing(job: Job, step: int, *, synchronous: bool) -> GroupStep:
        done = take_step(job, step, synchronous=synchronous)
        if step == 4 and context.world.place.group == 1:
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.to_local().fill_(float("nan"))
                    job.inner.optimizer.state[parameter]["exp_avg"].to_local().fill_(float("nan"))
        return done

    def reset() -> None:
        forgotten.append(True)
        real()

    with mock.patch("fedshard.engine.train.take_step", losing), mock.patch.object(job.inner, "reset_moments", reset):
        summary = train(job, Sinks([kept]))
    return kept, summary, len(forgotten)


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)])
def test_a_group_that_is_lost_comes_back_at_the_round(ranks: RankPool, cache, outer, shape):
    """It is left out of its round, takes the others' weights, forgets its moments, and counts again afterwards."""
    layout = Layout(*shape)
    recipe = recipe_of(layout, sync={"outer": {"kind": outer}}, budget={"steps": 10})
    answers = ranks.run(lose_group_1, layout, recipe, cache)
    assert [forgotten for _, _, forgotten in answers] == [0, 0, 1, 1]
    kept, summary, _ = answers[0]
    rounds = kept.of(RoundRow)
    assert [(row.step, row.excluded) for row in rounds] == [(3, []), (6, [1]), (9, []), (10, [])]
    assert rounds[1].weights == [1.0, 0.0]
    assert rounds[2].weights == [0.5, 0.5]
    steps = kept.of(StepRow)
    assert [row.step for row in steps if not math.isfinite(row.grad_norms[1])] == [5, 6]
    assert all(math.isfinite(row.group_losses[0]) for row in steps)
    assert all(math.isfinite(loss) for row in steps[6:] for loss in row.group_losses)
    assert math.isfinite(summary.eval_loss)
