"""How ranks are laid out: G groups × R replicas × S shards. Pure arithmetic.

Ranks run shard fastest, then replica, then group, so that with a launcher that numbers ranks node by node the
heaviest traffic (shards, every unit of every step) stays on the fastest tier.

    layout 2×2×2          group 0           group 1
      replica 0         ranks 0 1         ranks 4 5
      replica 1         ranks 2 3         ranks 6 7
                    shard 0     1             0     1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where one rank stands: its group, its replica in the group, its shard in the replica (all from 0)."""

    group: int
    replica: int
    shard: int


@dataclass(frozen=True)
class Layout:
    """G×R×S: `groups` groups of `replicas` replicas of `shards` shards.

    >>> layout = Layout(groups=2, replicas=2, shards=2)
    >>> layout.strategy, layout.ranks, layout.place(6)
    ('FL+HSDP', 8, Place(group=1, replica=1, shard=0))
    """

    groups: int
    replicas: int
    shards: int

    def __post_init__(self) -> None:
        assert min(self.groups, self.replicas, self.shards) >= 1, f"a layout has at least one of each: {self}"

    def __str__(self) -> str:
        return f"{self.groups}×{self.replicas}×{self.shards}"

    @property
    def ranks(self) -> int:
        """All ranks of the run: G·R·S."""
        return self.groups * self.group_ranks

    @property
    def group_ranks(self) -> int:
        """Ranks of one group: R·S."""
        return self.replicas * self.shards

    @property
    def strategy(self) -> str:
        """The field's name for this layout; derived, never stored.

        >>> [Layout(*grs).strategy for grs in [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 2), (1, 4, 1), (4, 1, 1)]]
        ['FSDP', 'HSDP', 'FL+FSDP', 'FL+HSDP', 'DDP', 'FL+DDP']
        """
        if self.ranks == 1:
            return "single process"
        inner = "DDP" if self.shards == 1 else "HSDP" if self.replicas > 1 else "FSDP"
        return inner if self.groups == 1 else f"FL+{inner}"

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        group, inside = divmod(rank, self.group_ranks)
        replica, shard = divmod(inside, self.shards)
        return Place(group, replica, shard)

    def rank(self, place: Place) -> int:
        """The rank that stands at `place`: group_start + replica·S + shard."""
        return place.group * self.group_ranks + place.replica * self.shards + place.shard

    def group_of(self, rank: int) -> range:
        """The ranks that train in lock-step with `rank`."""
        start = rank // self.group_ranks * self.group_ranks
        return range(start, start + self.group_ranks)

    def peers(self, rank: int) -> list[int]:
        """The ranks that hold the same slice in every group, in group order: the members of a round's exchange."""
        inside = rank % self.group_ranks
        return [group * self.group_ranks + inside for group in range(self.groups)]

    def all_peers(self) -> Iterator[list[int]]:
        """`peers` of every rank of group 0: one exchange per slice."""
        return (self.peers(rank) for rank in range(self.group_ranks))


def rows_of(shard: int, shards: int, rows: int) -> range:
    """The rows of dim 0 that one shard holds: chunks of ⌈rows/S⌉, the last ones shorter or empty (as FSDP2 does).

    >>> [len(rows_of(shard, 4, 6)) for shard in range(4)]
    [2, 2, 2, 0]
    """
    chunk = -(-rows // shards)
    return range(min(shard * chunk, rows), min((shard + 1) * chunk, rows))


def owned_of(replica: int, replicas: int, numel: int) -> range:
    """The elements of a shard's flattened tensor that one replica owns in a round: the r-th chunk of ⌈numel/R⌉.

    Chunks are equal but for the last ones, which may be shorter or empty, so that an all-gather of R chunks
    restores the whole without moving anything.

    >>> [owned_of(replica, 2, 5) for replica in range(2)]
    [range(0, 3), range(3, 5)]
    """
    return rows_of(replica, replicas, numel)
