"""A run's tensors as slices for a checkpoint, and back from one, in the same layout or another.

                    what                             kept by          written by
global/   weights   where groups are together        every group      one G·R-th by each rank that holds it
          anchor    where it is not the weights      every group      the same
          outer.*   outer optimizer's state          every group      the same
group-g/  weights   where groups are apart           group g          one R-th by each replica
          moment.*  inner optimizer's state          group g          the same
          buffer    persistent buffers               group g          its first rank
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedshard.core.layout import owned_of
from fedshard.engine.agree import persistent_buffers
from fedshard.engine.checkpoint import GLOBAL, group_folder
from fedshard.engine.job import Job
from fedshard.engine.merge import GroupSlices, SharedSlices
from fedshard.engine.parameters import local_rows, named_parameters
from fedshard.engine.shard import flat, reshard
from fedshard.engine.slices import Key, Slice

State = dict[str, dict[Key, Slice]]
"""Folder of the checkpoint → this rank's slices in it."""


@torch.no_grad()
def capture(job: Job, *, together: bool) -> State:
    """This rank's slices; they share the memory of what they are of, or are copies. `together` as in `Cursor`."""
    reshard(job.model)
    place, layout = job.world.place, job.world.layout
    shared: dict[Key, Slice] = {}
    own: dict[Key, Slice] = {}
    parameters = named_parameters(job.model)
    for name, parameter in parameters.items():
        part = _part(parameter, place.replica, layout.replicas)
        if together:
            shared["weights", name] = _narrow(part, place.group, layout.groups)
        else:
            own["weights", name] = part
        for key, value in job.inner.optimizer.state.get(parameter, {}).items():
            if value.ndim > 0:
                own[f"moment.{key}", name] = _part(value, place.replica, layout.replicas)
            elif job.world.rank % layout.group_ranks == 0:
                own[f"moment.{key}", name] = Slice(0, (), value.view(1))
    federation = job.federation.state_dict()
    anchored = federation["anchor"]
    if together and not job.federation.synchronous and _stored_alike(anchored, parameters):
        anchored = {}  # after a round it is the weights; in the warm-up they are ahead of it
    kinds = {"anchor": anchored, **{f"outer.{key}": values for key, values in federation["outer"].items()}}
    for kind, tensors in kinds.items():
        for name, values in tensors.items():
            whole = Slice(federation["parts"][name][0], tuple(parameters[name].shape), values)
            shared[kind, name] = _narrow(whole, place.group, layout.groups)
    if job.world.rank % layout.group_ranks == 0:
        for name, buffer in persistent_buffers(job.model).items():
            own["buffer", name] = Slice(0, tuple(buffer.shape), buffer.reshape(-1))
    return {GLOBAL: shared, group_folder(place.group): own}


@torch.no_grad()
def restore(
    job: Job,
    shared: SharedSlices,
    own: GroupSlices,
    *,
    rounds: int,
    synchronous: bool,
    anchored: bool,
    same_outer: bool,
) -> None:
    """Give a job that was made empty the saved values.

    `rounds` and `synchronous` as `Federation` has them. `anchored`: whether the saved anchor is still one, which it is
    not where a warm-up ends before its round. `same_outer`: whether the outer state is of the same outer optimizer.
    Raises InputError where they do not fit its model.
    """
    parameters = named_parameters(job.model)
    weights = shared if shared.has("weights") else own
    for name, parameter in parameters.items():
        part = _whole_part(parameter)
        if part:
            flat(parameter).copy_(weights.read("weights", name, part))
    state = job.federation.state_dict()  # as large as what is wanted, and with its parts
    kinds = {"anchor" if anchored and shared.has("anchor") else "weights": state["anchor"]}
    if same_outer:
        kinds |= {f"outer.{key}": values for key, values in state["outer"].items() if shared.has(f"outer.{key}")}
    for kind, tensors in kinds.items():
        for name, values in tensors.items():
            offset, length = state["parts"][name]
            if length > 0:
                values.copy_(shared.read(kind, name, range(offset, offset + length)))
    job.federation.load_state_dict(state | {"rounds": rounds, "synchronous": synchronous})
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            _restore_moments(job.inner.optimizer, parameter, name, own)
    for name, buffer in persistent_buffers(job.model).items():
        buffer.copy_(own.read("buffer", name, range(buffer.numel())).view_as(buffer))


def _restore_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, own: GroupSlices) -> None:
    """An optimizer that has not stepped has no state to load into: it is made here."""
    state = {}
    for kind in own.kinds("moment."):
        if not own.has(kind, name):
            continue
        key = kind.removeprefix("moment.")
        if own.is_scalar(kind, name):
            state[key] = own.read(kind, name, range(1)).view(()).to(parameter.device)
            continue
        state[key] = torch.zeros_like(parameter)
        if part := _whole_part(parameter):
            flat(state[key]).copy_(own.read(kind, name, part))
    if state:
        optimizer.state[parameter] = state


def _stored_alike(anchors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> bool:
    return all(parameters[name].dtype == anchor.dtype for name, anchor in anchors.items())


def _whole_part(parameter: torch.Tensor) -> range:
    """What this rank holds of the flattened tensor."""
    start = local_rows(parameter).start * parameter.shape[1:].numel()
    return range(start, start + flat(parameter).numel())


def _part(tensor: torch.Tensor, replica: int, replicas: int) -> Slice:
    """What one replica writes of this rank's part."""
    local, whole = flat(tensor), _whole_part(tensor)
    owned = owned_of(replica, replicas, local.numel())
    return Slice(whole.start + owned.start, tuple(tensor.shape), local[owned.start : owned.stop])


def _narrow(part: Slice, group: int, groups: int) -> Slice:
    """What one group writes of a slice that all groups hold alike."""
    mine = owned_of(group, groups, part.values.numel())
    return Slice(part.offset + mine.start, part.shape, part.values[mine.start : mine.stop])
