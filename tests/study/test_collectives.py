"""Times of collectives: formulas by hand, limits, and what grows with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.core.topology import Constant, Tier
from fedshard.study.collectives import (
    NCCL,
    Algorithm,
    Kind,
    Library,
    Members,
    Protocol,
    collective_seconds,
    two_tier_seconds,
)

PLAIN = Library("plain", (Protocol("only", 1.0),), base_seconds=0.0, tree_factor=1.0, tree_rate_factor=1.0)
"""One protocol and no other costs, so that formulas can be done by hand."""

KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MESSAGES = st.floats(1.0, 1e11)


def tier(latency_seconds: float, rate: float) -> Tier:
    def constant(value: float) -> Constant:
        return Constant(value=value, source="a test", confidence="assumed")

    return Tier(latency_seconds=constant(latency_seconds), link_bytes_per_second=constant(rate))


SLOW, FAST = tier(1e-3, 100.0), tier(1e-4, 1000.0)


def on_nodes(nodes: int, each: int = 1) -> Members:
    return Members(nodes * each, nodes, SLOW, FAST, port_members=each)


@pytest.mark.parametrize(
    ("kind", "algorithm", "expected"),
    [
        ("all_gather", "ring", 7 * (1e-3 + 50 / 100)),
        ("reduce_scatter", "ring", 7 * (1e-3 + 50 / 100)),
        ("all_to_all", "ring", 7 * (1e-3 + 50 / 100)),
        ("all_reduce", "ring", 14 * (1e-3 + 50 / 100)),
        ("all_reduce", "tree", 2 * (3 * 1e-3 + 400 / 100)),
        ("all_gather", "doubling", 3 * 1e-3 + 7 * 50 / 100),
        ("all_reduce", "doubling", 2 * (3 * 1e-3 + 7 * 50 / 100)),
        ("all_gather", "two-tier", 7 * (1e-3 + 50 / 100)),
    ],
)
def test_eight_nodes_by_hand(kind: Kind, algorithm: Algorithm, expected: float):
    assert collective_seconds(kind, 400, on_nodes(8), algorithm, PLAIN) == pytest.approx(expected, rel=1e-12)


def test_two_tiers_by_hand():
    """Four nodes of two: rings of four over half the message each, which share the node's link, and rings of two."""
    between = 3 * (1e-3 + 200 / 4 / (100 / 2))
    within = 1 * (1e-4 + 400 / 2 / 1000)
    assert two_tier_seconds("all_gather", 400, on_nodes(4, 2), PLAIN) == pytest.approx(between + within, rel=1e-12)


def test_a_tree_with_chains_in_its_nodes():
    """Three chains of four ranks: two levels between nodes, three hops inside them."""
    expected = 2 * (2 * 1e-3 + 3 * 1e-4 + 400 / 100)
    assert collective_seconds("all_reduce", 400, on_nodes(3, 4), "tree", PLAIN) == pytest.approx(expected, rel=1e-12)


def test_the_faster_protocol_is_taken():
    library = replace(PLAIN, protocols=(Protocol("whole", 1.0), Protocol("short", 0.25, 10.0)))
    short, long = (collective_seconds("all_gather", size, on_nodes(2), "ring", library) for size in (0.002, 200.0))
    assert short == pytest.approx(0.25e-3 + 0.001 / 10)
    assert long == pytest.approx(1e-3 + 100 / 100)


def test_processors_need_time_to_add():
    slow = replace(PLAIN, adds_bytes_per_second=25.0)
    algorithms: tuple[Algorithm, ...] = ("ring", "doubling")
    for kind, adds in zip(KINDS[:3], (0, 7 * 50 / 25, 7 * 50 / 25), strict=True):
        for algorithm in algorithms:
            more = collective_seconds(kind, 400, on_nodes(8), algorithm, slow)
            assert more - collective_seconds(kind, 400, on_nodes(8), algorithm, PLAIN) == pytest.approx(adds)


