"""The pool of ranks that other tests stand on, and what `Traffic` counts."""

import os
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fedshard.core.errors import Fault, InputError
from fedshard.core.layout import Layout
from fedshard.testing import OPERATIONS, RankError, Traffic

EIGHT_FLOATS = 8 * 4  # bytes


def sum_of_ranks(context, offset):
    total = torch.tensor(context.rank + offset)
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_back_by_rank(ranks, count):
    expected = sum(rank + 10 for rank in range(count))
    assert ranks.run(sum_of_ranks, count, 10) == [torch.tensor(expected)] * count


def where(context):
    mesh = {name: dist.get_process_group_ranks(context.mesh.get_group(name)) for name in context.mesh.mesh_dim_names}
    return context.rank, context.layout, context.world.place, dist.get_world_size(), mesh, torch.get_num_threads()


def test_the_context_knows_its_layout(ranks):
    layout = Layout(2, 1, 2)
    rank, seen, place, size, mesh, threads = ranks.run(where, layout)[3]
    assert (rank, seen, place, size, threads) == (3, layout, layout.place(3), 4, 1)
    assert mesh == {"group": [1, 3], "shard": [2, 3]}


def identity_of_groups(context):
    return id(context.mesh), os.getpid()


def test_groups_are_kept_between_calls(ranks):
    first = ranks.run(identity_of_groups, Layout(2, 1, 2))
    ranks.run(identity_of_groups, Layout(1, 2, 2))
    assert ranks.run(identity_of_groups, Layout(2, 1, 2)) == first


def raise_on(context, rank, error):
    if context.rank == rank:
        raise error
    dist.all_reduce(torch.ones(1))  # waits for the rank that has failed


def test_an_exception_names_its_rank_and_the_pool_recovers(ranks):
    error = InputError([Fault("sync.every", "0", "Set 1.")])
    with pytest.raises(InputError) as caught:
        ranks.run(raise_on, 2, 1, error)
    assert caught.value.faults == error.faults
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1:\nTraceback")
    assert "in raise_on" in note
    assert ranks.run(sum_of_ranks, 2, 0) == [torch.tensor(1)] * 2


class Homebound(Exception):
    """An error that cannot be made again from its own arguments."""

    def __init__(self, city, country):
        super().__init__(f"{city}, {country}")


def raise_homebound(context):
    raise Homebound("Ulm", "Germany")


def test_an_exception_that_cannot_travel_is_told(ranks):
    with pytest.raises(RankError, match="Homebound: Ulm, Germany"):
        ranks.run(raise_homebound, 1)


def return_what_cannot_travel(context):
    return lambda: context


def test_a_result_that_cannot_travel_is_an_error(ranks):
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        ranks.run(return_what_cannot_travel, 1)
    assert "raised on rank 0" in caught.value.__notes__[0]


def die(context, rank):
    if context.rank == rank:
        os._exit(9)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_is_named_and_the_pool_recovers(ranks):
    with pytest.raises(RankError, match=r"rank 1 .* exit code 9"):
        ranks.run(die, 2, 1)
    assert ranks.run(sum_of_ranks, 2, 0) == [torch.tensor(1)] * 2


def sleep_on(context, rank):
    if context.rank == rank:
        time.sleep(60)


@pytest.mark.slow
def test_a_call_that_takes_too_long_says_where_its_ranks_stand(ranks):
    ranks.run(sleep_on, 2, None)  # so that both ranks are up
    with pytest.raises(TimeoutError, match=r"ranks \[1\] not done after 0.5 s") as caught:
        ranks.run(sleep_on, 2, 1, timeout=0.5)
    assert "in sleep_on" in str(caught.value)
    assert ranks.run(sum_of_ranks, 2, 0) == [torch.tensor(1)] * 2


def warn(context):
    warnings.warn("old", FutureWarning, stacklevel=1)


