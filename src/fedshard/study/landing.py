"""Where a job's nodes really land, and what that makes of the rings of each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fedshard.core.topology import TIERS, Cluster, Jitter
from fedshard.study.collectives import Members, collective_seconds
from fedshard.study.setup import Axis, Setup

ALONG: dict[Axis, int] = {"group": 0, "replica": 1, "shard": 2}
"""Along which dim of an array over (groups, replicas, shards) an axis runs."""

SPREAD = 0.35
"""Standard deviation of the logarithm of how many cells a job gets: jobs of 128 nodes were seen in 3 to 19 cells, most
in about 10 (HLC-Lab/pico, 43 jobs)."""

LONG_MESSAGE_BYTES = 2.0**26
"""Of the message by which rings that cross different tiers are compared."""


def landed_cells(cluster: Cluster, chance: np.random.Generator) -> np.ndarray:
    """The cell of each node of a job on `cluster` (a job's: see `Cluster.job`): (nodes,), rising.

    The number of cells scatters around what the cluster's placement says. Each gets a node, and the others fall into
    them unevenly, with parts that are uniform over all ways to cut a whole: two nodes of such a job are in different
    cells as often as was seen (0.83 at 128 nodes, HLC-Lab/pico). Schedulers number nodes cell by cell. Without a
    placement nodes are packed.
    """
    if cluster.placement is None or cluster.nodes == 1:
        return np.arange(cluster.nodes) // cluster.nodes_per_cell
    median = cluster.placement.cells_of(cluster.nodes)
    cells = int(np.clip(round(median * math.exp(SPREAD * chance.standard_normal())), 1, cluster.nodes))
    nodes = 1 + chance.multinomial(cluster.nodes - cells, chance.dirichlet(np.ones(cells)))  # (cells,)
    return np.repeat(np.arange(cells), nodes)


@dataclass(frozen=True)
class Rings:
    """The rings of one axis. Arrays are over (groups, replicas, shards), with 1 along the axis."""

    axis: Axis
    leave_nodes: bool
    """Whether any of them uses the links of nodes."""
    factors: np.ndarray
    """Time of each ring over that of the packed job's slowest, which the pieces of a step are of."""
    medians: np.ndarray
    """Median of the factor that chance puts on its collectives."""
    spreads: np.ndarray
    """Standard deviation of that factor's logarithm. Equation (stragglers-jitter)."""

    @staticmethod
    def alike(setup: Setup, axis: Axis) -> Rings:
        """One ring that stands for all of them."""
        one = np.ones((1, 1, 1))
        return Rings(axis, setup.members(axis).nodes > 1, one, one, 0 * one)

    @staticmethod
    def landed(setup: Setup, axis: Axis, cells: np.ndarray, *, jitter: bool) -> Rings:
        """All of them, with each node in its cell of `cells`: (nodes,)."""
        places = setup.places.copy()  # (ranks, 3): node, cell, site
        places[:, 1] = cells[places[:, 0]]
        rings = setup.rings(axis)
        apart = (places[rings] != places[rings[:, :1]]).any(axis=1)  # (rings, 3)
        tiers = (apart * np.arange(1, len(TIERS))).max(axis=1)  # (rings,)
        known = [_jitter_of(setup.cluster, tier) if jitter else None for tier in range(len(TIERS))]
        medians = np.array([each.median_factor if each else 1.0 for each in known])
        spreads = np.array([_spread(each) if each else 0.0 for each in known])
        layout, along = setup.layout, ALONG[axis]
        sizes = (layout.groups, layout.replicas, layout.shards)
        shape = tuple(1 if dim == along else size for dim, size in enumerate(sizes))
        factors = _factors(setup, axis, tiers).reshape(shape)
        return Rings(axis, bool(tiers.any()), factors, medians[tiers].reshape(shape), spreads[tiers].reshape(shape))

    @property
    def along(self) -> int:
        """Along which dim of an array over all ranks they run."""
        return ALONG[self.axis]

    def slowest(self, times: np.ndarray) -> np.ndarray:
        """For each ring the largest of its members' values."""
        return times.max(axis=self.along, keepdims=True)

    def stretch(self, chance: np.random.Generator, messages: int) -> np.ndarray:
        """How many times longer than on the slowest quiet ring so many messages, one after the other, take on each."""
        if not self.spreads.any():
            return self.factors * self.medians
        drawn = np.exp(self.spreads * chance.standard_normal((messages, *self.factors.shape)))
        return self.factors * np.maximum(1.0, self.medians * drawn).mean(axis=0)


def _jitter_of(cluster: Cluster, tier: int) -> Jitter | None:
    """How times scatter on a tier, by its index in `TIERS`; None where the cluster does not say."""
    found = cluster.tiers.get(TIERS[tier])
    return None if found is None else found.jitter


def _spread(jitter: Jitter) -> float:
    return math.log(jitter.p99_factor / jitter.median_factor) / NormalDist().inv_cdf(0.99)


def _factors(setup: Setup, axis: Axis, tiers: np.ndarray) -> np.ndarray:
    """Time of each ring over that of the packed job's slowest, from the tier that it crosses: (rings,)."""
    slowest = setup.members(axis)
    if slowest.ranks == 1:
        return np.ones(len(tiers))

    def seconds(members: Members) -> float:
        return collective_seconds("all_gather", LONG_MESSAGE_BYTES, members)

    factors = np.ones(len(TIERS))
    for tier in set(tiers.tolist()):
        crossed = setup.cluster.tiers.get(TIERS[tier], slowest.tier)
        members = replace(slowest, tier=crossed)
        factors[tier] = seconds(members if tier else replace(members, nodes=1, port_rings=1)) / seconds(slowest)
    return factors[tiers]
