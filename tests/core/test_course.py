"""Where a run ends, in steps and tokens, and where its warm-up does: from the start and from a checkpoint on."""

import pytest

from fedshard.core.course import Course, Done
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe


def recipe(*words: str) -> Recipe:
    """`tiny` with these changes: 2048 tokens a step."""
    return read_recipe(overrides=words)


def test_from_the_start_it_is_the_recipe_s():
    course = Course.of(recipe())
    assert (course.steps, course.timetable) == (391, recipe().timetable)
    assert (course.tokens(0), course.tokens(391)) == (0, 391 * 2048)
    assert (course.consumed(0), course.consumed(391)) == (0.0, 1.0)


@pytest.mark.parametrize("step", [1, 38, 39, 40, 200, 390])
def test_the_same_recipe_goes_on_as_if_it_had_never_stopped(step):
    straight = Course.of(recipe())
    resumed = Course.of(recipe(), Done(step, straight.tokens(step), straight.timetable.warmup_steps, federated=True))
    assert resumed.timetable == straight.timetable
    for later in range(step, 392):
        assert resumed.tokens(later) == straight.tokens(later)
        assert resumed.consumed(later) == straight.consumed(later)


def test_another_batch_ends_at_the_same_tokens():
    """J9: the total does not shrink by what is done already."""
    done = Done(100, 204_800, 39, federated=True)
    assert Course.of(recipe("--train.accumulation", "2"), done).steps == 100 + -(-(800_000 - 204_800) // 4096)
    by_steps = Course.of(recipe("--train.accumulation", "2", "--budget.steps", "391"), done)
    assert (by_steps.steps, by_steps.budget_tokens) == (391, 204_800 + 291 * 4096)


def test_a_warm_up_that_is_over_stays_over():
    done = Done(100, 204_800, 39, federated=True)
    assert Course.of(recipe("--budget.tokens", "8000000"), done).timetable.warmup_steps == 39
    still = Done(30, 61_440, 39, federated=True)
    assert Course.of(recipe("--budget.tokens", "1600000"), still).timetable.warmup_steps == 78


def test_pre_train_synchronously_then_federate():
    done = Done(100, 204_800, 0, federated=False)
    timetable = Course.of(recipe(), done).timetable
    assert (timetable.warmup_steps, timetable.next_round(101)) == (100, 110)
    assert Course.of(recipe(), Done(10, 20_480, 0, federated=False)).timetable.warmup_steps == 39
    assert Course.of(recipe("--layout.groups", "1"), done).timetable.warmup_steps == 0
