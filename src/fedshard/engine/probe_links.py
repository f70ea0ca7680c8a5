"""Times of the collectives that training uses, over each axis of the layout and all its rings at once.

all-gather       engine/collectives.py          parameters of a unit; new slices of a round
reduce-scatter   FSDP2's; on gloo engine/ring.py   gradients of a unit
all-reduce       torch's; over the group axis the round's own weighted mean
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fedshard.core.topology import TIERS, Cluster, TierName
from fedshard.engine.agree import axes
from fedshard.engine.collectives import all_gather, scratch_numel, weighted_mean
from fedshard.engine.probe_fit import KINDS, Kind, Timing
from fedshard.engine.probe_times import time_calls
from fedshard.engine.ring import RingReduceScatter
from fedshard.engine.world import World

MESSAGES = {"cpu": tuple(2**power for power in range(13, 26, 3)), "cuda": tuple(2**power for power in range(13, 29, 3))}
"""Sizes of the whole tensor in bytes, by type of device: 8 KiB to 32 MiB or 256 MiB."""

FEWEST_MESSAGES = 3
"""Sizes that are measured however slow the link is."""

LONGEST_SECONDS = 0.5
"""Sizes are left out of which a call is expected to take longer."""

FLOAT_BYTES = 4


def measure_links(world: World, cluster: Cluster, seconds: float, say: Callable[[str], None]) -> list[Timing]:
    """The times of every collective over each axis that has more than one rank; the same list on all ranks.

    Each size of each takes about `seconds`. `cluster` needs its counts only. Where several rings share a port, the
    first is measured by itself, too.
    """
    timings: list[Timing] = []
    for axis in axes(world.mesh):
        rings, tier = slowest_rings(world, cluster, axis)
        members, sharing = ports(cluster, tier, rings[0])
        for alone in (False, True) if sharing > 1 else (False,):
            loud, sharers = (rings[:1], 1) if alone else (rings, sharing)
            how = "one ring by itself" if alone else "all rings at once"
            for kind in KINDS:
                say(f"{kind.replace('_', '-')} over the {axis} axis ({len(rings[0])} ranks, {tier} tier, {how})")
                for size, times in _sizes(world, axis, kind, loud, seconds, aligned=sharers > 1):
                    place = (axis, kind, tier, len(rings[0]), members, sharers, alone)
                    timings.append(Timing(*place, size, *shortest(times, loud)))
    return timings


def slowest_rings(world: World, cluster: Cluster, axis: str) -> tuple[list[list[int]], TierName]:
    """The rings of an axis that cross the outermost tier, which the others wait for, and that tier."""
    names = world.mesh.mesh_dim_names or ()
    every = world.mesh.mesh.movedim(names.index(axis), -1).flatten(0, -2).tolist()  # (rings, members)
    tiers: list[TierName] = [cluster.tier_between(ring) for ring in every]
    slowest = TIERS[max(map(TIERS.index, tiers))]
    return [ring for ring, tier in zip(every, tiers, strict=True) if tier == slowest], slowest


def ports(cluster: Cluster, tier: TierName, ring: Sequence[int]) -> tuple[int, int]:
    """Members of a ring behind one port of its tier, and how many such rings share a port when all run at once.

    A port is a node's links, or a site's uplink; inside a node every rank has its own.
    """
    if tier == "node":
        return 1, 1
    port_of = cluster.site_of if tier == "wide" else cluster.node_of
    members = max(Counter(map(port_of, ring)).values())
    ranks = cluster.ranks_per_node * (min(cluster.site_nodes, cluster.nodes) if tier == "wide" else 1)
    return members, max(1, ranks // members)


def shortest(times: torch.Tensor, rings: Sequence[Sequence[int]]) -> tuple[float, tuple[float, ...]]:
    """From (ranks, calls) to seconds, and how much longer each call took. A call is done when all of `rings` are."""
    calls = times[[rank for ring in rings for rank in ring]].amax(dim=0)  # (calls,)
    return float(calls.min()), tuple((calls / calls.min()).tolist())


def _sizes(
    world: World, axis: str, kind: Kind, loud: Sequence[Sequence[int]], seconds: float, *, aligned: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    """(bytes, times of every rank and call) of one collective, size by size; ranks outside the `loud` rings idle."""
    group = world.mesh.get_group(axis)
    takes_part = any(world.rank in ring for ring in loud)
    sizes = MESSAGES[world.device.type]
    for number, (size, after) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True), start=1):
        numel = size // FLOAT_BYTES // group.size() * group.size()
        call = collective(kind, axis, numel, group, world.device) if takes_part else _nothing
        times = time_calls(call, world, seconds, aligned=aligned)
        yield numel * FLOAT_BYTES, times
        expected = float(times.amax(dim=0).min()) * after / size
        if number >= FEWEST_MESSAGES and expected > LONGEST_SECONDS:
            return


def collective(kind: Kind, axis: str, numel: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """One collective of a tensor of `numel` float32 elements, a multiple of the ranks, ready to be called.

    All elements are 0, so that sums of sums stay as they are.
    """
    whole = torch.empty(numel, device=device).zero_()  # written to, because fresh zeros may be pages that do not exist
    part = whole.new_empty(numel // group.size()).zero_()
    if kind == "all_gather":

        def call() -> None:
            all_gather(whole, part, group)

    elif kind == "reduce_scatter":
        reduce_scatter = RingReduceScatter() if device.type == "cpu" else DefaultReduceScatter()

        def call() -> None:
            reduce_scatter(part, whole, group, dist.ReduceOp.SUM)

    elif axis == "group":
        needed = scratch_numel(group, numel)
        scratch = whole.new_empty(needed) if needed is not None else None
        weights = [1 / group.size()] * group.size()

        def call() -> None:
            for _ in weighted_mean(whole, weights, group, scratch):
                pass

    else:

        def call() -> None:
            dist.all_reduce(whole, group=group)

    return call


def _nothing() -> None:
    """What a rank does in the meantime that takes no part."""
