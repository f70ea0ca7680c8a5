"""When rounds happen: counted from the end of the warm-up, in optimizer steps, and always after the last one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.timetable import Timetable


def due_steps(table: Timetable) -> list[int]:
    assert table.steps is not None
    return [step for step in range(1, table.steps + 1) if table.due(step)]


@pytest.mark.parametrize(
    ("every", "warmup_steps", "steps", "due"),
    [
        (4, 0, 12, [4, 8, 12]),
        (4, 0, 13, [4, 8, 12, 13]),  # the last step's round covers the rest
        (4, 2, 12, [2, 6, 10, 12]),  # counted from the warm-up's end, which sets the anchor
        (1, 0, 3, [1, 2, 3]),
        (5, 0, 3, [3]),
        (10, 10, 10, [10]),  # nothing but warm-up: one round
        (3, 4, 5, [4, 5]),
    ],
)
def test_rounds_fall_on_these_steps(every, warmup_steps, steps, due):
    assert due_steps(Timetable(every, warmup_steps, steps)) == due


def test_no_round_before_the_first_step():
    assert not Timetable(every=4, warmup_steps=2).due(0)


def test_without_an_end_rounds_go_on():
    assert [step for step in range(1, 10) if Timetable(every=3).due(step)] == [3, 6, 9]


def test_only_the_warm_up_is_synchronous():
    table = Timetable(every=4, warmup_steps=2, steps=12)
    assert [step for step in range(1, 13) if table.synchronous(step)] == [1, 2]


def test_the_rounds_that_set_and_leave_the_anchor_are_plain():
    table = Timetable(every=4, warmup_steps=2, steps=12)
    assert [step for step in due_steps(table) if table.plain(step)] == [2, 12]


@given(st.integers(1, 20), st.integers(0, 30), st.integers(1, 80))
def test_rounds_are_counted_without_walking(every, warmup_steps, steps):
    table = Timetable(every, min(warmup_steps, steps), steps)
    assert table.rounds() == len(due_steps(table))
    assert due_steps(table)[-1] == steps, "the last step always ends with a round"


@given(st.integers(1, 20), st.integers(0, 30), st.integers(1, 80))
def test_the_next_round_is_the_first_at_or_after(every, warmup_steps, steps):
    table = Timetable(every, min(warmup_steps, steps), steps)
    due = due_steps(table)
    assert [table.next_round(step) for step in range(1, steps + 1)] == [
        min(each for each in due if each >= step) for step in range(1, steps + 1)
    ]
