"""Weights from a Hugging Face folder of safetensors, each rank reading its own rows alone.

Two steps: `plan_weights` finds from the files' headers where each tensor of the model is, and what does not fit;
`load` reads. Names and layouts of older files (a head by another name, experts one by one) go through the conversions
that transformers keeps for each architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from fedshard.core.errors import Fault, InputError
from fedshard.engine.model import build_on_meta, some_of
from fedshard.engine.parameters import local_part, local_rows, plain_name, tied_names
from fedshard.engine.tensor_files import TensorFiles, has_weights

__all__ = ["has_weights", "load", "plan_weights"]

COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$")
"""Tables of older architectures that files may hold and that are computed, not learned. They are not read."""


@dataclass(frozen=True)
class Whole:
    """A tensor of the model that is one of the files'."""

    key: str

    def shape(self, files: TensorFiles) -> tuple[int, ...]:
        """Its shape in the files."""
        return files.shapes[self.key]

    def read(self, files: TensorFiles, rows: range) -> torch.Tensor:
        """These rows of dim 0: (rows, …)."""
        return files.read(self.key, rows)


@dataclass(frozen=True)
class Experts:
    """A tensor of the model that holds all experts of a layer, of which the files have each by itself.

    `keys[e]` are the tensors that, one below the other, make up expert e: its gate above its up projection, say.
    """

    keys: tuple[tuple[str, ...], ...]

    def shape(self, files: TensorFiles) -> tuple[int, ...]:
        """The shape of them all together: (experts, rows of one expert, …)."""
        shapes = [files.shapes[key] for key in self.keys[0]]
        return len(self.keys), sum(shape[0] for shape in shapes), *shapes[0][1:]

    def read(self, files: TensorFiles, rows: range) -> torch.Tensor:
        """These experts: (rows, rows of one expert, …)."""
        return torch.stack([torch.cat([files.read(key) for key in self.keys[expert]]) for expert in rows])


def load(model: PreTrainedModel, folder: Path) -> None:
    """Give this rank's part of each parameter, and each persistent buffer, its value from the folder's safetensors.

    `model` is materialised, sharded or not; values are converted to the type that it stores. Raises InputError where
    model and files do not fit one another.
    """
    sources = plan_weights(model.config, folder)
    tensors = {plain_name(name): tensor for name, tensor in _tensors(model)}
    with torch.no_grad(), TensorFiles(folder) as files:
        for name, source in sources.items():
            rows = local_rows(tensors[name])
            if rows:
                local_part(tensors[name]).copy_(source.read(files, rows))


def plan_weights(config: PreTrainedConfig, folder: Path) -> dict[str, Whole | Experts]:
    """Where each tensor of the model of `config` is in the folder, by the model's names, tied ones once.

    Raises InputError with all that is wrong: tensors that one side lacks, shapes that differ, a head that contradicts
    `tie_word_embeddings`. Reads headers; values only of a head that must be compared with the embedding.
    """
    model = build_on_meta(config)
    with TensorFiles(folder) as files:
        found, faults = _match(model, files, folder)
        tied = tied_names(model)
        for name in [name for name in found if tied.get(name, name) != name]:
            source = found.pop(name)
            other = found.setdefault(tied[name], source)  # a file may hold a tied tensor by either name
            if other is not source and not _equal(files, other, source):
                faults.append(_contradiction(folder, f"true, but {name} and {tied[name]} differ", "false"))
        wanted = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
        missing = [name for name in wanted if name not in found]
        if missing == [name for name, tensor in _tensors(model) if tensor is _head(model)]:
            faults.append(_contradiction(folder, f"false, but the files hold no {missing[0]}", "true"))
        elif missing:
            faults.append(Fault(str(folder), f"its files lack {some_of(missing)}", "Give all of the model's files."))
        for name, source in found.items():
            if source.shape(files) != wanted[name]:
                says = f"{name} is {source.shape(files)} in the files and {wanted[name]} by config.json"
                faults.append(Fault(str(folder), says, "Mend config.json, or give its own files."))
    if faults:
        raise InputError(faults)
    return found


def _match(model: PreTrainedModel, files: TensorFiles, folder: Path) -> tuple[dict[str, Whole | Experts], list[Fault]]:
    """What the files have, by the model's names, and faults for what the model has no use for."""
    conversions = get_model_conversion_mapping(model)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    named = dict(model.state_dict())
    grouped: dict[str, dict[str | None, list[str]]] = {}  # name in the model → pattern of a conversion → keys
    unused = []
    for key in sorted(files.shapes, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, named)
        if name in named:
            grouped.setdefault(name, {}).setdefault(pattern, []).append(key)
        elif not COMPUTED.search(key):
            unused.append(key)
    found: dict[str, Whole | Experts] = {}
    for name, keys in grouped.items():
        source = _source(keys, converters)
        if source is None:
            unused += [key for each in keys.values() for key in each]
        else:
            found[name] = source
    faults = (
        [Fault(str(folder), f"its model has no use for {some_of(unused)}", "Give its own files.")] if unused else []
    )
    return found, faults


def _source(keys: dict[str | None, list[str]], converters: Iterable[WeightConverter]) -> Whole | Experts | None:
    """How the keys that belong to one tensor make it up; None where they do so in a way that is not known here."""
    if list(keys) == [None]:
        return Whole(keys[None][0]) if len(keys[None]) == 1 else None
    for converter in converters:
        if set(converter.source_patterns) == set(keys) and _stacks_experts(converter):
            parts = [keys[pattern] for pattern in converter.source_patterns]
            if len({len(part) for part in parts}) == 1:
                return Experts(tuple(zip(*parts, strict=True)))
    return None


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether a conversion stacks experts along dim 0 and joins their parts along what was each expert's dim 0."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, tied ones once, and persistent buffers."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _head(model: PreTrainedModel) -> torch.Tensor | None:
    return getattr(model.get_output_embeddings(), "weight", None)


def _equal(files: TensorFiles, one: Whole | Experts, other: Whole | Experts) -> bool:
    """Whether two tensors of the files hold the same values."""
    shape = one.shape(files)
    if shape != other.shape(files):
        return False
    parts = (range(start, min(start + 1024, shape[0])) for start in range(0, shape[0], 1024))
    return all(torch.equal(one.read(files, rows), other.read(files, rows)) for rows in parts)


def _contradiction(folder: Path, says: str, mend: str) -> Fault:
    return Fault(
        str(folder / "config.json"),
        f"tie_word_embeddings is {says}",
        f"Set tie_word_embeddings to {mend}, or give the files that belong to it.",
    )


def _natural(key: str) -> list[tuple[int, str]]:
    """A sort key that has expert 9 before expert 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
