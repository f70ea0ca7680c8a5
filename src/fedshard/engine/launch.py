"""How local ranks start, how one that fails ends them all, and how the first cause comes to be the last line.

torch is imported inside functions only: while this process imports it, the one that ranks are forked from does too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshard.core.errors import InputError
from fedshard.engine.failure import Failure, Stopped, failure_of, is_failure

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "transformers.models.llama.modeling_llama",
    "fedshard.engine.train",
)
"""What the process that ranks are forked from has loaded. None of it asks for CUDA devices, which a fork would lose."""

FORWARDED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals to the parent that the ranks get too; afterwards they have `grace_seconds` to end. SIGTERM reaches them as
SIGUSR1, on which they save and stop: as SIGTERM the agent ends the others when one rank fails, and then at once."""

LINGER_SECONDS = 0.5
"""How long a rank that has said why it fails stays. One that died without a word (killed, out of memory) is the first
cause of what the others then say; it is so seen before them."""

INTERRUPT_SECONDS = 3.0
"""How long a rank may take to leave after Ctrl-C. One that is deep in a collective would never leave by itself."""

ECHO_SECONDS = 2.0
"""How long a rank under someone else's launcher holds back what may be another rank's failure, or what rank 0 says
too. By then the launcher has stopped it, if the other was first."""

ECHOES = ("closed by peer", "reset by peer", "Broken pipe", "imed out")
"""How torch's collectives speak of a rank that is gone."""


def preload() -> None:
    """Start the process that ranks are forked from. It loads torch and the model code while this one goes on."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


def run_ranks(entry: Callable[..., Any], args: Sequence[Any], ranks: int, *, grace_seconds: float = 30.0) -> None:
    """Run `entry(*args)` in `ranks` new local ranks, through torchrun's agent, and return when all have ended well.

    `entry` is a module-level function. It finds its place with `engine.world.find_launch()`. What the ranks print
    passes through. A signal to this process goes to the ranks, which are killed after `grace_seconds`.

    Raises SystemExit when they did not end well: the first cause is then on stderr. Its code is 2 for an InputError,
    128 + n for signal n, else 1.
    """
    preload()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.11 always gives 30 s
    grace: dict[str, Any] = {"shutdown_timeout": math.ceil(grace_seconds)} if "shutdown_timeout" in known else {}
    with (
        tempfile.TemporaryDirectory(prefix="fedshard-") as folder,
        _signals_restored(),
        _sigterm_as_sigusr1() as terminated,
        _agent_silenced(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(each.name for each in FORWARDED),
            **grace,
        )
        try:
            elastic_launch(config, _rank)((entry, tuple(args)))  # packed: the agent rewrites `$` in arguments of text
        except ChildFailedError as error:
            failure = first_failure(error, Path(folder))
            print(failure.words, file=sys.stderr)
            raise SystemExit(failure.exit_code) from None
        except SignalException as stopped:
            number = signal.SIGTERM if terminated else stopped.sigval
            print(f"stopped by {number.name}", file=sys.stderr)
            raise SystemExit(128 + number) from None


def guard(entry: Callable[..., Any]) -> Callable[..., None]:
    """`entry` for a rank that someone else started (torchrun, srun, or nobody): on failure it prints what `run_ranks`
    would and ends this process with the same code, at once, whatever its process groups still wait for.
    """

    @functools.wraps(entry)
    def guarded(*args: Any) -> None:
        from fedshard.engine.world import find_launch

        _end_by(entry, args, find_launch().rank, alone=True)

    return guarded


def first_failure(error: ChildFailedError, folder: Path) -> Failure:
    """What failed first, by the ranks' records under `folder` and by what the agent saw."""
    rank, seen = error.get_first_failure()
    if not Path(seen.error_file).is_file():  # it died without a word, and before all that left one: see LINGER_SECONDS
        if seen.exitcode >= 0:
            how = f"exit code {seen.exitcode}"
        else:
            how = signal.Signals(-seen.exitcode).name + (", out of memory?" * (seen.exitcode == -signal.SIGKILL))
        return Failure(f"rank {rank}: ended without a word ({how})", 1, time.time_ns())
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("error.json")]
    failures = [Failure(**record["fedshard"]) for record in records]
    return min(failures, key=lambda failure: failure.failed_ns)


def end_with_parent() -> None:
    """From now on this process is killed when the one that started it is gone, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child has a parent to end with"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # not by an exception: the main thread may be deep in a collective

    threading.Thread(target=watch, daemon=True).start()


def _rank(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    """What one rank of `run_ranks` does."""
    from fedshard.engine.world import find_launch

    os.setsid()  # so that Ctrl-C reaches it once, through the parent
    _heed_ctrl_c()
    end_with_parent()
    entry, args = task
    _end_by(entry, args, find_launch().rank, alone=False)


def _heed_ctrl_c() -> None:
    """Ctrl-C raises KeyboardInterrupt as ever, and ends this process soon after, even if that is never raised."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # each signal's number arrives here at once, whatever the main thread is doing
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(INTERRUPT_SECONDS)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def _end_by(entry: Callable[..., Any], args: tuple[Any, ...], rank: int, alone: bool) -> None:
    """Run `entry`; if it fails, record why, print it if `alone`, and end the process."""
    from fedshard.engine.world import record_failure

    try:
        entry(*args)
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except BaseException as error:  # a checkpoint that fails to load is no Exception
        if not is_failure(error):
            if isinstance(error, Stopped) and not alone:
                _leave(0)  # at once: the agent was told to stop, and takes no results any more
            return
        failure = failure_of(error, rank)
        record_failure(error, rank)
        if alone:
            if _may_be_an_echo(error, rank):
                time.sleep(ECHO_SECONDS)
            print(failure.words, file=sys.stderr)
        elif not isinstance(error, InputError):
            time.sleep(LINGER_SECONDS)
        _leave(failure.exit_code)


def _may_be_an_echo(error: BaseException, rank: int) -> bool:
    """Whether another rank may have failed first, or says the same: rank 0 tells of wrong input for all."""
    if isinstance(error, InputError):
        return rank > 0
    return any(echo in str(error) for echo in ECHOES)


def _leave(exit_code: int) -> None:
    """End this process at once: an ordinary end would wait for process groups that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent handles signals in its own way and leaves it so; afterwards they are as before."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, *FORWARDED)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _sigterm_as_sigusr1() -> Iterator[list[int]]:
    """SIGTERM to this process becomes SIGUSR1, which the agent forwards; the list tells whether it came."""
    terminated: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        terminated.append(number)
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGTERM, pass_on)
    yield terminated


@contextmanager
def _agent_silenced() -> Iterator[None]:
    """The agent logs each process that it stops, with a traceback of its own; that would bury the first cause."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(silence)
            logger.propagate = True
