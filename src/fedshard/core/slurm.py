"""What SLURM says about a job step: its hosts, its tasks, and where rank 0 stands.

Pure: the environment comes in as a mapping, a host file as its text. Under srun each task is one rank. Variables of
the step win over those of the job, whose allocation may be larger than the step.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedshard.core.errors import Fault, InputError

RANKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

FIRST_PORT, PORTS = 12_000, 20_000  # below 32768, where Linux begins to hand out ports by itself
STEP_STRIDE = 7_919  # a prime, so that a step of one job and the next job's do not fall on one port


@dataclass(frozen=True)
class SlurmTask:
    """One task of a step, seen as a rank.

    `local_rank` of `local_ranks` on its own node; `address` and `port` are where rank 0 can be met. `cores` are those
    the task was given for itself (none: not said). `launcher_ranks` is how many ranks there would be if each task were
    a launcher of one rank per GPU of its node (none: GPUs not said).
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    cores: int | None
    launcher_ranks: int | None


def slurm_task(environ: Mapping[str, str], host_file: str | None = None) -> SlurmTask:
    """The task that this environment belongs to; `host_file` is the text of the file that SLURM_HOSTFILE names.

    Raises InputError where a variable is missing or broken.
    """
    rank, ranks = _number(environ, "SLURM_PROCID"), _number(environ, *RANKS)
    local_ranks = _local_ranks(environ, ranks)
    together = local_ranks == ranks  # all on one node, where SLURM's local numbering is the step's
    nodes = _text(environ, *NODE_LIST)
    hosts = expand_nodes(",".join(host_file.split())) if host_file else expand_nodes(nodes) if nodes else []
    if not hosts and not together:
        raise _missing(*NODE_LIST)
    gpus = _optional(environ, "SLURM_GPUS_ON_NODE")
    return SlurmTask(
        rank=rank,
        ranks=ranks,
        local_rank=_number(environ, "SLURM_LOCALID", fallback=rank if together else None),
        local_ranks=local_ranks,
        address=hosts[0] if hosts else "127.0.0.1",
        port=step_port(_number(environ, "SLURM_JOB_ID", "SLURM_JOBID", fallback=0), _step(environ)),
        cores=_optional(environ, "SLURM_CPUS_PER_TASK"),
        launcher_ranks=ranks * gpus if gpus else None,
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that srun started, rather than a batch script or a shell of one task."""
    if "SLURM_PROCID" not in environ or _number(environ, *RANKS, fallback=1) == 1:
        return False
    by_srun = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    return by_srun or environ.get("ENVIRONMENT") != "BATCH"


def step_port(job: int, step: int) -> int:
    """The port where the ranks of one job step meet: the same on all of them, another for the job next to it.

    >>> step_port(4711, 0), step_port(4712, 0), step_port(4711, 1)
    (16711, 16712, 24630)
    """
    return FIRST_PORT + (job + step * STEP_STRIDE) % PORTS


def device_index(local_rank: int, visible: int) -> int | None:
    """The CUDA device of a local rank, given how many it sees; None is the CPU.

    One visible device is the rank's own: SLURM bound it. Raises InputError where there are fewer devices than ranks.

    >>> device_index(3, 4), device_index(3, 1), device_index(0, 0)
    (3, 0, None)
    """
    if visible == 0:
        return None
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    says = f"local rank {local_rank} has no CUDA device of its own, {visible} are visible"
    raise InputError([Fault("train.device", says, "Start one rank per device, or set train.device=cpu.")])


def expand_nodes(text: str) -> list[str]:
    """The hosts of a SLURM node list, in its order. Raises InputError where it is broken.

    >>> expand_nodes("gpu[08-10,12]"), expand_nodes("rack[0-1]n[0-1]")
    (['gpu08', 'gpu09', 'gpu10', 'gpu12'], ['rack0n0', 'rack0n1', 'rack1n0', 'rack1n1'])
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # commas outside brackets
        if not re.fullmatch(r"(?:[^\s,\[\]]|\[[\d,-]+\])+", item):
            raise _broken_nodes(text)
        parts = [
            list(_expand_numbers(numbers, text)) if numbers else [plain]
            for numbers, plain in re.findall(r"\[([^\]]*)\]|([^\[]+)", item)
        ]
        hosts += map("".join, itertools.product(*parts))
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Tasks on each node of a step, in node order. Raises InputError where it is broken.

    >>> expand_tasks("4(x2),3")
    [4, 4, 3]
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            says = f"{text!r} is no list of tasks per node"
            raise InputError([Fault("SLURM_TASKS_PER_NODE", says, "Expected is a form like 4(x2),3.")])
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _expand_numbers(numbers: str, text: str) -> Iterator[str]:
    """The numbers between two brackets; zeros in front of a range's first one are kept."""
    for item in numbers.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _broken_nodes(text)
        first, last = match[1], match[2] or match[1]
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _local_ranks(environ: Mapping[str, str], ranks: int) -> int:
    """Tasks of the step on this task's own node."""
    tasks = expand_tasks(_text(environ, *TASKS_PER_NODE) or str(ranks))
    node = _number(environ, "SLURM_NODEID", fallback=0)
    if sum(tasks) == ranks and node < len(tasks):
        return tasks[node]
    if _number(environ, *NODES, fallback=1) == 1:  # the job's list, and the step is smaller
        return ranks
    says = f"node {node} of tasks per node {tasks} does not fit {ranks} tasks"
    raise InputError([Fault("SLURM_STEP_TASKS_PER_NODE", says, "Start the ranks with srun, which sets it.")])


def _step(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_ID", "SLURM_STEPID", fallback=0)


def _text(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of these variables that is set and not empty."""
    return next((environ[name] for name in names if environ.get(name)), None)


def _optional(environ: Mapping[str, str], *names: str) -> int | None:
    text = _text(environ, *names)
    if text is None:
        return None
    if not text.isdecimal():
        raise InputError([Fault(names[0], f"{text!r} is no number", "Start the ranks with srun, which sets it.")])
    return int(text)


def _number(environ: Mapping[str, str], *names: str, fallback: int | None = None) -> int:
    number = _optional(environ, *names)
    number = fallback if number is None else number
    if number is None:
        raise _missing(*names)
    return number


def _missing(*names: str) -> InputError:
    return InputError([Fault(names[0], "not set in this SLURM step", "Start the ranks with srun, which sets it.")])


def _broken_nodes(text: str) -> InputError:
    return InputError([Fault("SLURM node list", f"{text!r} is broken", "Expected is a form like node[01-04,7],login.")])
