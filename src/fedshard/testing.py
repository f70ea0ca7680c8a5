"""Ranks for tests, started once and used by many: ours, and those of anyone who extends fedshard.

    def sum_of_ranks(context, offset):                      # a module-level function; its arguments go by value
        total = torch.tensor(context.rank + offset)
        dist.all_reduce(total, group=context.world.group)
        return total

    def test_sum():
        with RankPool() as pool:                            # better: one pool in a fixture of session scope
            assert pool.run(sum_of_ranks, Layout(1, 1, 4), 10) == [46, 46, 46, 46]

`Traffic` counts what a block of code sends, and between which ranks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedshard.core.layout import Layout
from fedshard.engine.launch import end_with_parent, preload
from fedshard.engine.world import World, make_world

GROUP_TIMEOUT = timedelta(minutes=5)
"""Longer than any test: a call's own time-out ends it before, and says where its ranks stand."""

STACK_SECONDS = 0.3
"""How long the ranks of a call that timed out get to write their stacks."""


@dataclass(frozen=True)
class RankContext:
    """What a function that runs in a pool gets first: its place, and the world of the layout it was called for."""

    world: World

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def layout(self) -> Layout:
        return self.world.layout

    @property
    def mesh(self) -> DeviceMesh:
        return self.world.mesh


class RankError(Exception):
    """A rank ended without an answer, or raised what cannot be pickled."""


