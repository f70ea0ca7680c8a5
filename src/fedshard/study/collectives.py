"""How long a collective takes, by algorithm, from latencies (α) and rates (β). Derivations: docs/formal/collectives.md.

    p ranks on n nodes · V bytes of the whole (gathered) tensor · α seconds per hop, β bytes/s of the slowest link

    all-gather, reduce-scatter   ring       (p−1)·(α + V/(pβ))
    all-to-all                   pairwise   (p−1)·(α + V/(pβ))
    all-reduce                   ring       twice that
    all-reduce                   tree       2·log2(p)·α' + 2V/β
    all-gather, reduce-scatter   doubling   log2(p)·α + V(p−1)/(pβ)       one member per node
    all-reduce                   doubling   twice that
    all of them                  two-tier   rings between nodes, rings inside them

In NCCL all-gather and reduce-scatter, which FSDP lives on, have the ring alone: their latency grows with the ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedshard.core.topology import Cluster, Tier, TierName

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Algorithm = Literal["ring", "tree", "doubling", "two-tier", "best"]

REDUCTIONS: tuple[Kind, ...] = ("reduce_scatter", "all_reduce")
"""Collectives that add up what arrives."""


@dataclass(frozen=True)
class Protocol:
    """A way to put a message on the wire: short ones want little latency, long ones the whole rate."""

    name: str
    latency_factor: float
    """On the tier's latency."""
    most_bytes_per_second: float = math.inf
    """Rate that it does not exceed, whatever the link."""


@dataclass(frozen=True)
class Library:
    """What runs the collectives; of its protocols the fastest is taken for each message, as libraries themselves do."""

    name: str
    protocols: tuple[Protocol, ...]
    base_seconds: float
    """Time to start a collective at all."""
    tree_factor: float
    """On the latency of a hop in a tree, where whole pieces are received before they are passed on."""
    tree_rate_factor: float
    """On the rate of a tree."""
    adds_bytes_per_second: float = math.inf
    """Rate at which what arrives is added to what is there; accelerators are faster at it than links, hosts not."""
    doubles: tuple[Kind, ...] = ()
    """Collectives for which `best` may take recursive doubling."""


NCCL = Library(
    name="nccl",
    # Latencies relative to Simple's, in which tiers are given: NCCL src/graph/tuning.cc has 2.7 and 14 µs for a ring's
    # hop over the network; 1.15 and 4.2 µs were measured on MareNostrum 5, whose short messages give LL's 12 GB/s too.
    protocols=(Protocol("Simple", 1.0), Protocol("LL", 0.27, 12e9)),
    base_seconds=7e-6,  # 6.6 to 8.4 µs in tuning.cc
    tree_factor=3.0,  # 14 µs a hop in tuning.cc, against the 4.2 µs that a ring's hop was measured to take
    tree_rate_factor=0.92,  # tuning.cc
)


