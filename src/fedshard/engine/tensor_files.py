"""The safetensors of a Hugging Face folder, one file or several, as one set of tensors that is never read whole."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fedshard.core.errors import Fault, InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHERS = ("*.safetensors", "pytorch_model*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack")


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights.

    Raises InputError where it holds them in another form, so that training does not start anew where it should go on.
    """
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return True
    for pattern in OTHERS:
        for file in sorted(folder.glob(pattern)):
            says = f"holds {file.name}, and neither {SINGLE} nor {INDEX}"
            raise InputError([Fault(str(folder), says, "Save the model again, as safetensors; or remove the file.")])
    return False


class TensorFiles:
    """The tensors of a folder's safetensors; the files stay open until the `with` block ends."""

    def __init__(self, folder: Path):
        """Reads headers. Raises InputError where a file is missing or is no safetensors."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shape of each tensor, by its name in the files."""
        self._file_of: dict[str, Any] = {}
        self._stack = ExitStack()
        for file in _files(folder):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise InputError([_unreadable(file, error)]) from None
            for key in opened.keys():  # noqa: SIM118 (it is no mapping)
                self._file_of[key] = opened
                self.shapes[key] = tuple(opened.get_slice(key).get_shape())

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, key: str, rows: range | None = None) -> torch.Tensor:
        """These rows of dim 0 of a tensor, or all of it, on the CPU: (rows, …). No other rows are read."""
        file = self._file_of[key]
        if rows is None or not self.shapes[key]:
            return file.get_tensor(key)
        return file.get_slice(key)[rows.start : rows.stop]


def _files(folder: Path) -> list[Path]:
    """The files that the folder's index names, or the one of a folder without an index."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError) as error:
        raise InputError([_unreadable(index, error)]) from None
    return [folder / name for name in sorted(set(names))]


def _unreadable(file: Path, error: Exception) -> Fault:
    return Fault(str(file), f"cannot be read ({error})", "Give all of the model's files, whole.")
