"""A checkpoint as a Hugging Face folder: safetensors with an index, config, tokenizer. One process, tensor by tensor.

checkpoint ──► the global weights (of one between two rounds: after the round that was pending)
           ──► names and shapes as transformers itself would save them ──► one tensor after the other into files
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.recipe import FolderModel, Model, Recipe
from fedshard.engine.agree import persistent_buffers
from fedshard.engine.checkpoint import Checkpoint, group_folder
from fedshard.engine.config import read_config
from fedshard.engine.merge import SharedSlices, open_shared
from fedshard.engine.model import build_on_meta
from fedshard.engine.parameters import named_parameters, tied_names
from fedshard.engine.shard import stored_dtype
from fedshard.engine.slices import Slices
from fedshard.engine.tensor_files import INDEX, SINGLE
from fedshard.engine.tensor_writer import write_tensors
from fedshard.engine.tokenizer import BYTE_SEPARATOR, BYTES

FILE_BYTES = 5_000_000_000
"""Largest file, as transformers has it; a tensor that is larger gets one of its own."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")  # fmt: skip


@dataclass(frozen=True)
class Output:
    """A tensor of the model and what it becomes in the files: names with shapes."""

    source: str
    shape: tuple[int, ...]
    buffer: bool
    keys: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """In the files."""
        return sum(torch.Size(shape).numel() for shape in self.keys.values()) * self.dtype.itemsize


def export(checkpoint: Checkpoint, to: Path, dtype: torch.dtype, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write the folder; returns what a reader of it should know, in words.

    Weights are converted from float32 to `dtype`; integer buffers stay. Raises InputError where the folder exists, or
    the checkpoint cannot be read, and RunError where the folder cannot be written; then none is left.
    """
    if os.path.lexists(to):
        raise InputError([Fault(str(to), "exists already", "Give a new folder with --to DIR.")])
    unfinished = to.with_name(f"{to.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        notes = _write_all(unfinished, checkpoint, dtype, file_bytes)
        unfinished.rename(to)
    except OSError as error:
        raise RunError(f"{to} cannot be written: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return notes


def _write_all(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, file_bytes: int) -> list[str]:
    """All files of the folder; the notes of `export`."""
    recipe, cursor = checkpoint.recipe(), checkpoint.cursor()
    config = read_config(_described(checkpoint, recipe))
    model = build_on_meta(config)
    notes = [f"{name} is {first}, and left out: tie_word_embeddings is true" for name, first in _tied(model)]
    with ExitStack() as files:
        shared = open_shared(checkpoint, cursor, None, files)
        own = files.enter_context(Slices(checkpoint.path / group_folder(0)))
        write_weights(folder, plan(model, dtype), model, shared, own, file_bytes)
    _write_config(folder, config, model, recipe, dtype)
    notes += _write_tokenizer(folder, recipe)
    if dtype.itemsize < stored_dtype(recipe.train).itemsize:
        notes.append(f"weights are rounded from float32 to {str(dtype).removeprefix('torch.')}")
    if not cursor.together:
        notes.append("saved between two rounds: the groups' weights are averaged as the next round would have done")
    return notes


def plan(model: PreTrainedModel, dtype: torch.dtype) -> list[Output]:
    """What is written for each tensor of a model on the meta device, in order.

    Raises InputError for an architecture whose files mix tensors of the model in ways that need several at a time.
    """
    buffers = persistent_buffers(model)
    tensors = {**named_parameters(model), **buffers}
    outputs = []
    for name, tensor in tensors.items():
        written = dtype if tensor.is_floating_point() else tensor.dtype
        keys = {
            key: tuple(each.shape) for key, each in revert_weight_conversion(model, {name: tensor.detach()}).items()
        }
        outputs.append(Output(name, tuple(tensor.shape), name in buffers, keys, written))
    together = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in tensors.items()})
    if set(together) != {key for output in outputs for key in output.keys}:
        says = f"{model.config.model_type} cannot be written tensor by tensor"
        raise InputError([Fault("model.model_type", says, "Take another architecture.")])
    return outputs


def write_weights(
    folder: Path, outputs: list[Output], model: PreTrainedModel, shared: SharedSlices, own: Slices, file_bytes: int
) -> None:
    """All tensors, in files of at most `file_bytes`, with an index where there are several."""
    chunks: list[list[Output]] = [[]]
    for output in outputs:
        if chunks[-1] and sum(each.bytes for each in chunks[-1]) + output.bytes > file_bytes:
            chunks.append([])
        chunks[-1].append(output)

    def tensors(chunk: list[Output]) -> Iterator[tuple[str, torch.Tensor]]:
        for output in chunk:
            slices, kind = (own, "buffer") if output.buffer else (shared, "weights")
            whole = slices.read(kind, output.source, range(math.prod(output.shape))).view(output.shape)
            yield from revert_weight_conversion(model, {output.source: whole.to(output.dtype)}).items()

    several = len(chunks) > 1
    names = [f"model-{index:05}-of-{len(chunks):05}.safetensors" for index in range(1, len(chunks) + 1)]
    for name, chunk in zip(names, chunks, strict=True):
        shapes = {key: (shape, each.dtype) for each in chunk for key, shape in each.keys.items()}
        write_tensors(folder / (name if several else SINGLE), shapes, tensors(chunk))
    if several:
        where = {key: name for name, chunk in zip(names, chunks, strict=True) for each in chunk for key in each.keys}
        index = {"metadata": {"total_size": sum(each.bytes for each in outputs)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _described(checkpoint: Checkpoint, recipe: Recipe) -> Model:
    """Where the model's config is: a folder that is not here, on another machine, is not needed for it."""
    if isinstance(recipe.model, FolderModel) and not Path(recipe.model.path).is_dir():
        return FolderModel(kind="folder", path=str(checkpoint.path))
    return recipe.model


def _write_config(
    folder: Path, config: PreTrainedConfig, model: PreTrainedModel, recipe: Recipe, dtype: torch.dtype
) -> None:
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if recipe.data.tokenizer == BYTES and recipe.data.kind != "tokens":
        config.bos_token_id, config.eos_token_id = None, BYTE_SEPARATOR
    config.save_pretrained(folder)
    if isinstance(recipe.model, FolderModel):
        _copy(Path(recipe.model.path), folder, ("generation_config.json",))


def _write_tokenizer(folder: Path, recipe: Recipe) -> list[str]:
    if recipe.data.kind == "tokens":
        return ["no tokenizer: the run read token ids"]
    if recipe.data.tokenizer == BYTES:
        byte_tokenizer().save_pretrained(folder)
    elif not _copy(Path(recipe.data.tokenizer), folder, TOKENIZER_FILES):
        return [f"no tokenizer: {recipe.data.tokenizer} is not there any more"]
    return []


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The built-in `bytes` as a tokenizer of transformers: a token for each byte, and the separator as end of text."""
    alphabet = {character: byte for byte, character in _byte_characters().items()}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    made.add_special_tokens([end])
    assert made.token_to_id(end) == BYTE_SEPARATOR
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte: itself where it is one, else the next
    free one from U+0100 on. Source: the GPT-2 tokenizer."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _tied(model: PreTrainedModel) -> list[tuple[str, str]]:
    return [(name, first) for name, first in tied_names(model).items() if name != first]


def _copy(source: Path, folder: Path, names: tuple[str, ...]) -> list[str]:
    """Copy those files of `names` that there are, and return them."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, folder / name)
    return there
