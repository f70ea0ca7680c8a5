"""Where nodes land, as jobs were seen to, and what rings then take."""

import numpy as np
import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.study.architectures import read_architecture
from fedshard.study.landing import Rings, landed_cells
from fedshard.study.setup import Axis, Setup

LLAMA_8B = read_architecture("llama-3.1-8b")


def landings(nodes: int, times: int = 300) -> list[np.ndarray]:
    job = read_cluster("leonardo-observed").job(4 * nodes)
    return [landed_cells(job, np.random.default_rng(seed)) for seed in range(times)]


def rings_of(shape: tuple[int, int, int], axis: Axis, cells: np.ndarray, cluster: str = "leonardo-observed") -> Rings:
    layout = Layout(*shape)
    setup = Setup(LLAMA_8B, layout, read_cluster(cluster).job(layout.ranks), 2048)
    return Rings.landed(setup, axis, cells, jitter=True)


@pytest.mark.parametrize(("nodes", "median"), [(4, 1), (8, 2), (16, 3), (32, 6), (64, 10), (128, 10)])
def test_jobs_land_in_as_many_cells_as_they_were_seen_in(nodes, median):
    cells = [len(set(landed.tolist())) for landed in landings(nodes)]
    assert np.median(cells) == pytest.approx(median, abs=max(0.5, 0.1 * median))
    assert max(cells) <= nodes


def test_a_large_job_s_nodes_are_unevenly_spread():
    """HLC-Lab/pico, jobs of 128 nodes: 3 to 19 cells; two random nodes are in different ones in 83 of 100 cases."""
    landed = landings(128)
    cells = [len(set(each.tolist())) for each in landed]
    assert 2 <= np.quantile(cells, 0.01) <= 6
    assert 15 <= np.quantile(cells, 0.99) <= 24
    apart = [1 - float(((np.bincount(each) / 128) ** 2).sum()) for each in landed]
    assert np.mean(apart) == pytest.approx(0.83, abs=0.04)


def test_nodes_are_numbered_cell_by_cell():
    assert all((np.diff(each) >= 0).all() and len(each) == 16 for each in landings(16, 20))


def test_without_a_placement_nodes_are_packed():
    job = read_cluster("dgx-h100").job(16)
    assert landed_cells(job, np.random.default_rng(0)).tolist() == [0, 0]


def test_rings_cross_the_tiers_that_their_members_are_apart_by():
    """Four groups of one node each, the nodes in cells 0 0 0 1: shards stay inside nodes, groups cross cells."""
    cells = np.array([0, 0, 0, 1])
    inside, across = rings_of((4, 1, 4), "shard", cells), rings_of((4, 1, 4), "group", cells)
    assert not inside.leave_nodes
    assert inside.spreads.tolist() == np.zeros((4, 1, 1)).tolist()  # nothing is known of jitter inside nodes
    assert across.leave_nodes
    assert across.factors.shape == across.spreads.shape == (1, 1, 4)
    assert (across.spreads > 0).all()


def test_a_ring_that_lands_in_one_cell_has_shorter_hops():
    """Pairs of nodes in cells 0 0 | 0 1; the job's own cells, which the pieces were computed for, are apart."""
    together, apart = rings_of((2, 2, 4), "replica", np.array([0, 0, 0, 1])).factors[:, 0, 0]
    assert together <= apart


def test_jitter_has_its_median_and_its_tail():
    rings = rings_of((128, 1, 4), "group", np.arange(128) // 13)
    draw = np.random.default_rng(0)
    drawn = np.concatenate([(rings.stretch(draw, 1) / rings.factors).ravel() for _ in range(5_000)])
    assert np.median(drawn) == pytest.approx(1.03, rel=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(3.0, rel=0.05)
    assert drawn.min() == 1.0
    many = rings.stretch(draw, 400) / rings.factors  # messages one after the other average it out
    assert many == pytest.approx(drawn.mean(), rel=0.1)
