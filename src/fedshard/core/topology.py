"""A cluster as numbers: ranks in nodes, nodes in cells, cells in sites, and the links between them.

    tier      joins                        its rate is that of      shared by
    node      ranks of one node            a rank                   nobody
    cell      nodes of one cell            a node                   the node's ranks
    global    cells of one site            a node                   the node's ranks
    wide      sites                        a site's uplink          all ranks of the site

Every constant stands in the cluster's file with its source and how far to trust it. Rates are bytes per second in one
direction, and goodput: what a long message gets, not what is printed on the cable. Pure arithmetic; files are read by
`fedshard.core.cluster_file`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedshard.core.errors import Fault, InputError

TierName = Literal["node", "cell", "global", "wide"]
TIERS: tuple[TierName, ...] = ("node", "cell", "global", "wide")
"""From the inside out; a ring is as slow as the outermost of them that it crosses."""

Confidence = Literal["measured", "published", "second-hand", "recalled", "assumed"]
Positive = Annotated[float, Field(gt=0)]


class ClusterPart(BaseModel):
    """A frozen part of a cluster's file; a key that is no field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Sourced(ClusterPart):
    """Something that was found out somewhere."""

    source: str = Field(min_length=1)
    """Where it was read or measured, or what it was derived from."""
    confidence: Confidence
    """`measured` on the machine itself, `published` by its owner or maker, `second-hand` from a text about such a
    source, `recalled` and not checked, or `assumed`."""


class Constant(Sourced):
    """One number, in the unit that its key names."""

    value: float = Field(ge=0)
    """The number."""


class Efficiency(Sourced):
    """What is left of a link's rate for a message of so many bytes among so many ranks: a table to interpolate in.

    Between the table's points it is linear in the logarithms of bytes and ranks; outside it stays at the edge.

    >>> table = dict(message_bytes=[1e6, 1e8], ranks=[8, 512], fractions=[[0.4, 0.8], [0.2, 0.6]])
    >>> efficiency = Efficiency(**table, source="an example", confidence="assumed")
    >>> efficiency.at(1e7, 8), efficiency.at(1e9, 4096), efficiency.at(1e7, 64)
    (0.6, 0.6, 0.5)
    """

    message_bytes: tuple[Positive, ...] = Field(min_length=1)
    """Sizes of the whole (gathered) tensor, rising."""
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Ranks that take part, rising."""
    fractions: tuple[tuple[Annotated[float, Field(gt=0, le=1)], ...], ...]
    """The part of the rate that is left: one row for each of `ranks`, one column for each of `message_bytes`."""

    @model_validator(mode="after")
    def _is_a_table(self) -> Efficiency:
        for name, axis in (("message_bytes", self.message_bytes), ("ranks", self.ranks)):
            if list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} must rise, {list(axis)} given")
        columns = {len(row) for row in self.fractions}
        if len(self.fractions) != len(self.ranks) or columns != {len(self.message_bytes)}:
            raise ValueError(
                f"fractions must be {len(self.ranks)} rows (ranks) of {len(self.message_bytes)} (message_bytes)"
            )
        return self

    def at(self, message_bytes: float, ranks: int) -> float:
        """The fraction of the rate for this message among so many ranks."""
        row, up = _between(self.ranks, ranks)
        column, right = _between(self.message_bytes, message_bytes)
        lower, upper = self.fractions[row], self.fractions[min(row + 1, len(self.fractions) - 1)]
        after = min(column + 1, len(lower) - 1)
        below = lower[column] + right * (lower[after] - lower[column])
        above = upper[column] + right * (upper[after] - upper[column])
        return round(below + up * (above - below), 12)


class Jitter(Sourced):
    """How much longer than its shortest time a collective takes, as a lognormal distribution."""

    median_factor: float = Field(ge=1)
    """Half of the collectives take at most this many times the shortest time."""
    p99_factor: float = Field(ge=1)
    """99 of 100 take at most this many times the shortest time."""

    @model_validator(mode="after")
    def _is_a_tail(self) -> Jitter:
        if self.p99_factor < self.median_factor:
            raise ValueError(f"p99_factor {self.p99_factor} is below median_factor {self.median_factor}")
        return self


class Tier(ClusterPart):
    """A class of link."""

    latency_seconds: Constant
    """Time of one hop of a message without length (α)."""
    link_bytes_per_second: Constant
    """Rate in one direction (β): of a rank inside a node, of a whole node outside, of a site's uplink for `wide`."""
    rank_bytes_per_second: Constant | None = None
    """Outside a node, the most that one rank gets when it has the node's links to itself; without it, all of them."""
    efficiency: Efficiency | None = None
    """What is left of the rate by size and ranks; without a table, all of it."""
    jitter: Jitter | None = None
    """How times scatter; without it, they do not."""

    def rate(self, message_bytes: float, ranks: int) -> float:
        """Bytes per second that are left of the link's rate for this message among so many ranks."""
        share = 1.0 if self.efficiency is None else self.efficiency.at(message_bytes, ranks)
        return self.link_bytes_per_second.value * share


class Device(ClusterPart):
    """One rank's accelerator."""

    name: str = Field(min_length=1)
    """What it is called."""
    peak_flops_per_second: Constant
    """Dense bfloat16 peak, as model FLOP utilisation (MFU) is counted against."""
    achievable_fraction: Constant
    """The part of the peak that training reaches where no communication is waited for."""
    memory_bytes: Constant
    """Memory of the device."""
    memory_bytes_per_second: Constant
    """Rate of that memory, which the optimizer step is bound by."""
    deviation_fraction: Constant
    """Standard deviation of a rank's computing time from step to step, over its mean."""

    @property
    def flops_per_second(self) -> float:
        """What training reaches where no communication is waited for."""
        return self.peak_flops_per_second.value * self.achievable_fraction.value


