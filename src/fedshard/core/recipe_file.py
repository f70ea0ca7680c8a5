"""Reading and writing recipes: TOML, `--section.key value` on top of it, and every fault at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_keys import likely

# Sections in which one key decides what the others may be: setting one on the command line starts them anew.
CHOICES = {("model", "kind"): ("model",), ("sync", "outer", "kind"): ("sync", "outer"), ("budget",): ("budget",)}

# Keys of the design whose features this version does not have. They are refused by name, not as misspellings.
NOT_BUILT = {
    "layout.shapes": "unequal groups",
    "sync.delay": "overlap",
    "sync.fragments": "fragments",
    "sync.merge": "overlap",
    "sync.codec": "codecs",
    "sync.guard": "the guard",
    "sync.inner_state": "averaging or resetting moments",
    "budget.seconds": "a budget of time",
}


def read_recipe(path: Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file (none: the built-in `tiny`) with `--section.key value` pairs on top.

    Raises InputError with all faults at once.

    >>> read_recipe(overrides=["--layout.groups", "4", "--sync.outer.kind=nesterov"]).sync.outer.learning_rate
    0.7
    """
    raw = Recipe().model_dump(mode="json", exclude_none=True) | (read_toml(path) if path else {})
    anew: set[tuple[str, ...]] = set()  # sections that these words have started anew
    for keys, value in parse_overrides(overrides):
        put(raw, keys, value, anew)
    return make_recipe(raw)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree. Raises InputError where it cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError([Fault(str(path), "no such file", "Give the path of a recipe, or none for `tiny`.")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([Fault(str(path), f"cannot be read ({error})", "Give a readable TOML file.")]) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError([Fault(str(path), f"is not TOML ({error})", "Mend the line it names.")]) from None


def write_recipe(recipe: Recipe) -> str:
    """The complete recipe as TOML; reading it again gives an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """`--section.key value` or `--section.key=value` as (path of keys, value); values as in TOML, else plain text."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError([Fault(word, "is neither a recipe's path nor --section.key", "See `fedshard train -h`.")])
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise InputError([Fault(f"--{name}", "has no value", f"Write --{name} VALUE.")])
            value = rest.pop(0)
        yield tuple(name.replace("-", "_").split(".")), parse_value(value)


def parse_value(text: str) -> Any:
    """A value as TOML reads it; what is no TOML is text.

    >>> parse_value("3e-4"), parse_value("true"), parse_value("[0.9, 0.95]"), parse_value("runs/x")
    (0.0003, True, [0.9, 0.95], 'runs/x')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def put(raw: dict[str, Any], keys: tuple[str, ...], value: Any, anew: set[tuple[str, ...]]) -> None:
    """Set one key of a raw recipe; where that key decides what its section may hold, the section starts anew, once."""
    for choice, section in CHOICES.items():
        if keys[: len(choice)] == choice and _look(raw, keys) != value and section not in anew:
            _section(raw, section).clear()
            anew.add(section)
    _section(raw, keys[:-1])[keys[-1]] = value


def make_recipe(raw: Mapping[str, Any]) -> Recipe:
    """A recipe from a raw tree. Raises InputError with all its faults, those between sections included."""
    try:
        recipe, faults = Recipe.model_validate(raw), []
    except ValidationError as error:
        recipe, faults = _without_faults(raw, error), [_fault(each) for each in error.errors(include_url=False)]
    if recipe is not None:
        faulty = {fault.key.split(".")[0] for fault in faults}
        faults += [fault for fault in inconsistencies(recipe) if fault.key.split(".")[0] not in faulty]
    if faults or recipe is None:
        raise InputError(faults)
    return recipe


def inconsistencies(recipe: Recipe) -> list[Fault]:
    """What is wrong between the recipe's sections, as far as the recipe alone can tell."""
    return [*_round_faults(recipe), *_data_faults(recipe)]


def _round_faults(recipe: Recipe) -> Iterator[Fault]:
    if not recipe.federates:
        return
    steps, warmup, every = recipe.steps, recipe.timetable.warmup_steps, recipe.sync.every
    if warmup + every > steps:
        yield Fault(
            "sync.every",
            f"no round fits: {steps} steps, of which {warmup} are synchronous warm-up, and a round every {every}",
            f"Set sync.every to at most {max(steps - warmup, 1)}, or give a larger budget.",
        )


def _data_faults(recipe: Recipe) -> Iterator[Fault]:
    data, groups = recipe.data, recipe.layout.groups
    if data.assignment == "by-source":
        if len(data.sources) != groups:
            yield Fault(
                "data.sources",
                f"{len(data.sources)} sources for {groups} groups",
                "by-source wants one path for each group.",
            )
    elif data.sources:
        yield Fault("data.sources", f"not used by assignment = {data.assignment!r}", "Set data.assignment=by-source.")
    needs_path = data.kind != "stdlib" and data.assignment != "by-source"
    if needs_path and data.path is None:
        yield Fault("data.path", f"missing, and kind = {data.kind!r} needs it", "Give the file or folder.")
    if data.kind == "stdlib" and (data.path or data.assignment == "by-source"):
        yield Fault("data.kind", "stdlib takes neither path nor sources", "Set data.kind to what they hold.")


def _without_faults(raw: Mapping[str, Any], error: ValidationError) -> Recipe | None:
    """The recipe with the faulty sections at their defaults, so that faults between the others are found too."""
    faulty = {str(each["loc"][0]) for each in error.errors() if each["loc"]}
    try:
        return Recipe.model_validate({key: value for key, value in raw.items() if key not in faulty})
    except ValidationError:
        return None


def _fault(error: Any) -> Fault:
    """One of pydantic's errors in our words. Union tags are dropped from the path: they are no keys of the file."""
    path = _key_path(error["loc"])
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return _unknown(path, key)
    if error["type"] == "missing":
        return Fault(key, "missing", "Give it a value.")
    if error["type"] == "union_tag_not_found":
        return Fault(f"{key}.kind", "missing", "Say which kind the section is.")
    if error["type"] == "union_tag_invalid":
        says = f"no kind {error['ctx']['tag']!r}"
        return Fault(f"{key}.kind", says, f"Kinds: {error['ctx']['expected_tags']}.")
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    shown = "" if isinstance(given, dict | BaseModel) else f" ({given!r} given)"
    return Fault(key or "recipe", message[0].lower() + message[1:] + shown, "See the recipe reference.")


def _unknown(path: list[str], key: str) -> Fault:
    for known, feature in NOT_BUILT.items():
        if key == known or key.startswith(known + "."):
            return Fault(key, f"{feature} is not in this version", "Leave the key out.")
    meant, beside = likely(path)
    return Fault(
        key, "no such key", f"Did you mean {meant}?" if meant else f"Keys here: {', '.join(beside) or 'none'}."
    )


def _key_path(loc: tuple[int | str, ...]) -> list[str]:
    """A pydantic location as keys of the file: the tag of a discriminated union follows its section's name."""
    path = [str(part) for part in loc]
    for section in (["model"], ["sync", "outer"]):
        depth = len(section)
        if path[:depth] == section and len(path) > depth + 1:
            del path[depth]
    return path


def _section(raw: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        inner = raw.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InputError([Fault(key, f"is a section, {inner!r} given", "Write --section.key value.")])
        raw = inner
    return raw


def _look(raw: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(raw, dict) or key not in raw:
            return None
        raw = raw[key]
    return raw
