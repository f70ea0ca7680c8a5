"""A model's parameters as one rank holds them: their names, and its rows of each.

Needs torch alone, so that `fedshard.Federation` serves models of any origin.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor

from fedshard.core.layout import rows_of


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the names that the architecture gives them, tied ones once, whatever blocks are wrapped in."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """The name that the architecture gives a parameter or buffer, without what recomputation puts into it."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each name of each parameter → the name that `named_parameters` has it under."""
    first: dict[nn.Parameter, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in every}


def local_rows(parameter: torch.Tensor) -> range:
    """The rows of dim 0 that this rank holds: all of a plain tensor's, chunk by chunk of ⌈rows/S⌉ of a sharded one's.

    They may be none. A tensor without dimensions counts as one row.
    """
    rows = parameter.shape[0] if parameter.ndim else 1
    if not isinstance(parameter, DTensor):
        return range(rows)
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"FSDP2 cuts dim 0 here, not {placement}"
            mesh = parameter.device_mesh
            return rows_of(mesh.get_local_rank(axis), mesh.size(axis), rows)
    return range(rows)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, sharing its memory: (local rows, …), maybe empty."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
