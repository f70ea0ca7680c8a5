"""Outer optimizers: what becomes of the groups' mean at a round.

They see flat slices only, so each rank steps what it owns and nothing is gathered. All state is float32 (or the
anchor's own type where that is wider).

    anchor   the global weights as of the last round            # (owned_numel,)
    delta    anchor − mean of the groups, so that an optimizer that descends moves towards the groups
"""

from __future__ import annotations

from typing import Protocol

import torch

from fedshard.core.recipe import MeanOuter, MomentumOuter, NesterovOuter, Outer


class OuterOptimizer(Protocol):
    """What a round needs of an outer optimizer; yours may be given to `Federation` in place of ours."""

    state_names: tuple[str, ...]
    """Names of the state tensors that it keeps, each shaped like the anchor and zero at the start."""

    def step(self, anchor: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Move the anchor in place by one round's mean delta; `delta` may be overwritten."""
        ...


class Mean:
    """FedAvg: the anchor becomes the groups' mean. Source: arXiv:1602.05629, Alg. 1."""

    state_names: tuple[str, ...] = ()

    def step(self, anchor: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        anchor.sub_(delta)


class Momentum:
    """FedAvgM, heavy ball: v ← βv + Δ; x ← x − ηv. Source: arXiv:1909.06335, section 4.3."""

    state_names: tuple[str, ...] = ("momentum",)

    def __init__(self, learning_rate: float = 1.0, momentum: float = 0.9):
        self.learning_rate, self.momentum = learning_rate, momentum

    def step(self, anchor: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        velocity = state["momentum"]
        torch.add(delta, velocity, alpha=self.momentum, out=velocity)
        anchor.sub_(velocity, alpha=self.learning_rate)


class Nesterov:
    """DiLoCo: v ← βv + Δ; x ← x − η(Δ + βv). Source: arXiv:2311.08105, Alg. 1.

    FedMom (arXiv:2002.02090, Alg. 3) written with v₀ = x₀ is the same iteration.
    """

    state_names: tuple[str, ...] = ("momentum",)

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9):
        self.learning_rate, self.momentum = learning_rate, momentum

    def step(self, anchor: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        velocity = state["momentum"]
        torch.add(delta, velocity, alpha=self.momentum, out=velocity)
        anchor.sub_(delta, alpha=self.learning_rate).sub_(velocity, alpha=self.learning_rate * self.momentum)


def make_outer(outer: Outer) -> OuterOptimizer:
    """The outer optimizer that a recipe names."""
    match outer:
        case MeanOuter():
            return Mean()
        case MomentumOuter():
            return Momentum(outer.learning_rate, outer.momentum)
        case NesterovOuter():
            return Nesterov(outer.learning_rate, outer.momentum)
