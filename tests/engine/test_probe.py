"""Probing: α and β come back out of times made from them, collectives are the ones that training uses, and what is
written is a cluster that predictions start from."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import InputError, RunError
from fedshard.core.layout import Layout
from fedshard.core.recipe import ConfigModel, DataSection, Recipe
from fedshard.core.topology import Cluster
from fedshard.engine import probe_links
from fedshard.engine.model import build_on_meta, decoder_blocks
from fedshard.engine.probe import Asked, count_nodes, make_device, make_tiers, probe, write_cluster
from fedshard.engine.probe_device import DeviceTimes, block_flops, block_step
from fedshard.engine.probe_fit import KINDS, Timing, fit_ring, link_rate, rank_rate
from fedshard.engine.probe_links import collective, ports, shortest, slowest_rings
from fedshard.engine.world import Launch
from fedshard.study.architectures import architecture_of
from fedshard.study.collectives import Library, Members, Protocol, ring_seconds
from fedshard.study.setup import Setup
from fedshard.study.work import forward_flops, step_work
from fedshard.testing import RankContext, RankPool, Traffic

PLAIN = Library("plain", (Protocol("only", 1.0),), base_seconds=0.0, tree_factor=1.0, tree_rate_factor=1.0)
"""The ring formula without what NCCL adds to it."""

LATENCY, RATE = 3e-6, 25e9
SIZES = [2**power for power in range(13, 29, 3)]
SMALL = Recipe(
    model=ConfigModel(model_type="llama", vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                      num_attention_heads=2, num_key_value_heads=2),
    data=DataSection(sequence_length=8),
)  # fmt: skip


def counts(nodes: int, ranks_per_node: int, nodes_per_cell: int | None = None, site: int | None = None) -> Cluster:
    """A cluster of which only the counts are known."""
    return Cluster.model_construct(
        nodes=nodes, ranks_per_node=ranks_per_node, nodes_per_cell=nodes_per_cell or nodes, nodes_per_site=site
    )


def timing(tier="node", kind="all_gather", ranks=4, size=2**20, seconds=1.0, sharing=(1, 1), alone=False) -> Timing:
    return Timing("shard", kind, tier, ranks, *sharing, alone, size, seconds, (1.0, 1.5, 2.0))


def predicted(cluster: Cluster, members: list[int], **fields) -> list[Timing]:
    """Times of all collectives among these ranks of `cluster`, by the study's own formula."""
    who = Members.of(cluster, members)
    sharing = (who.port_members, who.port_rings) if who.nodes > 1 else (1, 1)
    tier = cluster.tier_between(members)
    return [
        timing(tier, kind, who.ranks, size, ring_seconds(kind, size, who, PLAIN), sharing, **fields)
        for kind in KINDS
        for size in SIZES
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_undoes_the_formula(kind, ranks):
    times = 2 if kind == "all_reduce" else 1
    seconds = {size: times * (ranks - 1) * (LATENCY + size / (ranks * RATE)) for size in SIZES}
    ring = fit_ring([timing(kind=kind, ranks=ranks, size=size, seconds=each) for size, each in seconds.items()])
    assert ring.latency_seconds == pytest.approx(LATENCY, rel=1e-6)
    assert ring.bytes_per_second == pytest.approx(RATE, rel=1e-6)
    assert ring.error_fraction < 1e-6


def test_a_few_times_that_are_far_off_move_nothing():
    cluster = read_cluster("leonardo-nominal").job(4)
    times = predicted(cluster, [0, 1, 2, 3])
    late = [dataclasses.replace(each, seconds=9 * each.seconds) for each in times[::6]]
    ring = fit_ring(late + [each for index, each in enumerate(times) if index % 6])
    assert ring.latency_seconds == pytest.approx(cluster.tiers["node"].latency_seconds.value, rel=0.01)
    assert ring.bytes_per_second == pytest.approx(cluster.tiers["node"].link_bytes_per_second.value, rel=0.01)


def test_no_latency_is_negative():
    """Times that grow faster than messages, as where caches end."""
    ring = fit_ring([timing(size=size, seconds=size**1.1 / 1e9) for size in SIZES])
    assert ring.latency_seconds == 0.0
    assert 0 < ring.bytes_per_second < 1e9


def test_times_that_do_not_grow_are_no_links():
    with pytest.raises(RunError, match="all_gather over shard: long messages take no longer"):
        fit_ring([timing(size=size, seconds=1 / size) for size in SIZES])


def test_what_shares_a_port_is_told_apart():
    """Four rings through a node's links, and one of them by itself: the links' rate and a rank's own come back."""
    cluster = read_cluster("leonardo-nominal").job(8)
    link, members = cluster.tiers["cell"].link_bytes_per_second.value, [0, 4]
    assert Members.of(cluster, members).port_rings == 4
    together = predicted(cluster, members)
    assert fit_ring(together, link_rate).bytes_per_second == pytest.approx(link, rel=1e-6)
    alone = [
        timing("cell", "all_gather", 2, size, LATENCY + size / 2 / (link / 3), (1, 1), alone=True) for size in SIZES
    ]
    assert fit_ring(alone, rank_rate).bytes_per_second == pytest.approx(link / 3, rel=1e-6)
    tier = make_tiers(together + alone, ["cell"])["cell"]
    assert tier.rank_bytes_per_second is not None
    assert tier.rank_bytes_per_second.value == pytest.approx(link / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "tier", "ring", "expected"),
    [
        (counts(2, 4), "node", [0, 1, 2, 3], (1, 1)),
        (counts(2, 4), "cell", list(range(8)), (4, 1)),
        (counts(2, 4), "cell", [1, 5], (1, 4)),
        (counts(4, 4, 2), "global", [0, 2, 8, 10], (2, 2)),
        (counts(4, 2, 2, 2), "wide", [0, 4], (1, 4)),
    ],
)
def test_ports_are_shared_as_in_the_study(cluster, tier, ring, expected):
    assert ports(cluster, tier, ring) == expected
    if tier != "node":
        whole = read_cluster("lab-two-sites" if tier == "wide" else "leonardo-nominal")
        like = whole.model_copy(update={name: getattr(cluster, name) for name in cluster.model_fields_set})
        who = Members.of(like, ring)
        assert (who.port_members, who.port_rings) == expected


