"""Collectives that make ranks wait for each other, and that share links.

A time is an array over (groups, replicas, shards), or over (1, 1, 1) where nothing tells ranks apart. Every rank issues
the same collectives in the same order, so a communicator needs no queue: a collective begins when its last member has
issued it and the communicator is free. Derivation: docs/formal/simulator.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedshard.core.layout import Layout
from fedshard.study.landing import Rings


@dataclass(frozen=True)
class Watch:
    """Picks the values of a few ranks out of arrays over all ranks."""

    ranks: tuple[int, ...]
    places: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Their groups, replicas and shards; zeros where one rank stands for all."""
    shape: tuple[int, ...]
    """Of an array over all ranks."""

    @staticmethod
    def of(ranks: Sequence[int], layout: Layout, shape: tuple[int, ...]) -> Watch:
        """On so many ranks in arrays of `shape`."""
        found = [layout.place(rank) for rank in ranks]
        places = np.array([(each.group, each.replica, each.shard) for each in found], dtype=int).reshape(-1, 3)
        group, replica, shard = np.minimum(places, np.array(shape) - 1).T
        return Watch(tuple(ranks), (group, replica, shard), shape)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Their values: (watched,)."""
        return np.broadcast_to(times, self.shape)[self.places].astype(float)


@dataclass
class Event:
    """What a stream of the watched ranks did."""

    name: str
    begin: np.ndarray
    """(watched,)"""
    end: np.ndarray
    """(watched,)"""


@dataclass
class Communicator:
    """The rings of one axis. Their collectives run one after the other."""

    rings: Rings
    chance: np.random.Generator
    """Of its jitter."""
    watch: Watch
    sharers: list[Communicator] = field(default_factory=list)
    """Those whose collectives use the same links."""
    events: list[Event] = field(default_factory=list)
    free: np.ndarray = field(init=False)
    """When the last collective of each ring ends."""

    def __post_init__(self) -> None:
        self.free = np.zeros_like(self.rings.factors)

    def run(self, issued: np.ndarray, seconds: float, name: str, messages: int = 1) -> np.ndarray:
        """When so many messages that ranks issue at `issued` are done, for each rank. Equation (simulator-start).

        No time at all is no collective, and waits for nobody. While another communicator is busy on the same links
        each gets half of them; what it has left then ends later. Equation (simulator-share).
        """
        if seconds == 0:
            return issued
        start = np.maximum(self.rings.slowest(issued), self.free)
        alone = seconds * self.rings.stretch(self.chance, messages)
        self.free = start + alone
        for other in self.sharers:
            both = np.clip(other.free - start, 0.0, alone)  # (groups, replicas, shards)
            if both.any():
                self.free = self.free + self.rings.slowest(both)
                other.put_off(start, both)
        if self.watch.ranks:
            self.events.append(Event(name, self.watch(start), self.watch(self.free)))
        return np.broadcast_to(self.free, np.broadcast_shapes(self.free.shape, issued.shape))

    def put_off(self, moment: np.ndarray, seconds: np.ndarray) -> None:
        """What has not ended at a moment has half of the links from then on, until that has cost it so many seconds.

        Nobody has been told an end yet that this changes: only reductions over replicas, and exchanges of rounds, are
        still running when another axis issues a collective, and those are waited for by when they are `free`.
        """
        late = self.rings.slowest(np.broadcast_to(seconds, np.broadcast_shapes(seconds.shape, self.free.shape)))
        self.free = self.free + late
        after, by = self.watch(moment), self.watch(late)
        for event in reversed(self.events):
            if (event.end <= after).all():
                break
            event.begin = event.begin + np.clip(event.begin - after, 0.0, by)
            event.end = event.end + np.clip(event.end - after, 0.0, by)
