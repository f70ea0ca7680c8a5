"""The ranks of a run as one of them sees it: where it stands, its device, and the groups it talks over.

The only place of the engine that reads the environment. Under torchrun, under srun and alone, the same code runs.

    layout 2×2×2                                  axes of the mesh
      group 0: ranks 0 1   group 1: ranks 4 5     "group"    0–4  1–5  2–6  3–7    rounds
               ranks 2 3            ranks 6 7     "replica"  0–2  1–3  4–6  5–7    HSDP's all-reduce
                                                  "shard"    0–1  2–3  4–5  6–7    FSDP's gathers
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fedshard.core.errors import Fault, InputError
from fedshard.core.layout import Layout, Place
from fedshard.core.recipe import Recipe
from fedshard.core.slurm import device_index, in_step, slurm_task
from fedshard.engine.failure import failure_of, is_failure

CLOSE_SECONDS = 2.0
"""How long a failed rank waits for its process groups to close before it goes on without."""


@dataclass(frozen=True)
class Launch:
    """How this process came to be a rank.

    `local_rank` of `local_ranks` on its own machine, which has `cores` for all of them. Rank 0 can be met at
    `address` and `port`. `how` says who started it; with "none" it is alone. `launcher_ranks`: how many ranks SLURM's
    tasks would start if each were a launcher (0: not known).
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    how: Literal["torchrun", "srun", "none"]
    cores: int
    launcher_ranks: int = 0


@dataclass(frozen=True)
class World:
    """What one rank knows of the others.

    `mesh` has the axes "group", "shard" and, if R > 1, "replica" between them. `peers` are the ranks that hold the
    same slice in every group (the group axis), `group` is all R·S ranks that train in lock-step with this one, and
    `control` is all ranks, over gloo on the CPU whatever the device, and so is `saving`, which has a time-out of its
    own and may be used by another thread.
    """

    rank: int
    local_rank: int
    layout: Layout
    place: Place
    device: torch.device
    mesh: DeviceMesh
    peers: dist.ProcessGroup
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    saving: dist.ProcessGroup


