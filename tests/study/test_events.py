"""Collectives wait for their members, for those before them, and share links with other axes."""

import numpy as np
import pytest

from fedshard.core.layout import Layout
from fedshard.study.events import Communicator, Watch
from fedshard.study.landing import Rings
from fedshard.study.setup import Axis

ONE = np.ones((1, 1, 1))


def communicator(axis: Axis, shape: tuple[int, int, int] = (1, 1, 1), factors: np.ndarray = ONE) -> Communicator:
    """Without jitter; the first rank is watched."""
    rings = Rings(axis, True, factors, np.ones_like(factors), np.zeros_like(factors))
    return Communicator(rings, np.random.default_rng(0), Watch.of((0,), Layout(*shape), shape))


def test_a_collective_begins_with_the_last_of_its_members():
    """Two groups of three shards: each ring waits for its own, and one has slower links."""
    factors = np.array([1.0, 2.0]).reshape(2, 1, 1)
    shards = communicator("shard", (2, 1, 3), factors)
    issued = np.array([[1.0, 4.0, 2.0], [3.0, 0.0, 0.0]]).reshape(2, 1, 3)
    assert shards.run(issued, 10.0, "gather").reshape(2, 3).tolist() == [[14.0] * 3, [23.0] * 3]
    assert shards.run(issued, 1.0, "gather").reshape(2, 3).tolist() == [[15.0] * 3, [25.0] * 3]


def test_what_takes_no_time_waits_for_nobody():
    shards = communicator("shard", (1, 1, 2), ONE)
    issued = np.array([1.0, 4.0]).reshape(1, 1, 2)
    assert shards.run(issued, 0.0, "gather") is issued
    assert shards.free.item() == 0
    assert shards.events == []


@pytest.mark.parametrize(
    ("issued", "reduced", "gathered"),
    [
        (0.0, 8.0, 6.0),  # the gather has half of the links throughout, and then the rest is done alone
        (3.0, 7.0, 8.0),  # 2 s are left of the reduction, and take 4
        (5.0, 5.0, 8.0),
        (9.0, 5.0, 12.0),
    ],
)
def test_half_of_the_links_each(issued, reduced, gathered):
    """A reduction of 5 s from 0 on, and on the same links a gather of 3 s from `issued` on."""
    replicas, shards = communicator("replica"), communicator("shard")
    shards.sharers, replicas.sharers = [replicas], [shards]
    replicas.run(0 * ONE, 5.0, "reduce")
    done = shards.run(issued * ONE, 3.0, "gather")
    assert (replicas.free.item(), done.item()) == (reduced, gathered)
    assert [(event.begin.item(), event.end.item()) for event in replicas.events] == [(0.0, reduced)]


def test_a_queue_on_shared_links_is_put_off_as_a_whole():
    """Reductions of 2 s and 4 s from 0 on; a gather of 3 s at 1 s is then in nobody's way from 7 s on."""
    replicas, shards = communicator("replica"), communicator("shard")
    shards.sharers, replicas.sharers = [replicas], [shards]
    for seconds in (2.0, 4.0):
        replicas.run(0 * ONE, seconds, "reduce")
    assert shards.run(ONE, 3.0, "gather").item() == 7.0
    assert replicas.free.item() == 9.0
    # Between 1 and 7 s all goes at half speed: the first reduction's last second takes two, the other begins then.
    assert [(event.begin.item(), event.end.item()) for event in replicas.events] == [(0.0, 3.0), (3.0, 9.0)]


def test_only_rings_on_busy_links_are_slowed_down():
    """Two groups of two replicas; the reductions of the second group alone are under way."""
    shape = (2, 2, 1)
    replicas = communicator("replica", shape, np.ones((2, 1, 1)))
    shards = communicator("shard", shape, np.ones((2, 2, 1)))
    shards.sharers = [replicas]
    replicas.free = np.array([0.0, 8.0]).reshape(2, 1, 1)
    assert shards.run(np.zeros(shape), 3.0, "gather").reshape(2, 2).tolist() == [[3.0, 3.0], [6.0, 6.0]]
    assert replicas.free.reshape(2).tolist() == [0.0, 11.0]


def test_watching_where_one_rank_stands_for_all():
    watch = Watch.of((0, 5), Layout(2, 1, 4), (1, 1, 1))
    assert watch(7 * ONE).tolist() == [7.0, 7.0]
    every = Watch.of((0, 5), Layout(2, 1, 4), (2, 1, 4))
    assert every(np.arange(8).reshape(2, 1, 4)).tolist() == [0.0, 5.0]