def test_warnings_are_errors_in_ranks_as_they_are_here(ranks):
    with pytest.raises(FutureWarning, match="old"):
        ranks.run(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks.run(warn, 1) == [None]


def some_traffic(context):
    world = context.world
    with Traffic() as traffic:
        dist.all_reduce(torch.ones(8), group=world.peers)
        dist.broadcast(torch.ones(8), 0)
        if context.rank < 2:
            other = 1 - context.rank
            sent, got = dist.isend(torch.ones(8), other), dist.irecv(torch.empty(8), other)
            sent.wait()
            got.wait()
    calls = dict(traffic.calls)
    sent = {operation: traffic.sent_bytes(operation) for operation in ("all_reduce", "broadcast", "send", "recv")}
    return calls, sent, traffic.sent_bytes(), traffic.across(context.layout)


def test_traffic_by_operation_and_ranks(ranks):
    answers = ranks.run(some_traffic, Layout(2, 1, 2))
    calls, sent, total, across = answers[0]
    everyone, peers, pair = frozenset(range(4)), frozenset({0, 2}), frozenset({0, 1})
    crossing = {("all_reduce", peers): 1, ("broadcast", everyone): 1}
    assert calls == crossing | {("send", pair): 1, ("recv", pair): 1}
    assert across == crossing
    assert sent == {"all_reduce": EIGHT_FLOATS, "broadcast": EIGHT_FLOATS, "send": EIGHT_FLOATS, "recv": 0}
    assert total == 3 * EIGHT_FLOATS
    assert answers[3][0] == {("all_reduce", frozenset({1, 3})): 1, ("broadcast", everyone): 1}


def fsdp_traffic(context):
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=context.mesh["shard"])
    with Traffic() as traffic:
        model(torch.ones(1, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    shards = frozenset(context.layout.group_of(context.rank))
    assert {members for _, members in traffic.calls} == {shards}
    return (
        {operation: calls for (operation, _), calls in traffic.calls.items()},
        {operation: payload for (operation, _), payload in traffic.payload_bytes.items()},
        traffic.sent_bytes("all_gather", shards),
        traffic.across(context.layout),
    )


def test_traffic_of_a_step_of_fsdp_stays_in_the_group(ranks):
    weight_bytes = 8 * 8 * 4
    for calls, payload, gathered, across in ranks.run(fsdp_traffic, Layout(2, 1, 2)):
        assert calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
        assert payload == {"all_gather": weight_bytes, "reduce_scatter": weight_bytes, "all_reduce": 4}
        assert gathered == weight_bytes / 2
        assert across == {}


def every_operation(context):
    ranks, rank, group = 2, context.rank, context.world.group
    eight, lists = torch.ones(8), [torch.empty(8) for _ in range(2)]
    mesh, root = context.mesh["shard"], rank == 0
    partial, long_partial = (DTensor.from_local(torch.ones(size), mesh, [Partial()]) for size in (8, 16))
    sharded = DTensor.from_local(eight, mesh, [Shard(0)])
    calls = {
        "all_reduce": [
            lambda: dist.all_reduce(eight, group=group),
            lambda: partial.redistribute(placements=[Replicate()]),
        ],
        "all_gather": [
            lambda: dist.all_gather(lists, eight, group),
            lambda: sharded.full_tensor(),
        ],
        "reduce_scatter": [
            lambda: dist.reduce_scatter(torch.empty(8), lists, group=group),
            lambda: long_partial.redistribute(placements=[Shard(0)]),
        ],
        "all_to_all": [lambda: dist.all_to_all_single(torch.empty(16), torch.ones(16), group=group)],
        "broadcast": [lambda: dist.broadcast(eight, 0, group)],
        "reduce": [lambda: dist.reduce(eight, 0, group=group)],
        "gather": [lambda: dist.gather(eight, lists if root else None, 0, group)],
        "scatter": [lambda: dist.scatter(torch.empty(8), lists if root else None, 0, group)],
        "send": [lambda: dist.send(eight, 1) if root else dist.recv(eight, 0)],
        "barrier": [lambda: dist.barrier(group)],
    }
    sent = {}
    for operation, ways in calls.items():
        for way in ways:
            with Traffic() as traffic:
                way()
            (counted,) = traffic.calls.items()
            expected = "recv" if operation == "send" and not root else operation
            assert counted == ((expected, frozenset(range(ranks))), 1)
            sent.setdefault(operation, []).append(traffic.sent_bytes())
    return sent


def test_every_operation_is_known_by_each_of_its_names(ranks):
    first, second = ranks.run(every_operation, Layout(1, 1, 2))
    full_bytes = 16 * 4  # of two ranks' eight floats
    assert first == {
        "all_reduce": [EIGHT_FLOATS] * 2,  # 2 · 1/2
        "all_gather": [full_bytes / 2] * 2,
        "reduce_scatter": [full_bytes / 2] * 2,
        "all_to_all": [full_bytes / 2],
        "broadcast": [EIGHT_FLOATS],
        "reduce": [EIGHT_FLOATS],
        "gather": [EIGHT_FLOATS],
        "scatter": [full_bytes / 2],
        "send": [EIGHT_FLOATS],
        "barrier": [0],
    }
    assert second == first | {"scatter": [0], "send": [0]}


def test_the_ring_formulas():
    assert [OPERATIONS["all_reduce"](ranks) for ranks in (1, 2, 4)] == [0, 1, 1.5]
    assert [OPERATIONS["all_gather"](ranks) for ranks in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [OPERATIONS["broadcast"](ranks) for ranks in (1, 2, 4)] == [0, 1, 1]
