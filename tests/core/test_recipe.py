"""The recipe's derived values, each computed here by hand, and what every field must have."""

import pytest
from pydantic import BaseModel, ValidationError

from fedshard.core.recipe import TINY_MODEL, ConfigModel, NesterovOuter, Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.core.recipe_keys import all_keys, describe_keys, nearest_key
from fedshard.core.timetable import Timetable


def sections(model: type[BaseModel] = Recipe) -> dict[str, type[BaseModel]]:
    """Every section of the recipe by its class's name, the kinds of a choice included."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= sections(kind)
    return found


def test_every_field_says_what_it_means():
    silent = [
        f"{section}.{name}"
        for section, model in sections().items()
        for name, field in model.model_fields.items()
        if not (field.description or "").rstrip().endswith((".", ")"))
    ]
    assert len(sections()) > 10
    assert silent == []


def test_every_section_says_what_it_is():
    assert [name for name, model in sections().items() if not model.__doc__] == []


def test_help_describes_every_key():
    described = {line.split()[0].removeprefix("--") for line in describe_keys().splitlines() if line.startswith("  --")}
    assert described == set(all_keys())


SMALL = {
    "layout": {"groups": 2, "replicas": 1, "shards": 2},
    "data": {"sequence_length": 256},
    "train": {"micro_batch": 4},
    "sync": {"every": 10, "warmup_fraction": 0.1},
    "budget": {"tokens": 800_000},
}


def test_a_budget_of_tokens():
    """2 ranks × 4 sequences × 256 tokens are a group's step; 800,000 / 4,096 = 195.3 steps, rounded up."""
    recipe = make_recipe(SMALL)
    assert (recipe.group_sequences, recipe.group_tokens, recipe.tokens_per_step) == (8, 2048, 4096)
    assert (recipe.steps, recipe.budget_tokens) == (196, 800_000)
    assert recipe.timetable == Timetable(every=10, warmup_steps=20, steps=196)
    assert recipe.timetable.rounds() == 1 + 18


def test_a_budget_of_steps():
    recipe = make_recipe(SMALL | {"budget": {"steps": 30}})
    assert (recipe.steps, recipe.budget_tokens) == (30, 30 * 4096)


def test_accumulation_and_replicas_make_a_step_larger():
    layout, train = {"groups": 2, "replicas": 3, "shards": 2}, {"micro_batch": 4, "accumulation": 5}
    recipe = make_recipe(SMALL | {"layout": layout, "train": train})
    assert recipe.group_sequences == 3 * 2 * 4 * 5
    assert recipe.tokens_per_step == 2 * 120 * 256


@pytest.mark.parametrize(
    ("layout", "outer", "strategy", "federates"),
    [
        ({"groups": 1, "replicas": 1, "shards": 4}, "mean", "FSDP", False),
        ({"groups": 1, "replicas": 2, "shards": 2}, "mean", "HSDP", False),
        ({"groups": 2, "replicas": 1, "shards": 2}, "mean", "FL+FSDP", True),
        ({"groups": 2, "replicas": 2, "shards": 1}, "mean", "FL+DDP", True),
        ({"groups": 1, "replicas": 1, "shards": 4}, "nesterov", "FSDP + outer", True),
        ({"groups": 2, "replicas": 2, "shards": 2}, "momentum", "FL+HSDP", True),
    ],
)
def test_strategy(layout, outer, strategy, federates):
    recipe = make_recipe({"layout": layout, "sync": {"outer": {"kind": outer}}})
    assert (recipe.strategy, recipe.federates) == (strategy, federates)


def test_one_group_has_no_synchronous_warm_up():
    recipe = make_recipe({"layout": {"groups": 1}, "sync": {"outer": {"kind": "nesterov"}}})
    assert recipe.timetable.warmup_steps == 0


def test_a_recipe_cannot_be_changed():
    recipe = Recipe()
    with pytest.raises(ValidationError):
        recipe.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError):
        recipe.sync.every = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_architecture_keeps_fields_of_its_own():
    model = make_recipe({"model": {"kind": "config", "model_type": "gpt2", "n_embd": 64}}).model
    assert isinstance(model, ConfigModel)
    assert model.fields == {"n_embd": 64}
    assert {"model_type": "llama", **Recipe().model.fields} == TINY_MODEL  # pyright: ignore[reportAttributeAccessIssue]


def test_diloco_defaults():
    """Source of both: arXiv:2311.08105, section 3."""
    assert (NesterovOuter(kind="nesterov").learning_rate, NesterovOuter(kind="nesterov").momentum) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sync.evry", "sync.every"),
        ("learning_rate", "optimizer.learning_rate"),
        ("layout.group", "layout.groups"),
        ("tokens", "budget.tokens"),
    ],
)
def test_nearest_key(given, meant):
    assert nearest_key(given) == meant
