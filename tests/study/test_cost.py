"""Bytes and seconds of a step: what real ranks send, what other formulas say, and a schedule worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.study.architectures import read_architecture
from fedshard.study.cost import (
    fragment_fractions,
    leaving_bytes,
    round_exposed_seconds,
    round_sent_bytes,
    step_bytes,
    step_seconds,
    tier_bytes,
)
from fedshard.study.setup import Setup
from fedshard.study.work import StepWork, UnitWork, step_work
from fedshard.testing import RankContext, RankPool, Traffic

LLAMA_8B = read_architecture("llama-3.1-8b")
M = LLAMA_8B.total
ROOT = LLAMA_8B.root_numel


def setup_of(shape: tuple[int, int, int], **changes: Any) -> Setup:
    layout = Layout(*shape)
    return replace(Setup(LLAMA_8B, layout, read_cluster("leonardo-nominal").job(layout.ranks), 2048), **changes)


# bytes that real ranks send


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A few short texts, and room for a cache: what is learned from them does not matter here."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / f"texts/{number}.txt").write_text(f"{number} is a number. " * 2_000)
    return folder


def recipe_of(layout: Layout, folder: Path, **train: Any) -> Recipe:
    """`tiny`, whose 257 rows of embedding no number of shards divides."""
    return make_recipe(
        {
            "layout": {"groups": layout.groups, "replicas": layout.replicas, "shards": layout.shards},
            "data": {"kind": "text", "path": str(folder / "texts"), "sequence_length": 8},
            "train": {"device": "cpu", "micro_batch": 1} | train,
            "sync": {"every": 3, "warmup_fraction": 0.0},
            "budget": {"steps": 9},
        }
    )


def sent_by(context: RankContext, recipe: Recipe, folder: Path) -> dict[str, float]:
    """What this rank sends in one step and in one round, by purpose."""
    from fedshard.engine.job import make_job
    from fedshard.engine.step import take_step

    job = make_job(recipe, context.world, folder / "cache")
    layout, place = context.layout, context.world.place
    with Traffic() as step:
        take_step(job, 1, synchronous=False)
    with Traffic() as between:
        job.federation.round(1.0)
    shards = frozenset(range(context.rank - place.shard, context.rank - place.shard + layout.shards))
    start = layout.group_of(context.rank).start + place.shard
    replicas = frozenset(range(start, start + layout.group_ranks, layout.shards))
    peers = layout.peers(context.rank)
    after = frozenset({context.rank, peers[(place.group + 1) % layout.groups]})
    return {
        "gather": step.sent_bytes("all_gather", shards),
        "reduction": step.sent_bytes("send"),
        "replica": step.sent_bytes("all_reduce", replicas) if layout.replicas > 1 else 0.0,
        "between": between.sent_bytes("send", after),
        "inside": between.sent_bytes("all_gather", replicas),
        "told": job.federation.sent_bytes,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "accumulation"),
    [((1, 2, 2), 2), ((2, 2, 1), 1), ((3, 1, 1), 1)],
)
def test_bytes_are_those_that_ranks_send(ranks: RankPool, folder, shape, accumulation):
    """Identity 9: of every purpose, the rank that sends most, padding included; small change to agree on beside it."""
    layout = Layout(*shape)
    recipe = recipe_of(layout, folder, accumulation=accumulation)
    seen = ranks.run(sent_by, layout, recipe, folder)
    most = {purpose: max(each[purpose] for each in seen) for purpose in seen[0]}
    setup = replace(Setup.from_recipe(recipe, read_cluster("workstation-8")), every=1)
    flow = step_bytes(setup)
    assert (flow.gather, flow.reduction) == (most["gather"], most["reduction"])
    assert flow.replica == pytest.approx(most["replica"], abs=200)
    assert round_sent_bytes(setup) == most["told"]
    if layout.groups > 1:
        assert flow.between == pytest.approx(most["between"], abs=400)  # chunks that do not divide
        assert flow.inside == pytest.approx(most["inside"], abs=200)


# the formulas for large jobs


def test_the_formulas_for_each_strategy():
    """b_g = 2, b_r = b_w = 4. The root is gathered once: it stays from its forward to the end of its backward.

    128,256 rows do not divide by 512, and are padded; everything divides by four.
    """
    fsdp, padded = step_bytes(setup_of((1, 1, 512))), LLAMA_8B.padded_numel(512)
    assert padded == M + 2 * 256 * 4096
    assert fsdp.gather == 511 / 512 * (2 * padded - 512 * LLAMA_8B.root_shard_numel(512)) * 2
    assert fsdp.reduction == 511 / 512 * padded * 4
    assert (fsdp.replica, fsdp.between, fsdp.inside) == (0, 0, 0)
    hsdp = step_bytes(setup_of((1, 128, 4)))
    assert hsdp.reduction == 3 / 4 * M * 4
    assert hsdp.replica == 2 * 127 / 128 * M / 4 * 4
    fl_fsdp = step_bytes(setup_of((128, 1, 4), every=8))
    assert fl_fsdp.between == 2 * 127 / 128 * M / 4 * 4 / 8
    fl_hsdp = step_bytes(setup_of((16, 8, 4), every=8))
    assert fl_hsdp.replica == 2 * 7 / 8 * M / 4 * 4
    assert fl_hsdp.between == 2 * 15 / 16 * M / (4 * 8) * 4 / 8
    assert fl_hsdp.inside == 7 / 8 * M / 4 * 4 / 8


def test_a_step_of_the_reference_experiment():
    """Pure bfloat16 on 512 ranks: 46.1 GB each, of which the backward's gathers are 13.96 GB."""
    narrow = {"gather_bytes": 2.0, "reduce_bytes": 2.0}
    assert step_bytes(setup_of((1, 1, 512), **narrow)).total == pytest.approx(46.1e9 * 511 / 512, rel=2e-3)
    kept = step_bytes(setup_of((1, 1, 512), **narrow, reshard_after_forward=False))
    assert step_bytes(setup_of((1, 1, 512), **narrow)).gather - kept.gather == pytest.approx(13.96e9, rel=3e-3)


