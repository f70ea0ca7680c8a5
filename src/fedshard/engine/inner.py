"""The inner optimizer: what one group does with its gradient, on its own.

gradient ──► (warm-up: mean over groups) ──► norm ──► clip ──► optimizer, at the schedule's learning rate
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from fedshard.core.recipe import OptimizerSection, ScheduleSection
from fedshard.engine.parameters import named_parameters
from fedshard.engine.shard import flat


def schedule_factor(schedule: ScheduleSection, before: float, after: float) -> float:
    """The learning rate of one step, in units of its peak: a function of the budget's fractions consumed.

    `before` and `after` the step, in 0..1. The first step's rate is above 0, the peak is exactly 1.

    >>> linear = ScheduleSection(kind="linear", warmup_fraction=0.2, final_fraction=0.0)
    >>> [round(schedule_factor(linear, step / 10, (step + 1) / 10), 3) for step in range(10)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    """
    warmup = schedule.warmup_fraction
    if before < warmup:
        return min(1.0, after / warmup)
    progress = (before - warmup) / (1 - warmup) if warmup < 1 else 1.0
    final = schedule.final_fraction
    match schedule.kind:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - final) * progress
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


class Inner:
    """The optimizer of one group's shards, with its clipping and its schedule."""

    def __init__(self, model: nn.Module, optimizer: OptimizerSection, schedule: ScheduleSection, clip_norm: float):
        self.optimizer = make_optimizer(model, optimizer)
        self._peak, self._schedule, self._clip_norm = optimizer.learning_rate, schedule, clip_norm
        self._parameters = named_parameters(model)

    def square_norm(self) -> torch.Tensor:
        """‖·‖² of this rank's part of the gradient, float64; the sum over a replica's shards is the whole."""
        return get_total_norm(list(self._gradients().values())).double().square()

    def step(self, grad_norm: float, before: float, after: float) -> float:
        """Clip by the group's norm, and step; returns the learning rate. `before`, `after`: the budget consumed."""
        rate = self._peak * schedule_factor(self._schedule, before, after)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if 0 < self._clip_norm < grad_norm:
            gradients = list(self._gradients().values())
            torch._foreach_mul_(gradients, self._clip_norm / grad_norm)  # pyright: ignore[reportPrivateImportUsage]
        self.optimizer.step()
        return rate

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def reset_moments(self) -> None:
        """Forget everything but the weights: after a group that went non-finite took the others' weights."""
        self.optimizer.state.clear()

    def non_finite_gradient(self, group: dist.ProcessGroup) -> str:
        """The name of the first parameter, on any rank of the group, whose gradient is not finite."""
        bad = torch.tensor([not bool(torch.isfinite(each).all()) for each in self._gradients().values()])
        bad = bad.to(torch.int64).to(next(iter(self._parameters.values())).device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        return next((name for name, each in zip(self._gradients(), bad.tolist(), strict=True) if each), "none")

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: flat(each.grad) for name, each in self._parameters.items() if each.grad is not None}


def make_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the trainable parameters. Only matrices decay, not norms and biases."""
    trainable = [each for each in named_parameters(model).values() if each.requires_grad]
    groups = [
        {"params": [each for each in trainable if each.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [each for each in trainable if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr=section.learning_rate)
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.epsilon, fused=True)


def reduce_over(values: Sequence[torch.Tensor | float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Scalars summed over a group in one small collective; waits for the device."""
    stacked = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in values])
    dist.all_reduce(stacked, group=group)
    return stacked.tolist()