@dataclass(frozen=True)
class Members:
    """Who takes part in a collective, and what they have between them.

    `port_members` of the ranks share one port (the node's links, or a site's uplink) with `port_rings` other
    collectives of the same kind that run at the same time, this one included.
    """

    ranks: int
    nodes: int
    tier: Tier
    """The slowest link in the ring."""
    inside: Tier
    """The node's."""
    port_members: int = 1
    port_rings: int = 1

    @staticmethod
    def of(cluster: Cluster, ranks: Sequence[int]) -> Members:
        """The ranks of one axis of a layout on `cluster` (a job's: see `Cluster.job`).

        Every rank of the job is taken to be in a collective of the same axis at the same time.
        """
        name = cluster.tier_between(ranks)
        if name == "node":
            return Members(len(ranks), 1, cluster.tiers["node"], cluster.tiers["node"], len(ranks))
        port_of = cluster.site_of if name == "wide" else cluster.node_of
        port_members = max(Counter(port_of(rank) for rank in ranks).values())
        return Members(
            ranks=len(ranks),
            nodes=len({cluster.node_of(rank) for rank in ranks}),
            tier=cluster.tiers[name],
            inside=cluster.tiers["node"],
            port_members=port_members,
            port_rings=max(1, port_ranks(cluster, name) // port_members),
        )

    @property
    def node_members(self) -> int:
        """Members on one node."""
        return -(-self.ranks // self.nodes)

    def rate(self, message_bytes: float) -> float:
        """Bytes per second that a ring over these ranks gets of its slowest link."""
        rate = self.tier.rate(message_bytes, self.ranks)
        if self.nodes == 1:
            return rate
        alone = self.tier.rank_bytes_per_second
        own = math.inf if alone is None else alone.value * self.port_members
        return min(rate / self.port_rings, own)


def port_ranks(cluster: Cluster, tier: TierName) -> int:
    """Ranks that share one port of a tier: those of a node, or those of a site for its uplink."""
    if tier == "node":
        return 1
    nodes = min(cluster.site_nodes, cluster.nodes) if tier == "wide" else 1
    return nodes * cluster.ranks_per_node


def ring_seconds(kind: Kind, message_bytes: float, members: Members, library: Library = NCCL) -> float:
    """A ring over all members. Equation (collectives-ring)."""
    hops = members.ranks - 1
    if hops == 0:
        return 0.0
    crossing = 1.0
    if kind == "all_to_all":  # what members of one port send to others does not travel hop by hop, but each by itself
        crossing = members.port_members * (members.ranks - members.port_members) / hops if members.nodes > 1 else 1.0
    times = 2 if kind == "all_reduce" else 1
    chunk = message_bytes / members.ranks * crossing
    hop = _message_seconds(chunk, members.rate(message_bytes), members.tier, library)
    adding = chunk / library.adds_bytes_per_second if kind in REDUCTIONS else 0.0
    return library.base_seconds + hops * (times * hop + adding)


def tree_seconds(message_bytes: float, members: Members, library: Library = NCCL) -> float:
    """An all-reduce up and down a tree of the nodes, with chains inside them. Equation (collectives-tree)."""
    if members.ranks == 1:
        return 0.0
    rate = members.rate(message_bytes) * library.tree_rate_factor
    outside = math.ceil(math.log2(members.nodes)) * members.tier.latency_seconds.value * library.tree_factor
    inside = (members.node_members - 1) * members.inside.latency_seconds.value
    adding = message_bytes / library.adds_bytes_per_second
    return (
        library.base_seconds
        + adding
        + 2
        * min(
            (outside + inside) * protocol.latency_factor + message_bytes / min(rate, protocol.most_bytes_per_second)
            for protocol in library.protocols
        )
    )


def doubling_seconds(kind: Kind, message_bytes: float, members: Members, library: Library = NCCL) -> float:
    """Partners 1, 2, 4, … ranks away, whose messages double (in a reduction: halve). Equation (collectives-doubling).

    For one member per node: else a node's members would need its links all at once.
    """
    assert members.node_members == 1 or members.nodes == 1, "doubling is for one member per node"
    times, total, done = (2 if kind == "all_reduce" else 1), library.base_seconds, 1
    while done < members.ranks:
        chunk = message_bytes / members.ranks * min(done, members.ranks - done)
        total += times * _message_seconds(chunk, members.rate(message_bytes), members.tier, library)
        total += chunk / library.adds_bytes_per_second if kind in REDUCTIONS else 0.0
        done *= 2
    return total


def two_tier_seconds(kind: Kind, message_bytes: float, members: Members, library: Library = NCCL) -> float:
    """Rings between nodes, one for each of a node's members, and rings inside nodes. Equation (collectives-two-tier).

    An all-gather goes between nodes first, while pieces are small; an all-reduce first scatters inside the nodes.
    """
    if members.nodes == 1 or members.node_members == 1:
        return ring_seconds(kind, message_bytes, members, library)
    each = members.node_members
    between = Members(
        members.nodes, members.nodes, members.tier, members.inside, 1, port_rings=each * members.port_rings
    )
    within = Members(each, 1, members.inside, members.inside, each)
    outside = ring_seconds(kind, message_bytes / each, between, library)
    return outside + ring_seconds(kind, message_bytes, within, library)


def collective_seconds(
    kind: Kind,
    message_bytes: float,
    members: Members,
    algorithm: Algorithm = "best",
    library: Library = NCCL,
) -> float:
    """Seconds of one collective over `message_bytes` (of the whole tensor).

    `best` is the fastest that the library has: NCCL takes ring or tree for an all-reduce, the ring for all else.
    """
    assert algorithm != "tree" or kind == "all_reduce", f"no tree for {kind}"
    if message_bytes == 0 or members.ranks == 1:
        return 0.0
    if algorithm == "two-tier":
        return two_tier_seconds(kind, message_bytes, members, library)
    if algorithm == "tree":
        return tree_seconds(message_bytes, members, library)
    if algorithm == "doubling":
        return doubling_seconds(kind, message_bytes, members, library)
    times = [ring_seconds(kind, message_bytes, members, library)]
    if algorithm == "best" and kind == "all_reduce":
        times.append(tree_seconds(message_bytes, members, library))
    if algorithm == "best" and kind in library.doubles and members.node_members == 1:
        times.append(doubling_seconds(kind, message_bytes, members, library))
    return min(times)


def _message_seconds(message_bytes: float, rate: float, tier: Tier, library: Library) -> float:
    """One message between neighbours on a tier, by the protocol that is fastest for it."""
    return min(
        tier.latency_seconds.value * protocol.latency_factor + message_bytes / min(rate, protocol.most_bytes_per_second)
        for protocol in library.protocols
    )
