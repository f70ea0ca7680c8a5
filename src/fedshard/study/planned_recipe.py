"""A choice of a plan as a recipe: what `fedshard train` then does is what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.study.choice import WARMUP_FRACTION, Choice


def recipe_of(choice: Choice, model: Mapping[str, Any]) -> Recipe:
    """The recipe of `choice` for the model that a recipe's `model` section describes. All else is at its default.

    Only what recipes can ask for may stand in a choice: no codec, no overlap, no fragments.
    """
    setup = choice.setup
    assert (setup.codec, setup.delay, setup.fragments) == ("fp32", 0, 1), f"no recipe can ask for this: {setup}"
    return make_recipe(
        {
            "layout": asdict(setup.layout),
            "model": dict(model),
            "data": {"sequence_length": setup.sequence_length},
            "train": {
                "micro_batch": setup.micro_batch,
                "accumulation": setup.accumulation,
                "recompute": "full" if setup.recompute else "none",
                "precision": "pure-bfloat16" if setup.stored_bytes == 2.0 else "bfloat16",
                "reduce_dtype": "bfloat16" if setup.reduce_bytes == 2.0 else "float32",
            },
            "sync": {"every": setup.every, "warmup_fraction": WARMUP_FRACTION},
            "budget": {"tokens": choice.budget},
        }
    )
