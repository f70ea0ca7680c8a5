"""Discrete events: equal to the closed form without effects, deterministic with it, and slower as things get worse."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.study.architectures import read_architecture
from fedshard.study.cost import step_seconds
from fedshard.study.setup import Setup
from fedshard.study.simulate import QUIET, Effects, Failure, simulate
from fedshard.study.stragglers import waiting
from fedshard.study.work import step_work

MODEL = read_architecture("llama-3.1-8b")


def setup_of(shape: tuple[int, int, int], cluster: str = "leonardo-observed", **more: object) -> Setup:
    layout = Layout(*shape)
    return Setup(MODEL, layout, read_cluster(cluster).job(layout.ranks), 2048, **more)  # type: ignore[arg-type]


def closed_form(setup: Setup, steps: int) -> float:
    return steps * step_seconds(step_work(setup), setup).total_seconds


LAYOUTS = [(1, 1, 512), (1, 128, 4), (128, 1, 4), (16, 8, 4), (4, 8, 16), (1, 1, 4), (4, 1, 1), (2, 2, 2)]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(LAYOUTS),
    cluster=st.sampled_from(["leonardo-nominal", "leonardo-observed", "jupiter"]),
    every=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    recompute=st.booleans(),
    reshard=st.booleans(),
    keep=st.booleans(),
    slow_links=st.floats(0.01, 100.0),
)
def test_without_effects_it_is_the_closed_form(
    shape, cluster, every, accumulation, recompute, reshard, keep, slow_links
):
    """Identity 10."""
    setup = setup_of(
        shape, cluster, every=every, accumulation=accumulation, recompute=recompute, reshard_after_forward=reshard,
        keep_unsharded_gradients=keep, reduce_bytes=4.0 * slow_links,
    )  # fmt: skip
    told = simulate(setup, rounds=2)
    assert told.seconds == pytest.approx(closed_form(setup, 2 * every), rel=1e-9)
    assert len(told.step_seconds) == 2 * every


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 0), (1, 2), (3, 1), (4, 1)])
def test_overlap_and_fragments_are_the_closed_form_s(fragments, delay):
    """From round to round: the last exchange of all has nothing to hide behind."""
    setup = setup_of((16, 8, 4), every=8, fragments=fragments, delay=delay, anchor=True)
    one, many = (simulate(setup, rounds).seconds for rounds in (2, 6))
    assert many - one == pytest.approx(closed_form(setup, 4 * 8), rel=1e-9)


def test_every_rank_by_itself_is_one_for_all():
    """The short cut for ranks that nothing tells apart changes nothing."""
    setup = setup_of((4, 8, 16), every=3)
    assert simulate(setup, 2, slow={0: 1.0}).seconds == pytest.approx(simulate(setup, 2).seconds, rel=1e-12)


SHARING = Effects(jitter=False, deviation=False, landing=False)


def test_axes_that_leave_nodes_slow_each_other_down():
    """Replicas of shards that span nodes; not those of shards inside one."""
    spanning, within = setup_of((4, 8, 16), every=8), setup_of((16, 8, 4), every=8)
    assert simulate(spanning, effects=SHARING).seconds > simulate(spanning).seconds
    assert simulate(within, effects=SHARING).seconds == simulate(within).seconds


def test_links_are_never_worth_more_than_one_after_the_other():
    """Sharing costs at most what it would to do one axis' collectives after the other's."""
    setup = setup_of((4, 8, 16), every=1)
    apart = sum(unit.replica_seconds for unit in step_work(setup).units)
    quiet, shared = (simulate(setup, effects=effects).step_seconds[0] for effects in (QUIET, SHARING))
    assert quiet < shared <= quiet + apart


def test_an_exchange_under_way_slows_the_steps_beside_it():
    setup = setup_of((4, 8, 16), every=8, delay=3, anchor=True)
    beside = range(8, 11)  # steps while the first round's exchange runs, counted from 0
    quiet, shared = (simulate(setup, 2, effects).step_seconds for effects in (QUIET, SHARING))
    assert max(shared[step] - quiet[step] for step in beside) > max(
        shared[step] - quiet[step] for step in range(16) if step not in beside
    )


def test_the_seed_decides():
    setup = setup_of((16, 8, 4), every=4)
    one, same, other = (simulate(setup, 2, Effects(seed)).step_seconds for seed in (1, 1, 2))
    assert one == same != other


def test_a_round_s_many_messages_average_their_jitter_out():
    """One message may take three times as long as another; hundreds on one communicator do not."""
    setup = setup_of((128, 1, 4), every=1)
    rounds = simulate(setup, 8, Effects(deviation=False)).round_seconds
    assert min(rounds) / simulate(setup).round_seconds[0] > 1.1
    assert max(rounds) / min(rounds) < 1.1


@pytest.mark.parametrize("effects", [Effects(jitter=False, landing=False), Effects(deviation=False, landing=False)])
def test_noise_only_ever_costs(effects):
    setup = setup_of((16, 8, 4), every=4)
    assert simulate(setup, 3, effects).seconds > simulate(setup, 3).seconds


def test_a_slow_rank_slows_its_group_and_at_rounds_all():
    setup = setup_of((4, 1, 4), every=4)
    slowed = simulate(setup, 2, slow={5: 1.5})
    compute = step_work(setup).compute_seconds
    assert slowed.seconds - simulate(setup, 2).seconds == pytest.approx(8 * 0.5 * compute, rel=0.05)
    within = setup_of((1, 1, 16), every=4)
    assert simulate(within, 2, slow={5: 1.5}).seconds > simulate(within, 2).seconds


@pytest.mark.parametrize(("shape", "every"), [((1, 1, 512), 1), ((16, 1, 32), 8)])
def test_uneven_ranks_are_waited_for_as_long_as_theory_says(shape, every):
    """Where computing hides all but the first gather and the last reduction."""
    setup = setup_of(shape, "dgx-h100", every=every, micro_batch=8)
    uneven = Effects(jitter=False, landing=False, sharing=False)
    rounds = 160 // every
    waited = (simulate(setup, rounds, uneven).seconds - simulate(setup, rounds).seconds) / (rounds * every)
    assert waited == pytest.approx(waiting(setup, step_work(setup).compute_seconds).total_seconds, rel=0.1)


def test_rounds_average_what_steps_wait_for():
    """Uneven ranks cost FL less than FSDP: groups of four wait for the slowest of four."""
    effects = Effects(jitter=False, landing=False)
    cost = {}
    for shape in [(1, 1, 512), (128, 1, 4)]:
        setup = setup_of(
            shape, "leonardo-nominal", micro_batch=8, every=16
        )  # where both wait for ranks, and not for links
        cost[shape] = simulate(setup, 2, effects).seconds / simulate(setup, 2).seconds - 1
    assert 0 < cost[128, 1, 4] < cost[1, 1, 512]


def test_a_group_that_fails_costs_the_steps_since_the_last_checkpoint():
    setup = setup_of((4, 1, 4), every=5)
    straight = simulate(setup, 4)
    failed = simulate(setup, 4, failure=Failure(step=13, checkpoint_every=5, restart_seconds=60.0))
    assert failed.tokens == straight.tokens
    assert len(failed.step_seconds) == len(straight.step_seconds) == 20
    assert failed.spent["lost"] == pytest.approx(failed.seconds - straight.seconds)
    assert failed.spent["lost"] == pytest.approx(60 + 3 * straight.step_seconds[0], rel=1e-6)
    assert {phase: seconds for phase, seconds in failed.spent.items() if phase != "lost"} == pytest.approx(
        {phase: seconds for phase, seconds in straight.spent.items() if phase != "lost"}
    )


def test_shares_are_all_of_the_time():
    told = simulate(setup_of((16, 8, 4), every=4), 2, Effects())
    assert sum(told.shares.values()) == pytest.approx(1.0)
    assert sum(told.spent.values()) <= told.seconds * (1 + 1e-9)
    assert told.tokens_per_second == told.tokens / told.seconds


def test_what_is_watched():
    setup = setup_of((2, 2, 2), every=2)
    told = simulate(setup, 1, watch=(0, 7))
    streams = {(rank, stream) for rank, stream, *_ in told.intervals}
    assert streams == {(rank, stream) for rank in (0, 7) for stream in ("compute", "shard", "replica", "group")}
    for rank in (0, 7):
        for stream in ("compute", "shard"):
            events = sorted((begin, end) for at, on, _, begin, end in told.intervals if (at, on) == (rank, stream))
            assert all(end <= following for (_, end), (following, _) in pairwise(events))
    forward = [name for rank, on, name, *_ in told.intervals if on == "compute" and rank == 0 and "forward" in name]
    assert len(forward) == 2 * (MODEL.blocks + 1)
    first = [name for rank, on, name, *_ in told.intervals if (rank, on) == (0, "shard")]
    assert first[:3] == ["gather root", "gather model.layers.0", "gather model.layers.1"]
    # Backward: the last block first, and always the next gather before the reduction.
    assert first[MODEL.blocks + 1 :][:5] == [
        "gather model.layers.31",
        "gather model.layers.30",
        "reduce model.layers.31",
        "gather model.layers.29",
        "reduce model.layers.30",
    ]


@pytest.mark.parametrize(
    ("shape", "cluster", "limit_seconds"), [((16, 8, 4), "leonardo-observed", 2), ((256, 16, 4), "jupiter", 60)]
)
def test_it_is_fast_enough_to_be_used(shape, cluster, limit_seconds):
    """Of the processor, because a busy machine makes any wall clock late."""
    setup = setup_of(shape, cluster, every=2)
    began = time.process_time()
    simulate(setup, 1, Effects(), slow={3: 1.1})
    assert time.process_time() - began < limit_seconds
