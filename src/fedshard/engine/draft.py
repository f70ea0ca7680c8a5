"""All ids of a source in one file, in the source's order, with the places where each document ends.

    documents   a  bb  c        draft    a E b b E c E        ends   2 5 7

Arrays of tokens become such a draft too; their sequences take the part of documents.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import DataSection
from fedshard.engine.sources import Source, read_documents
from fedshard.engine.tokenizer import BYTE_SEPARATOR, BYTES, load_tokenizer

CHARACTERS_AT_ONCE = 2**20
IDS_AT_ONCE = 2**22

Count = Callable[[int], None]
"""Told how many documents more are done."""


@dataclass(frozen=True, eq=False)
class Draft:
    """The ids of a source, in a file of raw numbers."""

    path: Path
    dtype: np.dtype
    ends: np.ndarray  # (documents,)
    """Where each document ends, its separator included. Ids behind the last end belong to no sequence."""
    separator: int | None
    """The id that ends a document; None for arrays of tokens whose tokenizer is not known."""
    highest_id: int
    """The highest id that may occur."""

    def stream(self) -> np.ndarray:
        """The ids, memory-mapped. (ids,)"""
        return np.memmap(self.path, dtype=self.dtype, mode="r")


def draft_documents(source: Source, data: DataSection, vocab_size: int, path: Path, count: Count) -> Draft:
    """Tokenise the documents of a source, with exactly one separator after each; those without any id are left out.

    Raises InputError where source or tokenizer cannot be read, or the tokenizer's ids exceed the vocabulary.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    check_vocabulary(source, data, tokenizer.highest_id, vocab_size)
    dtype = _dtype_for(tokenizer.highest_id)
    separator = np.array([tokenizer.separator], dtype=dtype)
    lengths = array("q")
    with path.open("wb") as file:
        for texts in _batches(read_documents(source)):
            for ids in tokenizer.encode(texts):
                if len(ids):
                    np.concatenate([ids.astype(dtype), separator]).tofile(file)
                    lengths.append(len(ids) + 1)
            count(len(texts))
    return Draft(path, dtype, np.cumsum(np.array(lengths, dtype=np.int64)), tokenizer.separator, tokenizer.highest_id)


def draft_arrays(source: Source, data: DataSection, vocab_size: int, path: Path, count: Count) -> Draft:
    """Join the arrays of a `tokens` source to one stream, and cut it into sequences.

    Raises InputError where one is no array of ids, or has ids beyond the vocabulary.
    """
    arrays, length = _load_arrays(source, data.sequence_length), data.sequence_length
    highest_id = max(int(ids.max()) for ids in arrays)
    check_vocabulary(source, data, highest_id, vocab_size)
    dtype, written = _dtype_for(highest_id), 0
    with path.open("wb") as file:
        for ids in arrays:
            flat = ids.reshape(-1)
            for start in range(0, len(flat), IDS_AT_ONCE):
                part = flat[start : start + IDS_AT_ONCE].astype(dtype)
                part.tofile(file)
                count((written + len(part)) // length - written // length)
                written += len(part)
    ends = np.arange(1, written // length + 1, dtype=np.int64) * length
    return Draft(path, dtype, ends, _separator_of_arrays(data.tokenizer, highest_id), highest_id)


def check_vocabulary(source: Source, data: DataSection, highest_id: int, vocab_size: int) -> None:
    """Raises InputError where an id has no row in the model's embedding."""
    if highest_id < vocab_size:
        return
    if source.kind == "tokens":
        key, what = source.key, f"ids in {source.path}"
    else:
        key, what = "data.tokenizer", f"ids of {data.tokenizer!r}"
    says = f"{what} go up to {highest_id}, and the model's vocabulary of {vocab_size} ends at {vocab_size - 1}"
    mend = f"Take the tokenizer that the model was made for, or a model.vocab_size of at least {highest_id + 1}."
    raise InputError([Fault(key, says, mend)])


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of about a million characters, so that memory does not depend on how short they are."""
    batch, characters = [], 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _load_arrays(source: Source, sequence_length: int) -> list[np.ndarray]:
    """The arrays, memory-mapped: all streams (ids,), or all (sequences, sequence_length)."""
    arrays = [_load_array(source, path, sequence_length) for path in source.files]
    if len({ids.ndim for ids in arrays}) > 1:
        says = f"{source.path} holds streams and arrays of sequences"
        raise source.fault(says, "Give only one sort, so that given sequences stay as they are.")
    return arrays


def _load_array(source: Source, path: Path, sequence_length: int) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise source.fault(f"{path} is no .npy array ({error})", "Save it with numpy.save.") from None
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        says = f"{path} holds {ids.dtype} in {ids.ndim} dims"
        raise source.fault(says, "Give integers, as one stream or as (sequences, sequence_length).")
    if ids.ndim == 2 and ids.shape[1] != sequence_length:
        says = f"{path} holds sequences of {ids.shape[1]} tokens, and data.sequence_length is {sequence_length}"
        raise source.fault(says, f"Set data.sequence_length to {ids.shape[1]}.")
    if ids.size == 0:
        raise source.fault(f"{path} is empty", "Take it out.")
    if ids.min() < 0:
        raise source.fault(f"{path} holds the id {ids.min()}", "Token ids start at 0.")
    return ids


def _separator_of_arrays(tokenizer: str, highest_id: int) -> int | None:
    """The separator of the tokenizer that is named; none where it is `bytes`, the default, and cannot be theirs."""
    if tokenizer == BYTES:
        return BYTE_SEPARATOR if highest_id <= BYTE_SEPARATOR else None
    return load_tokenizer(tokenizer).separator


def _dtype_for(highest_id: int) -> np.dtype:
    return np.dtype(np.uint16 if highest_id < 2**16 else np.uint32)
