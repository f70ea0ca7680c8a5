"""One optimizer step of one group, and what is known of it afterwards.

What a group knows stays in the group until the next round: between rounds nothing crosses groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fedshard.core.errors import RunError
from fedshard.engine.addressed import address_seed
from fedshard.engine.inner import reduce_over
from fedshard.engine.job import Job
from fedshard.engine.loss import micro_loss
from fedshard.engine.shard import last_micro_batch

SKIPS_IN_A_ROW = 3
"""Steps with a non-finite gradient after which training stops."""


@dataclass(frozen=True)
class GroupStep:
    """What one group knows of a step."""

    nll_sum: float
    """Σ −log p over the group's label tokens."""
    label_tokens: float
    """Of the group."""
    router_loss: float
    """Load-balancing loss of a mixture of experts, a mean over the group's micro-batches; 0 for other models."""
    grad_norm: float
    """Of the group's gradient before clipping; in the synchronous warm-up, of the mean over groups."""
    learning_rate: float
    """0 where the step was not applied."""
    rank_label_tokens: int
    """Of this rank."""


def take_step(job: Job, step: int, *, synchronous: bool) -> GroupStep:
    """Forward, backward and optimizer for step `step` (from 1); in the synchronous warm-up with all groups as one.

    A step whose gradient norm is not finite is not applied: its learning rate is 0 in the result.
    """
    world, recipe = job.world, job.recipe
    torch.manual_seed(address_seed(recipe.seed, "dropout", world.rank, step))  # distinct per rank, and per step
    micros = [micro.to(world.device) for micro in job.feed.next_step()]
    rank_tokens = sum(micro.label_tokens for micro in micros)
    group_tokens = torch.tensor(float(rank_tokens), dtype=torch.float64, device=world.device)
    dist.all_reduce(group_tokens, group=world.group)

    # the group's loss: a sum over label tokens, divided by all of them that the group has in this step
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    router_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for index, micro in enumerate(micros):
        last_micro_batch(job.model, index == len(micros) - 1)
        loss = micro_loss(job.model, micro)
        total = loss.nll_sum
        nll_sum += loss.nll_sum.detach()
        if loss.router_loss is not None:
            total = total + loss.router_loss * micro.label_tokens
            router_sum += loss.router_loss.detach() * micro.label_tokens
        (total / group_tokens.clamp(min=1).to(total.dtype)).backward()

    if synchronous:
        job.federation.average_gradients(rank_tokens)  # crosses groups

    known = [job.inner.square_norm(), nll_sum, router_sum, group_tokens, *job.stop.words()]
    square, *sums, asked, after = reduce_over(known, world.group, world.device)
    job.stop.hear(step, asked, after)
    grad_norm = math.sqrt(square / world.layout.replicas)  # each replica has the whole gradient
    rate = 0.0
    if math.isfinite(grad_norm):
        rate = job.inner.step(grad_norm, job.course.consumed(step - 1), job.course.consumed(step))
    tokens = sums[2] / world.layout.group_ranks
    return GroupStep(sums[0], tokens, sums[1] / max(tokens, 1), grad_norm, rate, rank_tokens)


class Skips:
    """Counts steps that were not applied, and stops at the third in a row."""

    def __init__(self, in_a_row: int = 0):
        self.in_a_row = in_a_row

    def note(self, job: Job, step: int, grad_norm: float) -> bool:
        """Whether this step was skipped. Raises RunError with a tensor's name at the third in a row."""
        self.in_a_row = 0 if math.isfinite(grad_norm) else self.in_a_row + 1
        if self.in_a_row == SKIPS_IN_A_ROW:
            name = job.inner.non_finite_gradient(job.world.group)
            raise RunError(
                f"step {step}: the gradient of group {job.world.place.group} is non-finite for the "
                f"{SKIPS_IN_A_ROW}rd step in a row, first in {name}; lower optimizer.learning_rate"
            )
        return self.in_a_row > 0