def rings_of(context: RankContext, cluster: Cluster, axis: str):
    return slowest_rings(context.world, cluster, axis)


def test_an_axis_is_as_slow_as_its_slowest_rings(ranks: RankPool):
    """Three nodes in a cell and one in another: of the two rings of shards, one goes between the cells."""
    assert ranks.run(rings_of, Layout(2, 1, 2), counts(4, 1, 3), "shard")[0] == ([[2, 3]], "global")
    assert ranks.run(rings_of, Layout(2, 1, 2), counts(1, 4), "group")[3] == ([[0, 2], [1, 3]], "node")
    assert ranks.run(rings_of, Layout(2, 1, 2), counts(2, 2, 1), "group")[0] == ([[0, 2], [1, 3]], "global")


def test_a_collective_is_done_when_all_its_ranks_are():
    times = torch.tensor([[1.0, 3.0, 2.0], [4.0, 2.0, 2.0], [9.0, 9.0, 9.0]])  # (ranks, calls)
    assert shortest(times, [[0, 1]]) == (2.0, (2.0, 1.5, 1.0))
    assert shortest(times, [[0, 1], [2]]) == (9.0, (1.0, 1.0, 1.0))


def sent_by(context: RankContext, kind, axis: str, numel: int) -> tuple[float, set[str]]:
    group = context.mesh.get_group(axis)
    call = collective(kind, axis, numel, group, context.world.device)
    with Traffic() as traffic:
        call()
        call()
    return traffic.sent_bytes() / 2, {operation for operation, _ in traffic.calls}


@pytest.mark.parametrize(
    ("kind", "axis", "operations"),
    [
        ("all_gather", "shard", {"all_gather"}),
        ("reduce_scatter", "shard", {"send", "recv"}),  # the ring of FSDP2's hook, not gloo's all-reduce
        ("all_reduce", "shard", {"all_reduce"}),
        ("all_reduce", "group", {"send", "recv"}),  # a round's running mean
    ],
)
def test_collectives_are_those_of_training_and_send_what_the_formula_says(ranks: RankPool, kind, axis, operations):
    layout, numel = (Layout(1, 1, 4) if axis == "shard" else Layout(4, 1, 1)), 4000
    for sent, used in ranks.run(sent_by, layout, kind, axis, numel):
        assert sent == (2 if kind == "all_reduce" else 1) * 3 / 4 * numel * 4
        assert used == operations


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral"])
def test_a_block_counts_as_many_operations_as_the_study_says(family):
    model_type, fields = FAMILIES[family]
    forward = forward_flops(architecture_of({"model_type": model_type, **fields}, family), 16)[1]
    assert block_flops(tiny_config(family), 16) == 3 * forward


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_block_of_any_architecture_runs_forward_and_backward(family):
    """Counted by torch: two operations forward and four backward, for each element of one block's matrices and token.

    Experts, which are stacked matrices, and attention are not counted by it on the CPU.
    """
    config = tiny_config(family)
    step = block_step(SMALL, config, torch.device("cpu"), rank=0)
    with FlopCounterMode(display=False) as counter:
        step()
    counted = counter.get_flop_counts()["Global"]
    _, block = decoder_blocks(build_on_meta(config))[0]
    matrices = sum(each.numel() for each in block.parameters() if each.ndim == 2)
    tokens = SMALL.train.micro_batch * SMALL.data.sequence_length
    assert counted[torch.ops.aten.mm] + counted.get(torch.ops.aten.addmm, 0) == 6 * matrices * tokens


