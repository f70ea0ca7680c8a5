"""Steps and rounds as events on every rank: what the closed form of `cost.py` gives, and what chance makes of it.

Each rank has a stream that computes and a communicator for each axis, on which collectives run in the order in which
FSDP2 issues them. On top of the closed form come links that axes share, placement over cells, jitter of every
collective, ranks that are slow or uneven, and a group that fails. Without these it is the closed form. Derivation:
docs/formal/simulator.md.

Where nothing tells ranks apart, one stands for all; else a time is an array over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from fedshard.core.topology import TIERS, Jitter
from fedshard.study.collectives import Members, collective_seconds
from fedshard.study.cost import fragment_fractions
from fedshard.study.events import AXES, Communicator, Draw, Ports
from fedshard.study.landing import landed_cells
from fedshard.study.setup import Axis, Setup
from fedshard.study.work import StepWork, UnitWork, step_work

PHASES: tuple[str, ...] = ("compute", "gather", "reduction", "clip", "optimizer", "round", "lost")
"""What a rank's time goes to: beside computing, waiting for parameters, for reductions, …"""

LONG_MESSAGE_BYTES = 2.0**26
"""Of the message by which rings that cross different tiers are compared."""


@dataclass(frozen=True)
class Failure:
    """A group that fails: the whole job begins again from its last checkpoint."""

    step: int
    """After this step, counted from 1 over all rounds."""
    checkpoint_every: int
    """Steps between checkpoints; those since the last one are lost."""
    restart_seconds: float
    """Until training goes on."""


@dataclass(frozen=True)
class Chance:
    """What is left to chance; the same seed gives the same times."""

    seed: int = 0
    jitter: bool = True
    """Collectives are longer than they need be, by their tier's distribution."""
    deviation: bool = True
    """Ranks compute unevenly from step to step, by the device's deviation."""
    landing: bool = True
    """Nodes land in cells as jobs do; False: packed."""


NOTHING = Chance(jitter=False, deviation=False, landing=False)
"""Nothing is left to chance."""


