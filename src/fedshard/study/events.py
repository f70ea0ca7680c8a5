"""Clocks of all ranks at once, and the collectives that make them wait for each other.

A time is an array over (groups, replicas, shards), or over (1, 1, 1) where nothing tells ranks apart. Every rank issues
the same collectives in the same order, so a communicator's events need no queue: a collective begins when its last
member has issued it, the communicator is free, and so are the links of its members' nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedshard.study.setup import Axis

AXES: dict[Axis, int] = {"group": 0, "replica": 1, "shard": 2}

Draw = Callable[[Axis, tuple[int, ...]], np.ndarray]
"""How much longer than its time each ring of an axis takes, by chance: an array of that shape."""


@dataclass
class Communicator:
    """The rings of one axis. Their collectives run one after the other."""

    axis: Axis
    ring_factors: np.ndarray
    """Time of each ring over that of the slowest one that the pieces were computed for."""
    ports: Ports | None
    """The links of nodes, where its rings leave them."""
    draw: Draw
    busy: list[tuple[str, np.ndarray, np.ndarray]] | None = None
    """If kept: name, start and end of each collective."""
    free: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.free = np.zeros_like(self.ring_factors)

    def run(self, issued: np.ndarray, seconds: float, name: str) -> np.ndarray:
        """When a collective that ranks issue at `issued` is done, for each rank; one of no time waits for nobody."""
        if seconds == 0:
            return issued
        start = np.maximum(issued.max(axis=AXES[self.axis], keepdims=True), self.free)
        if self.ports is not None:
            start = np.maximum(start, self.ports.free_for(self.axis))
        self.free = start + seconds * self.ring_factors * self.draw(self.axis, self.ring_factors.shape)
        if self.ports is not None:
            self.ports.take(self.axis, self.free)
        if self.busy is not None:
            self.busy.append((name, start, self.free))
        return np.broadcast_to(self.free, np.broadcast_shapes(self.free.shape, issued.shape))


@dataclass
class Ports:
    """The links of a job's nodes. Collectives of one axis share them (their times say so); those of two axes follow one
    another: a collective begins when the other axes' are done on its node."""

    until: dict[Axis, np.ndarray] = field(default_factory=dict)

    def free_for(self, axis: Axis) -> np.ndarray | float:
        """When what other axes have on the links is done."""
        others = [until for other, until in self.until.items() if other != axis]
        if not others:
            return 0.0
        latest = others[0]
        for each in others[1:]:
            latest = np.maximum(latest, each)
        return latest.max(axis=AXES[axis], keepdims=True)

    def take(self, axis: Axis, until: np.ndarray) -> None:
        """A collective has the links until then."""
        self.until[axis] = until
