"""A tree of processes with a user, process, mount and network namespace of its own, in which an ordinary user is root.

Everything that is made there, devices and rates and mounts, exists nowhere else and is gone with the last process. The
first process of the tree reads a pipe from this one. Once the pipe is closed, whether on purpose or because this
process died, the first one ends; and the kernel then kills all others of the tree, however they came about.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedshard.core.errors import Fault, InputError

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "env": "coreutils"}
"""What must be installed, and the package that has it on most systems."""

SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Where `ip` and `tc` may be, and where an ordinary user's PATH need not look."""

NEEDS = "It needs Linux with namespaces for ordinary users, veth, bridges, and tc with htb, bfifo and u32."

CLOSE_SECONDS = 10.0
"""How long the tree may take to be gone: killed processes leave at once, but where the machine is busy."""

PREPARE = f"""\
PATH=$PATH:{SYSTEM_FOLDERS}
read -r pid rest < /proc/self/stat  # by its number outside: /proc is still the outer one
mount -t tmpfs none /run  # where `ip netns` keeps its names; the outer one belongs to root
mount -t proc none /proc
"""
"""What the first process does before it builds, in `sh`."""

WAIT = "echo $pid; exec cat\n"
"""What it does then: it tells its number, and waits until its input is closed."""


class Namespaces:
    """The tree, from the moment that it is built until `close`.

    `commands` are run one after the other, as its root, in its own network namespace. Raises InputError with one fault
    where this system lacks what is needed, which names the command that failed.
    """

    def __init__(self, commands: Sequence[str]):
        found = _find_tools()
        script = PREPARE + "".join(f"{command}\n" for command in commands) + WAIT
        options = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ex"]
        with tempfile.TemporaryFile() as errors:
            self._first = subprocess.Popen(
                [found["unshare"], *options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,  # Ctrl-C is for this process, which then closes the tree in order
            )  # fmt: skip
            told = self._tell(script)
            if not told:
                self.close()
                errors.seek(0)
                raise lacking(_last_words(errors.read().decode(errors="replace")))
        self._found = found
        self.pid = int(told)
        """The first process's number, outside of the tree."""

    def close(self) -> None:
        """End all processes of the tree, and wait until they are gone. Closing twice does nothing more."""
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        with suppress(BrokenPipeError):  # of what it has not read, if it has failed
            self._first.stdin.close()
        try:
            self._first.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._first.kill()  # and --kill-child does the rest
            self._first.wait()
        self._first.stdout.close()

    def devices(self) -> str:
        """The text of /proc/net/dev in the tree's own network namespace."""
        return Path(f"/proc/{self.pid}/net/dev").read_text(encoding="utf-8")

    def enter(self, name: str) -> list[str]:
        """The words before a command that make it run in the tree, in the network namespace of this name.

        The command becomes the first of another tree within, so that killing it kills all that it started.
        """
        enter = f"--target {self.pid} --user --preserve-credentials --mount --net --pid --".split()
        within = f"netns exec {name} {self._found['unshare']} --pid --fork --kill-child --mount-proc".split()
        return [self._found["nsenter"], *enter, self._found["ip"], *within]

    def _tell(self, script: str) -> bytes:
        """Give the first process its script, and return the line that it answers with: empty, if it has failed."""
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        try:
            self._first.stdin.write(script.encode())
            self._first.stdin.flush()
        except BrokenPipeError:  # it ended before it had read everything
            return b""
        return self._first.stdout.readline().strip()


def lacking(what: str) -> InputError:
    """The error that tells what this system lacks."""
    return InputError([Fault("emulation", f"not possible on this system ({what})", NEEDS)])


def _find_tools() -> dict[str, str]:
    """Where the tools are. Raises InputError on another system than Linux, and with all that are missing."""
    if sys.platform != "linux":
        raise lacking(sys.platform)
    found = {tool: shutil.which(tool) or shutil.which(tool, path=SYSTEM_FOLDERS) for tool in TOOLS}
    if missing := [tool for tool, path in found.items() if path is None]:
        packages = sorted({TOOLS[tool] for tool in missing})
        raise lacking(f"no {', '.join(missing)}, of {', '.join(packages)}")
    return {tool: path for tool, path in found.items() if path is not None}


def _last_words(errors: str) -> str:
    """The last command that `sh -x` told of, and what it said then; all that was said, where no command was reached."""
    _, mark, last = f"\n{errors}".rpartition("\n+ ")
    command, _, said = last.partition("\n") if mark else ("", "", last)
    words = " ".join(said.split()) or "failed without a word"
    return f"{command}: {words}" if command else words
