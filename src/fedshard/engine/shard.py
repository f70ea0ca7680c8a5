"""From a model on the meta device to FSDP2 units on this rank's slice of the mesh.

The group axis stays outside FSDP's mesh: groups know nothing of each other between rounds. Gradients are summed, not
averaged, over the ranks of a group; the loss is already divided by the group's label tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fedshard.core.recipe import TrainSection
from fedshard.engine.parameters import local_part
from fedshard.engine.ring import RingReduceScatter


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that FSDP2 works on: `shard`, or `replica` × `shard` (HSDP)."""
    return mesh["replica", "shard"] if "replica" in (mesh.mesh_dim_names or ()) else mesh["shard"]


def shard_model(model: nn.Module, blocks: Sequence[str], mesh: DeviceMesh, train: TrainSection) -> None:
    """Make each decoder block (`blocks`, by name) and the root an FSDP2 unit of `mesh`, in place.

    Embedding, final norm and head stay in the root's unit: tied weights must not be split over two.
    """
    policy = precision_policy(train, mesh.device_type)
    inner = shard_mesh(mesh)
    for name in blocks:
        block = model.get_submodule(name)
        if train.recompute == "full":
            block = checkpoint_wrapper(block)
            model.set_submodule(name, block)
        if train.compile:
            block.compile()
        fully_shard(block, mesh=inner, mp_policy=policy)
    fully_shard(model, mesh=inner, mp_policy=policy)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by the group's label tokens already
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu":
            unit.set_custom_reduce_scatter(RingReduceScatter())


def precision_policy(train: TrainSection, device_type: str) -> MixedPrecisionPolicy:
    """What the units compute and reduce in; parameters and moments are stored in float32 whatever this says.

    Where nothing is narrower than what is stored, nothing is converted.
    """
    compute, stored, reduce = compute_dtype(train, device_type), stored_dtype(train), getattr(torch, train.reduce_dtype)
    return MixedPrecisionPolicy(
        param_dtype=compute if compute != stored else None, reduce_dtype=reduce if reduce != compute else None
    )


def compute_dtype(train: TrainSection, device_type: str) -> torch.dtype:
    """The type of activations: as the recipe says; `auto` is bfloat16 on CUDA and float32 on the CPU."""
    if train.precision == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return torch.float32 if train.precision == "float32" else torch.bfloat16


def stored_dtype(train: TrainSection) -> torch.dtype:
    """The type of stored parameters, gradients and moments."""
    return torch.bfloat16 if train.precision == "pure-bfloat16" else torch.float32


def units(model: nn.Module) -> list[FSDPModule]:
    """All FSDP2 units of a model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters, so that `model.parameters()` are the shards again.

    After a forward pass without a backward (evaluation) the root's unit stays gathered.
    """
    for unit in units(model):
        unit.reshard()


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """HSDP reduces between replicas only on a step's last micro-batch; before it, gradients stay scattered."""
    for unit in units(model):
        unit.set_requires_all_reduce(last)
        unit.set_is_last_backward(last)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient, flattened: (local numel,), sharing its memory; maybe empty."""
    return local_part(tensor).view(-1)
