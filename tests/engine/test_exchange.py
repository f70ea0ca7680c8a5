"""Exchanges and rings by themselves: every size that is awkward, against plain sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fedshard.core.layout import Layout
from fedshard.engine.exchange import IN_PLACE_BYTES, Exchange, Piece
from fedshard.engine.ring import RingReduceScatter
from fedshard.testing import RankContext, RankPool, Traffic

EDGE = IN_PLACE_BYTES // 4  # elements of float32 at which a tensor is moved in place
SIZES = [0, 1, 2, 3, 7, 1000, 0, EDGE - 1, EDGE, EDGE + 1, 3 * EDGE, 6 * EDGE]
LAYOUTS = [Layout(2, 1, 1), Layout(3, 1, 1), Layout(2, 2, 1), Layout(3, 2, 1), Layout(2, 3, 1), Layout(1, 2, 1)]


def values_of(group: int, sizes: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The tensors of one group; all its replicas hold the same."""
    generator = torch.Generator().manual_seed(group)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def nothing(piece: Piece, wire: torch.Tensor) -> None:
    """No change."""


def exchange_of(context: RankContext, tensors: list[torch.Tensor], bucket_bytes: int) -> Exchange:
    replica_axis = context.mesh.get_group("replica") if context.layout.replicas > 1 else None
    return Exchange(tensors, context.mesh.get_group("group"), replica_axis, bucket_bytes)


def mean_of(context: RankContext, weights: list[float], bucket_bytes: int, dtype: torch.dtype, bad_group: int | None):
    group = context.world.place.group
    tensors = values_of(group, SIZES, dtype)
    if group == bad_group:
        for tensor in tensors:
            tensor.fill_(float("nan"))
    exchange_of(context, tensors, bucket_bytes).run(tensors, weights, nothing, nothing)
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bucket_bytes", [2**16, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_size_is_averaged_and_restored(ranks: RankPool, layout, bucket_bytes, dtype):
    """Empty, tiny and uneven tensors, and those at the border between bucket and in place."""
    weights = [(group + 1) / sum(range(1, layout.groups + 1)) for group in range(layout.groups)]
    wide = torch.promote_types(dtype, torch.float32)
    groups = [values_of(group, SIZES, dtype) for group in range(layout.groups)]
    expected = [
        sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True))
        for tensors in zip(*groups, strict=True)
    ]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    first, *others = ranks.run(mean_of, layout, weights, bucket_bytes, dtype, None)
    for mine, mean in zip(first, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.to(wide), mean.to(wide), rtol=0, atol=tolerance)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("layout", [Layout(3, 1, 1), Layout(3, 2, 1)], ids=str)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_group_of_weight_zero_is_left_out_whatever_it_holds(ranks: RankPool, layout, bad):
    weights = [0.0 if group == bad else 0.5 for group in range(3)]
    good = [values_of(group, SIZES) for group in range(3) if group != bad]
    for tensors in ranks.run(mean_of, layout, weights, 2**16, torch.float32, bad):
        for tensor, one, other in zip(tensors, *good, strict=True):
            torch.testing.assert_close(tensor, (one + other) / 2, rtol=0, atol=1e-6)


def equal_values(context: RankContext):
    tensors = values_of(0, SIZES)
    exchange_of(context, tensors, 2**16).run(tensors, [0.2, 0.3, 0.5], nothing, nothing)
    return tensors


def test_equal_values_stay_exactly_equal(ranks: RankPool):
    for tensors in ranks.run(equal_values, Layout(3, 1, 1)):
        assert all(torch.equal(a, b) for a, b in zip(tensors, values_of(0, SIZES), strict=True))


def reduce_scatter(context: RankContext, numel: int):
    group, n = context.world.group, context.layout.ranks
    given = torch.arange(numel, dtype=torch.float64) * (context.rank + 1)
    output = torch.empty(numel // n, dtype=torch.float64)
    with Traffic() as traffic:
        RingReduceScatter()(output, given, group, dist.ReduceOp.SUM)
    return output, traffic.sent_bytes()


@pytest.mark.parametrize("ranks_", [1, 2, 3, 4])
def test_the_ring_reduce_scatter_is_a_sum_and_sends_what_a_ring_sends(ranks: RankPool, ranks_):
    """(n−1)/n of the tensor; gloo's own sends twice that."""
    numel = 12
    for rank, (output, sent) in enumerate(ranks.run(reduce_scatter, ranks_, numel)):
        whole = torch.arange(numel, dtype=torch.float64) * sum(range(1, ranks_ + 1))
        assert torch.equal(output, whole.chunk(ranks_)[rank])
        assert sent == (ranks_ - 1) / ranks_ * numel * 8


def sent_by(context: RankContext, sizes: list[int]):
    tensors = values_of(context.world.place.group, sizes)
    exchange = exchange_of(context, tensors, 2**16)
    with Traffic() as traffic:
        exchange.run(tensors, [1 / context.layout.groups] * context.layout.groups, nothing, nothing)
    return exchange.sent_bytes, traffic.sent_bytes("send"), traffic.sent_bytes("all_gather")


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(4, 1, 1), Layout(2, 2, 1), Layout(4, 2, 1)], ids=str)
def test_what_is_sent_is_what_is_told(ranks: RankPool, layout):
    sizes = [1024, EDGE, 2 * EDGE]
    total = sum(sizes) * 4 / layout.replicas
    for told, sent, gathered in ranks.run(sent_by, layout, sizes):
        assert told == sent == 2 * (layout.groups - 1) / layout.groups * total
        assert gathered == (layout.replicas - 1) * total


def largest_allocation(context: RankContext):
    numel = 2**25  # 128 MiB
    tensors = [torch.ones(numel)]
    exchange = exchange_of(context, tensors, 16 * 2**20)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        exchange.run(tensors, [0.5, 0.5], nothing, nothing)
    return max(event.nbytes() for event in profile.kineto_results.events() if event.name() == "[memory]")


def test_no_copy_of_the_model_is_made(ranks: RankPool):
    assert max(ranks.run(largest_allocation, Layout(2, 1, 1))) <= 16 * 2**20
