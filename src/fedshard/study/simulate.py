"""Steps and rounds as events on every rank: what the closed form of `cost.py` gives, and what the rest makes of it.

Beside the closed form there are links that axes share, nodes that land in cells as jobs do, jitter of every collective,
ranks that are slow or uneven, and a group that fails. Without these it is the closed form. Where nothing tells ranks
apart, one stands for all. Derivation: docs/formal/simulator.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedshard.study.cost import fragment_fractions
from fedshard.study.events import Communicator, Watch
from fedshard.study.landing import Rings, landed_cells
from fedshard.study.ranks import Interval, Ranks
from fedshard.study.setup import Axis, Setup
from fedshard.study.work import StepWork, messages, step_work

AXES: tuple[Axis, ...] = ("shard", "replica", "group")

LEAST_PACE = 0.05
"""No rank computes in less than this part of its mean time, however the deviation falls."""


@dataclass(frozen=True)
class Effects:
    """What the closed form leaves out. The same seed gives the same times."""

    seed: int = 0
    jitter: bool = True
    """Collectives are longer than they need be, by their tier's distribution."""
    deviation: bool = True
    """Ranks compute unevenly from step to step, by the device's deviation."""
    landing: bool = True
    """Nodes land in cells as jobs do; False: as evenly as `Cluster.job` has it."""
    sharing: bool = True
    """Axes whose collectives leave a node slow each other down."""


QUIET = Effects(jitter=False, deviation=False, landing=False, sharing=False)
"""None of it: the closed form."""


@dataclass(frozen=True)
class Failure:
    """A rank of one group fails, which ends the job for all: it begins again from its last checkpoint."""

    step: int
    """After this step and its round, counted from 1."""
    checkpoint_every: int
    """Steps between checkpoints, each of which waits for the next round's end; those since the last one are lost."""
    restart_seconds: float = 60.0
    """Until training goes on: process groups of 128 nodes took 23 s and of 256 nodes 39 s on Leonardo (alpha-unito/xffl
    logs, 33fd27f), and weights are read."""

    def saved(self, round_every: int) -> int:
        """The step of the last checkpoint before it; 0: there was none.

        >>> [Failure(step, checkpoint_every=5).saved(round_every=4) for step in (3, 7, 8, 11, 12, 13)]
        [0, 0, 8, 8, 12, 12]
        """
        due = range(0, self.step + 1, round_every)
        return max(step for step in due if step % self.checkpoint_every < round_every)


@dataclass(frozen=True)
class Simulation:
    """What happened."""

    begin_seconds: list[float]
    """When the last rank began each step."""
    step_seconds: list[float]
    """Of each step, without its round: from then to when the last rank was done."""
    round_seconds: list[float]
    """What each round added to the job."""
    seconds: float
    """All of it, with what was lost."""
    tokens: int
    """Sequences × sequence length of all ranks, without those that were lost."""
    spent: dict[str, float]
    """Seconds of the mean rank by phase: see `PHASES`."""
    intervals: list[Interval]
    """Of the ranks that were watched."""

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, over all of the time."""
        return self.tokens / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's part of the mean rank's time."""
        total = sum(self.spent.values())
        return {phase: seconds / total for phase, seconds in self.spent.items()}


