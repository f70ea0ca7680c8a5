"""Measuring a machine on the ranks it is given, and what comes of it: a cluster's file that plan and simulate read.

probe_links.py    times of collectives over the layout's axes ──► probe_fit.py: α and β
probe_device.py   the decoder block, a product, a copy
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tomli_w
import torch

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.topology import TIERS, Cluster, Confidence, Constant, Device, Jitter, Tier, TierName
from fedshard.engine.collectives import all_gather
from fedshard.engine.config import read_config
from fedshard.engine.probe_device import DeviceTimes, measure_device
from fedshard.engine.probe_fit import Timing, fit_ring, link_rate, rank_rate, ring_rate
from fedshard.engine.probe_links import measure_links
from fedshard.engine.world import Launch, World

SOURCE = "measured by fedshard probe"
"""What the source of each measured constant begins with."""

JITTER_BYTES = 2**20
"""Messages from which on scatter is looked at; a short one is late by many times its own time."""

FIGURES = 4
"""Figures that a measured value keeps in a cluster's file."""


@dataclass(frozen=True)
class Asked:
    """What a probe is told, because the machine cannot tell it."""

    name: str
    """The cluster's."""
    nodes_per_cell: int | None = None
    """Without it, all nodes are one cell."""
    nodes_per_site: int | None = None
    """Without it, all nodes are at one site."""
    seconds: float = 0.2
    """About how long each size of each collective is measured."""


@dataclass(frozen=True)
class LinkRow:
    """One collective over one axis, as the ring formula sees it."""

    tier: TierName
    axis: str
    kind: str
    ranks: int
    rings_per_port: int
    latency_seconds: float
    """Of one hop (α)."""
    ring_bytes_per_second: float
    """What each ring gets (β)."""
    error_fraction: float
    """By how much the formula is off: the median over sizes."""


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    cluster: Cluster
    links: tuple[LinkRow, ...]
    device: DeviceTimes


def probe(recipe: Recipe, world: World, launch: Launch, asked: Asked, say: Callable[[str], None]) -> Findings:
    """Measure; all ranks call it together, and all get the same. `say` gets a line for what comes next.

    Raises InputError, on all ranks, where they are not numbered node by node.
    """
    counts = count_nodes(world, launch, asked)
    device = measure_device(recipe, read_config(recipe.model), world, launch.local_ranks, asked.seconds, say)
    timings = measure_links(world, counts, asked.seconds, say)
    backend = "NCCL" if world.device.type == "cuda" else "gloo"
    cluster = Cluster(
        name=asked.name,
        about=f"{counts.ranks} ranks of {device.name} on {counts.nodes} {'node' if counts.nodes == 1 else 'nodes'} in "
        f"layout {world.layout}, measured on {time.strftime('%Y-%m-%d')} with torch {torch.__version__} and {backend}.",
        nodes=counts.nodes,
        ranks_per_node=counts.ranks_per_node,
        nodes_per_cell=counts.nodes_per_cell,
        nodes_per_site=counts.nodes_per_site,
        device=make_device(device, recipe),
        tiers=make_tiers(timings, counts.crossed(counts.nodes)),
    )
    return Findings(cluster, tuple(link_rows(timings)), device)


def count_nodes(world: World, launch: Launch, asked: Asked) -> Cluster:
    """A cluster of which only the counts are known. Raises InputError where ranks are not numbered node by node."""
    mine = torch.tensor([launch.local_rank, launch.local_ranks])
    every = torch.empty(2 * world.layout.ranks, dtype=mine.dtype)
    all_gather(every, mine, world.control)
    each = launch.local_ranks
    if [tuple(pair) for pair in every.view(-1, 2).tolist()] != [(rank % each, each) for rank in range(launch.ranks)]:
        says = "nodes have unequal numbers of ranks, or ranks are not numbered node by node"
        mend = "Give every node as many; under srun, --distribution=block."
        raise InputError([Fault("ranks", says, mend)])
    nodes = launch.ranks // each
    return Cluster.model_construct(
        nodes=nodes,
        ranks_per_node=each,
        nodes_per_cell=min(asked.nodes_per_cell or nodes, nodes),
        nodes_per_site=asked.nodes_per_site,
    )


