"""Theorems on costs: limits, monotonicity, and what volume alone allows; each for layouts at large."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster
from fedshard.study.architectures import read_architecture
from fedshard.study.bounds import balance_bytes_per_second, break_even_every, speedup_bound
from fedshard.study.cost import leaving_bytes, round_sent_bytes, step_bytes, step_seconds
from fedshard.study.setup import Setup
from fedshard.study.work import step_work

LLAMA_8B = read_architecture("llama-3.1-8b")
LEONARDO = read_cluster("leonardo-nominal")
NARROW: dict[str, Any] = {"reduce_bytes": 2.0, "round_bytes": 2.0, "sliced": False}
"""How the reference experiment does it: everything in bfloat16, each replica averages its own copy."""


def setup_of(shape: tuple[int, int, int], cluster: Cluster = LEONARDO, **changes: Any) -> Setup:
    layout = Layout(*shape)
    return replace(Setup(LLAMA_8B, layout, cluster.job(layout.ranks), 2048), **changes)


def seconds(setup: Setup) -> float:
    return step_seconds(step_work(setup), setup).total_seconds


def scaled(latency: float = 1.0, rate: float = 1.0) -> Cluster:
    """Leonardo as one cell, with other links, and without tables of efficiency, which are no laws."""

    def constant(of: Any, factor: float) -> Any:
        return of and of.model_copy(update={"value": of.value * factor})

    tiers = {
        name: tier.model_copy(
            update={
                "latency_seconds": constant(tier.latency_seconds, latency),
                "link_bytes_per_second": constant(tier.link_bytes_per_second, rate),
                "rank_bytes_per_second": constant(tier.rank_bytes_per_second, rate),
                "efficiency": None,
            }
        )
        for name, tier in LEONARDO.tiers.items()
    }
    return LEONARDO.model_copy(update={"tiers": tiers, "nodes_per_cell": LEONARDO.nodes})


powers = st.sampled_from([1, 2, 4, 8])
choices = st.fixed_dictionaries(
    {
        "micro_batch": st.integers(1, 3),
        "accumulation": st.integers(1, 3),
        "every": st.integers(1, 50),
        "recompute": st.booleans(),
        "reshard_after_forward": st.booleans(),
        "keep_unsharded_gradients": st.booleans(),
        "sliced": st.booleans(),
        "codec": st.sampled_from(["fp32", "bf16", "int8"]),
    }
)
shapes = st.tuples(powers, powers, st.sampled_from([4, 8, 16]))


@given(shapes, choices, st.floats(1, 100))
def test_slower_links_never_make_a_step_faster(shape, chosen, factor):
    """Monotone in α and in 1/β."""
    plain = seconds(setup_of(shape, scaled(), **chosen))
    assert seconds(setup_of(shape, scaled(latency=factor), **chosen)) >= plain * (1 - 1e-12)
    assert seconds(setup_of(shape, scaled(rate=1 / factor), **chosen)) >= plain * (1 - 1e-12)


@given(powers, powers, st.sampled_from([4, 8, 16, 32]), choices)
def test_more_shards_send_and_take_more(groups, replicas, shards, chosen):
    """Monotone in p: each rank of a larger replica sends more, and waits longer for its first gather."""
    fewer, more = (setup_of((groups, replicas, each), scaled(), **chosen) for each in (shards, 2 * shards))
    assert step_bytes(more).gather > step_bytes(fewer).gather
    assert step_bytes(more).reduction > step_bytes(fewer).reduction
    first, second = (step_work(setup).units[1].gather_seconds for setup in (fewer, more))
    assert second > first


@given(shapes, choices, st.integers(1, 8))
def test_rarer_rounds_never_cost_more_and_end_at_isolated_groups(shape, chosen, doublings):
    """FL → isolated groups as H → ∞: what is left above them is the round over H, and nothing else."""
    isolated = setup_of((1, *shape[1:]), scaled(), **chosen)
    alone, bare = seconds(isolated), step_bytes(isolated)
    seldom = {**chosen, "every": chosen["every"] * 2**doublings}
    often, rare = (setup_of(shape, scaled(), **each) for each in (chosen, seldom))
    above = [seconds(setup) - alone for setup in (often, rare)]
    assert above[1] == pytest.approx(above[0] / 2**doublings, rel=1e-6, abs=1e-12)
    sent = [step_bytes(setup).total - bare.total for setup in (often, rare)]
    assert sent[1] == pytest.approx(sent[0] / 2**doublings, rel=1e-9, abs=1)
    assert (above[0] > 0) == (sent[0] > 0) == (shape[0] > 1)


@given(st.sampled_from([2, 4, 16]), powers, powers)
def test_a_sliced_round_sends_one_rth_of_a_naive_one(groups, replicas, shards):
    sliced, naive = (setup_of((groups, replicas, shards), sliced=each) for each in (True, False))
    assert round_sent_bytes(naive) == replicas * round_sent_bytes(sliced)


@given(shapes, choices)
def test_a_step_is_never_shorter_than_its_parts(shape, chosen):
    """No schedule beats computing alone, nor the communicator of the shards alone."""
    setup = setup_of(shape, **chosen)
    work = step_work(setup)
    time = step_seconds(work, setup)
    root, *blocks = work.units
    again = 2 if setup.reshard_after_forward else 1
    gathers = setup.accumulation * (root.gather_seconds + again * sum(unit.gather_seconds for unit in blocks))
    reductions = sum(unit.scatter_seconds for unit in work.units)
    reductions *= 1 if setup.keep_unsharded_gradients else setup.accumulation
    busy = time.compute_seconds + time.gather_exposed_seconds + time.reduction_exposed_seconds
    assert busy >= max(time.compute_seconds, gathers + reductions) * (1 - 1e-12)
    assert busy <= time.compute_seconds + gathers + reductions + sum(unit.replica_seconds for unit in work.units) + 1e-9


# volume alone


def test_the_balance_law_is_what_a_step_sends_over_what_it_computes():
    """Of FSDP on many ranks: of the law's 6 bytes and 6 FLOPs per parameter, the root's second gather falls away, the
    embedding is not multiplied, and attention comes on top."""
    setup = setup_of((1, 1, 512), reduce_bytes=2.0, micro_batch=2)
    needed = leaving_bytes(setup, "node") / step_work(setup).compute_seconds
    law = balance_bytes_per_second(setup.cluster.device.flops_per_second, setup.rank_tokens)
    bytes_of_six = 6 - 2 * LLAMA_8B.root_numel / LLAMA_8B.total
    flops_of_six = LLAMA_8B.flops_per_token(2048) / LLAMA_8B.total
    assert needed == pytest.approx(law * bytes_of_six / flops_of_six, rel=2e-3)


def test_float32_reduction_needs_a_third_more():
    assert balance_bytes_per_second(134e12, 4096, 2, 4) / balance_bytes_per_second(134e12, 4096) == 8 / 6


@pytest.mark.parametrize(("times", "hidden"), [(2.0, True), (0.5, False)])
def test_links_faster_than_the_law_hide_all_but_the_ends(times, hidden):
    """With links that have no latency: above the law only the first gathers and the last reductions are waited for."""
    law = balance_bytes_per_second(LEONARDO.device.flops_per_second, 4096)
    links = scaled(latency=0.0, rate=times * law / LEONARDO.tiers["cell"].link_bytes_per_second.value)
    setup = setup_of((1, 1, 512), links, reduce_bytes=2.0, micro_batch=2)
    work = step_work(setup)
    root, block = work.units[:2]
    time = step_seconds(work, setup)
    ends = root.gather_seconds + block.gather_seconds
    assert (time.gather_exposed_seconds <= ends * 1.01) == hidden


def test_what_the_reference_experiment_can_gain_over_fsdp_by_traffic():
    """Groups of a node, H = 8: 46.0 GB out of each node against 4.0, and only if computing took no time."""
    fsdp = setup_of((1, 1, 512), **NARROW, micro_batch=2)
    groups = setup_of((128, 1, 4), **NARROW, micro_batch=2, every=8)
    bound = speedup_bound(fsdp, groups)
    assert bound.traffic == pytest.approx(11.5, abs=0.1)
    assert 1 < bound.least == bound.compute < 1.2  # with nominal links FSDP hides nearly all


def test_fl_hsdp_gains_nothing_by_volume_where_the_terms_meet():
    """16 groups of 8 nodes, H = 8: 28.1 GB for replicas and 3.8 for rounds, against HSDP's 31.9."""
    hsdp, fl_hsdp = setup_of((1, 128, 4), **NARROW), setup_of((16, 8, 4), **NARROW, every=8)
    assert leaving_bytes(hsdp, "node") == leaving_bytes(fl_hsdp, "node") == pytest.approx(31.87e9, rel=1e-3)
    assert break_even_every(Layout(16, 8, 4), sliced=False) == 8
    assert speedup_bound(hsdp, fl_hsdp).traffic == 1


@given(st.sampled_from([2, 4, 16]), st.sampled_from([2, 4, 8]), st.booleans())
def test_break_even_is_where_volumes_cross(groups, replicas, sliced):
    layout = Layout(groups, replicas, 4)
    meet = break_even_every(layout, sliced=sliced)
    hsdp = leaving_bytes(setup_of((1, groups * replicas, 4), reduce_bytes=2.0), "node")
    for every in (1, 2, 3, 5, 8, 13, 40):
        rounds = setup_of((groups, replicas, 4), reduce_bytes=2.0, round_bytes=2.0, sliced=sliced, every=every)
        above = leaving_bytes(rounds, "node") - hsdp
        if every != pytest.approx(meet):
            assert (above > 0) == (every < meet)


def test_slicing_the_round_moves_break_even_down():
    layout = Layout(16, 8, 4)
    assert break_even_every(layout) == pytest.approx(1 + 7 / (2 * 15 / 16))
    assert break_even_every(layout) < break_even_every(layout, sliced=False)


def test_nothing_leaves_the_node_of_a_job_that_has_one():
    setup = setup_of((2, 1, 2), every=4)
    assert leaving_bytes(setup, "node") == 0
    assert speedup_bound(setup, setup).traffic == float("inf")