def simulate(
    setup: Setup,
    rounds: int = 1,
    effects: Effects = QUIET,
    *,
    work: StepWork | None = None,
    slow: Mapping[int, float] | None = None,
    failure: Failure | None = None,
    watch: Sequence[int] = (),
) -> Simulation:
    """So many rounds of `setup`, after its warm-up; where it has no rounds, as many times `every` steps.

    `work`: the pieces of a step, if not `step_work`'s. `slow`: ranks that compute so many times longer. `watch`: ranks
    whose streams are kept as intervals.
    """
    assert setup.delay < -(-setup.every // setup.fragments), "a fragment arrives before the next one leaves"
    job, steps, step = _Job(setup, effects, work or step_work(setup), slow or {}, watch), rounds * setup.every, 0
    while step < steps:
        step += 1
        job.step(step)
        job.round(step)
        if failure is not None and step == failure.step:
            step = failure.saved(setup.every if setup.federates else 1)
            job.fail(step, failure.restart_seconds)
            failure = None
    job.drain(steps)
    return Simulation(
        begin_seconds=list(job.begin_seconds.values()),
        step_seconds=list(job.step_seconds.values()),
        round_seconds=list(job.round_seconds.values()),
        seconds=job.ranks.last,
        tokens=steps * setup.tokens_per_step,
        spent=job.ranks.spent,
        intervals=job.ranks.intervals(),
    )


class _Job:
    """A job's steps and rounds, by number, so that those done again after a failure take the place of the lost ones."""

    def __init__(
        self, setup: Setup, effects: Effects, work: StepWork, slow: Mapping[int, float], watch: Sequence[int]
    ) -> None:
        device, layout = setup.cluster.device, setup.layout
        self.setup, self.work = setup, work
        self.deviation = device.deviation_fraction.value if effects.deviation else 0.0
        self.chance, jitter, landing = (np.random.default_rng((effects.seed, purpose)) for purpose in range(3))
        alike = not (self.deviation or slow or _scatters(setup, effects))
        shape = (1, 1, 1) if alike else (layout.groups, layout.replicas, layout.shards)
        watched = Watch.of(watch, layout, shape)
        cells = setup.places[:: setup.cluster.ranks_per_node, 1]  # (nodes,)
        if effects.landing:
            cells = landed_cells(setup.cluster, landing)
        axes: dict[Axis, Communicator] = {}
        for axis in AXES:
            rings = Rings.alike(setup, axis) if alike else Rings.landed(setup, axis, cells, jitter=effects.jitter)
            axes[axis] = Communicator(rings, jitter, watched)
        if effects.sharing:
            _share_links(list(axes.values()))
        self.pace = np.ones(shape)  # how many times longer than the device's mean each rank computes
        for rank, factor in slow.items():
            self.pace.reshape(-1)[rank] *= factor
        self.ranks = Ranks(work, axes, watched)
        self.flying: tuple[int, float] | None = None
        """The step after which a fragment arrives, and its part of the model."""
        self.spent_after = {0: dict(self.ranks.spent)}
        self.begin_seconds: dict[int, float] = {}
        self.step_seconds: dict[int, float] = {}
        self.round_seconds: dict[int, float] = {}

    def step(self, step: int) -> None:
        """One optimizer step of every group."""
        setup, pace = self.setup, self.pace
        self.begin_seconds[step] = self.ranks.last
        if self.deviation:
            drawn = 1 + self.deviation * self.chance.standard_normal(pace.shape)
            pace = pace * np.maximum(LEAST_PACE, drawn)
        for micro in range(setup.accumulation):
            last = micro == setup.accumulation - 1
            reduce_over: tuple[Axis, ...] = ("shard", "replica") if last else ("shard",)
            if setup.keep_unsharded_gradients and not last:
                reduce_over = ()
            self.ranks.micro_batch(pace, again=setup.reshard_after_forward, reduce_over=reduce_over)
        self.ranks.update()
        self.step_seconds[step] = self.ranks.last - self.begin_seconds[step]

    def round(self, step: int) -> None:
        """What is due after this step: a fragment arrives, or leaves."""
        setup, began = self.setup, self.ranks.last
        arrived = self._arrive(step)
        for index, part in enumerate(fragment_fractions(setup)) if setup.federates else ():
            if (step - index * setup.every // setup.fragments) % setup.every == 0:
                self._exchange(part, index)
                self.flying = step + setup.delay, part
                arrived = self._arrive(step) or arrived
        if arrived:
            self.round_seconds[step] = self.ranks.last - began
        self.spent_after[step] = dict(self.ranks.spent)

    def drain(self, step: int) -> None:
        """What is still under way after the last step is waited for."""
        began = self.ranks.last
        if self.flying is not None and self._arrive(self.flying[0]):
            self.round_seconds[step] = self.round_seconds.get(step, 0.0) + self.ranks.last - began

    def fail(self, saved: int, restart_seconds: float) -> None:
        """What was done since step `saved` is lost, and all ranks begin again from there."""
        self.ranks.stop(restart_seconds)
        self.flying = None
        kept = self.spent_after[saved]
        lost = sum(self.ranks.spent.values()) - sum(kept.values()) + restart_seconds
        self.ranks.spent = kept | {"lost": lost}

    def _exchange(self, part: float, fragment: int) -> None:
        """Owned slices of a part of the model begin to cross groups."""
        seconds = part * self.work.round_between_seconds
        self.ranks.axes["group"].run(self.ranks.now, seconds, f"round {fragment}", self._messages(part))

    def _arrive(self, step: int) -> bool:
        """If an exchange is due: it is waited for, the outer step is done, and slices are gathered in the group."""
        if self.flying is None or self.flying[0] != step:
            return False
        _, part = self.flying
        self.flying = None
        ranks, seconds = self.ranks, part * self.work.round_inside_seconds
        ranks.wait("round", np.maximum(ranks.now, ranks.axes["group"].free))
        if self.setup.sliced and self.setup.layout.replicas > 1:
            ranks.wait("round", ranks.axes["replica"].run(ranks.now, seconds, "round", self._messages(part)))
        else:
            ranks.wait("round", ranks.now + seconds)
        return True

    def _messages(self, part: float) -> int:
        """Of a part of the model in a round, taken to be of one size."""
        return max(1, round(part * sum(count for _, count in messages(self.setup, self.setup.owners))))


def _scatters(setup: Setup, effects: Effects) -> bool:
    """Whether links make ranks differ."""
    cluster = setup.cluster
    jitter = effects.jitter and any(tier.jitter is not None for tier in cluster.tiers.values())
    return jitter or (effects.landing and cluster.placement is not None)


def _share_links(axes: Sequence[Communicator]) -> None:
    """Those that leave nodes slow each other down; each node's links carry the collectives of all of them."""
    leaving = [axis for axis in axes if axis.rings.leave_nodes]
    for axis in leaving:
        axis.sharers = [other for other in leaving if other is not axis]