def find_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Who started this process, by its environment (none: the real one). torchrun inside srun is torchrun.

    Raises InputError where the environment says so only in part.

    >>> find_launch({}).how
    'none'
    """
    environ = os.environ if environ is None else environ
    cores = len(os.sched_getaffinity(0))
    if "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        rank, ranks, local_rank, local_ranks, port = (_integer(environ, name) for name in names)
        address = _given(environ, "MASTER_ADDR")
        return Launch(rank, ranks, local_rank, local_ranks, address, port, "torchrun", cores)
    if not in_step(environ):
        return Launch(0, 1, 0, 1, "127.0.0.1", 0, "none", cores)
    host_file = environ.get("SLURM_HOSTFILE")
    task = slurm_task(environ, Path(host_file).read_text(encoding="utf-8") if host_file else None)
    return Launch(
        task.rank,
        task.ranks,
        task.local_rank,
        task.local_ranks,
        environ.get("MASTER_ADDR", task.address),
        _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else task.port,
        "srun",
        task.cores * task.local_ranks if task.cores else cores,
        task.launcher_ranks or 0,
    )


@contextmanager
def open_world(recipe: Recipe, launch: Launch) -> Iterator[World]:
    """The world of this rank, for as long as the block runs; all ranks enter it together.

    Raises InputError, before any process group exists, where the number of ranks is not the layout's or a rank lacks
    the device asked for. An error inside the block is recorded before the other ranks can feel it.
    """
    check_ranks(recipe.shape, launch)
    device = own_device(recipe.train.device, launch, torch.cuda.device_count())
    timeout = timedelta(seconds=recipe.sync.timeout_seconds)
    with _torch_settings(launch, recipe.train.deterministic):
        try:
            dist.init_process_group(
                "gloo", rank=launch.rank, world_size=launch.ranks, timeout=timeout, **_meeting_point(launch)
            )
            if recipe.train.device == "auto":
                device = _agree(device, launch)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            saving = timedelta(seconds=recipe.checkpoint.timeout_seconds)
            yield make_world(recipe.shape, launch.rank, launch.local_rank, device, timeout, saving_timeout=saving)
        except BaseException as error:
            record_failure(error, launch.rank)
            _close_quickly()
            raise
        dist.destroy_process_group()


def record_failure(error: BaseException, rank: int) -> None:
    """Write down why this rank fails, where the agent that started it reads it; the first record stays.

    It is torchrun's own error file, with what `engine.launch.first_failure` needs beside it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file) or not is_failure(error):
        return
    failure = failure_of(error, rank)
    told = "".join(traceback.format_exception(error))
    extra = {"py_callstack": told, "timestamp": str(failure.failed_ns // 10**9)}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    unfinished = Path(f"{file}.unfinished")  # so that a rank killed meanwhile leaves no half of a record
    unfinished.write_text(json.dumps({"message": message, "fedshard": asdict(failure)}), encoding="utf-8")
    unfinished.rename(file)


def check_ranks(layout: Layout, launch: Launch) -> None:
    """Raises InputError if the ranks that were started are not as many as the layout has."""
    if launch.ranks == layout.ranks:
        return
    says = f"{layout} is {layout.ranks} ranks, {launch.ranks} {'was' if launch.ranks == 1 else 'were'} started"
    mend = f"Start {layout.ranks}, or set layout.groups, layout.replicas and layout.shards."
    if launch.launcher_ranks == layout.ranks:
        mend = f"Under srun each task is one rank: start {layout.ranks} tasks, or put torchrun between."
    raise InputError([Fault("layout", says, mend)])


def own_device(asked: str, launch: Launch, visible: int) -> torch.device:
    """The device of this rank, given `train.device` and how many CUDA devices it sees.

    `auto` takes CUDA only where each local rank has a device of its own. Raises InputError where CUDA was asked for
    and is not to be had.
    """
    bound = visible == 1 and launch.how == "srun"  # SLURM gives each task its own device
    if asked == "cpu" or (asked == "auto" and visible < launch.local_ranks and not bound):
        return torch.device("cpu")
    if visible < launch.local_ranks and not bound:
        says = f"{launch.local_ranks} local ranks, {visible} CUDA devices visible"
        raise InputError([Fault("train.device", says, "Start one rank per device, or set train.device=cpu.")])
    index = device_index(launch.local_rank, visible)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def make_world(
    layout: Layout,
    rank: int,
    local_rank: int,
    device: torch.device,
    timeout: timedelta,
    backend: str | None = None,
    saving_timeout: timedelta | None = None,
) -> World:
    """The world of one layout over the default process group, which is over gloo and has as many ranks.

    All ranks create all groups, those they are not in too, in one order: else groups die.
    """
    sizes = {"group": layout.groups, "replica": layout.replicas, "shard": layout.shards}
    if layout.replicas == 1:
        del sizes["replica"]
    ranks = torch.arange(layout.ranks).view(*sizes.values())  # (groups, [replicas,] shards)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")

    def own(name: str, rank_lists: Iterable[list[int]]) -> dist.ProcessGroup:
        made = [(dist.new_group(each, timeout, backend, group_desc=name), each) for each in rank_lists]
        mine = next(group for group, members in made if rank in members)
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    axes = [own(name, ranks.movedim(dim, -1).flatten(0, -2).tolist()) for dim, name in enumerate(sizes)]
    group = axes[-1]  # with one replica its shards are the whole group
    if layout.replicas > 1:
        group = own("lock-step", (list(layout.group_of(first)) for first in range(0, layout.ranks, layout.group_ranks)))
    mesh = DeviceMesh.from_group(axes, device.type, ranks, mesh_dim_names=tuple(sizes))
    control = dist.group.WORLD
    assert control is not None, "the default process group comes first"
    saving = dist.new_group(
        None, saving_timeout or timeout, "gloo" if backend == "nccl" else backend, group_desc="saving"
    )
    assert isinstance(saving, dist.ProcessGroup)
    return World(rank, local_rank, layout, layout.place(rank), device, mesh, axes[0], group, control, saving)


@contextmanager
def _torch_settings(launch: Launch, deterministic: bool) -> Iterator[None]:
    """Threads by the machine's cores, deterministic kernels if asked for; torch's settings as before afterwards."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler says on stderr that it starts and stops
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(max(1, launch.cores // launch.local_ranks))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with fixed space
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


def _meeting_point(launch: Launch) -> dict[str, Any]:
    """Where the ranks find each other: the store that torchrun keeps, one that rank 0 keeps, or alone a table."""
    if launch.how == "none":
        return {"store": dist.HashStore()}  # pyright: ignore[reportPrivateImportUsage]
    return {"init_method": "env://" if launch.how == "torchrun" else f"tcp://{launch.address}:{launch.port}"}


def _agree(device: torch.device, launch: Launch) -> torch.device:
    """The device that every rank can take, said on stderr by rank 0: one rank on the CPU takes all there."""
    have = torch.tensor(int(device.type == "cuda"))
    dist.all_reduce(have)
    if have == launch.ranks:
        chosen, why = device, "each rank has a CUDA device of its own"
    else:
        chosen, why = torch.device("cpu"), f"{int(have)} of {launch.ranks} ranks have a CUDA device of their own"
    if launch.rank == 0:
        print(f"device: {chosen.type} ({why})", file=sys.stderr)
    return chosen


def _close_quickly() -> None:
    """Close the process groups of a failed rank, which may never close by themselves: the work that they still wait
    for needs ranks that are gone, or that wait for this one."""

    def close() -> None:
        with suppress(Exception):  # the error that matters is already on its way
            dist.destroy_process_group()

    if dist.is_initialized():
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _given(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InputError([Fault(name, "not set, and RANK is", "Start the ranks with torchrun, which sets all.")])
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _given(environ, name)
    if not text.isdecimal():
        raise InputError([Fault(name, f"{text!r} is no number", "Start the ranks with torchrun, which sets it.")])
    return int(text)