def test_micro_batches_add_gathers_and_reductions():
    once, thrice = step_bytes(setup_of((1, 2, 8))), step_bytes(setup_of((1, 2, 8), accumulation=3))
    assert (thrice.gather, thrice.reduction) == (3 * once.gather, 3 * once.reduction)
    assert thrice.replica == once.replica
    kept = step_bytes(setup_of((1, 2, 8), accumulation=3, keep_unsharded_gradients=True))
    assert (kept.gather, kept.reduction) == (thrice.gather, once.reduction)


def test_a_sliced_round_sends_the_replicas_part_of_a_naive_one():
    sliced, naive = (setup_of((4, 8, 4), sliced=sliced) for sliced in (True, False))
    assert round_sent_bytes(naive) == 8 * round_sent_bytes(sliced)
    assert step_bytes(naive).inside == 0


def test_codecs_narrow_what_crosses_groups_and_nothing_else():
    exact, half, eighth = (step_bytes(setup_of((4, 2, 4), codec=codec)) for codec in ("fp32", "bf16", "int8"))
    assert half.between == exact.between / 2
    assert eighth.between == pytest.approx(exact.between * (1 + 4 / 256) / 4)
    assert exact.inside == half.inside == eighth.inside


def test_one_group_sends_nothing_between_groups():
    alone = step_bytes(setup_of((1, 2, 4), outer_states=1, anchor=True))
    assert alone.between == 0
    assert alone.inside == 1 / 2 * M / 4 * 4  # the look-ahead still steps slices


# tiers


def test_a_ring_over_nodes_leaves_each_node_once():
    """FSDP on 512 ranks: the last rank of each node sends over the network, the others inside."""
    setup = setup_of((1, 1, 512))
    flow, tiers = step_bytes(setup), tier_bytes(setup)
    assert tiers["cell"].rank == tiers["node"].rank == flow.total
    assert tiers["cell"].total == 128 * flow.total
    assert tiers["node"].total == 384 * flow.total
    assert leaving_bytes(setup, "node") == flow.total


