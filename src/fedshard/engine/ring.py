"""Rings over point-to-point messages: what gloo's own collectives do with more bytes or more passes over memory.

Each rank passes a chunk to the next one and works on the chunk that arrives from the one before. Both rings below send
exactly what the formulas say, and every element is computed in one place and then copied, so that all ranks end with
the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


def ring_mean(
    wire: torch.Tensor, weights: Sequence[float], group: dist.ProcessGroup, arriving: torch.Tensor
) -> Generator[None, None, None]:
    """The weighted mean of `wire` over `group`, in place: (numel,) on every rank; each `next` does one hop.

    A running mean travels the ring: mean ← mean + w/W·(mine − mean), where W is the weight so far. So the weighting
    costs no pass of its own, equal values stay exactly equal, and what has weight 0 is left out, not multiplied by it.
    Sends 2(n−1)/n of the tensor. `arriving` is working space of at least ⌈numel/n⌉ elements. Ranks must make the same
    calls in the same order.
    """
    ranks, rank = group.size(), group.rank()
    chunks = _chunks(wire, ranks)
    for hop in range(1, ranks):
        leaving, mine = (rank - hop) % ranks, (rank - hop - 1) % ranks
        here = arriving[: chunks[mine].numel()]
        wait = _pass_on(chunks[leaving], here, group)
        yield
        wait()
        # `mine` started at rank mine+1 and has come hop ranks far: the weights so far are those of its travellers.
        before = sum(weights[(mine + 1 + step) % ranks] for step in range(hop))
        _blend(here, before, chunks[mine], weights[rank])
    for hop in range(ranks - 1):
        leaving, into = (rank - hop) % ranks, (rank - hop - 1) % ranks
        wait = _pass_on(chunks[leaving], chunks[into], group)
        yield
        wait()


def _blend(mean: torch.Tensor, weight: float, mine: torch.Tensor, my_weight: float) -> None:
    """mine ← the mean of `mean` (of weight `weight`) and `mine`; one without weight is not looked at."""
    if my_weight == 0:
        mine.copy_(mean)
    elif weight > 0:
        torch.lerp(mean, mine, my_weight / (weight + my_weight), out=mine)


class RingReduceScatter(ReduceScatter):
    """A reduce-scatter that sends what the formula says, for FSDP2's hook on gloo.

    gloo itself emulates reduce-scatter by an all-reduce, which sends twice the bytes. Here each rank passes on one
    chunk n − 1 times: (n−1)/n of the tensor. The sum runs in ring order, the same on every call. The input is used as
    working space; FSDP2 drops it afterwards.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,  # (numel / ranks,)
        input_tensor: torch.Tensor,  # (numel,)
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "the engine sums gradients; it never averages them"
        assert not async_op, "FSDP2 calls this synchronously"
        ranks, rank = group.size(), group.rank()
        chunks = _chunks(input_tensor, ranks)
        arriving = torch.empty_like(output_tensor)
        for hop in range(1, ranks):
            leaving, mine = (rank - hop) % ranks, (rank - hop - 1) % ranks
            _pass_on(chunks[leaving], arriving, group)()
            chunks[mine].add_(arriving)
        output_tensor.copy_(chunks[rank])


def _chunks(wire: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """One chunk per rank, of ⌈numel/ranks⌉ elements; the last ones may be shorter or empty."""
    size = -(-wire.numel() // ranks)
    return [wire[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _pass_on(leaving: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup):
    """Start sending to the next rank and receiving from the one before; the result waits for both."""
    ranks, rank = group.size(), group.rank()
    works = []
    if arriving.numel() > 0:
        works.append(dist.irecv(arriving, group=group, group_src=(rank - 1) % ranks))
    if leaving.numel() > 0:
        works.append(dist.isend(leaving, group=group, group_dst=(rank + 1) % ranks))

    def wait() -> None:
        for work in works:
            work.wait()

    return wait
