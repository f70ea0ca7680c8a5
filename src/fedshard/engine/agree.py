"""Small things that all ranks agree on: sums over the mesh, and whether groups hold the same values.

Axes are visited from the fast one to the slow one (shard, replica, group), so that one small message per rank crosses
groups. Sums of integers stay exact in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fedshard.engine.parameters import local_part, plain_name

HASH_CHUNK = 2**20
HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2⁶⁴ / golden ratio as a signed number: neighbours get unlike multipliers


def axes(mesh: DeviceMesh) -> list[str]:
    """The mesh's axes along which there is someone to agree with, fastest first."""
    names = mesh.mesh_dim_names or ()
    return [name for name in ("shard", "replica", "group") if name in names and mesh.get_group(name).size() > 1]


def agree(values: torch.Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """`values` (n,) reduced over all ranks of the mesh; on the CPU, the same bits on every rank."""
    reduced = values.to(mesh.device_type, copy=True)
    for axis in axes(mesh):
        dist.all_reduce(reduced, op, group=mesh.get_group(axis))
    return reduced.cpu()


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, by name. Tables that are rebuilt from the config are not."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def first_difference(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> str | None:
    """The name of the first tensor whose bits are not the same in all groups and replicas, by hash; the same on all."""
    mine = torch.stack([_hash(local_part(tensor).reshape(-1)) for tensor in tensors.values()]).to(mesh.device_type)
    lowest, highest = mine.clone(), mine.clone()
    for axis in axes(mesh):
        if axis != "shard":
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    differs = agree((lowest != highest).to(torch.int64), mesh).tolist()
    return next((name for name, ranks in zip(tensors, differs, strict=True) if ranks > 0), None)


@torch.no_grad()
def make_equal(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Give all groups and replicas the values of the first one; what is not sharded, the first rank's."""
    for tensor in tensors:
        local = local_part(tensor).contiguous()
        for axis in axes(mesh):
            if axis != "shard" or not isinstance(tensor, DTensor):
                dist.broadcast(local, group_src=0, group=mesh.get_group(axis))
        local_part(tensor).copy_(local)


def average_buffers(model: nn.Module, weights: Sequence[float], mesh: DeviceMesh) -> None:
    """The weighted mean over groups of the persistent float buffers, if any differs; a group's ranks count alike.

    Equal ones are left alone, because averaging them would let them drift by rounding. Integer buffers stay.
    """
    buffers = [buffer for buffer in persistent_buffers(model).values() if buffer.is_floating_point()]
    if not buffers:
        return
    values = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
    if torch.equal(agree(values, mesh, dist.ReduceOp.MIN), agree(values, mesh, dist.ReduceOp.MAX)):
        return
    group = mesh.get_local_rank("group")
    share = weights[group] * len(weights) / mesh.size()
    mean = agree(values * share if share > 0 else torch.zeros_like(values), mesh)
    for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def _hash(values: torch.Tensor) -> torch.Tensor:
    """64 bits of a flat tensor's bytes and their places, as int64; computed where the tensor is."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), HASH_CHUNK):
        bits = values[start : start + HASH_CHUNK].view(integer).to(torch.int64)
        places = torch.arange(start + 1, start + 1 + bits.numel(), device=values.device)
        mixed = (bits + places) * HASH_FACTOR
        total += ((mixed ^ (mixed >> 29)) * (2 * places + 1)).sum()
    return total