@dataclass
class Simulation:
    """What happened. Shares are of the mean rank's time."""

    step_seconds: list[float]
    """Of each step, from the moment when the last rank began to the one when the last was done, without its round."""
    round_seconds: list[float]
    """That each round added to the job."""
    seconds: float
    """Of everything."""
    tokens: int
    """Sequences × sequence length of all ranks, those lost to a failure left out."""
    spent: dict[str, float]
    """Seconds of the mean rank, by phase: compute, gather, reduction, clip, optimizer, round, lost."""
    intervals: list[tuple[int, str, str, float, float]] = field(default_factory=list)
    """Of the ranks that were watched: rank, stream, name, begin and end."""

    @property
    def tokens_per_second(self) -> float:
        """Over all of it."""
        return self.tokens / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's part of the mean rank's time."""
        total = sum(self.spent.values())
        return {name: seconds / total for name, seconds in self.spent.items()}


def simulate(
    setup: Setup,
    rounds: int = 1,
    chance: Chance = NOTHING,
    *,
    work: StepWork | None = None,
    slow: Mapping[int, float] | None = None,
    failure: Failure | None = None,
    watch: tuple[int, ...] = (),
    share_links: bool = True,
) -> Simulation:
    """So many rounds of `setup` (without rounds: as often `every` steps).

    `work`: the pieces of a step, if not `step_work`'s. `slow`: factors on the computing time of some ranks. `watch`:
    ranks whose streams are kept as intervals. `share_links`: whether axes whose collectives leave a node wait for each
    other.
    """
    job = _Job(setup, work or step_work(setup), chance, slow or {}, share_links, watch)
    steps, failed = rounds * setup.every, False
    step = 0
    while step < steps:
        step += 1
        job.step()
        job.round(step)
        if failure is not None and step == failure.step and not failed:
            failed, lost = True, step % failure.checkpoint_every
            job.lose(lost, failure.restart_seconds)
            step -= lost
    return job.told(steps)


class _Job:
    """All ranks, while they train."""

    def __init__(
        self,
        setup: Setup,
        work: StepWork,
        chance: Chance,
        slow: Mapping[int, float],
        share_links: bool,
        watch: tuple[int, ...],
    ):
        layout = setup.layout
        self.setup, self.work, self.watch = setup, work, watch
        self.chance, self.source = chance, np.random.default_rng(chance.seed)
        self.deviation = setup.cluster.device.deviation_fraction.value if chance.deviation else 0.0
        alike = not (chance.jitter or chance.landing or self.deviation or slow)
        self.shape = (1, 1, 1) if alike else (layout.groups, layout.replicas, layout.shards)
        self.pace = np.ones(math.prod(self.shape))
        for rank, factor in slow.items():
            self.pace[rank] *= factor
        self.pace = self.pace.reshape(self.shape)
        self.now = np.zeros(self.shape)
        self.axes = self._communicators(share_links)
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.step_seconds: list[float] = []
        self.round_seconds: list[float] = []
        self.flying: dict[int, tuple[float, np.ndarray]] = {}  # step to apply after → part of the model, end
        self.computed: list[tuple[str, np.ndarray, np.ndarray]] = []

    def step(self) -> None:
        """One optimizer step of every group."""
        began, units, setup = float(self.now.max()), self.work.units, self.setup
        factor = self.pace
        if self.deviation:
            factor = factor * np.maximum(0.05, 1 + self.deviation * self.source.standard_normal(self.shape))
        for micro in range(setup.accumulation):
            last = micro == setup.accumulation - 1
            self._forward(units, factor)
            self._backward(units, factor, reduce=last or not setup.keep_unsharded_gradients, replicas=last)
        self._pass("reduction", np.maximum(self.now, np.maximum(self.axes["shard"].free, self.axes["replica"].free)))
        together = np.broadcast_to(self.now.max(axis=(1, 2), keepdims=True), self.shape)  # the group agrees on its norm
        self._pass("reduction", together)
        self._pass("clip", self.now + self.work.clip_seconds)
        self._pass("optimizer", self.now + self.work.optimizer_seconds)
        self.step_seconds.append(float(self.now.max()) - began)

    def round(self, step: int) -> None:
        """What is due after this step (counted from 1): fragments leave, and those that have arrived are applied."""
        setup = self.setup
        if not setup.federates:
            return
        began = float(self.now.max())
        for index, part in enumerate(fragment_fractions(setup)):
            if (step - index * setup.every // setup.fragments) % setup.every == 0:
                done = self.axes["group"].run(self.now, part * self.work.round_between_seconds, f"round {index}")
                self.flying[step + setup.delay] = part, done
        if step in self.flying:
            part, done = self.flying.pop(step)
            self._pass("round", np.maximum(self.now, done) + part * self.work.round_inside_seconds)
            self.round_seconds.append(float(self.now.max()) - began)

    def lose(self, steps: int, restart_seconds: float) -> None:
        """The last steps are lost, and all ranks begin again together."""
        begin = np.full(self.shape, float(self.now.max()) + restart_seconds)
        self._pass("lost", begin)
        self.flying.clear()
        del self.step_seconds[len(self.step_seconds) - steps :]

    def told(self, steps: int) -> Simulation:
        """What came of it."""
        if self.flying:  # the last round is waited for
            for part, done in self.flying.values():
                self._pass("round", np.maximum(self.now, done) + part * self.work.round_inside_seconds)
        tokens = steps * self.setup.tokens_per_step
        ended = float(self.now.max())
        return Simulation(self.step_seconds, self.round_seconds, ended, tokens, self.spent, self._intervals())

    def _forward(self, units: tuple[UnitWork, ...], factor: np.ndarray) -> None:
        """Equation (step-forward) on every rank."""
        (root, *blocks), shards = units, self.axes["shard"]
        self._pass("gather", shards.run(self.now, root.gather_seconds, "gather root"))
        ready = shards.run(self.now, blocks[0].gather_seconds, f"gather {blocks[0].name}")
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self._pass("gather", np.maximum(self.now, ready))
            if following is not None:
                ready = shards.run(self.now, following.gather_seconds, f"gather {following.name}")
            self._compute(block.forward_seconds * factor, f"forward {block.name}")
        self._compute(root.forward_seconds * factor, "forward root")

    def _backward(self, units: tuple[UnitWork, ...], factor: np.ndarray, *, reduce: bool, replicas: bool) -> None:
        """Equation (step-backward) on every rank."""
        shards, again = self.axes["shard"], self.setup.reshard_after_forward

        def gather(unit: UnitWork | None) -> np.ndarray:
            if unit is None or not again:
                return self.now
            return shards.run(self.now, unit.gather_seconds, f"gather {unit.name}")

        def reduce_gradients(unit: UnitWork) -> None:
            if reduce:
                done = shards.run(self.now, unit.scatter_seconds, f"reduce {unit.name}")
                if replicas:
                    self.axes["replica"].run(done, unit.replica_seconds, f"all-reduce {unit.name}")

        root, *blocks = units
        blocks.reverse()
        ready = gather(blocks[0])
        self._compute(root.backward_seconds * factor, "backward root")
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self._pass("gather", np.maximum(self.now, ready))
            ready = gather(following)
            self._compute(block.backward_seconds * factor, f"backward {block.name}")
            reduce_gradients(block)
        reduce_gradients(root)

    def _compute(self, seconds: np.ndarray, name: str) -> None:
        began = self.now
        self._pass("compute", began + seconds)
        if self.watch:
            self.computed.append((name, began, self.now))

    def _pass(self, phase: str, until: np.ndarray) -> None:
        """Time passes on every rank, and is put down to a phase."""
        self.spent[phase] += float((until - self.now).mean())
        self.now = np.asarray(until)

    def _communicators(self, share_links: bool) -> dict[Axis, Communicator]:
        """One for each axis, with the rings as they landed."""
        places = self.setup.places.copy()  # (ranks, node cell site)
        if self.chance.landing:
            places[:, 1] = landed_cells(self.setup.cluster, self.source)[places[:, 0]]
        made: dict[Axis, Communicator] = {}
        ports = Ports()
        for axis, along in AXES.items():
            shape = tuple(1 if dim == along else size for dim, size in enumerate(self.shape))
            tiers = _ring_tiers(self.setup.rings(axis), places)
            factors, draw = np.ones(shape), _no_jitter
            if self.shape != (1, 1, 1):
                factors = _ring_factors(self.setup, axis, tiers).reshape(shape)
            if self.chance.jitter:
                draw = self._jitter(axis, tiers)
            leaves = share_links and int(tiers.max()) > 0
            made[axis] = Communicator(axis, factors, ports if leaves else None, draw, [] if self.watch else None)
        return made

    def _jitter(self, axis: Axis, tiers: np.ndarray) -> Draw:
        """A lognormal factor for each ring, by its own tier."""
        jitters = [self.setup.cluster.tiers[TIERS[tier]].jitter for tier in tiers]
        median = np.array([jitter.median_factor if jitter else 1.0 for jitter in jitters])
        spread = np.array([_spread(jitter) if jitter else 0.0 for jitter in jitters])

        def draw(_: Axis, shape: tuple[int, ...]) -> np.ndarray:
            drawn = median * np.exp(spread * self.source.standard_normal(len(median)))
            return np.maximum(1.0, drawn).reshape(shape)

        return draw

    def _intervals(self) -> list[tuple[int, str, str, float, float]]:
        """What the watched ranks' streams did."""
        streams = [("compute", self.computed), *((axis, each.busy or []) for axis, each in self.axes.items())]
        found = []
        for rank in self.watch:
            place = self.setup.layout.place(rank)
            at = (place.group, place.replica, place.shard)
            for stream, events in streams:
                for name, begin, end in events:
                    times = (float(each[tuple(min(a, s - 1) for a, s in zip(at, each.shape, strict=True))])
                             for each in (begin, end))  # fmt: skip
                    found.append((rank, stream, name, *times))
        return found


