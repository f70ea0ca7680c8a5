"""How far a run is and how far it goes, in steps and in tokens: from its start, or from a checkpoint on.

steps    1 … done │ done+1 … step … steps          a step that comes after `done` takes `tokens_per_step`,
tokens   0 … done_tokens │ … tokens(step) … ≥ budget   however large the steps before it were
"""

from __future__ import annotations

from dataclasses import dataclass

from fedshard.core.recipe import Recipe
from fedshard.core.timetable import Timetable


@dataclass(frozen=True)
class Done:
    """How far a run had come when it was saved."""

    step: int
    """The last step that it took."""
    tokens: int
    """Sequences × sequence length of all groups."""
    warmup_steps: int
    """Where its synchronous warm-up ended or was going to end; 0 where there was none."""
    federated: bool
    """Whether it had rounds at all; without them every step was synchronous."""


@dataclass(frozen=True)
class Course:
    """The steps of a run and the tokens that go with them.

    >>> course = Course.of(Recipe(), Done(step=100, tokens=400_000, warmup_steps=20, federated=True))
    >>> course.steps, course.tokens(101), course.timetable.warmup_steps
    (296, 402048, 20)
    """

    tokens_per_step: int
    """Of all groups, in each step from here on."""
    budget_tokens: int
    """After so many tokens training ends."""
    timetable: Timetable
    """When rounds happen."""
    done: Done
    """Where it begins."""

    @staticmethod
    def of(recipe: Recipe, done: Done | None = None) -> Course:
        """The course of a recipe, from the start or after what is `done`.

        A warm-up that is over stays over. One that is not, or a run that was synchronous all along, ends where the
        recipe says, or here if that is past: "pre-train synchronously, then federate".
        """
        if done is None:
            nothing = Done(0, 0, recipe.timetable.warmup_steps, recipe.federates)
            return Course(recipe.tokens_per_step, recipe.budget_tokens, recipe.timetable, nothing)
        per_step = recipe.tokens_per_step
        if recipe.budget.steps is not None:
            steps, budget = recipe.budget.steps, done.tokens + (recipe.budget.steps - done.step) * per_step
        else:
            steps, budget = done.step - (done.tokens - recipe.budget_tokens) // per_step, recipe.budget_tokens
        warmup = done.warmup_steps
        if recipe.layout.groups == 1:
            warmup = 0
        elif not done.federated or done.step < warmup:
            warmup = max(done.step, round(recipe.sync.warmup_fraction * steps))
        return Course(per_step, budget, Timetable(recipe.sync.every, warmup, steps), done)

    @property
    def steps(self) -> int:
        """The last step."""
        assert self.timetable.steps is not None, "a run has an end"
        return self.timetable.steps

    def tokens(self, step: int) -> int:
        """Sequences × sequence length of all groups, up to and with this step (which is not before `done`)."""
        return self.done.tokens + (step - self.done.step) * self.tokens_per_step

    def consumed(self, step: int) -> float:
        """The part of the budget that is consumed after this step, 0..1."""
        return min(self.tokens(step) / self.budget_tokens, 1.0)