class RankPool:
    """Up to `ranks` ranks on the CPU, over gloo, with one thread each; they wait between calls.

    Each number of ranks gets a team of its own at its first call, whose default process group is exactly these ranks,
    and each layout its groups; both are kept. A team whose call failed is given up: the next call gets a fresh one.

    >>> from operator import attrgetter
    >>> with RankPool(2) as pool:
    ...     pool.run(attrgetter("rank"), Layout(groups=2, replicas=1, shards=1))
    [0, 1]
    """

    def __init__(self, ranks: int = 8):
        self.ranks = ranks
        self._teams: dict[int, _Team] = {}
        preload()

    def run(self, function: Callable[..., Any], layout: Layout | int, *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(context, *args)` on each rank of a layout (a number n: one group of n shards); results by rank.

        Results are anything that can be pickled. What a rank raises is raised here, with its rank and traceback as a
        note. Raises RankError if a rank dies, TimeoutError, with the stacks of the ranks that are not done, after
        `timeout` seconds. Warnings are treated in the ranks as they are here.
        """
        layout = Layout(1, 1, layout) if isinstance(layout, int) else layout
        assert layout.ranks <= self.ranks, f"{layout} is {layout.ranks} ranks, the pool has {self.ranks}"
        team = self._teams.get(layout.ranks)
        if team is None or not team.alive():
            team = self._teams[layout.ranks] = _Team(layout.ranks)
        try:
            return team.call(function, layout, args, timeout)
        except BaseException:
            self._teams.pop(layout.ranks).stop()
            raise

    def close(self) -> None:
        """Stop all ranks."""
        while self._teams:
            self._teams.popitem()[1].stop()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Team:
    """The processes of one number of ranks."""

    def __init__(self, ranks: int):
        self._folder = tempfile.TemporaryDirectory(prefix="fedshard-ranks-")
        context = multiprocessing.get_context("forkserver")
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(self, function: Callable[..., Any], layout: Layout, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """See `RankPool.run`; after an exception the team is of no use."""
        deadline = time.monotonic() + timeout
        message = pickle.dumps((sys.path, warnings.filters, pickle.dumps((function, layout, args))))
        for connection in self._connections:
            connection.send_bytes(message)
        waiting: dict[Any, int] = dict(zip(self._connections, range(layout.ranks), strict=True))
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._stacks(list(waiting.values()), timeout))
            answers = [self._answer(waiting.pop(connection)) for connection in ready]
            for answer in sorted(answers, key=lambda answer: answer.answered_ns):
                if answer.error is not None:
                    answer.error.add_note(answer.note)
                    raise answer.error
                results[answer.rank] = answer.result
        return [results[rank] for rank in range(layout.ranks)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self._folder.cleanup()

    def _answer(self, rank: int) -> _Answer:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            process = self._processes[rank]
            process.join()
            error = RankError(f"rank {rank} ended in the middle of a call, with exit code {process.exitcode}")
            return _Answer(rank, answered_ns=0, error=error)  # before all that the others say of it

    def _stacks(self, late: Sequence[int], timeout: float) -> str:
        for rank in late:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        stacks = [f"rank {rank}:\n{_stack_file(self._folder.name, rank).read_text()}" for rank in late]
        return "\n".join([f"ranks {list(late)} not done after {timeout} s", *stacks])


@dataclass(frozen=True)
class _Answer:
    rank: int
    answered_ns: int
    result: Any = None
    error: BaseException | None = None
    note: str = ""


def _serve(connection: Connection, rank: int, ranks: int, folder: str) -> None:
    """What a rank of a pool does until its connection closes."""
    end_with_parent()
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        dist.init_process_group("gloo", f"file://{folder}/store", GROUP_TIMEOUT, ranks, rank)
        worlds: dict[Layout, World] = {}
        with suppress(EOFError):
            while True:
                connection.send_bytes(_run(connection.recv_bytes(), rank, worlds))


def _run(message: bytes, rank: int, worlds: dict[Layout, World]) -> bytes:
    """One call, and its pickled answer."""
    try:
        sys.path[:], filters, call = pickle.loads(message)
        function, layout, args = pickle.loads(call)
        if layout not in worlds:
            worlds[layout] = make_world(layout, rank, rank, torch.device("cpu"), GROUP_TIMEOUT)
        with warnings.catch_warnings():
            warnings.filters = filters
            result = function(RankContext(worlds[layout]), *args)
        return pickle.dumps(_Answer(rank, time.time_ns(), result))
    except BaseException as error:
        note = f"raised on rank {rank}:\n{''.join(traceback.format_exception(error))}"
        return pickle.dumps(_Answer(rank, time.time_ns(), error=_portable(error), note=note))


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says so where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")
    return error


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


OPERATIONS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: float(ranks > 1),
    "reduce": lambda ranks: float(ranks > 1),
    "gather": lambda ranks: float(ranks > 1),
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "send": lambda _: 1.0,
    "recv": lambda _: 0.0,
    "barrier": lambda _: 0.0,
}
"""What one rank of a ring sends, as a part of the payload (the largest over ranks).

torch has many names for each operation; the first of these that such a name holds is meant.
"""


class Traffic(TorchDispatchMode):
    """Counts what this rank exchanges inside the block.

    Keys are (operation, global ranks that take part): those of the process group, or the two of a send or receive.
    `calls` counts calls, `payload_bytes` adds up the full tensor of each: what is reduced, what has been gathered,
    what is about to be scattered. What is decided over a store is no operation and not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, frozenset[int]]] = Counter()
        self.payload_bytes: Counter[tuple[str, frozenset[int]]] = Counter()

    def sent_bytes(self, operation: str | None = None, ranks: frozenset[int] | None = None) -> float:
        """What this rank sent, by the ring formulas; of one operation, of one set of ranks, or of all.

        Raises KeyError for an operation that is not in the table.
        """
        return sum(
            OPERATIONS[each](len(members)) * payload
            for (each, members), payload in self.payload_bytes.items()
            if operation in (None, each) and ranks in (None, members)
        )

    def across(self, layout: Layout) -> dict[tuple[str, frozenset[int]], int]:
        """The calls that went across groups."""
        return {
            (operation, ranks): calls
            for (operation, ranks), calls in self.calls.items()
            if len({layout.place(rank).group for rank in ranks}) > 1
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back as the operators on plain tensors that it is made of
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and "c10d" in func.namespace:
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._schema.name.partition("::")[2], dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, name: str, given: dict[str, Any]) -> None:
        group = _process_group(given)
        if group is None:
            return  # it waits for another one
        plain = name.replace("_", "")
        operation = next((each for each in OPERATIONS if each.replace("_", "") in plain), name)
        ranks = dist.get_process_group_ranks(group)
        brought = next(value for key, value in given.items() if key.startswith(("input", "tensor")))
        payload = sum(tensor.nbytes for tensor in _tensors(brought))
        if operation == "all_gather":
            payload *= len(ranks)
        other = given.get("dst", given.get("src"))
        if operation in ("send", "recv") and other is not None:
            ranks = [ranks[other], dist.get_rank()]
        self.calls[operation, frozenset(ranks)] += 1
        self.payload_bytes[operation, frozenset(ranks)] += payload


def _process_group(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """The group of an operator's arguments: torch gives it boxed, or by name."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    name = given.get("group_name")
    if isinstance(name, str):
        resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
        return resolve(name)
    return name


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for each in nested:
            yield from _tensors(each)
