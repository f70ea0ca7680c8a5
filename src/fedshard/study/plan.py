"""Which layout, batch, recomputation and H make the most tokens per second, and fit: every choice, ranked.

    layouts G×R×S of the ranks ──► micro-batches that fit, with and without recomputation
       ──► accumulation up to the batch limit ──► the smallest H whose rounds take at most a twentieth of the time
       ──► seconds of a step ──► ranking

It ranks speed, not quality: how large a batch may be and how few rounds a run may have, the caller says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedshard.core.layout import Layout
from fedshard.study.choice import Choice, Wanted
from fedshard.study.cost import step_seconds
from fedshard.study.memory import memory, state_bytes
from fedshard.study.setup import Setup
from fedshard.study.work import StepWork, step_work

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
EVERY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

SYNC_SHARE = 0.05
"""What rounds may take of the time: H is the smallest one for which they take no more."""

ALIKE = 0.01
"""Speeds that differ by less count as equal, and the smaller batch wins: it costs no speed, and gives more steps."""


@dataclass
class Plan:
    """All choices that fit, the fastest first, and what became of the others."""

    wanted: Wanted
    choices: list[Choice] = field(default_factory=list)
    least_bytes: dict[int, float] = field(default_factory=dict)
    """Shards of a replica → least memory that a rank needs, for those that do not fit."""
    too_large: dict[Layout, int] = field(default_factory=dict)
    """Layouts whose smallest batch is over the limit → its tokens."""
    few_rounds: dict[Layout, int] = field(default_factory=dict)
    """Layouts with a batch for which the budget has too few rounds → how many it has at most."""
    uneven: int = 0
    """Layouts whose shards or groups cut nodes unevenly, which are not looked at."""

    @cached_property
    def rows(self) -> list[Choice]:
        """The best of each layout, the fastest first: what a table shows."""
        by_layout: dict[Layout, list[Choice]] = {}
        for choice in self.choices:
            by_layout.setdefault(choice.setup.layout, []).append(choice)
        return sorted(map(_best, by_layout.values()), key=lambda choice: -choice.tokens_per_second)

    def best(self, strategy: str) -> Choice | None:
        """The first row of a strategy."""
        return next((row for row in self.rows if row.strategy == strategy), None)

    def of(self, strategy: str) -> list[Choice]:
        """All choices of a strategy, the fastest first."""
        return [choice for choice in self.choices if choice.strategy == strategy]


def make_plan(wanted: Wanted) -> Plan:
    """Try every layout, micro-batch, accumulation and recomputation within the limits."""
    made, found = Plan(wanted), list(layouts(wanted.cluster.ranks))
    looked_at = [layout for layout in found if is_even(layout, wanted.cluster.ranks_per_node)]
    made.uneven = len(found) - len(looked_at)
    for layout in looked_at:
        made.choices += search(made, wanted.setup(layout))
    made.choices.sort(key=lambda choice: -choice.tokens_per_second)
    return made


def layouts(ranks: int) -> Iterator[Layout]:
    """Every G×R×S of so many ranks.

    >>> [str(layout) for layout in layouts(4)]
    ['1×1×4', '1×2×2', '1×4×1', '2×1×2', '2×2×1', '4×1×1']
    """
    for groups in _divisors(ranks):
        for replicas in _divisors(ranks // groups):
            yield Layout(groups, replicas, ranks // groups // replicas)


def is_even(layout: Layout, ranks_per_node: int) -> bool:
    """Whether the shards of a replica, and a group, fill nodes or divide one.

    >>> [str(layout) for layout in layouts(12) if not is_even(layout, 4)]
    ['1×2×6', '1×4×3', '2×1×6', '2×2×3', '2×3×2', '2×6×1', '4×1×3', '4×3×1']
    """
    return all(
        members % ranks_per_node == 0 or ranks_per_node % members == 0
        for members in (layout.shards, layout.group_ranks)
    )


def search(made: Plan, base: Setup) -> Iterator[Choice]:
    """What fits of one layout within the limits, done as `base` says. Notes in `made` why others do not."""
    wanted, layout = made.wanted, base.layout
    smallest = layout.group_ranks * base.sequence_length
    if smallest > wanted.max_batch_tokens:
        made.too_large[layout] = smallest
        return
    if sum(state_bytes(base).values()) > wanted.capacity_bytes:
        _note_least(made, replace(base, recompute=True))
        return
    work = step_work(base)
    for recompute in (False, True):
        once = replace(base, recompute=recompute)
        alone = _that_fit(once, MICRO_BATCHES, wanted)
        if not alone:
            _note_least(made, once)
        # several micro-batches keep their gradients: more memory, but the same for any number of them
        several = _that_fit(replace(once, accumulation=ACCUMULATIONS[1]), alone, wanted)
        for micro_batch in alone:
            pieces = scaled(work, micro_batch, recompute)
            for accumulation in ACCUMULATIONS if micro_batch in several else ACCUMULATIONS[:1]:
                if smallest * micro_batch * accumulation > wanted.max_batch_tokens:
                    break
                setup = replace(once, micro_batch=micro_batch, accumulation=accumulation)
                choice = _with_rounds(made, setup, pieces)
                if choice is not None:
                    yield choice


def _that_fit(base: Setup, micro_batches: Sequence[int], wanted: Wanted) -> Sequence[int]:
    """The micro-batches that fit, of these in rising order; memory grows with them, so few are tried."""

    def held(micro_batch: int) -> float:
        return memory(replace(base, micro_batch=micro_batch)).total_bytes

    return micro_batches[: bisect_right(micro_batches, wanted.capacity_bytes, key=held)]


def _note_least(made: Plan, setup: Setup) -> None:
    shards, held = setup.layout.shards, memory(setup).total_bytes
    made.least_bytes[shards] = min(held, made.least_bytes.get(shards, held))


def scaled(work: StepWork, micro_batch: int, recompute: bool) -> StepWork:
    """The pieces of one sequence at a time for a larger micro-batch, and for recomputation: only what computes grows.

    Equation (step-compute).
    """
    root = work.units[0]
    units = tuple(
        replace(
            unit,
            forward_seconds=unit.forward_seconds * micro_batch,
            backward_seconds=(3 if recompute and unit is not root else 2) * unit.forward_seconds * micro_batch,
        )
        for unit in work.units
    )
    return replace(work, units=units)


def _with_rounds(made: Plan, setup: Setup, work: StepWork) -> Choice | None:
    """The choice with the smallest H whose rounds are cheap enough, or else the largest that leaves enough rounds.

    None where the budget has too few rounds even with one after every step.
    """
    time, budget = step_seconds(work, setup), made.wanted.budget  # of H = 1: a whole round in every step
    if setup.layout.groups == 1:
        return Choice(setup, work, time, budget)
    chosen = None
    for every in EVERY:
        if every <= setup.delay:
            continue
        seconds = replace(time, round_exposed_seconds=time.round_exposed_seconds / every)
        choice = Choice(replace(setup, every=every), work, seconds, budget)
        rounds = choice.timetable.rounds()
        if rounds < made.wanted.min_rounds:
            if chosen is None:
                made.few_rounds[setup.layout] = max(rounds, made.few_rounds.get(setup.layout, 0))
            break
        chosen = choice
        if choice.sync_share <= SYNC_SHARE:
            break
    return chosen


def _best(choices: Iterable[Choice]) -> Choice:
    """Of those that are about as fast as the fastest, the one with the smallest batch."""
    listed = list(choices)
    enough = (1 - ALIKE) * max(choice.tokens_per_second for choice in listed)
    return min(
        (choice for choice in listed if choice.tokens_per_second >= enough),
        key=lambda choice: (choice.group_tokens, -choice.tokens_per_second),
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
