"""Why a rank failed, in words for a person and in a form that travels between processes."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass

from fedshard.core.errors import FedshardError, InputError

LAST_FRAMES = 8
"""How much of a failed rank's traceback is shown."""


class Stopped(SystemExit):
    """A signal asked all ranks to stop, and this one has: no failure."""


@dataclass(frozen=True)
class Failure:
    """Why one rank failed: what to print, the exit code it gives the job, and when (nanoseconds since the epoch)."""

    words: str
    exit_code: int
    failed_ns: int


def is_failure(error: BaseException) -> bool:
    """Whether what ends a rank is a failure of its own: not Ctrl-C, and not leaving on purpose with exit code 0."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def failure_of(error: BaseException, rank: int) -> Failure:
    """Why `rank` failed, in words for a person: errors raised on purpose by their message, others with the last frames
    of their traceback above it."""
    now = time.time_ns()
    if isinstance(error, InputError):
        return Failure(str(error), error.exit_code, now)
    if isinstance(error, FedshardError):
        return Failure(f"rank {rank}: {error}", error.exit_code, now)
    told = traceback.TracebackException.from_exception(error, limit=-LAST_FRAMES)
    message = "".join(told.format_exception_only())
    frames = "".join(told.format()).removesuffix(message)
    return Failure(f"{frames}rank {rank}: {message.rstrip()}", 1, now)
