"""Waiting for the slowest: against draws of random numbers, and the limits that theory gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.topology import Jitter
from fedshard.study.architectures import read_architecture
from fedshard.study.cost import step_seconds
from fedshard.study.setup import Setup
from fedshard.study.stragglers import mean_factor, slowest_of, waiting, with_jitter
from fedshard.study.work import step_work

LLAMA_8B = read_architecture("llama-3.1-8b")


def setup_of(shape: tuple[int, int, int], every: int = 1, cluster: str = "leonardo-nominal") -> Setup:
    layout = Layout(*shape)
    return Setup(LLAMA_8B, layout, read_cluster(cluster).job(layout.ranks), 2048, every=every)


@pytest.mark.parametrize("members", [1, 2, 3, 16, 512])
def test_the_slowest_of_many_is_as_slow_as_draws_say(members):
    draws = np.random.default_rng(0).standard_normal((20_000, members)).max(axis=1)
    mean, spread = slowest_of(members)
    assert mean == pytest.approx(draws.mean(), abs=0.02)
    assert spread == pytest.approx(draws.std(), rel=0.02)


@pytest.mark.parametrize(
    ("members", "mean"), [(1, 0.0), (2, 0.5641896), (3, 0.8462844), (5, 1.1629645), (10, 1.5387527)]
)
def test_tabled_values_of_the_largest_of_normals(members, mean):
    """Order statistics of the normal distribution, as statisticians' tables have them."""
    assert slowest_of(members)[0] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(("groups", "ranks", "every"), [(4, 8, 1), (4, 8, 16), (16, 4, 8)])
def test_waiting_is_what_simulated_ranks_wait(groups, ranks, every):
    """Steps of groups one after the other, rounds that wait for the slowest group; a second of computing each."""
    rng = np.random.default_rng(1)
    times = 1 + 0.01 * rng.standard_normal((2_000, every, groups, ranks))
    rounds = times.max(axis=3).sum(axis=1).max(axis=1)  # (rounds,)
    expected = waiting(setup_of((groups, 1, ranks), every), 1.0).total_seconds
    assert expected == pytest.approx(rounds.mean() / every - 1, rel=0.05)


def test_groups_wait_less_than_one_large_group_and_less_the_rarer_they_meet():
    """The part that rounds wait falls with √H; what is left is the group's own."""
    together = waiting(setup_of((1, 1, 512)), 1.0)
    often, rarely = (waiting(setup_of((128, 1, 4), every), 1.0) for every in (1, 100))
    assert together.round_seconds == pytest.approx(0, abs=1e-15)
    assert rarely.total_seconds < often.total_seconds < together.total_seconds * 1.2
    assert rarely.step_seconds == often.step_seconds
    assert rarely.round_seconds == pytest.approx(often.round_seconds / 10)


def test_a_lognormals_mean_follows_from_its_median_and_its_tail():
    jitter = Jitter(median_factor=1.03, p99_factor=3.0, source="a test", confidence="assumed")
    spread = np.log(3.0 / 1.03) / 2.3263479
    draws = 1.03 * np.exp(spread * np.random.default_rng(2).standard_normal(200_000))
    assert np.quantile(draws, 0.99) == pytest.approx(3.0, rel=0.03)
    assert mean_factor(jitter) == pytest.approx(draws.mean(), rel=0.01)
    assert mean_factor(None) == 1


def test_jitter_lengthens_what_crosses_noisy_links_and_nothing_else():
    quiet, noisy = setup_of((16, 8, 4), 8), setup_of((16, 8, 4), 8, "leonardo-observed")
    assert with_jitter(step_work(quiet), quiet) == step_work(quiet)
    before, after = step_work(noisy), with_jitter(step_work(noisy), noisy)
    factor = mean_factor(noisy.cluster.tiers["global"].jitter)
    assert after.units[1].gather_seconds == before.units[1].gather_seconds  # shards stay in their node
    assert after.units[1].replica_seconds == pytest.approx(before.units[1].replica_seconds * factor)
    assert after.round_between_seconds == pytest.approx(before.round_between_seconds * factor)
    assert step_seconds(after, noisy).total_seconds > step_seconds(before, noisy).total_seconds
    alone = replace(noisy, layout=Layout(128, 1, 4))
    assert with_jitter(step_work(alone), alone).units == step_work(alone).units
