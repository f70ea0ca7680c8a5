"""Stopping: all ranks after the same step, whichever heard the signal, with groups of different paces."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fedshard.core.layout import Layout
from fedshard.engine.stop import Stop, heeding_signals, open_stop
from fedshard.testing import RankContext, RankPool


def steps_until_stopped(context: RankContext, asked: int, at: int, every: int) -> tuple[int, int]:
    """Steps as a run takes them: a reduction in the group each, a round over the groups after every `every`; rank
    `asked` hears a signal in step `at`. How many steps were taken, and how many rounds."""
    world = context.world
    stop = open_stop(world, None)
    taken = rounds = 0
    dist.barrier(world.control)
    with heeding_signals(stop), mock.patch("fedshard.engine.stop.LOOK_SECONDS", 0.02):
        while taken < 2000 and not stop.before(taken + 1):
            taken += 1
            if context.rank == asked and taken == at:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001 * (1 + 2 * world.place.group))  # later groups are slower
            known = torch.tensor(stop.words(), dtype=torch.float64)
            dist.all_reduce(known, group=world.group)
            stop.hear(taken, *known.tolist())
            if taken % every == 0:
                dist.all_reduce(known, group=world.peers)
                rounds += 1
    dist.barrier(world.control)  # as a run ends: with what all groups do together
    stop.close()
    return taken, rounds


ONE_GROUP = [((1, 2, 2), 10_000)]
SEVERAL = [(shape, every) for shape in [(2, 1, 2), (4, 1, 1)] for every in [3, 100, 10_000]]


@pytest.mark.parametrize("asked", [0, 1, 3])
@pytest.mark.parametrize(("shape", "every"), ONE_GROUP + SEVERAL)
def test_all_ranks_stop_after_the_same_step(ranks: RankPool, shape, every, asked):
    told = ranks.run(steps_until_stopped, Layout(*shape), asked, 10, every)
    assert len(set(told)) == 1, told
    taken, rounds = told[0]
    assert 10 <= taken < 1500
    assert rounds == taken // every


def test_one_group_stops_after_the_step_in_which_it_hears():
    stop = Stop()
    assert (stop.before(1), stop.words()) == (False, [0.0, 0.0])
    stop.ask()
    assert stop.words() == [1.0, 0.0]
    stop.hear(7, asked=2.0, after=0.0)
    assert (stop.before(7), stop.before(8)) == (False, True)


def test_the_earlier_of_two_stops_counts():
    stop = Stop(after=5)
    stop.hear(3, asked=1.0, after=0.0)
    assert stop.after == 3
    stop.hear(4, asked=1.0, after=0.0)
    assert stop.after == 3


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    with heeding_signals(Stop()):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
