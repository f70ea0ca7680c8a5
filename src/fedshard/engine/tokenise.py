"""Tokenise a source once: its draft, dealt by document to a train and an eval array.

    draft   a E b b E c E      held out   the second      train   a E c E      eval   b b E

Two passes, because a fair share of n documents can be held out only when n is known. Memory does not grow with the
source, but for some bytes per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fedshard.core.recipe import DataSection
from fedshard.engine.addressed import address_seed
from fedshard.engine.draft import Count, Draft, draft_arrays, draft_documents
from fedshard.engine.order import permute
from fedshard.engine.sources import Source

TRAIN, EVAL = "train.npy", "eval.npy"


@dataclass(frozen=True)
class Record:
    """What is known of tokenised data beside its ids."""

    separator: int | None
    """The id that ends a document; None where it is not known."""
    highest_id: int
    """The highest id that may occur."""
    documents: int
    """Documents dealt; for arrays of tokens, sequences."""
    dropped_tokens: int
    """Ids of the source that were dealt to neither side."""
    digest: str
    """A hash of the train and eval ids."""


def tokenise(source: Source, data: DataSection, *, seed: int, vocab_size: int, into: Path, quiet: bool) -> Record:
    """Write `train.npy` and `eval.npy`, one stream of ids each, into the empty folder `into`.

    Raises InputError where the source cannot be read, has ids beyond the vocabulary, or fewer than two documents.
    """
    make = draft_arrays if source.kind == "tokens" else draft_documents
    with _progress(source, quiet) as count:
        draft = make(source, data, vocab_size, into / "draft", count)
    documents = len(draft.ends)
    if documents < 2:
        what = "sequences" if source.kind == "tokens" else "documents with text in them"
        says = f"{source.path} holds {documents} {what}, and train and eval need at least one each"
        raise source.fault(says, "Give more data, or cut it into more documents.")
    digest, dealt_tokens = _deal(draft, held_out(documents, data.eval_fraction, seed), into)
    dropped_tokens = len(draft.stream()) - dealt_tokens
    draft.path.unlink()
    return Record(draft.separator, draft.highest_id, documents, dropped_tokens, digest)


def held_out(documents: int, eval_fraction: float, seed: int) -> np.ndarray:
    """The numbers of the documents held out for evaluation: that fraction of them, at least one, never all.

    In random order, so that the first ones are a fair sample too. (held_out,)
    """
    count = min(max(1, round(eval_fraction * documents)), documents - 1)
    return permute(np.arange(count), documents, address_seed(seed, "held out"))


def _deal(draft: Draft, held: np.ndarray, into: Path) -> tuple[str, int]:
    """Copy the held-out documents to the eval array, in their order, and what lies between them to the train array.

    Gives a hash of both, and how many ids they hold.
    """
    starts, ends = np.concatenate([[0], draft.ends[:-1]]), draft.ends
    ascending = np.sort(held)
    between = zip([0, *ends[ascending]], [*starts[ascending], ends[-1]], strict=True)
    train = _copy(draft.stream(), list(between), into / TRAIN)
    evaluation = _copy(draft.stream(), list(zip(starts[held], ends[held], strict=True)), into / EVAL)
    digest = hashlib.blake2b(train.data, digest_size=16)
    digest.update(evaluation.data)
    return digest.hexdigest(), len(train) + len(evaluation)


def _copy(stream: np.ndarray, ranges: Iterable[tuple[int, int]], path: Path) -> np.ndarray:
    """Write the ranges of the stream, one after the other, as an array to `path`; gives it, memory-mapped."""
    size = int(sum(end - start for start, end in ranges))
    copied = np.lib.format.open_memmap(path, mode="w+", dtype=stream.dtype, shape=(size,))
    filled = 0
    for start, end in ranges:
        copied[filled : filled + end - start] = stream[start:end]
        filled += end - start
    copied.flush()
    return copied


@contextmanager
def _progress(source: Source, quiet: bool) -> Iterator[Count]:
    """A live line on stderr that counts the documents that are done; one plain line where stderr is no terminal."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        console.print(f"tokenising {source.path}", soft_wrap=True, highlight=False, markup=False)
    columns = (SpinnerColumn(), TextColumn("tokenising: {task.completed:,} documents"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None)
        yield lambda documents: bar.advance(task, documents)