def test_the_best_is_the_fastest_that_the_library_has():
    """Long messages by ring, short ones by tree; all-gather has the ring alone, or doubling where a library does so."""
    many = on_nodes(512)
    for size in (1.0, 1e9):
        each = {name: collective_seconds("all_reduce", size, many, name) for name in ("ring", "tree", "best")}
        assert each["best"] == min(each["ring"], each["tree"])
        gather = collective_seconds("all_gather", size, many)
        assert gather == collective_seconds("all_gather", size, many, "ring")
    doubling = replace(NCCL, doubles=("all_gather",))
    assert collective_seconds("all_gather", 1.0, many, library=doubling) < collective_seconds("all_gather", 1.0, many)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_and_nothing_take_no_time(kind: Kind):
    assert collective_seconds(kind, 1e9, on_nodes(1)) == 0
    assert collective_seconds(kind, 0, on_nodes(8)) == 0


@given(st.sampled_from(KINDS), MESSAGES, MESSAGES, st.integers(2, 4096))
def test_longer_messages_take_longer(kind: Kind, one: float, other: float, nodes: int):
    short, long = sorted((one, other))
    assert collective_seconds(kind, short, on_nodes(nodes)) <= collective_seconds(kind, long, on_nodes(nodes))


@given(st.sampled_from(["all_gather", "reduce_scatter"]), MESSAGES, st.integers(2, 2048))
def test_more_ranks_take_longer(kind: Kind, message_bytes: float, nodes: int):
    """By hops alone; the bytes that each rank passes on approach the whole message."""
    fewer, more = (collective_seconds(kind, message_bytes, on_nodes(each)) for each in (nodes, nodes + 1))
    assert fewer < more


@given(MESSAGES, st.integers(2, 12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(message_bytes: float, power: int):
    members = on_nodes(2**power)
    for algorithm in ("ring", "doubling"):
        each = [collective_seconds(kind, message_bytes, members, algorithm, PLAIN) for kind in KINDS[:3]]
        assert each[2] == pytest.approx(each[0] + each[1], rel=1e-9)


@given(st.integers(2, 4096), MESSAGES)
def test_no_algorithm_beats_the_link(nodes: int, message_bytes: float):
    """Each rank must receive all that it does not have, over its one link."""
    least = message_bytes * (nodes - 1) / nodes / 100
    for algorithm in ("ring", "doubling"):
        assert collective_seconds("all_gather", message_bytes, on_nodes(nodes), algorithm, PLAIN) >= least * (1 - 1e-9)


def test_rings_of_one_axis_share_a_nodes_links():
    """Leonardo, 8 nodes of 4: a ring over all has a node's whole rate; four rings of one rank a node a quarter each."""
    cluster = read_cluster("leonardo-nominal").job(32)
    whole, one = Members.of(cluster, range(32)), Members.of(cluster, range(0, 32, 4))
    assert (whole.port_rings, whole.rate(1e9)) == (1, 45e9)
    assert (one.port_rings, one.rate(1e9)) == (4, 45e9 / 4)


def test_a_node_by_itself_has_its_own_links():
    cluster = read_cluster("leonardo-nominal").job(4)
    members = Members.of(cluster, range(4))
    assert (members.nodes, members.rate(1e10)) == (1, 205e9)


def test_latency_is_what_is_left_of_a_short_message():
    """4.5 µs a hop with the long protocol, 0.27 of it with the short one; 511 hops; and 7 µs to start."""
    members = Members.of(read_cluster("leonardo-nominal").job(512), range(512))
    short = collective_seconds("all_gather", 64, members)
    assert short == pytest.approx(7e-6 + 511 * 0.27 * 4.5e-6, rel=1e-2)
    tree = collective_seconds("all_reduce", 64, members)
    assert tree < short
    assert tree == collective_seconds("all_reduce", 64, members, "tree")


def test_measured_collectives_are_met():
    """NCCL's rings on MareNostrum 5, measured by others at 512 MiB: 11.3, 12.6 and 15.2 ms on 16, 32 and 128 ranks."""
    for ranks, measured in ((16, 11.33e-3), (32, 12.62e-3), (128, 15.17e-3)):
        members = Members.of(read_cluster("marenostrum5").job(ranks), range(ranks))
        assert collective_seconds("all_reduce", 2**29, members, "ring") == pytest.approx(measured, rel=0.05)