def place_of(context: RankContext, local_ranks: int, cyclic: bool) -> Cluster:
    rank, count = context.rank, context.layout.ranks
    local = rank // (count // local_ranks) if cyclic else rank % local_ranks
    launch = Launch(rank, count, local, local_ranks, "127.0.0.1", 1, "srun", 1)
    return count_nodes(context.world, launch, Asked("c", nodes_per_cell=1))


def test_nodes_are_counted_by_their_ranks(ranks: RankPool):
    found = ranks.run(place_of, 4, 2, False)[3]
    assert (found.nodes, found.ranks_per_node, found.nodes_per_cell, found.nodes_per_site) == (2, 2, 1, None)
    with pytest.raises(InputError, match="not numbered node by node"):
        ranks.run(place_of, 4, 2, True)


def test_a_tier_that_no_ring_stays_in_is_assumed_and_says_so():
    seconds = {size: LATENCY + size / 2 / RATE for size in SIZES}
    times = [timing("global", "all_gather", 2, size, each) for size, each in seconds.items()]
    tiers = make_tiers(times, counts(2, 1, 1).crossed(2))
    assert {name: tier.link_bytes_per_second.confidence for name, tier in tiers.items()} == {
        "node": "assumed", "cell": "assumed", "global": "measured",
    }  # fmt: skip
    assert tiers["cell"].link_bytes_per_second.value == pytest.approx(RATE)
    assert "no axis of the layout that was measured stays in tier cell" in tiers["cell"].latency_seconds.source


def test_scatter_is_that_of_long_messages():
    short, long = [timing(size=size, seconds=LATENCY + size / RATE) for size in (2**13, 2**22)]
    short = dataclasses.replace(short, factors=(1.0, 50.0, 90.0))
    jitter = make_tiers([short, long], ["node"])["node"].jitter
    assert jitter is not None
    assert (jitter.median_factor, jitter.p99_factor) == (1.5, float(f"{np.quantile([1, 1.5, 2], 0.99):.4g}"))


DEVICE = DeviceTimes("a card", 4e11, 0.02, 1.1, 8e11, 1024, None, 24 * 10**9, "a test", 1e12)


def test_a_peak_that_is_not_known_is_assumed_and_one_that_is_comes_from_its_sheet():
    device = make_device(DEVICE, SMALL)
    assert (device.peak_flops_per_second.value, device.peak_flops_per_second.confidence) == (8e11, "assumed")
    assert "no data sheet" in device.peak_flops_per_second.source
    assert device.flops_per_second == pytest.approx(4e11)
    device = make_device(dataclasses.replace(DEVICE, sheet_flops_per_second=1e12), SMALL)
    assert (device.peak_flops_per_second.value, device.peak_flops_per_second.confidence) == (1e12, "published")
    assert device.flops_per_second == pytest.approx(4e11)


def probed(context: RankContext):
    """A probe in a hurry, as if every two ranks were a node."""
    rank, count = context.rank, context.layout.ranks
    launch = Launch(rank, count, rank % 2, 2, "127.0.0.1", 1, "torchrun", 2)
    said: list[str] = []
    with mock.patch.object(probe_links, "MESSAGES", {"cpu": (2**13, 2**17, 2**21)}):
        return probe(SMALL, context.world, launch, Asked("small", seconds=0.02), said.append), said


@pytest.mark.slow
def test_what_is_written_is_a_cluster_that_predictions_start_from(ranks: RankPool, tmp_path):
    (found, said), *others = ranks.run(probed, Layout(2, 1, 2), timeout=100)
    assert all(other == found for other, _ in others), "all ranks know the same"
    (tmp_path / "small.toml").write_text(write_cluster(found.cluster))
    cluster = read_cluster(tmp_path / "small.toml")
    assert cluster == found.cluster
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node, set(cluster.tiers)) == (
        "small",
        2,
        2,
        {"node", "cell"},
    )
    assert {(row.tier, row.axis, row.rings_per_port) for row in found.links} == {
        ("node", "shard", 1), ("cell", "group", 2), ("cell", "group", 1),
    }  # fmt: skip
    assert cluster.tiers["node"].rank_bytes_per_second is None
    for constant in (cluster.tiers["cell"].rank_bytes_per_second, cluster.tiers["node"].latency_seconds):
        assert constant is not None
        assert (constant.confidence, constant.source.partition(":")[0]) == ("measured", "measured by fedshard probe")
    assert len(said) == len(set(said)) == 2 + len(found.links)

    for row in found.links:
        assert 0 <= row.latency_seconds < 0.1, row
        assert 1e6 < row.ring_bytes_per_second < 1e11, row
    work = step_work(Setup.from_recipe(SMALL, cluster))
    assert 1e-5 < work.compute_seconds < 1
    assert 0 < work.units[0].gather_seconds < 1
