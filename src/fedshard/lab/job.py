"""A command on each node at the same time: the first failure ends them all, and node 0 is the one that is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from fedshard.core.errors import RunError

POLL_SECONDS = 0.02
"""How often the commands are looked at. One that fails because of another one's failure is seldom seen before it."""

GRACE_SECONDS = 5.0
"""How long commands that are told to stop may take; then they are killed."""

LAST_LINES = 20
"""How much is shown of what a failed node said, where it was not heard before."""

PASSED_ON = "INT,TERM"
"""Signals for the commands, not for the processes around them, which wait for the commands to end."""


class Job:
    """One process per node, each given by the words before its command (`enter`) and the command itself.

    Node 0's output passes through. What the others say is shown if they fail.
    """

    def __init__(self, starts: Sequence[tuple[Sequence[str], Sequence[str]]]):
        others = [tempfile.TemporaryFile() for _ in starts[1:]]  # noqa: SIM115 (`stop` closes them)
        self._outputs: list[IO[bytes] | None] = [None, *others]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for (enter, command), output in zip(starts, self._outputs, strict=True):
                self._processes.append(_start(enter, command, output))
        except BaseException:
            self.stop(0)
            raise

    @property
    def running(self) -> bool:
        """Whether the command of any node still runs."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, seconds: float | None = None) -> None:
        """Return when all have ended well.

        Raises RunError when one has not, or has not within so many seconds; it and Ctrl-C end the others.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while self.running and not self._failed():
                if deadline is not None and time.monotonic() > deadline:
                    raise RunError(f"not done after {seconds:g} s on node {self._slow()}")
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self.stop(number=signal.SIGINT)
            raise
        except RunError:
            self.stop()
            raise
        if failed := self._failed():
            words = self._words(failed[0])
            self.stop()
            raise RunError(words)
        self.stop(0)

    def stop(self, grace_seconds: float = GRACE_SECONDS, number: int = signal.SIGTERM) -> None:
        """Send a signal to all that still run, and kill those that have not ended after the grace."""
        deadline = time.monotonic() + grace_seconds
        if grace_seconds:
            self._send(number)
            while self.running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for output in self._outputs:
            if output is not None:
                output.close()

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _failed(self) -> list[int]:
        return [node for node, process in enumerate(self._processes) if process.poll() not in (None, 0)]

    def _slow(self) -> int:
        """The first node whose command still runs."""
        return next(node for node, process in enumerate(self._processes) if process.poll() is None)

    def _words(self, node: int) -> str:
        """How this node's command failed, below the end of what it said unless that was heard before."""
        code = self._processes[node].returncode
        how = f"node {node}: ended by {signal.Signals(-code).name}" if code < 0 else f"node {node}: exit code {code}"
        output = self._outputs[node]
        if output is None:
            return how
        output.seek(0)
        said = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([how, *said]) if said else how


def _start(enter: Sequence[str], command: Sequence[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    around = ["env", f"--ignore-signal={PASSED_ON}", *enter]
    # The shell takes the place of the first process of the node's tree, which ignores signals that it does not handle.
    inside = ["env", f"--default-signal={PASSED_ON}", f"--chdir={os.getcwd()}", "sh", "-c", '"$@"; exit $?', "sh"]
    return subprocess.Popen(
        [*around, *inside, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process, which passes it on
    )
