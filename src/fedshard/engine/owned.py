"""What a rank owns, by parameter: anchors and outer state lie in pieces, and are saved under names.

A piece holds parts of several parameters, or a segment of one; a name's part is one contiguous range of the flattened
full parameter, whatever pieces it was cut into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedshard.engine.exchange import Exchange
from fedshard.engine.parameters import local_rows


def owned_parts(exchange: Exchange, parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """For each parameter the (offset, length) that this rank owns of it, in elements of the flattened full tensor."""
    starts = [local_rows(each).start * each.shape[1:].numel() for each in parameters]
    owned = {index: range(0) for index in range(len(parameters))}
    for index, part in _slots(exchange):
        first = owned[index].start if owned[index] else part.start
        owned[index] = range(first, part.stop)
    return [(starts[index] + part.start, len(part)) for index, part in owned.items()]


def by_name(exchange: Exchange, names: Sequence[str], pieces: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One flat tensor per parameter from tensors in pieces; none where nothing is kept."""
    parts: dict[str, list[torch.Tensor]] = {}
    if pieces:
        for (index, _), view in zip(_slots(exchange), _views(exchange, pieces), strict=True):
            parts.setdefault(names[index], []).append(view)
    return {name: torch.cat(each) for name, each in parts.items()}


def put_by_name(
    exchange: Exchange, names: Sequence[str], pieces: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    """The way back from `by_name`: copy named tensors into the pieces; there are neither where nothing is kept."""
    if not pieces:
        return
    taken = dict.fromkeys(tensors, 0)
    for (index, part), view in zip(_slots(exchange), _views(exchange, pieces), strict=True):
        name = names[index]
        view.copy_(tensors[name][taken[name] : taken[name] + len(part)])
        taken[name] += len(part)


def _slots(exchange: Exchange) -> list[tuple[int, range]]:
    """Each slot's parameter and what this replica owns there of its flattened local shard, in the pieces' order."""
    slots = [slot for piece in exchange.pieces for slot in piece.slots]
    parts = [slot.part(exchange.replica) for slot in slots]
    return [(slot.tensor, range(part.start, part.stop)) for slot, part in zip(slots, parts, strict=True)]


def _views(exchange: Exchange, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each slot's owned values in the pieces, without padding."""
    views = []
    for piece, values in zip(exchange.pieces, pieces, strict=True):
        for slot in piece.slots:
            part = slot.part(exchange.replica)
            views.append(values[slot.offset : slot.offset + part.stop - part.start])
    return views
