"""How long each piece of one optimizer step takes by itself; what hides behind what is `cost.py`'s matter.

Units are those of engine/shard.py: each decoder block, and the root with all the rest. Formulas: docs/formal/step.md
and docs/formal/rounds.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedshard.study.collectives import Kind, Members, collective_seconds
from fedshard.study.setup import Setup
from fedshard.study.size import Architecture

FEW_NUMBERS_BYTES = 64
"""A message that is all latency."""

IN_PLACE_BYTES = 2**18
"""Owned parts that are smaller travel through a bucket, as in engine/exchange.py."""


@dataclass(frozen=True)
class UnitWork:
    """One unit, for one micro-batch; each time as if nothing else went on."""

    name: str
    gather_seconds: float
    forward_seconds: float
    backward_seconds: float
    """Recomputation included."""
    scatter_seconds: float
    """Of the reduction of its gradients over the shards."""
    replica_seconds: float
    """Of the reduction over the replicas that follows it on a step's last micro-batch."""


@dataclass(frozen=True)
class StepWork:
    """One optimizer step's pieces, and a round's."""

    units: tuple[UnitWork, ...]
    """In forward order. The first is the root: gathered first, but its head computes after all blocks, and its
    gradients are reduced last."""
    clip_seconds: float
    """The group agrees on tokens and norm, and scales its gradients."""
    optimizer_seconds: float
    round_between_seconds: float
    """Of a whole round, all fragments together: what crosses groups."""
    round_inside_seconds: float
    """Of a whole round: the outer step, and the new slices gathered over the replicas."""
    synchronous_seconds: float
    """What a step of the synchronous warm-up takes more: gradients averaged over the groups."""

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return sum(unit.forward_seconds + unit.backward_seconds for unit in self.units)


def step_work(setup: Setup) -> StepWork:
    """The pieces of a step of `setup`. Equations (step-compute), (step-optimizer), (round-seconds)."""
    inside, plain = _gather_slices(setup), _average_slices(setup, setup.layout.replicas, 4.0)
    federates = setup.federates
    return StepWork(
        units=_units(setup),
        clip_seconds=_clip_seconds(setup),
        optimizer_seconds=_optimizer_seconds(setup),
        round_between_seconds=_round_between(setup) if federates else 0.0,
        round_inside_seconds=_outer_seconds(setup) + (inside if setup.sliced else 0.0) if federates else 0.0,
        synchronous_seconds=plain + inside if setup.layout.groups > 1 else 0.0,
    )


def forward_flops(architecture: Architecture, sequence_length: int) -> tuple[int, int]:
    """Floating-point operations per token of one forward pass: of the root's head, and of one block.

    Three times their sum over all units is `Architecture.flops_per_token`. Equation (step-compute).
    """
    experts = sum(tensor.numel for tensor in architecture.block if tensor.role == "expert")
    idle = experts * (architecture.experts - architecture.experts_used) // architecture.experts
    block = architecture.block_numel - idle
    attention = 4 * architecture.attention_width * sequence_length
    return 2 * (architecture.multiplied - architecture.blocks * block), 2 * block + attention


def _units(setup: Setup) -> tuple[UnitWork, ...]:
    """Root and blocks; a block that computes again does one more forward pass in its backward."""
    model, shards = setup.architecture, setup.layout.shards
    head, block = (
        flops * setup.rank_tokens / setup.cluster.device.flops_per_second
        for flops in forward_flops(model, setup.sequence_length)
    )
    root = _unit(setup, "root", model.root_shard_numel(shards), head, 2 * head)
    one = _unit(setup, "", model.block_shard_numel(shards), block, (3 if setup.recompute else 2) * block)
    blocks = (replace(one, name=f"{model.block_prefix}.{index}") for index in range(model.blocks))
    return root, *blocks