def link_rows(timings: Iterable[Timing]) -> Iterator[LinkRow]:
    """One row for each collective, axis and number of rings at once."""
    alike: dict[tuple[object, ...], list[Timing]] = {}
    for each in timings:
        alike.setdefault((each.tier, each.axis, each.kind, each.port_rings), []).append(each)
    for same in alike.values():
        first, ring = same[0], fit_ring(same, ring_rate)
        place = (first.tier, first.axis, first.kind, first.ranks, first.port_rings)
        yield LinkRow(*place, ring.latency_seconds, ring.bytes_per_second, ring.error_fraction)


def make_tiers(timings: Sequence[Timing], needed: Iterable[TierName]) -> dict[TierName, Tier]:
    """The tiers that were measured, and of those `needed` that no ring stayed in, what is assumed."""
    found: dict[TierName, Tier] = {}
    for tier in TIERS:
        if same := [each for each in timings if each.tier == tier]:
            found[tier] = make_tier(same)
    return {tier: found[tier] if tier in found else _like(tier, found) for tier in needed}


def make_tier(timings: Sequence[Timing]) -> Tier:
    """One tier from all its collectives together: one α and β, and how times scatter."""
    together, alone = [each for each in timings if not each.alone], [each for each in timings if each.alone]
    link = fit_ring(together, link_rate)
    rank = min(link.bytes_per_second, fit_ring(alone, rank_rate).bytes_per_second) if alone else None
    axes = ", ".join(dict.fromkeys(each.axis for each in together))
    how = f"all-gather, reduce-scatter and all-reduce over {axes}; the formula is off by {link.error_fraction:.0%}"
    scatter = np.array([factor for each in together if each.message_bytes >= JITTER_BYTES for factor in each.factors])
    return Tier(
        latency_seconds=measured(link.latency_seconds, how),
        link_bytes_per_second=measured(link.bytes_per_second, how),
        rank_bytes_per_second=None if rank is None else measured(rank, f"one ring by itself over {axes}"),
        jitter=None if scatter.size == 0 else _jitter(scatter),
    )


def make_device(times: DeviceTimes, recipe: Recipe) -> Device:
    """One rank's device; its peak is by data sheet, or else assumed."""
    tokens = recipe.train.micro_batch * recipe.data.sequence_length
    block = f"one decoder block of the recipe, forward and backward, {tokens} tokens"
    if times.sheet_flops_per_second is not None:
        peak = _constant(times.sheet_flops_per_second, f"data sheet of {times.name}, dense bfloat16", "published")
    else:
        width = times.product_width
        how = f"no data sheet known: the fastest product of {width} x {width} matrices that fedshard probe saw"
        peak = _constant(max(times.product_flops_per_second, times.block_flops_per_second), how, "assumed")
    return Device(
        name=times.name,
        peak_flops_per_second=peak,
        achievable_fraction=measured(times.block_flops_per_second / peak.value, f"{block}, over the peak given"),
        memory_bytes=measured(times.memory_bytes, times.memory_source),
        memory_bytes_per_second=measured(times.copied_bytes_per_second, "bytes read and written in copies"),
        deviation_fraction=measured(times.deviation_fraction, f"{block}, from call to call"),
    )


def measured(value: float, how: str) -> Constant:
    """A constant that was measured just now."""
    return _constant(value, f"{SOURCE}: {how}", "measured")


def write_cluster(cluster: Cluster) -> str:
    """The cluster as TOML; `core.cluster_file.read_cluster` reads an equal one."""
    return tomli_w.dumps(cluster.model_dump(mode="json", exclude_none=True))


def _like(tier: TierName, found: dict[TierName, Tier]) -> Tier:
    """A tier that no ring stayed in: as the next one outside it that was measured, else as the outermost."""
    nearest: list[TierName] = [each for each in (*TIERS[TIERS.index(tier) :], *reversed(TIERS)) if each in found]
    other = nearest[0]
    how = f"as of tier {other}: no axis of the layout that was measured stays in tier {tier}"
    return Tier(
        latency_seconds=_constant(found[other].latency_seconds.value, how, "assumed"),
        link_bytes_per_second=_constant(found[other].link_bytes_per_second.value, how, "assumed"),
    )


def _jitter(factors: np.ndarray) -> Jitter:
    half, most = (float(f"{value:.{FIGURES}g}") for value in np.quantile(factors, [0.5, 0.99]))
    how = f"{SOURCE}: {factors.size} collectives of at least 1 MiB, over the shortest of their kind"
    return Jitter(median_factor=half, p99_factor=most, source=how, confidence="measured")


def _constant(value: float, source: str, confidence: Confidence) -> Constant:
    return Constant(value=float(f"{value:.{FIGURES}g}"), source=source, confidence=confidence)
