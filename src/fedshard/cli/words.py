"""Command-line words: a command's own flags and paths, and the `--section.key value` of recipes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe_keys import nearest_key

ALIKE = 0.75
"""From this likeness on, a name is taken for a command's own flag, misspelt."""


@dataclass(frozen=True)
class Words:
    """What a command was given: paths, its own flags with their values ("" for one that takes none), overrides."""

    paths: list[str]
    flags: dict[str, str]
    overrides: list[str]


def read_words(words: Sequence[str], flags: Mapping[str, str], most_paths: int = 1) -> Words:
    """Sort out the words of a command whose own `flags` map to their value's name ("" for none, [NAME] if it may lack).

    Every other `--name value` is an override of the recipe. Raises InputError with all the words that are wrong: a flag
    without its value or with one that it does not take, one that is nearly the name of the command's own, a word with
    one dash, and more paths than the command takes.

    >>> read_words(["r.toml", "--layout.groups", "4", "--into", "x"], {"--into": "DIR"})
    Words(paths=['r.toml'], flags={'--into': 'x'}, overrides=['--layout.groups', '4'])
    """
    paths: list[str] = []
    own: dict[str, str] = {}
    overrides: list[str] = []
    faults: list[Fault] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            paths.append(word)
            continue
        name, equals, text = word.partition("=")
        value = text if equals else None
        if value is None and flags.get(name) != "" and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        faults += _faults(name, value, flags)
        if name in flags:
            own[name] = value or ""
        else:
            overrides += [name, value or ""]
    faults += [Fault(path, "one path too many", "Options begin with two dashes.") for path in paths[most_paths:]]
    if faults:
        raise InputError(faults)
    return Words(paths, own, overrides)


def _faults(name: str, value: str | None, flags: Mapping[str, str]) -> Iterator[Fault]:
    """What is wrong with one flag or override, given with `value` (None: without)."""
    if not name.startswith("--") or name == "--":
        yield Fault(name, "no such option", "Options begin with two dashes, and have a name.")
    elif name in flags:
        if flags[name] and not flags[name].startswith("[") and not value:
            yield Fault(name, "has no value", f"Write {name} {flags[name]}.")
        if not flags[name] and value is not None:
            yield Fault(name, f"takes no value, {value!r} given", f"Write {name} alone.")
    elif meant := difflib.get_close_matches(name.replace("_", "-"), flags, 1, ALIKE):
        yield Fault(name, "no such option", f"Did you mean {meant[0]}?")
    elif value is None:
        key, nearest = name[2:], nearest_key(name[2:])
        says = "has no value" if key == nearest else "has no value, and is no flag"
        yield Fault(name, says, f"Write {name} VALUE." if key == nearest else f"Did you mean --{nearest} VALUE?")
