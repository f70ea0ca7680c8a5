"""A directive that writes the recipe reference from the recipe itself, so that it cannot be behind.

Each section becomes a heading with the section's docstring, each key a term with its values, its default and its
field's docstring.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from docutils import nodes
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedshard.core.recipe import Recipe

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
NAMES = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}


class RecipeReference(SphinxDirective):
    """`{recipe-reference}`: all sections of the recipe."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(reference()), allow_section_headings=True)


def reference() -> Iterator[str]:
    """The reference as lines of Markdown."""
    plain = [name for name, field in Recipe.model_fields.items() if not kinds(field)]
    yield "## Top level\n"
    for name in plain:
        yield term(name, Recipe.model_fields[name])
    for name, field in Recipe.model_fields.items():
        if kinds(field):
            yield f"## `[{name}]`\n"
            yield from choice(name, kinds(field), 3)


def choice(name: str, sections: list[type[BaseModel]], level: int) -> Iterator[str]:
    """One section, or each of its kinds under a heading of its own."""
    for section in sections:
        if len(sections) > 1:
            yield f'{"#" * level} `{name}.kind = "{section.model_fields["kind"].annotation.__args__[0]}"`\n'
        yield f"{section.__doc__}\n"
        inner = []
        for key, field in section.model_fields.items():
            if kinds(field):
                inner.append((f"{name}.{key}", kinds(field)))
            elif not (len(sections) > 1 and key == "kind"):
                yield term(f"{name}.{field.alias or key}", field)
        for key, below in inner:
            yield f"### `[{key}]`\n"
            yield from choice(key, below, 4)


def kinds(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a field may hold; none where it holds a value."""
    each = (field.annotation, *get_args(field.annotation))
    return [kind for kind in each if isinstance(kind, type) and issubclass(kind, BaseModel)]


def term(key: str, field: FieldInfo) -> str:
    """A key with its values and its default, and what it means."""
    values = describe(field.annotation, field.metadata)
    default = "" if field.is_required() or field.default is None else f", default `{toml(field.default)}`"
    meaning = " ".join(str(field.description).split())
    return f"`{key}` — {values}{default}\n: {meaning}\n"


def describe(kind: Any, limits: list[Any]) -> str:
    """The values of a type, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        return describe(inner, [limit for each in more for limit in getattr(each, "metadata", [each])])
    if origin is Literal:
        return " or ".join(f"`{toml(value)}`" for value in get_args(kind))
    if origin in (Union, UnionType):
        return describe(next(each for each in get_args(kind) if each is not type(None)), limits)
    if origin is tuple:
        inner = [each for each in get_args(kind) if each is not Ellipsis]
        return f"list of {describe(inner[0], [])}" if len(inner) == 1 else f"{len(inner)} × {describe(inner[0], [])}"
    bounds = [
        f"{sign} {getattr(limit, name)}" for limit in limits for name, sign in SIGNS.items() if hasattr(limit, name)
    ]
    return " ".join([NAMES[kind], ", ".join(bounds)]).rstrip()


def toml(value: Any) -> str:
    """A value as a recipe has it, on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("recipe-reference", RecipeReference)
    return {"parallel_read_safe": True}
