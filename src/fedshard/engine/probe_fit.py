"""From times of collectives to latency (α) and rate (β) of the links that they went over.

    t = c·(p−1)·(α + V/(pβ))       c = 2 for an all-reduce, else 1

p ranks in a ring, V bytes of the whole (gathered) tensor. Equation (collectives-ring) of docs/formal/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedshard.core.errors import RunError
from fedshard.core.topology import TierName

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")

REFITS = 30
"""Least-squares fits, each of which trusts less what the one before left far off."""

SMALLEST_ERROR = 1e-3
"""What is off by less counts as if it were off by this fraction."""


@dataclass(frozen=True)
class Timing:
    """What one collective took, of one size over one axis.

    `port_members` of a ring's `ranks` share one port (the node's links, or a site's uplink) with `port_rings` rings
    that ran at the same time, this one included.
    """

    axis: str
    kind: Kind
    tier: TierName
    ranks: int
    port_members: int
    port_rings: int
    alone: bool
    """Whether all other rings of the axis were silent."""
    message_bytes: int
    """Of the whole tensor (V)."""
    seconds: float
    """The shortest time in which all ranks of all rings were done that ran."""
    factors: tuple[float, ...]
    """How many times longer than the shortest each call took."""


@dataclass(frozen=True)
class Ring:
    """The two numbers that times of collectives come down to."""

    latency_seconds: float
    """Of one hop (α)."""
    bytes_per_second: float
    """In one direction (β)."""
    error_fraction: float
    """By how much the formula is off, as a fraction of the time: the median over what was measured."""


def ring_rate(timing: Timing) -> float:
    """β is what the ring gets."""
    return 1.0


def link_rate(timing: Timing) -> float:
    """β is that of the port, which so many rings share."""
    return float(timing.port_rings)


def rank_rate(timing: Timing) -> float:
    """β is what each member of a ring contributes that has the port to itself."""
    return 1.0 / timing.port_members


def fit_ring(timings: Sequence[Timing], of: Callable[[Timing], float] = ring_rate) -> Ring:
    """α and β from times of one tier, in which each counts by its relative error; `of` says whose rate β is.

    The sum of absolute errors is made least, so that a few times that are far off move nothing. α is not negative.
    Raises RunError where times do not grow with messages.
    """
    seconds = np.array([each.seconds for each in timings])  # (timings,)
    hops = np.array([(2 if each.kind == "all_reduce" else 1) * (each.ranks - 1) for each in timings])
    passed = hops * np.array([each.message_bytes / each.ranks * of(each) for each in timings])  # bytes over the link
    latency, slowness = _least_absolute(np.stack([hops, passed], axis=1) / seconds[:, None])
    if latency < 0:
        latency, (slowness,) = 0.0, _least_absolute((passed / seconds)[:, None])
    if slowness <= 0:
        what = f"{timings[0].kind} over {timings[0].axis}"
        raise RunError(f"{what}: long messages take no longer than short ones; measure again on a quiet machine")
    errors = np.abs((hops * latency + passed * slowness) / seconds - 1)
    return Ring(float(latency), float(1 / slowness), float(np.median(errors)))


def _least_absolute(columns: np.ndarray) -> np.ndarray:
    """x with the least Σ |columns · x − 1|, by least squares with weights: (rows, n) → (n,)."""
    scale = np.abs(columns).max(axis=0)  # the columns are of very different size
    weights = np.ones(len(columns))
    found = np.zeros(columns.shape[1])
    for _ in range(REFITS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(columns / scale * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(columns / scale @ found - 1), SMALLEST_ERROR)
    return found / scale
