"""What a round does to each piece before and after it is averaged over the groups, and what it measures on the way.

Three kinds: a mean without an anchor, a mean with one, and an outer optimizer's step. All write into `wire`, the owned
values that travel: (piece.numel,).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fedshard.engine.exchange import Exchange, Piece
from fedshard.engine.outer import OuterOptimizer

SAMPLE = 2**18
"""Owned elements that the spread of a mean without an anchor is measured on."""

CHUNK = 2**20
"""Elements that a distance looks at together, so that it needs little memory."""


class Update(Protocol):
    """A kind of round. `own_square` is ‖·‖² of this rank's part of its group's delta (or spread), `mean_square` of the
    mean delta; sums over ranks give the groups' norms."""

    own_square: torch.Tensor
    mean_square: torch.Tensor

    def before(self, piece: Piece, wire: torch.Tensor) -> None:
        """From the group's values to what is averaged."""
        ...

    def after(self, piece: Piece, wire: torch.Tensor) -> None:
        """From the mean to the new values."""
        ...


class _Squares:
    def __init__(self, exchange: Exchange):
        self.own_square = torch.zeros((), dtype=torch.float64, device=exchange.device)
        self.mean_square = torch.zeros((), dtype=torch.float64, device=exchange.device)


class PlainMean(_Squares):
    """The values themselves are averaged, and nothing is kept. Measures the spread ‖local − mean‖ on a sample.

    The sample is a run in the middle of every piece; where a rank owns at most `SAMPLE` elements it is all of them.
    """

    def __init__(self, exchange: Exchange):
        super().__init__(exchange)
        self._owned = sum(piece.numel for piece in exchange.pieces)
        self._samples: dict[int, torch.Tensor] = {}

    def before(self, piece: Piece, wire: torch.Tensor) -> None:
        self._samples[piece.index] = self._sample(wire).clone()

    def after(self, piece: Piece, wire: torch.Tensor) -> None:
        sample = self._samples.pop(piece.index)
        if sample.numel() > 0:
            self.own_square += (sample - self._sample(wire)).double().square().sum() * (wire.numel() / sample.numel())

    def _sample(self, wire: torch.Tensor) -> torch.Tensor:
        size = min(wire.numel(), -(-wire.numel() * SAMPLE // max(self._owned, 1)))
        start = (wire.numel() - size) // 2
        return wire[start : start + size]


class AnchoredMean(_Squares):
    """The values themselves are averaged, and become the anchor: exactly the plain mean, with delta norms."""

    def __init__(self, exchange: Exchange, anchors: list[torch.Tensor]):
        super().__init__(exchange)
        self._anchors = anchors

    def before(self, piece: Piece, wire: torch.Tensor) -> None:
        self.own_square += _square_distance(self._anchors[piece.index], wire)

    def after(self, piece: Piece, wire: torch.Tensor) -> None:
        self.mean_square += _square_distance(self._anchors[piece.index], wire)
        self._anchors[piece.index].copy_(wire)


class OuterStep(_Squares):
    """Deltas are averaged, and the outer optimizer moves the anchor by their mean; the anchor is the new value."""

    def __init__(
        self,
        exchange: Exchange,
        anchors: list[torch.Tensor],
        outer: OuterOptimizer,
        states: list[dict[str, torch.Tensor]],
    ):
        super().__init__(exchange)
        self._anchors, self._outer, self._states = anchors, outer, states

    def before(self, piece: Piece, wire: torch.Tensor) -> None:
        torch.sub(self._anchors[piece.index], wire, out=wire)
        self.own_square += _square(wire)

    def after(self, piece: Piece, wire: torch.Tensor) -> None:
        self.mean_square += _square(wire)
        self._outer.step(self._anchors[piece.index], wire, self._states[piece.index])
        wire.copy_(self._anchors[piece.index])


def _square(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values).double().square()


def _square_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=one.device)
    for start in range(0, one.numel(), CHUNK):
        total += _square(one[start : start + CHUNK] - other[start : start + CHUNK])
    return total
