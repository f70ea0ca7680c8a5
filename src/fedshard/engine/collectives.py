"""The collectives whose name or best form depends on torch's version or on the backend: chosen here alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from fedshard.engine.ring import ring_mean

# torch 2.13 renames this collective and warns about the old name; 2.11 knows only the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

RING_CHUNK = 2**21
"""Elements of a ring's chunk: long enough for the link to run at its rate, short enough to overlap with arithmetic."""


def all_gather(
    output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Concatenate every rank's `mine` into `output`: (n,) each into (ranks · n,).

    `mine` may be the rank's own part of `output`.
    """
    return _all_gather(output, mine, group=group, async_op=async_op)


def weighted_mean(
    wire: torch.Tensor, weights: Sequence[float], group: dist.ProcessGroup, scratch: torch.Tensor | None
) -> Generator[None, None, None]:
    """The weighted mean of `wire` over `group`, in place; `next` moves it on, and its end is the mean's.

    `weights` are the ranks' in group order and sum to 1; a rank of weight 0 is left out, whatever its values.
    Between two calls the message is on its way, so several means can share the link. `scratch` is what
    `scratch_numel` asks for.
    """
    if scratch is not None:
        yield from ring_mean(wire, weights, group, scratch)
        return
    mine = weights[group.rank()]
    if mine == 0:
        wire.zero_()  # 0 · NaN is NaN
    else:
        wire.mul_(mine)
    work = dist.all_reduce(wire, group=group, async_op=True)
    yield
    assert work is not None
    work.wait()


def segment_numel(group: dist.ProcessGroup) -> int | None:
    """Largest message of an exchange, in elements; None: as large as the tensor.

    A ring over point-to-point messages works chunk by chunk, so on gloo large tensors are cut, to let one chunk's
    arithmetic run beside another's transfer. NCCL pipelines inside the message and prefers it whole.
    """
    return RING_CHUNK * group.size() if dist.get_backend(group) == "gloo" else None


def scratch_numel(group: dist.ProcessGroup, largest: int) -> int | None:
    """Working space that a weighted mean of at most `largest` elements needs, in elements; None: none, on NCCL."""
    return -(-largest // group.size()) if dist.get_backend(group) == "gloo" else None
