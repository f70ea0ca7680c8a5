"""How slices move between groups: each byte of the model crosses the group axis once per group.

A rank's part of a parameter is a contiguous range of its flattened tensor; replica r owns the r-th chunk of it
(`core.layout.owned_of`). An exchange averages the owned chunks over the group axis, and gathers them over the replica
axis:

                      group axis (slow)                replica axis (fast)
    local shard  ──► owned chunk ──weighted mean──► new chunk ──all-gather──► local shard

Large tensors move in place, without a copy. Small ones, uneven ones and those of another type than the wire's go
through one of two buckets. A few messages are on their way at once, and all ranks visit them in one order.

Legend: numel = elements of a rank's local shard; chunk = ⌈numel/R⌉, what one replica owns of it (the last owns less).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fedshard.engine.collectives import all_gather, scratch_numel, segment_numel, weighted_mean

IN_PLACE_BYTES = 2**18
"""Smaller tensors are cheaper to copy into a bucket than to send on their own."""

IN_FLIGHT = 4
"""Messages on their way at once: some leave, some arrive, one is worked on."""


@dataclass(frozen=True)
class Slot:
    """A part of one tensor in a piece: elements `begin … begin + size` of every replica's chunk of that tensor."""

    tensor: int  # its index among the exchanged tensors
    numel: int
    chunk: int
    begin: int
    size: int
    offset: int  # where it lies in the piece

    def part(self, replica: int) -> slice:
        """The elements of the flattened tensor that one replica owns of this slot; short or empty at the end."""
        owned = range(self.numel)[replica * self.chunk : (replica + 1) * self.chunk][
            self.begin : self.begin + self.size
        ]
        return slice(owned.start, owned.stop)

    @property
    def ends_chunk(self) -> bool:
        """Whether no later slot holds more of the same tensor."""
        return self.begin + self.size == self.chunk


@dataclass(frozen=True)
class Piece:
    """What travels as one message: (a segment of) a large tensor in place, or a bucket of slots."""

    index: int
    slots: tuple[Slot, ...]
    in_place: bool

    @property
    def numel(self) -> int:
        """Elements on the wire, padding included."""
        return sum(slot.size for slot in self.slots)


@dataclass
class _Message:
    """A piece on its way: `wire` is our part of the bucket, or of the tensor itself."""

    piece: Piece
    wire: torch.Tensor  # (piece.numel,)
    bucket: torch.Tensor | None  # (replicas · bucket_numel,)
    scratch: torch.Tensor | None
    hops: Generator[None, None, None]