def test_replicas_share_the_ports_of_their_node():
    """HSDP with shards inside nodes: all four ranks send over the network."""
    setup = setup_of((1, 128, 4))
    flow = step_bytes(setup)
    assert tier_bytes(setup)["cell"].rank == flow.replica
    assert leaving_bytes(setup, "node") == 4 * flow.replica == 2 * 127 / 128 * M * 4


def test_volume_between_groups_alone():
    """Groups of a node: nothing but rounds leaves it."""
    setup = setup_of((128, 1, 4), every=8)
    assert leaving_bytes(setup, "node") == pytest.approx(4 * step_bytes(setup).between)


def test_cells_and_sites_are_left_by_what_crosses_them():
    """Two sites of two cells of two nodes of two ranks, as a group axis of 16: rings pass each border once each way."""
    cluster = read_cluster("two-sites-10g")
    cluster = cluster.model_copy(update={"nodes": 8, "ranks_per_node": 2, "nodes_per_cell": 2, "nodes_per_site": 4})
    cluster = cluster.model_copy(
        update={"tiers": dict.fromkeys(("node", "cell", "global", "wide"), cluster.tiers["wide"])}
    )
    setup = Setup(LLAMA_8B, Layout(16, 1, 1), cluster, 2048)
    sent, tiers = step_bytes(setup).between, tier_bytes(setup)
    counts = {"node": 8, "cell": 4, "global": 2, "wide": 2}
    assert {tier: each.total for tier, each in tiers.items()} == {tier: sent * n for tier, n in counts.items()}
    assert [leaving_bytes(setup, place) for place in ("node", "cell", "site")] == [sent] * 3
    lossy = tier_bytes(replace(setup, codec="bf16"))
    each_way = sent / 2 / 2  # half the bytes, in two phases
    assert lossy["wide"].rank == pytest.approx(each_way * (1 + 8 / 15))  # 8 of 15 others are at the other site
    assert lossy["wide"].total == pytest.approx(each_way * (2 + 16 * 8 / 15))


# seconds, by hand


def work_of(blocks: Sequence[UnitWork], root: UnitWork, **changes: Any) -> StepWork:
    quiet = StepWork((root, *blocks), 0.0, 0.0, 0.0, 0.0, 0.0)
    return replace(quiet, **changes)


def unit(gather: float, forward: float, backward: float, scatter: float, replica: float = 0.0) -> UnitWork:
    return UnitWork("unit", gather, forward, backward, scatter, replica)


def test_a_schedule_by_hand():
    """Two blocks that gather faster than they compute: all but the first gathers and the last reductions hides."""
    work = work_of([unit(2, 3, 6, 4)] * 2, unit(1, 5, 10, 1), clip_seconds=0.5, optimizer_seconds=0.25)
    time = step_seconds(work, setup_of((1, 1, 4)))
    # forward: root 0–1, first block's gather 1–3, blocks compute 3–6–9, head to 14
    # backward: head to 24, blocks to 30 and 36; reductions 30–34, 36–40, root 40–41
    assert time.compute_seconds == 33
    assert time.gather_exposed_seconds == 3
    assert time.reduction_exposed_seconds == 5
    assert time.total_seconds == 41.75
    assert sum(time.shares.values()) == pytest.approx(1)


def test_slow_gathers_hold_up_what_computes():
    """Gathers longer than computing: one after the other on the communicator, reductions between them."""
    work = work_of([unit(4, 1, 2, 3)] * 2, unit(1, 1, 2, 1))
    time = step_seconds(work, setup_of((1, 1, 4)))
    # forward: root 0–1, gathers 1–5, 5–9, blocks compute 5–6, 9–10, head to 11
    # backward: head 11–13, gather of block 2 11–15, of block 1 15–19; block 2 15–17, its reduction waits until 19–22;
    # block 1 19–21, its reduction 22–25, root's 25–26
    assert time.compute_seconds == 9
    assert time.gather_exposed_seconds == 21 - 9
    assert time.reduction_exposed_seconds == 5


