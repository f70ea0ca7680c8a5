"""Which layout, batch, recomputation and H make the most tokens per second, and fit: every choice, ranked.

    layouts G×R×S of the ranks ──► largest micro-batches that fit ──► accumulation up to the batch limit
       ──► the smallest H whose rounds take at most a twentieth of the time ──► seconds of a step ──► ranking

It ranks speed, not quality: how large a batch may be and how rare rounds, the caller says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster
from fedshard.study.cost import StepTime, round_exposed_seconds, step_bytes, step_seconds
from fedshard.study.memory import memory, state_bytes
from fedshard.study.setup import Setup
from fedshard.study.size import Architecture
from fedshard.study.work import StepWork, step_work

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
EVERY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

SYNC_SHARE = 0.05
"""What rounds may take of the time: H is the smallest one for which they take no more."""

MEMORY_FRACTION = 0.95
"""Of a device's memory, what training may fill: allocators leave gaps."""

DEFAULT_BATCH_TOKENS = 4 * 2**20
"""Largest batch of one optimizer step of one group, where nobody says otherwise."""

DEFAULT_ROUNDS = 50
"""Fewest rounds of a run, where nobody says otherwise."""

SHORTEST = 256
"""Tokens of the shortest sequence that is looked at where nothing fits."""

TOKENS_PER_PARAMETER = 20
"""Budget in tokens for each parameter, where nobody says otherwise. Source: arXiv:2203.15556."""


@dataclass(frozen=True)
class Wanted:
    """What is to be trained on what."""

    architecture: Architecture
    cluster: Cluster
    """Exactly the ranks of the job (`Cluster.job`)."""
    sequence_length: int = 4096
    tokens: int = 0
    """Budget; 0: `TOKENS_PER_PARAMETER` for each parameter."""
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    min_rounds: int = DEFAULT_ROUNDS
    pure_bfloat16: bool = False
    """Whether weights and moments are stored in bfloat16 too."""

    @property
    def budget(self) -> int:
        """In tokens."""
        return self.tokens or TOKENS_PER_PARAMETER * self.architecture.total


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it gives."""

    setup: Setup
    work: StepWork
    time: StepTime

    @cached_property
    def memory_bytes(self) -> float:
        """Of the rank that holds most."""
        return memory(self.setup).total_bytes

    @property
    def strategy(self) -> str:
        """The layout's name."""
        return self.setup.layout.strategy

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.setup.tokens_per_step / self.time.total_seconds

    @property
    def group_tokens(self) -> int:
        """Tokens of one optimizer step of one group."""
        return self.setup.tokens_per_step // self.setup.layout.groups

    @property
    def sync_share(self) -> float:
        """What rounds take of the time."""
        return self.time.round_exposed_seconds / self.time.total_seconds

    @property
    def between_bytes(self) -> float:
        """What one rank sends to other groups, per step."""
        return step_bytes(self.setup).between

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the devices' peak, what the model itself needs."""
        setup = self.setup
        flops = setup.architecture.flops_per_token(setup.sequence_length) * self.tokens_per_second
        return flops / setup.layout.ranks / setup.cluster.device.peak_flops_per_second.value


@dataclass
class Plan:
    """All choices that fit, the fastest first, and what became of the others."""

    wanted: Wanted
    choices: list[Choice] = field(default_factory=list)
    least_bytes: dict[int, float] = field(default_factory=dict)
    """Shards of a replica → least memory that a rank needs, for those that do not fit."""
    too_large: dict[Layout, int] = field(default_factory=dict)
    """Layouts whose smallest batch is over the limit → its tokens."""

    @cached_property
    def best_by_layout(self) -> list[Choice]:
        """The fastest of each layout, the fastest first."""
        best: dict[Layout, Choice] = {}
        for choice in self.choices:
            best.setdefault(choice.setup.layout, choice)
        return list(best.values())

    def best(self, strategy: str) -> Choice | None:
        """The fastest of a strategy."""
        return next((choice for choice in self.choices if choice.strategy == strategy), None)

    @property
    def capacity_bytes(self) -> float:
        """What a rank may fill."""
        return self.wanted.cluster.device.memory_bytes.value * MEMORY_FRACTION


def make_plan(wanted: Wanted) -> Plan:
    """Try every layout, micro-batch, accumulation and recomputation within the limits."""
    made = Plan(wanted)
    for layout in layouts(wanted.cluster.ranks):
        made.choices += _choices(made, layout)
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


