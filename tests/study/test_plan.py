"""The planner: every choice fits, the ranking holds, limits are kept, and a recipe does what its choice says."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.recipe_file import make_recipe, write_recipe
from fedshard.study.architectures import read_architecture
from fedshard.study.choice import Wanted
from fedshard.study.cost import step_seconds
from fedshard.study.known_models import MODELS
from fedshard.study.memory import memory
from fedshard.study.plan import ALIKE, SYNC_SHARE, Plan, is_even, layouts, make_plan
from fedshard.study.planned_recipe import recipe_of
from fedshard.study.setup import Setup
from fedshard.study.work import step_work


def plan_of(model: str = "llama-3.1-8b", cluster: str = "leonardo-nominal", ranks: int = 64, **more: object) -> Plan:
    job = read_cluster(cluster).job(ranks)
    return make_plan(Wanted(read_architecture(model), job, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


@given(st.integers(1, 600))
@settings(max_examples=30)
def test_layouts_are_all_of_so_many_ranks(ranks):
    found = list(layouts(ranks))
    assert all(layout.ranks == ranks for layout in found)
    assert len(set(found)) == len(found)
    divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    assert len(found) == sum(ranks // each % other == 0 for each in divisors for other in divisors)


def test_every_choice_fits_and_is_what_the_closed_form_says(plan):
    for choice in plan.rows:
        assert choice.memory_bytes == memory(choice.setup).total_bytes <= plan.wanted.capacity_bytes
        time = step_seconds(step_work(choice.setup), choice.setup)
        assert choice.time.total_seconds == pytest.approx(time.total_seconds, rel=1e-9)
        assert choice.tokens_per_second == choice.setup.tokens_per_step / choice.time.total_seconds


def test_nothing_that_fits_is_left_out():
    """Every micro-batch, accumulation and recomputation of one layout, tried one by one."""
    wanted = Wanted(
        read_architecture("llama-2-7b"), read_cluster("leonardo-nominal").job(8), 2048, max_batch_tokens=2**17
    )
    found = [choice.setup for choice in make_plan(wanted).choices if choice.setup.layout == Layout(1, 1, 8)]
    base = wanted.setup(Layout(1, 1, 8))
    tried = [
        replace(base, micro_batch=micro_batch, accumulation=accumulation, recompute=recompute)
        for micro_batch in (1, 2, 4, 8, 16, 32)
        for accumulation in (1, 2, 4, 8, 16, 32)
        for recompute in (False, True)
    ]
    right = [
        setup
        for setup in tried
        if setup.tokens_per_step <= 2**17 and memory(setup).total_bytes <= wanted.capacity_bytes
    ]
    assert 5 < len(right) < len(tried)
    assert len(found) == len(right)
    assert all(setup in found for setup in right)


def test_the_fastest_comes_first_and_baselines_are_at_their_best(plan):
    speeds = [choice.tokens_per_second for choice in plan.choices]
    assert speeds == sorted(speeds, reverse=True)
    shown = [row.tokens_per_second for row in plan.rows]
    assert shown == sorted(shown, reverse=True)
    for strategy in ("FSDP", "HSDP", "FL+FSDP", "FL+HSDP"):
        best, most = plan.best(strategy), max(choice.tokens_per_second for choice in plan.of(strategy))
        assert (1 - ALIKE) * most <= best.tokens_per_second <= most
    assert 0.2 < plan.rows[0].mfu < 0.45


def test_of_equal_speeds_the_smaller_batch_is_taken(plan):
    for row in plan.rows:
        others = [choice for choice in plan.choices if choice.setup.layout == row.setup.layout]
        for other in others:
            slower = other.tokens_per_second < (1 - ALIKE) * max(each.tokens_per_second for each in others)
            assert slower or other.group_tokens >= row.group_tokens


def test_rounds_are_as_frequent_as_they_are_cheap(plan):
    for choice in plan.choices:
        if choice.setup.layout.groups > 1 and choice.setup.every > 1:
            assert choice.sync_share <= SYNC_SHARE
            oftener = replace(choice.setup, every=choice.setup.every // 2)
            time = step_seconds(choice.work, oftener)
            assert time.round_exposed_seconds > SYNC_SHARE * time.total_seconds


def test_there_are_as_many_rounds_as_are_wanted():
    few = plan_of(cluster="leonardo-observed", tokens=1_000_000_000, min_rounds=100)
    rounds = [choice.timetable.rounds() for choice in few.choices if choice.setup.layout.groups > 1]
    assert rounds
    assert min(rounds) >= 100
    assert few.few_rounds  # large batches have too few steps
    assert max(few.few_rounds.values()) < 100


def test_the_batch_limit_is_kept():
    limited = plan_of(max_batch_tokens=65_536)
    assert max(choice.group_tokens for choice in limited.choices) == 65_536
    assert {choice.strategy for choice in limited.choices} == {"FL+FSDP", "FL+HSDP"}
    assert limited.too_large[Layout(1, 1, 64)] == 64 * 4096


def test_layouts_that_cut_nodes_unevenly_are_counted_and_not_looked_at():
    made = plan_of("gpt2", ranks=12, sequence_length=512)
    assert all(is_even(choice.setup.layout, 4) for choice in made.choices)
    assert made.uneven == 8
    assert len(made.rows) == len(list(layouts(12))) - 8


def test_three_ranks_have_their_layouts():
    assert [str(choice.setup.layout) for choice in plan_of(ranks=3).rows] == ["1×1×3"]
    small = plan_of("gpt2", ranks=3, sequence_length=512)
    assert {str(choice.setup.layout) for choice in small.rows} == {"1×1×3", "1×3×1", "3×1×1"}


def test_the_whole_run_is_the_warm_up_and_then_steps_and_rounds(plan):
    choice = next(row for row in plan.rows if row.strategy == "FL+FSDP")
    steps = -(-plan.wanted.budget // choice.setup.tokens_per_step)
    warmup = round(steps / 10)
    whole_round = choice.work.round_between_seconds + choice.work.round_inside_seconds
    rounds = 1 + -(-(steps - warmup) // choice.setup.every)
    right = steps * choice.time.inner_seconds + warmup * choice.work.synchronous_seconds + rounds * whole_round
    assert choice.run_seconds == pytest.approx(right)
    assert choice.days == pytest.approx(right / 86400)
    assert choice.gpu_hours == pytest.approx(64 * right / 3600)
    alone = plan.best("FSDP")
    assert alone.run_seconds == pytest.approx(
        -(-plan.wanted.budget // alone.setup.tokens_per_step) * alone.time.total_seconds
    )


@pytest.mark.parametrize("precision", ["mixed", "bfloat16-reductions", "pure-bfloat16"])
def test_a_recipe_does_what_was_predicted(precision):
    """From the recipe follow the same setup, and so the same seconds and bytes, and the same steps and rounds."""
    cluster = read_cluster("leonardo-nominal")
    made = plan_of(ranks=16, precision=precision)
    for choice in made.rows:
        recipe = recipe_of(choice, {"kind": "config", **MODELS["llama-3.1-8b"]})
        again = Setup.from_recipe(recipe, cluster)
        named = replace(again, architecture=choice.setup.architecture)
        assert named == replace(choice.setup, every=named.every)
        assert recipe.steps == choice.timetable.steps
        if choice.setup.layout.groups > 1:
            assert recipe.timetable == choice.timetable
        assert make_recipe(recipe.model_dump(mode="json", exclude_none=True)) == recipe
        assert write_recipe(recipe)