def test_replicas_reduce_behind_the_shards_on_the_last_micro_batch():
    work = work_of([unit(0, 1, 1, 1, 7)], unit(0, 0, 0, 1, 7))
    # block computes 0–2, reduced over shards 2–3, over replicas 3–10; root over shards 3–4, over replicas 10–17
    assert step_seconds(work, setup_of((1, 2, 2))).reduction_exposed_seconds == 15
    # the second micro-batch computes 2–4; its shards' reductions are done at 5 and 6, the replicas' at 12 and 19
    assert step_seconds(work, setup_of((1, 2, 2), accumulation=2)).reduction_exposed_seconds == 15


def test_without_resharding_the_backward_pass_gathers_nothing():
    work = work_of([unit(4, 1, 2, 0)] * 2, unit(1, 1, 2, 0))
    time = step_seconds(work, setup_of((1, 1, 4), reshard_after_forward=False))
    assert time.gather_exposed_seconds == 1 + 4 + 3  # as in the forward pass above


def test_gradients_that_are_kept_whole_are_reduced_once():
    work = work_of([unit(0, 1, 1, 10)], unit(0, 0, 0, 0))
    often, once = (
        step_seconds(work, setup_of((1, 1, 4), accumulation=3, keep_unsharded_gradients=kept)).total_seconds
        for kept in (False, True)
    )
    assert (often, once) == (2 + 3 * 10, 6 + 10)


def test_a_blocking_round_is_paid_once_in_h_steps():
    work = work_of([unit(0, 1, 2, 0)], unit(0, 0, 0, 0), round_between_seconds=5.0, round_inside_seconds=1.0)
    assert step_seconds(work, setup_of((2, 2, 4), every=4)).round_exposed_seconds == 6 / 4


def test_a_delay_hides_what_is_shorter_than_it():
    work = work_of([unit(0, 1, 2, 0)], unit(0, 0, 0, 0), round_between_seconds=5.0, round_inside_seconds=1.0)
    exposed = [round_exposed_seconds(work, setup_of((2, 2, 4), every=4, delay=delay), 3.0) for delay in (0, 1, 2)]
    assert exposed == [6, 3, 1]


def test_fragments_hide_more_and_send_as_much():
    whole = setup_of((2, 1, 4), every=8, delay=1)
    split = replace(whole, fragments=5)
    parts = fragment_fractions(split)
    assert (len(parts), sum(parts)) == (5, pytest.approx(1))
    assert parts[0] == ROOT / M
    assert parts[1:] == [8 * LLAMA_8B.block_numel / M] * 4
    assert step_bytes(split) == step_bytes(whole)
    work, step = step_work(whole), 0.4
    assert round_exposed_seconds(work, split, step) < round_exposed_seconds(work, whole, step)


def test_blocks_that_do_not_divide_are_dealt_out_in_turn():
    assert fragment_fractions(setup_of((2, 1, 4), fragments=4))[1:] == [
        count * LLAMA_8B.block_numel / M for count in (11, 11, 10)
    ]


def test_every_equation_that_code_cites_stands_in_the_docs():
    root = Path(__file__).parents[2]
    stated = re.findall(r"^:label: (\S+)$", "".join(page.read_text() for page in root.glob("docs/**/*.md")), re.M)
    sources = "".join(path.read_text() for path in root.glob("src/fedshard/**/*.py"))
    cited = [
        name
        for text in re.findall(r"[Ee]quations? (\(.*?)\.(?:\s|$)", sources, re.S)
        for name in re.findall(r"\(([a-z]+-[a-z-]+)\)", text)
    ]
    assert len(set(cited)) > 20
    assert set(cited) <= set(stated)
    assert len(stated) == len(set(stated))
