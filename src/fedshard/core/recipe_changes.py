"""What a resumed run may do differently: the recipe that it was saved with against the one that it goes on with.

Model, tokens and their order are what the saved state is of, so they stay; all else may change from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedshard.core.errors import Fault
from fedshard.core.recipe import Recipe

FIXED = ("seed", "model", "data", "optimizer.kind")
"""Keys, or sections, that a resumed run must share with the saved one."""

MOVABLE = ("model.path", "data.path", "data.sources")
"""Files may lie elsewhere now: the data's fingerprint and the weights' shapes are checked."""


def changed_keys(saved: Recipe, now: Recipe) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ, each with the saved value and the new one; None where a side has none."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return [
        (key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def forbidden_changes(saved: Recipe, now: Recipe) -> Iterator[Fault]:
    """What differs and must not."""
    for key, before, after in changed_keys(saved, now):
        if key not in MOVABLE and any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED):
            yield Fault(key, f"the checkpoint was saved with {before!r}, not {after!r}", "Leave it as it was.")
    if saved.data.assignment != "disjoint" and saved.layout.groups != now.layout.groups:
        says = f"{saved.layout.groups} groups have read data of their own, and {now.layout.groups} cannot go on with it"
        yield Fault("layout.groups", says, f"Keep {saved.layout.groups} groups.")


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    yield from _flat(recipe.model_dump(mode="json", exclude_none=True), "")


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
