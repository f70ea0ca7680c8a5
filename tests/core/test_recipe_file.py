"""Recipes in and out of files: what is given comes back, and what is wrong is named, all at once.

Trap O1 (unslothai/unsloth#10452): a key that nobody knows must be refused at every level, never dropped.
"""

import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import TINY_MODEL, ConfigModel, Recipe
from fedshard.core.recipe_file import NOT_BUILT, make_recipe, parse_value, read_recipe, write_recipe
from fedshard.core.recipe_keys import all_keys

KEYS = sorted(all_keys())


def faults(raw: dict[str, Any] | None = None, words: tuple[str, ...] = ()) -> dict[str, Fault]:
    """What is wrong with a raw recipe, or with words of the command line, by key."""
    with pytest.raises(InputError) as caught:
        read_recipe(overrides=words) if raw is None else make_recipe(raw)
    found = {fault.key: fault for fault in caught.value.faults}
    assert len(found) == len(caught.value.faults), "one fault for each key"
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b.c` as the tree that TOML would give, beside the choices that its section needs."""
    kinds = {"model": {"kind": "folder", "path": "m"}, "sync.outer": {"kind": "nesterov"}}
    tree: dict[str, Any] = {}
    place, path = tree, key.split(".")
    for depth, name in enumerate(path[:-1], 1):
        place = place.setdefault(name, dict(kinds.get(".".join(path[:depth]), {})))
    place[path[-1]] = value
    return tree


def misspelt(key: str) -> list[str]:
    """The last name of a key with a letter doubled, with two exchanged, and with dashes for underscores."""
    section, dot, name = key.rpartition(".")
    doubled, swapped = name[:2] + name[1:], name[:-2] + name[-1] + name[-2]
    wrong = dict.fromkeys([doubled, swapped, name.replace("_", "-")])
    return [section + dot + each for each in wrong if each != name]


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_in_a_file_is_refused_with_the_one_meant(key):
    for wrong in misspelt(key):
        assert faults(nested(wrong, "x"))[wrong] == Fault(wrong, "no such key", f"Did you mean {key}?")


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_on_the_command_line_is_refused_with_the_one_meant(key):
    choice = {"model": ("--model.kind", "folder", "--model.path", "m"), "sync.outer": ("--sync.outer.kind", "nesterov")}
    before = choice.get(key.rpartition(".")[0], ())
    for wrong in misspelt(key)[:2]:  # dashes are taken for underscores there
        assert faults(words=(*before, f"--{wrong}", "x"))[wrong].mend == f"Did you mean {key}?"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("learning_rate", "optimizer.learning_rate"),  # at the wrong level
        ("optimizer.weigth_decay", "optimizer.weight_decay"),
        ("optimizer.momentum", "sync.outer.momentum"),
        ("seed2", "seed"),
    ],
)
def test_a_key_in_the_wrong_place(wrong, meant):
    assert faults(nested(wrong, 1))[wrong] == Fault(wrong, "no such key", f"Did you mean {meant}?")


@pytest.mark.parametrize("section", [name for name in Recipe.model_fields if name != "seed"])
def test_a_misspelt_section_is_refused_with_the_one_meant(section):
    wrong = section[:2] + section[1:]
    assert faults({wrong: {}})[wrong] == Fault(wrong, "no such key", f"Did you mean {section}?")


def test_a_key_of_the_default_model_alone():
    model = read_recipe(overrides=["--model.hidden_size", "64"]).model
    assert model == ConfigModel(**TINY_MODEL | {"hidden_size": 64})


@pytest.mark.parametrize("section", ["model", "sync.outer"])
def test_a_choice_without_its_kind_is_named(section):
    path = section.split(".")
    raw = {path[0]: {path[1]: {"momentum": 0.5}}} if len(path) > 1 else {section: {"path": "m"}}
    assert faults(raw)[f"{section}.kind"].says.startswith("missing")


def test_a_key_of_another_kind_is_not_suggested_as_itself():
    found = faults({"sync": {"outer": {"kind": "mean", "momentum": 0.5}}})["sync.outer.momentum"]
    assert found.mend != "Did you mean sync.outer.momentum?"


@pytest.mark.parametrize("key", NOT_BUILT)
def test_what_is_not_built_is_refused_by_name(key):
    found = faults(nested(key, 1))[key]
    assert found.says == f"{NOT_BUILT[key]} is not in this version"


def test_all_faults_at_once():
    found = faults(
        {
            "seed": -1,
            "layout": {"groups": 0, "shard": 2},
            "sync": {"every": 0, "outer": {"kind": "nesterov", "momentum": 1.5}},
            "data": {"kind": "text"},
            "budget": {"tokens": 5, "steps": 5},
            "optimiser": {},
        }
    )
    assert found.keys() == {
        "seed", "layout.groups", "layout.shard", "sync.every", "sync.outer.momentum", "data.path", "budget", "optimiser"
    }  # fmt: skip
    assert all(str(fault).endswith((".", "?")) for fault in found.values())


@pytest.mark.parametrize(
    ("raw", "key", "says"),
    [
        ({"sync": {"every": 0}}, "sync.every", "greater than or equal to 1 (0 given)"),
        ({"layout": {"groups": 0}}, "layout.groups", "greater than or equal to 1 (0 given)"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "finite number (nan given)"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1", "less than 1 (1.0 given)"),
        ({"data": {"kind": "csv"}}, "data.kind", "'csv' given"),
        ({"budget": {}}, "budget", "exactly one of tokens and steps is needed, none given"),
        ({"model": {"kind": "folder"}}, "model.path", "missing"),
        ({"data": {"kind": "jsonl"}}, "data.path", "kind = 'jsonl' needs it"),
        ({"data": {"path": "x"}}, "data.kind", "stdlib takes neither"),
        ({"data": {"kind": "text", "path": "x", "sources": ["a"]}}, "data.sources", "not used by"),
        (
            {"data": {"kind": "text", "assignment": "by-source", "sources": ["a", "b", "c"]}},
            "data.sources",
            "3 sources for 2 groups",
        ),
    ],
)
def test_a_fault_names_its_key_and_the_value(raw, key, says):
    assert says in faults(raw)[key].says


@pytest.mark.parametrize(
    ("steps", "warmup_fraction", "every", "fits"),
    [(10, 0.0, 10, True), (9, 0.0, 10, False), (20, 0.5, 10, True), (20, 0.55, 10, False), (20, 1.0, 1, False)],
)
def test_a_round_must_fit_after_the_warm_up(steps, warmup_fraction, every, fits):
    raw = {"budget": {"steps": steps}, "sync": {"warmup_fraction": warmup_fraction, "every": every}}
    if fits:
        assert make_recipe(raw).timetable.rounds() >= 1
    else:
        assert f"{steps} steps, of which {round(warmup_fraction * steps)} are" in faults(raw)["sync.every"].says


def test_without_rounds_no_round_must_fit():
    assert make_recipe({"layout": {"groups": 1}, "budget": {"steps": 1}}).steps == 1


counts, fractions = st.integers(1, 9), st.floats(0, 1)
models = [{"kind": "folder", "path": 'a "b" \\ c'}, {"kind": "config", "model_type": "gpt2", "n_embd": 8, "bias": True}]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
raw_recipes = st.fixed_dictionaries(
    {"budget": st.fixed_dictionaries({"steps": st.integers(100, 10**9)})},
    optional={
        "seed": st.integers(0, 2**31),
        "layout": st.fixed_dictionaries({}, optional=dict.fromkeys(("groups", "replicas", "shards"), counts)),
        "model": st.sampled_from(models),
        "optimizer": st.fixed_dictionaries({"betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list)}),
        "schedule": st.fixed_dictionaries({"warmup_fraction": fractions, "final_fraction": fractions}),
        "sync": st.fixed_dictionaries(
            {"every": st.integers(1, 20), "outer": st.sampled_from([{"kind": "mean"}, {"kind": "momentum"}])}
        ),
        "log": st.fixed_dictionaries({"wandb": texts}),
    },
)


@given(raw_recipes)
def test_what_is_written_is_read_again(raw):
    recipe = make_recipe(raw)
    text = write_recipe(recipe)
    assert make_recipe(tomllib.loads(text)) == recipe
    assert write_recipe(make_recipe(tomllib.loads(text))) == text


def test_files_and_words_give_the_same_recipe(tmp_path):
    words = ["--layout.groups", "4", "--sync.outer.kind=nesterov", "--sync.outer.momentum", "0.8", "--log.wandb", "me"]
    path = tmp_path / "r.toml"
    path.write_text(
        tomli_w.dumps(
            {
                "layout": {"groups": 4},
                "sync": {"outer": {"kind": "nesterov", "momentum": 0.8}},
                "log": {"wandb": "me"},
            }
        )
    )
    assert read_recipe(path) == read_recipe(overrides=words)


def test_words_win_over_the_file(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[sync]\nevery = 7\nwarmup_fraction = 0.2\n")
    sync = read_recipe(path, ["--sync.every", "3"]).sync
    assert (sync.every, sync.warmup_fraction) == (3, 0.2)


def test_another_kind_starts_its_section_anew(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[sync.outer]\nkind = "nesterov"\nmomentum = 0.5\n[budget]\ntokens = 5\n')
    recipe = read_recipe(path, ["--sync.outer.kind", "mean", "--budget.steps", "50"])
    assert recipe.sync.outer.kind == "mean"
    assert (recipe.budget.steps, recipe.budget.tokens) == (50, None)


def test_the_same_kind_keeps_its_section(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[sync.outer]\nkind = "nesterov"\nmomentum = 0.5\n')
    assert read_recipe(path, ["--sync.outer.kind", "nesterov"]).sync.outer.momentum == 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_dashes_on_the_command_line_are_underscores():
    assert read_recipe(overrides=["--optimizer.weight-decay", "0.3"]).optimizer.weight_decay == 0.3


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("3e-4", 3e-4), ("true", True), ("[1, 2]", [1, 2]), ('"3"', "3"), ("a b", "a b"), ("", ""), ("-1", -1)],
)
def test_values_as_toml_reads_them(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("words", "key"),
    [(["stray"], "stray"), (["--sync.every"], "--sync.every"), (["--seed.x", "1", "--seed.y", "2"], "seed")],
)
def test_words_that_are_no_overrides(words, key):
    assert key in faults(words=tuple(words))


@pytest.mark.parametrize(
    ("content", "says"), [(None, "no such file"), (b"a = = 1", "is not TOML"), (b"\xff\xfe", "cannot be read")]
)
def test_a_file_that_is_no_recipe(tmp_path, content, says):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        read_recipe(path)
    assert caught.value.faults[0].key == str(path)


def test_defaults_make_every_section_optional():
    assert make_recipe({}) == Recipe()
