"""What a step costs: bytes per rank and over each tier, and seconds with what hides behind computation taken off.

Bytes are those of rings, padding included, of the rank that sends most; derivations in docs/formal/bytes.md. Times
follow the order in which FSDP2 gathers ahead; derivation in docs/formal/step.md.

    forward    gather of unit i+1 is issued when unit i starts to compute      unit i waits for its own gather
    backward   the same in reverse; a unit's gradients are reduced when it is done, and nothing waits for that but
               the step's end
    gathers and reductions over the shards share one communicator, and go in the order of their issue
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedshard.core.topology import TIERS, TierName
from fedshard.study.setup import Axis, Setup
from fedshard.study.work import StepWork, UnitWork


@dataclass(frozen=True)
class StepBytes:
    """What the rank that sends most sends in one optimizer step, by what it is for. Rounds count 1/H each step."""

    gather: float
    """Parameters, between shards. Equation (bytes-gather)."""
    reduction: float
    """Gradients, between shards. Equation (bytes-reduction)."""
    replica: float
    """Gradients, between replicas. Equation (bytes-replica)."""
    between: float
    """Rounds, between groups. Equation (round-sliced), (round-naive) or (round-lossy)."""
    inside: float
    """Rounds, new slices between the replicas of a group. Equation (round-inside)."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.gather + self.reduction + self.replica + self.between + self.inside


@dataclass(frozen=True)
class TierBytes:
    """What goes over one tier in one optimizer step."""

    rank: float
    """Sent over it by the rank that sends most."""
    total: float
    """Sent over it by all ranks together."""


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of one optimizer step go. All but `compute_seconds` is time without computation."""

    compute_seconds: float
    """Forward and backward of all micro-batches."""
    gather_exposed_seconds: float
    """Units that wait for their parameters; the first of a step always do."""
    reduction_exposed_seconds: float
    """From the end of the last backward pass until all gradients are reduced."""
    clip_seconds: float
    optimizer_seconds: float
    round_exposed_seconds: float
    """Of a round, per step: 1/H of what is not hidden by a delay."""

    @property
    def inner_seconds(self) -> float:
        """The step without its part of a round."""
        inner = self.compute_seconds + self.gather_exposed_seconds + self.reduction_exposed_seconds
        return inner + self.clip_seconds + self.optimizer_seconds

    @property
    def total_seconds(self) -> float:
        """The whole step."""
        return self.inner_seconds + self.round_exposed_seconds

    @property
    def shares(self) -> dict[str, float]:
        """Each part's fraction of the step, by name."""
        parts = {
            "compute": self.compute_seconds,
            "gather": self.gather_exposed_seconds,
            "reduction": self.reduction_exposed_seconds,
            "clip": self.clip_seconds,
            "optimizer": self.optimizer_seconds,
            "round": self.round_exposed_seconds,
        }
        return {name: seconds / self.total_seconds for name, seconds in parts.items()}


# bytes


def step_bytes(setup: Setup) -> StepBytes:
    """Bytes of one step of the rank that sends most. A ring over n ranks sends (n−1)/n of what it gathers or reduces.

    >>> from fedshard.core.cluster_file import read_cluster
    >>> from fedshard.core.layout import Layout
    >>> from fedshard.study.architectures import read_architecture
    >>> job = read_cluster("leonardo-nominal").job(512)
    >>> setup = Setup(read_architecture("llama-3.1-8b"), Layout(1, 1, 512), job, 4096, reduce_bytes=2.0)
    >>> round(step_bytes(setup).total / 1e9, 1)
    46.0
    """
    model, layout = setup.architecture, setup.layout
    root, blocks = model.root_shard_numel(layout.shards), model.blocks * model.block_shard_numel(layout.shards)
    gathered = root + blocks * (2 if setup.reshard_after_forward else 1)  # the root stays until its backward is done
    reductions = 1 if setup.keep_unsharded_gradients else setup.accumulation
    return StepBytes(
        gather=setup.accumulation * (layout.shards - 1) * gathered * setup.gather_bytes,
        reduction=reductions * (layout.shards - 1) * (root + blocks) * setup.reduce_bytes,
        replica=2 * _others(layout.replicas) * (root + blocks) * setup.reduce_bytes,
        between=round_sent_bytes(setup) / setup.every,
        inside=_round_inside_bytes(setup) / setup.every,
    )


