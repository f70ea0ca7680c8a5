"""The recipe's keys: all of them, what they mean, and which one was probably meant."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel

from fedshard.core.recipe import Recipe


def all_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key that a recipe may hold, as `section.key`, in the order of the fields.

    >>> "sync.outer.momentum" in set(all_keys())
    True
    """
    for name, field in model.model_fields.items():
        sections = _sections(field.annotation)
        if not sections:
            yield prefix + (field.alias or name)
        else:
            yield from dict.fromkeys(key for section in sections for key in all_keys(section, f"{prefix}{name}."))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: one, the kinds of a choice, or none where it holds a plain value."""
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def likely(path: list[str]) -> tuple[str | None, list[str]]:
    """For a key that does not exist there: the one probably meant, if any, and all that its section has."""
    key, section = ".".join(path), ".".join(path[:-1])
    every = [*all_keys(), *Recipe.model_fields]
    beside = [name.rpartition(".")[2] for name in every if name.rpartition(".")[0] == section]
    here = [".".join([*path[:-1], name]) for name in difflib.get_close_matches(path[-1], beside, 2, 0.6)]
    same_name = [name for name in every if name.rpartition(".")[2] == path[-1]]
    candidates = here + same_name + difflib.get_close_matches(key, every, 2, 0.6)
    # a key that exists and is refused belongs to another kind of its section
    return next((name for name in candidates if name != key), None), [name for name in beside if name != path[-1]]


def nearest_key(key: str) -> str:
    """The recipe's key that is most like `key`.

    >>> nearest_key("sync.evry"), nearest_key("learning_rate")
    ('sync.every', 'optimizer.learning_rate')
    """
    every = list(all_keys())
    last = [name for name in every if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return (last + difflib.get_close_matches(key, every, 1, 0.0))[0]


def describe_keys() -> str:
    """Every key with its default and its meaning, as `fedshard train --help` shows them."""
    return "".join(_described(Recipe, ""))


def _described(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        for each in inner:
            yield from _described(each, f"{prefix}{name}.")
        if not inner:
            default = "" if field.is_required() or field.default is None else f"  (default: {_as_toml(field.default)})"
            text = textwrap.fill(str(field.description), 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
            yield f"  --{prefix}{field.alias or name}{default}\n{text}\n"


def _as_toml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps({"value": plain}).partition("= ")[2].replace("\n", "").replace("    ", " ").replace(",]", " ]")
