"""Parts of flattened tensors on disk: each rank writes what it holds, and any rank of any layout reads what it needs.

    a parameter, flattened     0 ─────────────────────────────────── numel
    written by ranks           │ 0 at offset 0 │ 1 at … │ 2 … │ 3 │
    read by another layout              └── any range ──┘

A *kind* tells what the values are: `weights`, `anchor`, `outer.momentum`, `moment.exp_avg`, …
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedshard.core.errors import InputError
from fedshard.engine.checkpoint import damaged, read_json

INDEX = "index.json"

Key = tuple[str, str]
"""Kind and parameter."""


@dataclass(frozen=True)
class Slice:
    """A contiguous part of a flattened tensor."""

    offset: int
    shape: tuple[int, ...]
    """Of the full tensor."""
    values: torch.Tensor  # (length,)


@dataclass(frozen=True)
class Entry:
    """What the index says of one tensor."""

    shape: tuple[int, ...]
    parts: list[tuple[int, int, str]]
    """Offset, length and file of each, in the order of offsets."""


def write_slices(file: Path, slices: Mapping[Key, Slice]) -> dict[str, Any]:
    """One rank's slices as one safetensors file; returns their entries for the index. Empty ones are left out."""
    there = {key: each for key, each in slices.items() if each.values.numel() > 0}
    if not there:
        return {}
    save_file({f"{kind}/{name}": each.values for (kind, name), each in there.items()}, file, metadata={"format": "pt"})
    entries: dict[str, Any] = {}
    for (kind, name), each in there.items():
        part = [each.offset, each.values.numel(), file.name]
        entries.setdefault(kind, {})[name] = {"shape": list(each.shape), "parts": [part]}
    return entries


def merge_entries(indices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The index of a folder from the entries of its files."""
    merged: dict[str, Any] = {}
    for index in indices:
        for kind, names in index.items():
            for name, entry in names.items():
                into = merged.setdefault(kind, {}).setdefault(name, {"shape": entry["shape"], "parts": []})
                into["parts"] += entry["parts"]
    for names in merged.values():
        for entry in names.values():
            entry["parts"].sort()
    return merged


class Slices:
    """The slices of one folder; files are opened when they are needed, and stay open until the `with` block ends."""

    def __init__(self, folder: Path):
        """Reads the index. Raises InputError where it cannot be read."""
        self._folder = folder
        self._index = read_json(folder / INDEX, dict[str, dict[str, Entry]])
        self._stack, self._open = ExitStack(), dict[str, Any]()

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def has(self, kind: str, name: str | None = None) -> bool:
        """Whether there is anything of a kind, or of one parameter in it."""
        return kind in self._index and (name is None or name in self._index[kind])

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The full shape of every parameter that has values of this kind."""
        return {name: entry.shape for name, entry in self._index.get(kind, {}).items()}

    def kinds(self) -> list[str]:
        """All kinds in the folder."""
        return list(self._index)

    def read(self, kind: str, name: str, part: range) -> torch.Tensor:
        """The elements `part` of the flattened tensor, on the CPU, in memory of their own: (len(part),).

        Raises InputError where a file cannot be read or does not hold all of them.
        """
        pieces, reached = [], part.start
        entry = self._index.get(kind, {}).get(name)
        for offset, length, file in entry.parts if entry else ():
            if offset + length <= reached or reached >= part.stop:
                continue
            if offset > reached:
                break
            stop = min(offset + length, part.stop)
            pieces.append(self._values(file, f"{kind}/{name}", reached - offset, stop - offset))
            reached = stop
        if reached < part.stop:
            says = f"nothing holds elements {reached} to {part.stop} of {kind} of {name}"
            raise InputError([damaged(self._folder / INDEX, says)])
        return torch.cat(pieces)  # a copy of a single one, too: what safetensors gives is the file's mapped memory

    def _values(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        if Path(file).name != file:
            raise InputError([damaged(self._folder / INDEX, f"names {file}, which is outside")])
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            values = self._open[file].get_slice(key)[start:stop]
        except (OSError, SafetensorError) as error:
            raise InputError([damaged(self._folder / file, f"cannot be read ({error})")]) from None
        if values.shape != (stop - start,):
            raise InputError([damaged(self._folder / file, f"holds {key} in another size than {INDEX} says")])
        return values
