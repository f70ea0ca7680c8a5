"""The ranks of a job while they train: their clocks, and the streams on which they compute and communicate.

Each rank has a stream that computes and a communicator for each axis, on which collectives run in the order in which
FSDP2 issues them. The equations are those of docs/formal/step.md, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedshard.study.events import Communicator, Event, Watch
from fedshard.study.setup import Axis
from fedshard.study.work import StepWork, UnitWork

PHASES: tuple[str, ...] = ("compute", "gather", "reduction", "clip", "optimizer", "round", "lost")
"""What a rank's time goes to. Beside computing it waits for parameters, for gradients and for rounds, each with the
ranks that it meets there; what a failure undoes is lost."""


class Interval(NamedTuple):
    """What one stream of one rank did, from one second to another."""

    rank: int
    stream: str
    """`compute`, or the axis of a communicator."""
    name: str
    begin: float
    end: float


class Ranks:
    """All ranks. Times are arrays over (groups, replicas, shards), or (1, 1, 1) where one rank stands for all."""

    def __init__(self, work: StepWork, axes: Mapping[Axis, Communicator], watch: Watch) -> None:
        self.work, self.axes, self.watch = work, axes, watch
        self.now = np.zeros(watch.shape)
        self.spent = dict.fromkeys(PHASES, 0.0)
        """Seconds of the mean rank."""
        self.computed: list[Event] = []

    @property
    def last(self) -> float:
        """The clock of the rank that is furthest."""
        return float(self.now.max())

    def wait(self, phase: str, until: np.ndarray) -> None:
        """Time passes on every rank until then, and is put down to a phase."""
        self.spent[phase] += float((until - self.now).mean())
        self.now = until

    def micro_batch(self, pace: np.ndarray, *, again: bool, reduce_over: tuple[Axis, ...]) -> None:
        """Forward and backward, on ranks that compute for `pace` times as long as they should.

        `again`: blocks are gathered once more for the backward pass. `reduce_over`: axes over which gradients are then
        reduced, in this order.
        """
        self._forward(pace)
        self._backward(pace, again=again, reduce_over=reduce_over)

    def update(self) -> None:
        """What ends a step: reductions are waited for, the group agrees on its norm, and the optimizer steps."""
        reduced = np.maximum(self.axes["shard"].free, self.axes["replica"].free)
        together = np.maximum(self.now, reduced).max(axis=(1, 2), keepdims=True)  # (groups, 1, 1)
        self.wait("reduction", np.broadcast_to(together, self.now.shape))
        self.wait("clip", self.now + self.work.clip_seconds)
        self.wait("optimizer", self.now + self.work.optimizer_seconds)

    def stop(self, seconds: float) -> None:
        """Everything is broken off, and so much later all ranks begin again together."""
        self.now = np.full(self.now.shape, self.last + seconds)
        for axis in self.axes.values():
            axis.free = np.minimum(axis.free, self.last)

    def intervals(self) -> list[Interval]:
        """What the streams of the watched ranks did."""
        streams = {"compute": self.computed} | {name: axis.events for name, axis in self.axes.items()}
        return [
            Interval(rank, stream, event.name, float(event.begin[at]), float(event.end[at]))
            for at, rank in enumerate(self.watch.ranks)
            for stream, events in streams.items()
            for event in events
        ]

    def _forward(self, pace: np.ndarray) -> None:
        """Equation (step-forward)."""
        (root, *blocks), shards = self.work.units, self.axes["shard"]
        self.wait("gather", shards.run(self.now, root.gather_seconds, "gather root"))
        ready = shards.run(self.now, blocks[0].gather_seconds, f"gather {blocks[0].name}")
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self.wait("gather", np.maximum(self.now, ready))
            if following is not None:
                ready = shards.run(self.now, following.gather_seconds, f"gather {following.name}")
            self._compute(block.forward_seconds * pace, f"forward {block.name}")
        self._compute(root.forward_seconds * pace, "forward root")

    def _backward(self, pace: np.ndarray, *, again: bool, reduce_over: tuple[Axis, ...]) -> None:
        """Equation (step-backward)."""

        def gather(unit: UnitWork | None) -> np.ndarray:
            if unit is None or not again:
                return self.now
            return self.axes["shard"].run(self.now, unit.gather_seconds, f"gather {unit.name}")

        def reduce(unit: UnitWork) -> None:
            done, seconds = self.now, {"shard": unit.scatter_seconds, "replica": unit.replica_seconds}
            for axis in reduce_over:
                done = self.axes[axis].run(done, seconds[axis], f"reduce {unit.name}")

        root, *blocks = self.work.units
        blocks.reverse()
        ready = gather(blocks[0])
        self._compute(root.backward_seconds * pace, "backward root")
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self.wait("gather", np.maximum(self.now, ready))
            ready = gather(following)
            self._compute(block.backward_seconds * pace, f"backward {block.name}")
            reduce(block)
        reduce(root)

    def _compute(self, seconds: np.ndarray, name: str) -> None:
        begin = self.now
        self.wait("compute", begin + seconds)
        if self.watch.ranks:
            self.computed.append(Event(name, self.watch(begin), self.watch(self.now)))
