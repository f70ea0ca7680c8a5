"""What is wanted of a plan, and one way to train with what it gives: speed, memory, bytes, days."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedshard.core.layout import Layout
from fedshard.core.timetable import Timetable
from fedshard.core.topology import Cluster
from fedshard.study.cost import StepTime, step_bytes
from fedshard.study.memory import memory
from fedshard.study.setup import Setup
from fedshard.study.size import Architecture
from fedshard.study.work import StepWork

Precision = Literal["mixed", "bfloat16-reductions", "pure-bfloat16"]
"""All compute in bfloat16. `mixed`: weights, moments and reductions in float32. `bfloat16-reductions`: gradients are
reduced in bfloat16. `pure-bfloat16`: weights and moments are stored in it too."""

DEFAULT_BATCH_TOKENS = 4 * 2**20
"""Largest batch of one optimizer step of one group, where nobody says otherwise."""

DEFAULT_ROUNDS = 50
"""Fewest rounds of a run, where nobody says otherwise."""

TOKENS_PER_PARAMETER = 20
"""Budget in tokens for each parameter, where nobody says otherwise. Source: arXiv:2203.15556."""

WARMUP_FRACTION = 0.1
"""Of the steps, those in which groups still train as one; a recipe's default."""

MEMORY_FRACTION = 0.95
"""Of a device's memory, what training may fill: allocators leave gaps."""


@dataclass(frozen=True)
class Wanted:
    """What is to be trained on what, and within which limits."""

    architecture: Architecture
    cluster: Cluster
    """Exactly the ranks of the job (`Cluster.job`)."""
    sequence_length: int = 4096
    tokens: int = 0
    """Budget; 0: `TOKENS_PER_PARAMETER` for each parameter."""
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Of one optimizer step of one group."""
    min_rounds: int = DEFAULT_ROUNDS
    """That a run of several groups must have."""
    precision: Precision = "mixed"

    @property
    def budget(self) -> int:
        """In tokens."""
        return self.tokens or TOKENS_PER_PARAMETER * self.architecture.total

    @property
    def capacity_bytes(self) -> float:
        """What a rank may fill."""
        return self.cluster.device.memory_bytes.value * MEMORY_FRACTION

    def setup(self, layout: Layout) -> Setup:
        """One sequence at a time in that layout."""
        return Setup(
            self.architecture,
            layout,
            self.cluster,
            self.sequence_length,
            stored_bytes=2.0 if self.precision == "pure-bfloat16" else 4.0,
            reduce_bytes=4.0 if self.precision == "mixed" else 2.0,
        )


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it gives."""

    setup: Setup
    work: StepWork
    time: StepTime
    budget: int
    """Tokens of the whole run."""

    @cached_property
    def memory_bytes(self) -> float:
        """Of the rank that holds most."""
        return memory(self.setup).total_bytes

    @property
    def strategy(self) -> str:
        """The layout's name."""
        return self.setup.layout.strategy

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, once the synchronous warm-up is over."""
        return self.setup.tokens_per_step / self.time.total_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the devices' peak, what the model itself needs."""
        setup = self.setup
        flops = setup.architecture.flops_per_token(setup.sequence_length) * self.tokens_per_second
        return flops / setup.layout.ranks / setup.cluster.device.peak_flops_per_second.value

    @property
    def group_tokens(self) -> int:
        """Tokens of one optimizer step of one group."""
        return self.setup.tokens_per_step // self.setup.layout.groups

    @property
    def between_bytes(self) -> float:
        """What one rank sends to other groups, per step."""
        return step_bytes(self.setup).between

    @property
    def sync_share(self) -> float:
        """What rounds take of the time."""
        return self.time.round_exposed_seconds / self.time.total_seconds

    @property
    def timetable(self) -> Timetable:
        """Of the whole run. One group has no warm-up, and its rounds are none."""
        steps = -(-self.budget // self.setup.tokens_per_step)
        warmup = round(WARMUP_FRACTION * steps) if self.setup.layout.groups > 1 else 0
        return Timetable(self.setup.every, warmup, steps)

    @property
    def run_seconds(self) -> float:
        """Of the whole run: in the synchronous warm-up gradients cross groups in every step, then come the rounds."""
        timetable = self.timetable
        assert timetable.steps is not None
        rounds = timetable.rounds() * self.setup.every * self.time.round_exposed_seconds
        return (
            timetable.steps * self.time.inner_seconds + timetable.warmup_steps * self.work.synchronous_seconds + rounds
        )

    @property
    def days(self) -> float:
        """Of the whole run."""
        return self.run_seconds / 86400

    @property
    def gpu_hours(self) -> float:
        """Of the whole run, over all ranks."""
        return self.run_seconds / 3600 * self.setup.layout.ranks