def _choices(made: Plan, layout: Layout) -> Iterator[Choice]:
    """What fits of one layout, within the limits. Notes in `made` why others do not."""
    wanted = made.wanted
    base = Setup(
        wanted.architecture,
        layout,
        wanted.cluster,
        wanted.sequence_length,
        stored_bytes=2.0 if wanted.pure_bfloat16 else 4.0,
        reduce_bytes=2.0 if wanted.pure_bfloat16 else 4.0,
    )
    smallest = layout.group_ranks * wanted.sequence_length
    if smallest > wanted.max_batch_tokens:
        made.too_large[layout] = smallest
        return
    if sum(state_bytes(base).values()) > made.capacity_bytes:
        held = memory(replace(base, recompute=True)).total_bytes
        made.least_bytes[layout.shards] = min(held, made.least_bytes.get(layout.shards, held))
        return
    work = step_work(base)
    for recompute, accumulations in product((False, True), (ACCUMULATIONS[:1], ACCUMULATIONS[1:])):
        # several micro-batches keep their gradients: what the first of a list needs, all of it do
        for setup in _that_fit(made, replace(base, recompute=recompute, accumulation=accumulations[0])):
            scaled = _scaled(work, setup.micro_batch, recompute)
            for accumulation in accumulations:
                if smallest * setup.micro_batch * accumulation > wanted.max_batch_tokens:
                    break
                yield _with_rounds(replace(setup, accumulation=accumulation), scaled, wanted)


def _that_fit(made: Plan, base: Setup) -> list[Setup]:
    """`base` with each micro-batch that fits and stays within the limit; memory grows with it, so few are tried."""
    smallest = base.layout.group_ranks * base.sequence_length * base.accumulation
    setups = [
        replace(base, micro_batch=micro_batch)
        for micro_batch in MICRO_BATCHES
        if smallest * micro_batch <= made.wanted.max_batch_tokens
    ]
    fitting = bisect_right(setups, made.capacity_bytes, key=lambda setup: memory(setup).total_bytes)
    if fitting == 0 and setups and base.accumulation == 1:
        held, shards = memory(base).total_bytes, base.layout.shards
        made.least_bytes[shards] = min(held, made.least_bytes.get(shards, held))
    return setups[:fitting]


def _scaled(work: StepWork, micro_batch: int, recompute: bool) -> StepWork:
    """The pieces for another micro-batch: only what computes grows with it. Equation (step-compute)."""
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


def _with_rounds(setup: Setup, work: StepWork, wanted: Wanted) -> Choice:
    """The choice with the smallest H whose rounds are cheap enough, or the largest that leaves enough rounds."""
    if setup.layout.groups == 1:
        return Choice(setup, work, step_seconds(work, setup))
    most = max(1, wanted.budget // setup.tokens_per_step // wanted.min_rounds)
    time = step_seconds(work, setup)
    whole_round = round_exposed_seconds(work, setup, time.inner_seconds)
    allowed = [every for every in EVERY if every <= most]
    cheap = (
        every for every in allowed if whole_round / every <= SYNC_SHARE * (time.inner_seconds + whole_round / every)
    )
    every = next(cheap, allowed[-1])
    chosen = replace(setup, every=every)
    return Choice(chosen, work, replace(time, round_exposed_seconds=whole_round / every))


def variants(choice: Choice) -> dict[str, float]:
    """Tokens per second of a choice with rounds as `fedshard train` does not do them yet: codecs, and overlap."""
    ways = {"bf16 codec": {"codec": "bf16"}, "int8 codec": {"codec": "int8"}, "overlap of one step": {"delay": 1}}
    speeds = {}
    for name, way in ways.items():
        setup = replace(choice.setup, **way, anchor=True)
        rounds = step_work(setup)
        work = replace(choice.work, round_between_seconds=rounds.round_between_seconds,
                       round_inside_seconds=rounds.round_inside_seconds)  # fmt: skip
        speeds[name] = setup.tokens_per_step / step_seconds(work, setup).total_seconds
    return speeds


def nearest(wanted: Wanted, cluster: Cluster) -> tuple[int, int] | None:
    """(ranks, sequence length) of the nearest thing that fits: more ranks of the whole `cluster`, doubled each time; if
    all are too few, shorter sequences, halved each time. None if that does not help either."""
    length = wanted.sequence_length
    while length >= SHORTEST:
        ranks = wanted.cluster.ranks
        while ranks <= cluster.ranks:
            if _fits(wanted, cluster, ranks, length):
                return ranks, length
            ranks = max(cluster.ranks_per_node, ranks * 2)
        length //= 2
    return None


def _fits(wanted: Wanted, cluster: Cluster, ranks: int, length: int) -> bool:
    """Whether one replica over so many ranks, a sequence at a time, with recomputation, stays within a device."""
    try:
        job = cluster.job(ranks)
    except InputError:  # ranks that do not fill nodes
        return False
    stored = 2.0 if wanted.pure_bfloat16 else 4.0
    setup = Setup(wanted.architecture, Layout(1, 1, ranks), job, length, recompute=True, stored_bytes=stored,
                  reduce_bytes=stored)  # fmt: skip
    return memory(setup).total_bytes <= job.device.memory_bytes.value * MEMORY_FRACTION


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
