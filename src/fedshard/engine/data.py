"""What one rank feeds its model: its part of the global order in training, its part of the held-out data after.

Shapes: batch = sequences that go through the model at once, sequence = tokens in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedshard.core.layout import Layout, Place
from fedshard.engine.corpus import Corpus
from fedshard.engine.order import Order

IGNORED = -100
"""The label of a position that has no target; the one that torch's cross-entropy leaves out."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences that go through the model at once, with their targets."""

    input_ids: torch.Tensor  # (batch, sequence) int64
    labels: torch.Tensor  # (batch, sequence) int64
    """Already shifted: the target of each position, or −100 where there is none, as at the last position."""
    document_ids: torch.Tensor | None  # (batch, sequence) int64
    """Which document of its row a position belongs to, from 0; None where documents are not isolated."""
    position_ids: torch.Tensor | None  # (batch, sequence) int64
    """Positions that start at 0 in each document; None where documents are not isolated."""
    label_tokens: int
    """How many labels are targets: what losses divide by."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return MicroBatch(
            self.input_ids.to(device),
            self.labels.to(device),
            None if self.document_ids is None else self.document_ids.to(device),
            None if self.position_ids is None else self.position_ids.to(device),
            self.label_tokens,
        )


class Feed:
    """One rank's training data, step by step.

    A step of the run takes the next slots of the global order. Each group takes a contiguous part of them, in which
    all ranks' first micro-batches come before all second ones:

        two groups of two ranks, micro_batch 2, accumulation 2, cursor c (slots from c on; b = second micro-batch)
        group 0: rank 0 | rank 1 | rank 0 b | rank 1 b     group 1: rank 2 | rank 3 | rank 2 b | rank 3 b
                 0 1      2 3      4 5        6 7                   8 9      10 11    12 13      14 15

    `cursor` is the number of sequences consumed, and all the state there is: save it, and set it to go on from it.
    With `disjoint` it counts those of all groups, and is the same on all ranks. With `replicated` (each group takes
    all sequences in an order of its own) and `by-source` (each group's corpus is another) it counts the group's.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        layout: Layout,
        place: Place,
        micro_batch: int,
        accumulation: int,
        assignment: Literal["disjoint", "replicated", "by-source"],
        seed: int,
        isolate_documents: bool,
    ):
        self.cursor = 0
        self._corpus = corpus
        self._isolate = isolate_documents
        group_sequences = layout.group_ranks * micro_batch * accumulation
        if assignment == "disjoint":
            self._order = Order(len(corpus.train), (seed, "order"))
            self._advance, group_start = layout.groups * group_sequences, place.group * group_sequences
        else:
            self._order = Order(len(corpus.train), (seed, "order", place.group))
            self._advance, group_start = group_sequences, 0
        rank_in_group = place.replica * layout.shards + place.shard
        slots = np.arange(group_sequences).reshape(accumulation, layout.group_ranks, micro_batch)
        self._slots = group_start + slots[:, rank_in_group]  # (accumulation, micro_batch), from the cursor on

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the step at the cursor, which moves on by one step."""
        chosen = self._order.sequences(self.cursor + self._slots)
        self.cursor += self._advance
        return [make_micro_batch(self._corpus.train[rows], self._separator) for rows in chosen]

    @property
    def _separator(self) -> int | None:
        return self._corpus.separator if self._isolate else None


def eval_batches(
    corpus: Corpus, *, sequences: int, ranks: int, rank: int, micro_batch: int, isolate_documents: bool
) -> Iterator[MicroBatch]:
    """One rank's part of the first `sequences` held-out sequences (fewer, if there are fewer).

    Over all ranks each comes exactly once, and every rank gets equally many batches of `micro_batch` rows, because
    a forward pass is a collective: where sequences run out, rows without any label fill up.
    """
    count = min(sequences, len(corpus.eval))
    separator = corpus.separator if isolate_documents else None
    for start in range(0, count, ranks * micro_batch):
        slots = start + rank * micro_batch + np.arange(micro_batch)
        real = slots < count
        yield make_micro_batch(corpus.eval[np.where(real, slots, 0)], separator, real)


def make_micro_batch(rows: np.ndarray, separator: int | None, real: np.ndarray | None = None) -> MicroBatch:
    """Token ids (batch, sequence) with their targets; documents are isolated if a `separator` is given.

    Rows that are not `real` (batch,) get no labels. Labels are masked by position, never for being some token: a
    separator is a target like any other.
    """
    input_ids = rows.astype(np.int64)
    labels = np.full_like(input_ids, IGNORED)
    labels[:, :-1] = input_ids[:, 1:]
    document_ids = position_ids = None
    if separator is not None:
        ends = input_ids == separator
        labels[ends] = IGNORED  # the target there would be the next document's first token
        document_ids, position_ids = _documents(ends)
    if real is not None:
        labels[~real] = IGNORED
    return MicroBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        document_ids,
        position_ids,
        int((labels != IGNORED).sum()),
    )


def _documents(ends: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Document ids and positions, from where documents end. (batch, sequence) each

    ends       0 0 1 0 1 0
    documents  0 0 0 1 1 2
    positions  0 1 2 0 1 0
    """
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    columns = np.arange(ends.shape[1])
    latest_start = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return torch.from_numpy(starts.cumsum(axis=1)), torch.from_numpy(columns - latest_start)
