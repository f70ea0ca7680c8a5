"""The saved state as the layout that goes on wants to see it, where it was saved by another number of groups.

same number of groups   each group goes on with its own
another, together       weights, anchor and outer state are all groups' anyway; moments are merged
another, apart          first the round that was pending: saved group weights → their mean → outer step
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, Protocol

import torch

from fedshard.core.errors import Fault, InputError
from fedshard.core.layout import Place
from fedshard.engine.checkpoint import GLOBAL, Checkpoint, Cursor, group_folder
from fedshard.engine.outer import Mean, OuterOptimizer, make_outer
from fedshard.engine.slices import Slices


class SharedSlices(Protocol):
    """What all groups share."""

    def has(self, kind: str, name: str | None = None) -> bool: ...
    def read(self, kind: str, name: str, part: range) -> torch.Tensor: ...


class GroupSlices:
    """What one group goes on with: its own state, or that of all saved groups merged."""

    def __init__(self, groups: Sequence[Slices], moments: Literal["average", "first", "reset"]):
        """`groups`: those that are merged; where it is one, `moments` decides nothing but `reset`."""
        self._groups, self._moments = groups, moments

    def kinds(self, prefix: str) -> list[str]:
        """The kinds that begin with `prefix`."""
        every = dict.fromkeys(kind for group in self._groups for kind in group.kinds())
        return [kind for kind in every if kind.startswith(prefix) and not self._drops(kind)]

    def has(self, kind: str, name: str | None = None) -> bool:
        """Whether any of the groups has it."""
        return any(group.has(kind, name) for group in self._chosen(kind)) and not self._drops(kind)

    def is_scalar(self, kind: str, name: str) -> bool:
        """Whether it is one number, such as Adam's count of steps."""
        return next(group for group in self._groups if group.has(kind, name)).shapes(kind)[name] == ()

    def read(self, kind: str, name: str, part: range) -> torch.Tensor:
        """The values: (len(part),). Of several groups' their mean, of counts the highest."""
        holders = [group for group in self._chosen(kind) if group.has(kind, name)]
        values = [group.read(kind, name, part) for group in holders]
        if len(values) == 1:
            return values[0]
        stacked = torch.stack(values)  # (groups, len(part))
        return stacked.amax(0) if self.is_scalar(kind, name) else stacked.mean(0)

    def _chosen(self, kind: str) -> Sequence[Slices]:
        averaged = kind.startswith("moment.") and self._moments == "average"
        return self._groups if averaged else self._groups[:1]

    def _drops(self, kind: str) -> bool:
        return self._moments == "reset" and kind.startswith("moment.")


class PendingRound:
    """What all groups would share after the round that was pending when they were saved apart: done here, on whatever
    part is read."""

    def __init__(self, shared: Slices, groups: Sequence[Slices], weights: Sequence[float], outer: OuterOptimizer):
        self._shared, self._groups, self._weights, self._outer = shared, groups, weights, outer

    def has(self, kind: str, name: str | None = None) -> bool:
        """Weights, and what the outer optimizer keeps. An anchor would be the weights."""
        return kind == "weights" or (kind != "anchor" and self._shared.has(kind, name))

    def read(self, kind: str, name: str, part: range) -> torch.Tensor:
        """The values after the round: (len(part),)."""
        if isinstance(self._outer, Mean) or not self._shared.has("anchor", name):  # without one it is frozen
            return self._mean(name, part)
        anchor = self._shared.read("anchor", name, part)
        state = {key: self._shared.read(f"outer.{key}", name, part) for key in self._outer.state_names}
        self._outer.step(anchor, anchor - self._mean(name, part), state)
        return anchor if kind == "weights" else state[kind.removeprefix("outer.")]

    def _mean(self, name: str, part: range) -> torch.Tensor:
        mean = torch.zeros(len(part))
        for group, weight in zip(self._groups, self._weights, strict=True):
            if weight > 0:
                values = group.read("weights", name, part)
                mean = mean.to(torch.promote_types(mean.dtype, values.dtype)).add_(values, alpha=weight)
        if not bool(torch.isfinite(mean).all()):
            says = f"a group's {name} is not finite, and the round that was pending cannot be done"
            raise InputError([Fault("checkpoint", says, "Take one at a round's end.")])
        return mean


def open_shared(checkpoint: Checkpoint, cursor: Cursor, groups: int | None, files: ExitStack) -> SharedSlices:
    """What all of so many groups share (None: the global model, whoever goes on with it); files are open as long as
    `files` is. Raises InputError where the checkpoint cannot be read, or nothing was trained since the last round.
    """
    shared, saved_groups = files.enter_context(Slices(checkpoint.path / GLOBAL)), checkpoint.layout().groups
    if cursor.together or saved_groups == groups:
        return shared
    recipe = checkpoint.recipe()
    counted = [float(each) if recipe.sync.weights == "tokens" else float(each > 0) for each in cursor.label_tokens]
    if not any(counted):
        says = "no group has a label token since the last round, and the pending one cannot be done"
        raise InputError([Fault(str(checkpoint.path), says, "Take one at a round's end.")])
    every = [files.enter_context(Slices(checkpoint.path / group_folder(each))) for each in range(saved_groups)]
    weights = [each / sum(counted) for each in counted]
    return PendingRound(shared, every, weights, make_outer(recipe.sync.outer))


def open_own(
    checkpoint: Checkpoint, place: Place, groups: int, moments: Literal["average", "first", "reset"], files: ExitStack
) -> GroupSlices:
    """What the group of `place`, one of `groups`, goes on with; files are open as long as `files` is.

    Raises InputError where the checkpoint cannot be read.
    """
    saved_groups = checkpoint.layout().groups
    same = saved_groups == groups
    chosen = [place.group] if same else range(saved_groups)
    own = [files.enter_context(Slices(checkpoint.path / group_folder(each))) for each in chosen]
    return GroupSlices(own, "first" if same else moments)