class Exchange:
    """Averages owned slices over the group axis and restores the local shards; its pieces are cut once.

    `tensors` are flat local shards of one type. `sent_bytes` is what this rank sends to other groups each time
    (a ring, padding included).
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group_axis: dist.ProcessGroup,
        replica_axis: dist.ProcessGroup | None,
        bucket_bytes: int,
    ):
        self.group_axis, self.replica_axis = group_axis, replica_axis
        self.groups = group_axis.size()
        self.replicas = replica_axis.size() if replica_axis else 1
        self.replica = replica_axis.rank() if replica_axis else 0
        self.device = tensors[0].device
        self.wire_dtype = torch.promote_types(torch.float32, tensors[0].dtype)
        self.pieces = list(self._cut(tensors, bucket_bytes // (2 * self.wire_dtype.itemsize)))
        wire_bytes = sum(piece.numel for piece in self.pieces) * self.wire_dtype.itemsize
        self.sent_bytes = 2 * (self.groups - 1) * wire_bytes // self.groups

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        weights: Sequence[float],
        prepare: Callable[[Piece, torch.Tensor], None],
        finish: Callable[[Piece, torch.Tensor], None],
    ) -> None:
        """One exchange of `tensors`, written in place; `weights` are the groups' and sum to 1.

        For every piece, `prepare(piece, wire)` turns this group's owned values into what is averaged, and
        `finish(piece, wire)` turns the mean into the new values. `wire` is (piece.numel,) and changed in place.
        """
        buckets, scratches = self._buckets(), self._scratches()
        flying: deque[_Message] = deque()
        gathers: list[dist.Work] = []

        def advance() -> None:
            """Move the oldest message one hop on; one that has arrived is finished and stored."""
            message = flying.popleft()
            if next(message.hops, _ARRIVED) is not _ARRIVED:
                flying.append(message)
                return
            finish(message.piece, message.wire)
            gathers.extend(self._store(message, tensors))
            scratches.append(message.scratch)
            if message.bucket is not None:
                buckets.append(message.bucket)

        for piece in self.pieces:
            while not scratches or not (piece.in_place or buckets):
                advance()
            bucket, scratch = None if piece.in_place else buckets.pop(), scratches.pop()
            wire = self._load(piece, tensors, bucket)
            prepare(piece, wire)
            hops = weighted_mean(wire, weights, self.group_axis, scratch)
            flying.append(_Message(piece, wire, bucket, scratch, hops))
            next(hops, None)
        while flying:
            advance()
        for gather in gathers:
            gather.wait()

    def read(self, piece: Piece, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of this replica's owned values, as the wire would carry them: (piece.numel,), padding zero."""
        wire = torch.empty(piece.numel, dtype=self.wire_dtype, device=self.device)
        self._pack(piece, tensors, wire)
        return wire

    def owned(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This replica's part of every slot, as views into the tensors."""
        return [tensors[slot.tensor][slot.part(self.replica)] for piece in self.pieces for slot in piece.slots]

    def _cut(self, tensors: Sequence[torch.Tensor], bucket_numel: int) -> Iterator[Piece]:
        """Buckets first: by the time they are emptied, the tensors that need none are on their way."""
        segment = segment_numel(self.group_axis)
        alone: list[Slot] = []
        buckets: list[list[Slot]] = []
        room = 0
        for index, tensor in enumerate(tensors):
            numel = tensor.numel()
            chunk = -(-numel // self.replicas)
            if self._moves_in_place(tensor):
                size = segment or chunk
                starts = range(0, chunk, size)
                alone += [Slot(index, numel, chunk, begin, min(size, chunk - begin), 0) for begin in starts]
                continue
            begin = 0
            while begin < chunk:
                if room == 0:
                    buckets.append([])
                    room = bucket_numel
                size = min(chunk - begin, room)
                buckets[-1].append(Slot(index, numel, chunk, begin, size, bucket_numel - room))
                begin, room = begin + size, room - size
        for index, slots in enumerate(buckets):
            yield Piece(index, tuple(slots), in_place=False)
        for index, slot in enumerate(alone, start=len(buckets)):
            yield Piece(index, (slot,), in_place=True)

    def _moves_in_place(self, tensor: torch.Tensor) -> bool:
        chunk, rest = divmod(tensor.numel(), self.replicas)
        return rest == 0 and chunk * tensor.dtype.itemsize >= IN_PLACE_BYTES and tensor.dtype == self.wire_dtype

    def _buckets(self) -> list[torch.Tensor]:
        """Two buckets at most, as large as the largest bucketed piece of all replicas."""
        numels = [piece.numel for piece in self.pieces if not piece.in_place]
        numel = self.replicas * max(numels, default=0)
        return [torch.empty(numel, dtype=self.wire_dtype, device=self.device) for _ in numels[:2]]

    def _scratches(self) -> list[torch.Tensor | None]:
        """Working space for the messages that may be on their way at once, one each."""
        numel = scratch_numel(self.group_axis, max((piece.numel for piece in self.pieces), default=0))
        if numel is None:
            return [None] * IN_FLIGHT
        return [torch.empty(numel, dtype=self.wire_dtype, device=self.device) for _ in range(IN_FLIGHT)]

    def _load(self, piece: Piece, tensors: Sequence[torch.Tensor], bucket: torch.Tensor | None) -> torch.Tensor:
        """Our owned values of a piece, where they can travel: in the bucket, or in the tensor itself."""
        if bucket is None:
            slot = piece.slots[0]
            return tensors[slot.tensor][slot.part(self.replica)]
        wire = self._rows(piece, bucket)[self.replica]
        self._pack(piece, tensors, wire)
        return wire

    def _rows(self, piece: Piece, bucket: torch.Tensor) -> torch.Tensor:
        """The part of a bucket that a piece fills: (replicas, piece.numel)."""
        return bucket[: self.replicas * piece.numel].view(self.replicas, piece.numel)

    def _pack(self, piece: Piece, tensors: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        for slot in piece.slots:
            values = tensors[slot.tensor][slot.part(self.replica)]
            there = wire[slot.offset : slot.offset + slot.size]
            there[: values.numel()].copy_(values)
            there[values.numel() :].zero_()  # padding: what a bucket held before must not travel

    def _store(self, message: _Message, tensors: Sequence[torch.Tensor]) -> Iterator[dist.Work]:
        """New values into the local shards; yields a gather that is still on its way."""
        piece = message.piece
        if message.bucket is None:
            slot = piece.slots[0]
            if self.replica_axis is not None and slot.ends_chunk:
                flat = tensors[slot.tensor]
                mine = flat[self.replica * slot.chunk : (self.replica + 1) * slot.chunk]
                work = all_gather(flat, mine, self.replica_axis, async_op=True)
                assert work is not None
                yield work
            return
        rows = self._rows(piece, message.bucket)
        if self.replica_axis is not None:
            all_gather(rows.view(-1), message.wire, self.replica_axis)
        for replica, row in enumerate(rows):
            for slot in piece.slots:
                there = tensors[slot.tensor][slot.part(replica)]
                there.copy_(row[slot.offset : slot.offset + there.numel()])


_ARRIVED = object()
