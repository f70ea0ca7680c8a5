"""When rounds happen. Steps are optimizer steps (never micro-batches), counted from 1, across epochs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timetable:
    """`every` = H steps between rounds, `warmup_steps` = W steps of synchronous warm-up, `steps` in all (if known).

    >>> [step for step in range(1, 13) if Timetable(every=4, warmup_steps=2, steps=12).due(step)]
    [2, 6, 10, 12]
    """

    every: int
    warmup_steps: int = 0
    steps: int | None = None

    def synchronous(self, step: int) -> bool:
        """Whether the gradients of this step are averaged over the groups."""
        return step <= self.warmup_steps

    def plain(self, step: int) -> bool:
        """Whether the round after this step is a plain mean whatever the outer optimizer.

        The round that ends the warm-up only sets the anchor; the last round leaves no momentum in the weights.
        """
        return step == self.warmup_steps or step == self.steps

    def due(self, step: int) -> bool:
        """Whether a round follows this step."""
        if step < self.warmup_steps:
            return False
        return (step - self.warmup_steps) % self.every == 0 or step == self.steps

    def next_round(self, step: int) -> int:
        """The first step at or after `step` that a round follows."""
        while not self.due(step):
            step += 1
        return step

    def rounds(self) -> int:
        """How many rounds the whole run does."""
        assert self.steps is not None, "a run without an end has no number of rounds"
        apart = self.steps - self.warmup_steps  # steps that groups train on their own
        return (self.warmup_steps > 0) + -(-apart // self.every)
