"""Timing the same thing on all ranks at once, as often as fits into a given time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fedshard.engine.collectives import all_gather
from fedshard.engine.world import World

FEWEST_CALLS, MOST_CALLS = 5, 60
"""How often something is timed, however long or short it takes."""


def time_calls(call: Callable[[], object], world: World, seconds: float, *, aligned: bool = False) -> torch.Tensor:
    """Times of single calls on every rank, the same table everywhere: (ranks, calls), in seconds.

    All ranks make equally many calls, as many as the slowest of them makes in `seconds`. The first does not count:
    connections are set up, kernels are loaded. Calls follow each other without a pause; where they are `aligned`, all
    ranks wait for each other before each of them, so that rings that share a link do share it.
    """

    def once() -> float:
        _finish(world.device)
        if aligned:
            dist.barrier(group=world.control)
        began = time.perf_counter()
        call()
        _finish(world.device)
        return time.perf_counter() - began

    call()
    mine = [once() for _ in range(FEWEST_CALLS)]
    longest = torch.tensor(sum(mine), dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=world.control)
    calls = min(MOST_CALLS, max(FEWEST_CALLS, int(seconds / float(longest) * FEWEST_CALLS)))
    mine += [once() for _ in range(calls - FEWEST_CALLS)]
    every = torch.empty(world.layout.ranks * calls, dtype=torch.float64)
    all_gather(every, torch.tensor(mine, dtype=torch.float64), world.control)
    return every.view(world.layout.ranks, calls)


def _finish(device: torch.device) -> None:
    """Wait for what the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
