"""Command-line words: a command's own flags and paths, and the `--section.key value` of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe_keys import nearest_key


@dataclass(frozen=True)
class Words:
    """What a command was given: paths, its own flags with their values ("" for one that takes none), overrides."""

    paths: list[str]
    flags: dict[str, str]
    overrides: list[str]


def read_words(words: Sequence[str], flags: Mapping[str, str], most_paths: int = 1) -> Words:
    """Sort out the words of a command whose own `flags` map to their value's name ("" for none).

    Every other `--name value` is an override of the recipe. Raises InputError for a flag without its value, and for
    more paths than the command takes.

    >>> read_words(["r.toml", "--layout.groups", "4", "--into", "x"], {"--into": "DIR"})
    Words(paths=['r.toml'], flags={'--into': 'x'}, overrides=['--layout.groups', '4'])
    """
    paths: list[str] = []
    own: dict[str, str] = {}
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            paths.append(word)
        elif name in flags and not flags[name]:
            own[name] = ""
        else:
            if not equals:
                if not rest or rest[0].startswith("--"):
                    raise InputError([_without_value(name, flags)])
                value = rest.pop(0)
            if name in flags:
                own[name] = value
            else:
                overrides += [name, value]
    if len(paths) > most_paths:
        raise InputError([Fault(paths[most_paths], "one path too many", "Options begin with two dashes.")])
    return Words(paths, own, overrides)


def _without_value(name: str, flags: Mapping[str, str]) -> Fault:
    if name in flags:
        return Fault(name, "has no value", f"Write {name} {flags[name]}.")
    meant = nearest_key(name[2:])
    if name[2:] == meant:
        return Fault(name, "has no value", f"Write {name} VALUE.")
    return Fault(name, "has no value, and is no flag", f"Did you mean --{meant} VALUE?")
