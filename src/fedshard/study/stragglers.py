"""What waiting for the slowest costs, in expectation: ranks that compute unevenly, and collectives that are held up.

A step waits for the slowest rank of its group; a round for the slowest group, but only after H steps, over which
groups have averaged. Derivations: docs/formal/stragglers.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from fedshard.core.topology import Jitter
from fedshard.study.collectives import Members
from fedshard.study.setup import Setup
from fedshard.study.work import StepWork


@dataclass(frozen=True)
class Waiting:
    """Expected seconds that one step is longer because ranks are not equally fast."""

    step_seconds: float
    """For the slowest rank of the group."""
    round_seconds: float
    """For the slowest group, per step."""

    @property
    def total_seconds(self) -> float:
        """Both."""
        return self.step_seconds + self.round_seconds


def waiting(setup: Setup, compute_seconds: float) -> Waiting:
    """The expected wait of a step that computes so long. Equations (stragglers-step) and (stragglers-round).

    Each rank's time in each step is normal around its mean, by the device's deviation, and independent of the others:
    a rank that is always slow is waited for by every layout, and is not in here.
    """
    deviation = setup.cluster.device.deviation_fraction.value * compute_seconds
    mean, spread = slowest_of(setup.layout.group_ranks)
    apart = spread * slowest_of(setup.layout.groups)[0] / math.sqrt(setup.every)
    return Waiting(mean * deviation, apart * deviation)


@lru_cache
def slowest_of(members: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of so many standard normal values. Equation (stragglers-slowest).

    >>> mean, _ = slowest_of(2)
    >>> abs(mean - math.pi**-0.5) < 1e-9
    True
    """
    normal, values = NormalDist(), np.linspace(-9.0, 9.0, 3601)
    below = np.array([normal.cdf(value) for value in values]) ** members  # that none is larger
    chances, middles = np.diff(below), (values[1:] + values[:-1]) / 2
    mean = float(chances @ middles)
    return mean, math.sqrt(float(chances @ (middles - mean) ** 2))


def mean_factor(jitter: Jitter | None) -> float:
    """How much longer than its shortest time a collective takes on average: a lognormal's mean from median and tail.

    Equation (stragglers-jitter).
    """
    if jitter is None:
        return 1.0
    spread = math.log(jitter.p99_factor / jitter.median_factor) / NormalDist().inv_cdf(0.99)
    return jitter.median_factor * math.exp(spread**2 / 2)


def with_jitter(work: StepWork, setup: Setup) -> StepWork:
    """The pieces of a step with every collective as long as it is on average on its tier."""
    shard, replica, group = (_factor(setup.members(axis)) for axis in ("shard", "replica", "group"))
    return replace(
        work,
        units=tuple(
            replace(
                unit,
                gather_seconds=unit.gather_seconds * shard,
                scatter_seconds=unit.scatter_seconds * shard,
                replica_seconds=unit.replica_seconds * replica,
            )
            for unit in work.units
        ),
        round_between_seconds=work.round_between_seconds * group,
        round_inside_seconds=work.round_inside_seconds * replica,
        synchronous_seconds=work.synchronous_seconds * group,
    )


def _factor(members: Members) -> float:
    return mean_factor(members.tier.jitter) if members.ranks > 1 else 1.0