def round_sent_bytes(setup: Setup) -> int:
    """What one rank sends to other groups in a whole round, the largest over ranks.

    Equation (round-sliced): 2·(G−1)/G of the owned slice; (round-naive) is the same of the whole shard, and
    (round-lossy) of the encoded slice, which goes all-to-all and comes back in a gather.
    """
    groups, owned = setup.layout.groups, setup.architecture.owned_numel(setup.layout.shards, setup.owners)
    return int(2 * (groups - 1) * owned * setup.wire_bytes // groups)


def tier_bytes(setup: Setup) -> dict[TierName, TierBytes]:
    """What goes over each tier that the job reaches over, in one step. Equation (bytes-tier).

    In a ring a rank sends all to the next one; what goes all-to-all goes in equal parts to all others. Every rank is
    taken to send as much as the one that sends most.
    """
    sent = _sent_over(setup)
    crossed = setup.cluster.crossed(setup.cluster.nodes)
    return {
        tier: TierBytes(float(sent[:, at].max()), float(sent[:, at].sum()))
        for at, tier in enumerate(TIERS)
        if tier in crossed
    }


def leaving_bytes(setup: Setup, place: Literal["node", "cell", "site"]) -> float:
    """What leaves a node (a cell, a site) in one step: all of its ranks together, of the place that sends most."""
    column = ("node", "cell", "site").index(place)
    outside = _sent_over(setup)[:, column + 1 :].sum(axis=1)  # (ranks,)
    return float(np.bincount(setup.places[:, column], weights=outside).max())


def _sent_over(setup: Setup) -> np.ndarray:
    """What each rank sends over each tier in one step: (ranks, tiers)."""
    flow, sent = step_bytes(setup), np.zeros((setup.layout.ranks, len(TIERS)))
    all_to_all = flow.between / 2 if setup.lossy else 0.0
    along: dict[Axis, float] = {
        "shard": flow.gather + flow.reduction,
        "replica": flow.replica + flow.inside,
        "group": flow.between - all_to_all,
    }
    for axis, sent_bytes in along.items():
        rings = setup.rings(axis)
        _send(setup, sent, rings, np.roll(rings, -1, axis=1), sent_bytes)
    rings = setup.rings("group")
    others = rings.shape[1] - 1
    for hop in range(1, others + 1 if all_to_all else 1):
        _send(setup, sent, rings, np.roll(rings, -hop, axis=1), all_to_all / others)
    return sent


def _send(setup: Setup, sent: np.ndarray, ranks: np.ndarray, to: np.ndarray, sent_bytes: float) -> None:
    """Add to `sent` (ranks, tiers) what each of `ranks` sends to the rank at its place in `to`."""
    np.add.at(sent, (ranks, setup.tier_of(ranks, to)), sent_bytes)


def _round_inside_bytes(setup: Setup) -> float:
    """What one rank passes on to the replicas of its group in a round: the new slices, as they are stored."""
    layout = setup.layout
    if not (setup.sliced and setup.federates):
        return 0.0
    owned = setup.architecture.owned_numel(layout.shards, layout.replicas)
    return (layout.replicas - 1) * owned * (4.0 if setup.lossy else setup.round_bytes)


def _others(members: int) -> float:
    """(n−1)/n: what a ring of n members sends of a message."""
    return (members - 1) / members


# seconds


def step_seconds(work: StepWork, setup: Setup) -> StepTime:
    """Seconds of one step, without noise. Equations (step-forward), (step-backward) and (round-exposed)."""
    shards, replicas, now = _Channel(), _Channel(), 0.0
    for micro in range(setup.accumulation):
        last = micro == setup.accumulation - 1
        now = _forward(work.units, shards, now)
        reduce_over = [shards, replicas] if last else [] if setup.keep_unsharded_gradients else [shards]
        now = _backward(work.units, shards, reduce_over, now, again=setup.reshard_after_forward)
    compute = setup.accumulation * work.compute_seconds
    time = StepTime(
        compute_seconds=compute,
        gather_exposed_seconds=max(0.0, now - compute),  # never below 0 but by rounding
        reduction_exposed_seconds=max(0.0, shards.free - now, replicas.free - now),
        clip_seconds=work.clip_seconds,
        optimizer_seconds=work.optimizer_seconds,
        round_exposed_seconds=0.0,
    )
    return replace(time, round_exposed_seconds=round_exposed_seconds(work, setup, time.inner_seconds) / setup.every)


def round_exposed_seconds(work: StepWork, setup: Setup, inner_seconds: float) -> float:
    """What a whole round adds to its H steps of `inner_seconds` each. Equation (round-exposed).

    A blocking round hides nothing. With a delay of τ steps each fragment's exchange runs beside them, and what goes on
    longer is waited for; the outer step and the gather inside the group are never hidden.
    """
    hidden = setup.delay * inner_seconds
    between = sum(max(0.0, part * work.round_between_seconds - hidden) for part in fragment_fractions(setup))
    return between + work.round_inside_seconds


def fragment_fractions(setup: Setup) -> list[float]:
    """Each fragment's part of the model: the root is the first of several, blocks are dealt out to the others."""
    model, dealt = setup.architecture, setup.fragments - 1
    if dealt == 0:
        return [1.0]
    parts = [model.root_numel] + [len(range(first, model.blocks, dealt)) * model.block_numel for first in range(dealt)]
    return [part / model.total for part in parts]


class _Channel:
    """A communicator: its collectives run one after the other. `free` is when the last one of them ends."""

    def __init__(self) -> None:
        self.free = 0.0

    def run(self, issued: float, seconds: float) -> float:
        """When a collective that is issued then is done; one that takes no time is none, and waits for nobody."""
        if seconds == 0:
            return issued
        self.free = max(self.free, issued) + seconds
        return self.free


def _forward(units: Sequence[UnitWork], shards: _Channel, now: float) -> float:
    """When a forward pass that begins `now` is done. Equation (step-forward)."""
    root, *blocks = units
    now = shards.run(now, root.gather_seconds)  # the embedding, a look-up that takes no time, waits for it
    ready = shards.run(now, blocks[0].gather_seconds)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        now = max(now, ready)
        if following is not None:
            ready = shards.run(now, following.gather_seconds)
        now += block.forward_seconds
    return now + root.forward_seconds


def _backward(
    units: Sequence[UnitWork], shards: _Channel, reduce_over: Sequence[_Channel], now: float, *, again: bool
) -> float:
    """When a backward pass that begins `now` is done. Equation (step-backward).

    `again`: blocks are gathered once more. Gradients are reduced over the channels of `reduce_over`, one after the
    other: the shards', and then the replicas'.
    """

    def gather(unit: UnitWork | None) -> float:
        return shards.run(now, unit.gather_seconds) if again and unit is not None else now

    def reduce(unit: UnitWork) -> None:
        done = now
        for channel, seconds in zip(reduce_over, (unit.scatter_seconds, unit.replica_seconds), strict=False):
            done = channel.run(done, seconds)

    root, *blocks = units
    blocks.reverse()
    ready = gather(blocks[0])
    now += root.backward_seconds
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        now = max(now, ready)
        ready = gather(following)
        now += block.backward_seconds
        reduce(block)
    reduce(root)
    return now
