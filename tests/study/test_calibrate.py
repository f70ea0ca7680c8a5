"""Efficiency found from a measured step, and what a real step has that an ideal one lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.study.architectures import read_architecture
from fedshard.study.calibrate import (
    CONTENTION,
    at_efficiency,
    calibrated_efficiency,
    loaded_work,
    predicted_step,
)
from fedshard.study.setup import Setup
from fedshard.study.work import step_work

LLAMA_8B = read_architecture("llama-3.1-8b")


def setup_of(*shape: int, cluster: str = "dgx-h100", **changes: Any) -> Setup:
    layout = Layout(*shape)
    job = read_cluster(cluster).job(layout.ranks)
    return replace(Setup(LLAMA_8B, layout, job, sequence_length=4096, micro_batch=2), **changes)


@settings(max_examples=20)
@given(
    st.floats(0.05, 2.0),
    st.sampled_from([(1, 1, 8), (1, 4, 8), (1, 1, 256), (8, 1, 8)]),
    st.booleans(),
    st.integers(1, 4),
)
def test_calibration_inverts_prediction(efficiency, shape, fused, accumulation):
    setup = setup_of(*shape, accumulation=accumulation)
    seconds = predicted_step(setup, efficiency=efficiency, fused=fused).total_seconds
    assert calibrated_efficiency(setup, seconds, fused=fused) == pytest.approx(efficiency, rel=1e-6)


def test_only_the_rate_is_calibrated():
    """One measured step on 8 ranks, and the prediction on 256 stands on the same links and constants."""
    small, large = setup_of(1, 1, 8), setup_of(1, 1, 256)
    efficiency = calibrated_efficiency(small, 1.5)
    assert at_efficiency(large, efficiency).cluster.tiers == large.cluster.tiers
    assert predicted_step(large, efficiency=efficiency).total_seconds > 1.5


@pytest.mark.parametrize("seconds", [1e-3, 1e6])
def test_a_time_that_no_rate_gives_is_refused(seconds):
    with pytest.raises(InputError, match="where communication and memory alone take"):
        calibrated_efficiency(setup_of(1, 1, 8), seconds)


def loads(setup: Setup, *, fused: bool = False) -> list[tuple[float, float]]:
    """What root and first block take more than ideal ones, forward and backward."""
    ideal, real = step_work(setup).units[:2], loaded_work(setup, fused=fused).units[:2]
    return [
        (with_it.forward_seconds - without.forward_seconds, with_it.backward_seconds - without.backward_seconds)
        for without, with_it in zip(ideal, real, strict=True)
    ]


def test_a_block_by_hand():
    """One rank has no collectives. Llama-3.1-8B's block: 218,112,000 parameters in bf16, reduced in float32.

    Weights: 8 bytes forward, 8 + 4 + 8 backward. Kept for each token: 200,704 bytes, moved twice forward, four times
    backward, 6 backward with recomputation, where weights are read once more.
    """
    rate, tokens, numel, kept = 3.35e12, 8192, 218_112_000, 200_704
    (_, block) = loads(setup_of(1, 1, 1))
    assert block[0] == pytest.approx((8 * numel + 2 * kept * tokens) / rate)
    assert block[1] == pytest.approx((20 * numel + 4 * kept * tokens) / rate)
    (_, block) = loads(setup_of(1, 1, 1, recompute=True))
    assert block[1] == pytest.approx((22 * numel + 6 * kept * tokens) / rate)
    (_, block) = loads(setup_of(1, 1, 1), fused=True)
    assert block[0] == pytest.approx((8 * numel + kept * tokens) / rate)
    (_, block) = loads(setup_of(1, 1, 1, reshard_after_forward=False))
    assert block[1] == pytest.approx((14 * numel + 4 * kept * tokens) / rate)


def test_the_root_by_hand():
    """1,050,677,248 parameters that are not gathered again, and 128,256 logits for each token."""
    rate, tokens, numel, vocabulary = 3.35e12, 8192, 1_050_677_248, 128_256
    (root, _) = loads(setup_of(1, 1, 1))
    assert root[0] == pytest.approx((8 * numel + 2 * 6 * vocabulary * tokens) / rate)
    assert root[1] == pytest.approx((14 * numel + 2 * 10 * vocabulary * tokens) / rate)


def test_collectives_slow_down_what_they_hide_behind():
    """Half of their seconds: two ranks on two nodes against the same ranks with no links to speak of."""
    setup = setup_of(1, 4, 8, accumulation=2)
    ideal = step_work(setup).units[1]
    free = replace(setup, layout=Layout(1, 1, 1), cluster=read_cluster("dgx-h100").job(1))
    (_, alone), (_, beside) = loads(free), loads(setup)
    assert CONTENTION == 0.5
    assert beside[0] - alone[0] == pytest.approx(0.5 * ideal.gather_seconds)
    behind = ideal.gather_seconds + ideal.scatter_seconds + ideal.replica_seconds / 2
    assert beside[1] - alone[1] == pytest.approx(0.5 * behind)


def test_small_models_are_further_from_the_peak():
    """Traffic grows with the width and products with its square: the same efficiency gives a narrow model less."""
    reached = {}
    for name in ("smollm2-135m", "tinyllama-1.1b", "llama-2-7b", "llama-2-70b"):
        model = read_architecture(name)
        setup = Setup(model, Layout(1, 1, 8), read_cluster("dgx-a100").job(8), 2048, micro_batch=16, accumulation=8)
        seconds = predicted_step(setup, efficiency=0.75).total_seconds
        flops = model.flops_per_token(2048) * setup.rank_tokens * setup.accumulation
        reached[name] = flops / seconds / 312e12
    assert list(reached.values()) == sorted(reached.values())
    assert reached["smollm2-135m"] < 0.5 < 0.65 < reached["llama-2-70b"] < 0.75