def _unit(setup: Setup, name: str, shard_numel: int, forward_seconds: float, backward_seconds: float) -> UnitWork:
    """A unit of so many elements on each rank. FSDP2 gathers and reduces a unit's tensors in one message."""
    shard, whole = setup.members("shard"), shard_numel * setup.layout.shards
    return UnitWork(
        name=name,
        gather_seconds=collective_seconds("all_gather", whole * setup.gather_bytes, shard),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        scatter_seconds=collective_seconds("reduce_scatter", whole * setup.reduce_bytes, shard),
        replica_seconds=collective_seconds("all_reduce", shard_numel * setup.reduce_bytes, setup.members("replica")),
    )


def _clip_seconds(setup: Setup) -> float:
    """Two small sums over the group, and three passes over the gradients: read for the norm, read and written."""
    passes = 3 * setup.stored_bytes * setup.architecture.shard_numel(setup.layout.shards)
    return 2 * _small(setup.group_members) + passes / setup.cluster.device.memory_bytes_per_second.value


def _optimizer_seconds(setup: Setup) -> float:
    """Bound by memory: the gradient is read, weights and moments are read and written. Equation (step-optimizer)."""
    passes = (1 + 2 * (1 + setup.moments)) * setup.stored_bytes * setup.architecture.shard_numel(setup.layout.shards)
    return passes / setup.cluster.device.memory_bytes_per_second.value


def _round_between(setup: Setup) -> float:
    """Agreement on flags and on norms, and the exchange. Equation (round-seconds)."""
    axes = (setup.members("shard"), setup.members("replica"), setup.members("group"))
    return 2 * sum(map(_small, axes)) + _average_slices(setup, setup.owners, setup.wire_bytes, lossy=setup.lossy)


def _average_slices(setup: Setup, owners: int, wire_bytes: float, *, lossy: bool = False) -> float:
    """Owned slices averaged over the groups, in so many bytes per element: message after message on one communicator.

    A lossy codec goes all-to-all, is summed by the owner of each chunk, encoded anew and gathered.
    """
    kinds: tuple[Kind, ...] = ("all_to_all", "all_gather") if lossy else ("all_reduce",)
    members = setup.members("group")
    return sum(
        count * collective_seconds(kind, numel * wire_bytes, members)
        for numel, count in messages(setup, owners)
        for kind in kinds
    )


def _gather_slices(setup: Setup) -> float:
    """New values of the owned slices gathered over the replicas, as they are stored: a lossy codec has ended."""
    members, replicas = setup.members("replica"), setup.layout.replicas
    each = 4.0 if setup.lossy else setup.round_bytes
    return sum(
        count * collective_seconds("all_gather", numel * replicas * each, members)
        for numel, count in messages(setup, replicas)
    )


def messages(setup: Setup, owners: int) -> Iterator[tuple[float, int]]:
    """(owned elements, how many such messages) of a round: large tensors by themselves, the others through buckets."""
    for chunk, times in _chunks(setup, owners):
        if chunk * 4 >= IN_PLACE_BYTES:
            yield chunk, times
    if bucketed := bucketed_numel(setup, owners):
        count = -(-bucketed // (setup.bucket_bytes // 8))  # two buckets share their bytes
        yield bucketed / count, count


def bucketed_numel(setup: Setup, owners: int) -> int:
    """Owned elements that go through a bucket in a round."""
    return sum(chunk * times for chunk, times in _chunks(setup, owners) if chunk * 4 < IN_PLACE_BYTES)


def _chunks(setup: Setup, owners: int) -> Iterator[tuple[int, int]]:
    """(owned elements of a tensor, how many such tensors)."""
    model, shards = setup.architecture, setup.layout.shards
    for tensors, times in ((model.root, 1), (model.block, model.blocks)):
        for tensor in tensors:
            yield -(-tensor.shard_numel(shards) // owners), times


def _outer_seconds(setup: Setup) -> float:
    """Passes over the owned slices in float32: three for a mean, four more with an anchor, three for each state."""
    passes = 3 + 4 * setup.anchor + 3 * setup.outer_states
    owned = setup.architecture.owned_numel(setup.layout.shards, setup.owners)
    return passes * 4 * owned / setup.cluster.device.memory_bytes_per_second.value


def _small(members: Members) -> float:
    return collective_seconds("all_reduce", FEW_NUMBERS_BYTES, members)
