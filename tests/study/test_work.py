"""The pieces of a step: FLOPs that add up, messages that a round is made of, and times that follow from both."""

import time
from dataclasses import replace
from typing import Any

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.study.architectures import known_models, read_architecture
from fedshard.study.collectives import Members, collective_seconds
from fedshard.study.setup import Setup
from fedshard.study.work import forward_flops, messages, step_work

LLAMA_8B = read_architecture("llama-3.1-8b")


def setup_of(shape: tuple[int, int, int], **changes: Any) -> Setup:
    layout = Layout(*shape)
    return replace(Setup(LLAMA_8B, layout, read_cluster("leonardo-nominal").job(layout.ranks), 2048), **changes)


@pytest.mark.parametrize("name", known_models())
def test_forward_flops_are_a_third_of_training(name):
    model = read_architecture(name)
    head, block = forward_flops(model, 1024)
    assert 3 * (head + model.blocks * block) == model.flops_per_token(1024)


def test_the_root_computes_the_head_alone():
    assert forward_flops(LLAMA_8B, 2048)[0] == 2 * (LLAMA_8B.head + LLAMA_8B.width)  # and the final norm


def test_computing_takes_flops_over_the_rate():
    setup = setup_of((1, 1, 8), micro_batch=2)
    rate = 312e12 * 0.45
    assert step_work(setup).compute_seconds == pytest.approx(LLAMA_8B.flops_per_token(2048) * 4096 / rate)


def test_recomputation_is_one_more_forward_pass_of_the_blocks():
    setup = setup_of((1, 1, 8))
    root, *blocks = step_work(setup).units
    again, *blocks_again = step_work(replace(setup, recompute=True)).units
    assert again == root
    assert {unit.backward_seconds for unit in blocks_again} == {3 * blocks[0].forward_seconds}


def test_units_are_the_root_and_the_blocks():
    units = step_work(setup_of((1, 2, 4))).units
    assert [unit.name for unit in units[:3]] == ["root", "model.layers.0", "model.layers.1"]
    assert len(units) == 33


@pytest.mark.parametrize("shards", [8, 12])
def test_a_unit_is_gathered_and_reduced_in_one_message_over_its_ring(shards):
    """Padding included: 4,096 rows over 12 shards are 342 each."""
    setup = setup_of((1, 2, shards))
    block, numel = step_work(setup).units[1], shards * LLAMA_8B.block_shard_numel(shards)
    ring, replicas = Members.of(setup.cluster, range(shards)), Members.of(setup.cluster, [0, shards])
    assert block.gather_seconds == collective_seconds("all_gather", numel * 2, ring)
    assert block.scatter_seconds == collective_seconds("reduce_scatter", numel * 4, ring)
    assert block.replica_seconds == collective_seconds("all_reduce", numel // shards * 4, replicas)


def test_one_rank_speaks_with_nobody():
    work = step_work(setup_of((1, 1, 1)))
    assert {(unit.gather_seconds, unit.scatter_seconds, unit.replica_seconds) for unit in work.units} == {(0, 0, 0)}
    assert work.round_between_seconds == work.round_inside_seconds == work.synchronous_seconds == 0


@pytest.mark.parametrize("shape", [(2, 1, 4), (2, 4, 4), (4, 2, 1)])
@pytest.mark.parametrize("sliced", [True, False])
def test_messages_of_a_round_carry_every_owned_element(shape, sliced):
    setup = setup_of(shape, sliced=sliced)
    carried = sum(numel * count for numel, count in messages(setup, setup.owners))
    assert carried == pytest.approx(LLAMA_8B.owned_numel(shape[2], shape[1] if sliced else 1), rel=1e-12)


def test_norms_share_a_bucket():
    """Seven matrices of each block and two of the root go alone; 65 norms of 4,096 fit into half a bucket."""
    counts = [count for _, count in messages(setup_of((2, 1, 4)), 1)]
    assert sum(counts) == 2 + 7 * 32 + 1


def test_small_tensors_are_those_of_the_engine():
    from fedshard.engine import exchange
    from fedshard.study import work

    assert work.IN_PLACE_BYTES == exchange.IN_PLACE_BYTES


def test_a_sliced_round_is_faster_between_groups_and_pays_inside():
    sliced, naive = (step_work(setup_of((4, 8, 4), sliced=sliced)) for sliced in (True, False))
    assert naive.round_between_seconds / sliced.round_between_seconds == pytest.approx(8, rel=0.05)
    assert sliced.round_inside_seconds > naive.round_inside_seconds


def test_narrower_codecs_cross_groups_faster():
    exact, half, eighth = (
        step_work(setup_of((8, 1, 4), codec=codec)).round_between_seconds for codec in ("fp32", "bf16", "int8")
    )
    assert exact > half > eighth


def test_the_warm_up_averages_float32_gradients_whatever_the_codec():
    exact, narrow = (step_work(setup_of((8, 2, 4), codec=codec)).synchronous_seconds for codec in ("fp32", "int8"))
    assert exact == narrow > 0


def test_the_optimizer_is_bound_by_memory():
    """AdamW on 8 billion parameters over 4 ranks: 28 bytes each, at 1.64 TB/s."""
    assert step_work(setup_of((1, 1, 4))).optimizer_seconds == pytest.approx(LLAMA_8B.total / 4 * 28 / 1.64e12)
    assert step_work(setup_of((1, 1, 4), moments=0)).optimizer_seconds == pytest.approx(
        LLAMA_8B.total / 4 * 12 / 1.64e12
    )


def test_a_layout_of_eight_thousand_ranks_is_no_work():
    setup = setup_of((128, 16, 4))
    began = time.process_time()
    step_work(setup)
    assert time.process_time() - began < 0.5