def _no_jitter(_: Axis, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape)


def _spread(jitter: Jitter) -> float:
    """Standard deviation of the logarithm. Equation (stragglers-jitter)."""
    return math.log(jitter.p99_factor / jitter.median_factor) / NormalDist().inv_cdf(0.99)


def _ring_tiers(rings: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The outermost tier that each ring crosses, as an index into `TIERS`: (rings,)."""
    apart = (places[rings] != places[rings[:, :1]]).any(axis=1)  # (rings, 3): of another node, cell, site
    return (apart * np.arange(1, len(TIERS))).max(axis=1)


def _ring_factors(setup: Setup, axis: Axis, tiers: np.ndarray) -> np.ndarray:
    """Time of each ring over that of the packed job's slowest, which the pieces of a step are of: (rings,)."""
    slowest = setup.members(axis)
    if slowest.ranks == 1:
        return np.ones(len(tiers))

    def seconds(members: Members) -> float:
        return collective_seconds("all_gather", LONG_MESSAGE_BYTES, members)

    factors = {}
    for tier in sorted(set(tiers.tolist())):
        known = setup.cluster.tiers.get(TIERS[tier], slowest.tier)
        inside = replace(slowest, nodes=1, port_rings=1) if tier == 0 else slowest
        factors[tier] = seconds(replace(inside, tier=known)) / seconds(slowest)
    return np.array([factors[tier] for tier in tiers.tolist()])