class Placement(Sourced):
    """Over how many cells the scheduler spreads a job, as jobs really landed."""

    job_nodes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Nodes of a job, rising."""
    cells: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Cells that such a job has nodes in (the median)."""

    @model_validator(mode="after")
    def _is_a_table(self) -> Placement:
        if list(self.job_nodes) != sorted(set(self.job_nodes)) or len(self.cells) != len(self.job_nodes):
            raise ValueError("job_nodes must rise, with one entry of cells for each")
        return self

    def cells_of(self, nodes: int) -> int:
        """The cells that a job of so many nodes has nodes in; at most one per node."""
        at, up = _between(self.job_nodes, nodes)
        after = self.cells[min(at + 1, len(self.cells) - 1)]
        return min(round(self.cells[at] + up * (after - self.cells[at])), nodes)


class Cluster(ClusterPart):
    """Nodes, their ranks, and the links between them. Ranks are numbered node by node, nodes cell by cell."""

    name: str = Field(min_length=1)
    """What it is called."""
    about: str = Field(min_length=1)
    """What it stands for, and what it leaves out."""
    nodes: int = Field(ge=1)
    """Nodes of the whole cluster."""
    ranks_per_node: int = Field(ge=1)
    """Accelerators of one node, one rank each."""
    nodes_per_cell: int = Field(ge=1)
    """Nodes whose links meet without leaving their cell."""
    nodes_per_site: int | None = Field(default=None, ge=1)
    """Nodes of one site; without it, all of them."""
    device: Device
    """One rank's accelerator."""
    tiers: dict[TierName, Tier]
    """The links: `node`, and each further tier that the cluster is large enough to have."""
    placement: Placement | None = None
    """How jobs are spread over cells; without it, they are packed."""

    @model_validator(mode="after")
    def _has_its_tiers(self) -> Cluster:
        if missing := [tier for tier in TIERS if tier in self.crossed(self.nodes) and tier not in self.tiers]:
            raise ValueError(f"{self.nodes} nodes reach over tiers that are not given: {', '.join(missing)}")
        return self

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.nodes * self.ranks_per_node

    @property
    def site_nodes(self) -> int:
        """Nodes of one site."""
        return self.nodes_per_site or self.nodes

    def crossed(self, nodes: int) -> tuple[TierName, ...]:
        """The tiers that the first so many nodes reach over."""
        sizes: dict[TierName, int] = {"node": 0, "cell": 1, "global": self.nodes_per_cell, "wide": self.site_nodes}
        within = min(nodes, self.site_nodes)
        return tuple(tier for tier in TIERS if (nodes if tier == "wide" else within) > sizes[tier])

    def node_of(self, rank: int) -> int:
        """The node that a rank stands on."""
        return rank // self.ranks_per_node

    def cell_of(self, rank: int) -> int:
        """The cell that a rank stands in; cells are numbered through all sites."""
        site, inside = divmod(self.node_of(rank), self.site_nodes)
        return site * -(-self.site_nodes // self.nodes_per_cell) + inside // self.nodes_per_cell

    def site_of(self, rank: int) -> int:
        """The site that a rank stands at."""
        return self.node_of(rank) // self.site_nodes

    def tier_between(self, ranks: Iterable[int]) -> TierName:
        """The slowest link in a ring over these ranks: the outermost tier that it must cross.

        >>> from fedshard.core.cluster_file import read_cluster
        >>> cluster = read_cluster("leonardo-nominal")
        >>> cluster.tier_between([0, 3]), cluster.tier_between([0, 4]), cluster.tier_between([0, 720])
        ('node', 'cell', 'global')
        """
        members = list(ranks)
        outside: tuple[TierName, ...] = ("wide", "global", "cell")
        for tier, of in zip(outside, (self.site_of, self.cell_of, self.node_of), strict=True):
            if len({of(rank) for rank in members}) > 1:
                return tier
        return "node"

    def job(self, ranks: int) -> Cluster:
        """The part of the cluster that a job of so many ranks gets, spread over cells as `placement` says.

        Raises InputError where the cluster has fewer ranks, or where several nodes would not be filled.
        """
        nodes = -(-ranks // self.ranks_per_node)
        if ranks > self.ranks:
            says = f"{ranks} ranks, and {self.name} has {self.ranks}"
            raise InputError([Fault("ranks", says, f"Ask for at most {self.ranks}.")])
        if nodes > 1 and ranks % self.ranks_per_node:
            says = f"{ranks} ranks do not fill nodes of {self.ranks_per_node}"
            mend = (
                f"Ask for {nodes * self.ranks_per_node}, or for {ranks // self.ranks_per_node * self.ranks_per_node}."
            )
            raise InputError([Fault("ranks", says, mend)])
        together = self.nodes_per_cell
        if self.placement is not None:
            together = min(together, -(-nodes // self.placement.cells_of(nodes)))
        filled = {"nodes": nodes, "nodes_per_cell": together, "ranks_per_node": min(ranks, self.ranks_per_node)}
        return self.model_copy(update=filled)


def _between(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The point of a rising axis at or below `value`, and how far on the way to the next one (in logarithms)."""
    at = bisect_right(axis, value) - 1
    if at < 0:
        return 0, 0.0
    if at == len(axis) - 1:
        return at, 0.0
    return at, math.log(value / axis[at]) / math.log(axis[at + 1] / axis[at])
