"""Initial values from an address: any range of a tensor's elements, without making the others.

Element i of the tensor `name` gets the i-th draw of a counter-based generator keyed by (seed, name), so that where a
range begins, and who makes it, changes nothing. All is computed in float64 on the CPU and rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedshard.engine.addressed import address_seed

LANES = 4  # draws that numpy's Philox makes for one value of its counter


class Law(Protocol):
    """What a value is drawn from, as the quantile function that a uniform draw goes through."""

    def quantile(self, uniform: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def quantile(self, uniform: torch.Tensor) -> torch.Tensor:
        """`value`, whatever was drawn."""
        return torch.full_like(uniform, self.value)


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`."""

    low: float = 0.0
    high: float = 1.0

    def quantile(self, uniform: torch.Tensor) -> torch.Tensor:
        """The interval, scaled."""
        return self.low + (self.high - self.low) * uniform


@dataclass(frozen=True)
class Normal:
    """Normal with `mean` and standard deviation `std`; with bounds, what lies outside is drawn from inside instead."""

    mean: float = 0.0
    std: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def quantile(self, uniform: torch.Tensor) -> torch.Tensor:
        """The inverse of the normal distribution function, between the bounds."""
        below, above = (0.5 + 0.5 * math.erf((bound - self.mean) / self.std / math.sqrt(2)) for bound in self.bounds)
        inside = below + (above - below) * uniform  # unchanged where there are no bounds
        return (self.mean + self.std * torch.special.ndtri(inside)).clamp(self.low, self.high)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound."""
        return self.low, self.high


@dataclass(frozen=True)
class Piece:
    """One law for the elements [`start`, `stop`) of a flattened tensor."""

    law: Law
    start: int
    stop: int


def initial_values(seed: int, name: str, pieces: Sequence[Piece], start: int, numel: int) -> torch.Tensor:
    """The elements [start, start + numel) of the flattened tensor `name`, float64: (numel,).

    `pieces` together cover the tensor; where they overlap, the later one counts.

    >>> whole = initial_values(0, "head.weight", [Piece(Normal(std=0.02), 0, 100)], 0, 100)
    >>> torch.equal(whole[37:90], initial_values(0, "head.weight", [Piece(Normal(std=0.02), 0, 100)], 37, 53))
    True
    """
    values = torch.full((numel,), math.nan, dtype=torch.float64)
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.stop, start + numel)
        if first < last:
            values[first - start : last - start] = piece.law.quantile(uniform_draws(seed, name, first, last - first))
    return values


def uniform_draws(seed: int, name: str, start: int, numel: int) -> torch.Tensor:
    """The draws start, start + 1, … of (seed, name), each in the open interval (0, 1), float64: (numel,)."""
    counter, skipped = divmod(start, LANES)
    generator = np.random.Philox(key=address_seed(seed, "initial", name), counter=counter)
    bits = generator.random_raw(skipped + numel)[skipped:]
    # 52 bits and a half: the ends of the interval, whose normal quantiles are infinite, cannot come up.
    return torch.from_numpy(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
