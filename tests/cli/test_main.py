"""Finding the command, and what its errors become: a message on stderr and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import ModuleType

import pytest

import fedshard
from fedshard.cli.main import COMMANDS, main
from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.recipe_keys import all_keys
from fedshard.engine.launch import ECHO_SECONDS

WRONG = InputError([Fault("sync.every", "0 steps", "Set 1."), Fault("data.path", "missing", "Give it.")])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """`failing(error)`: from now on the command `train` raises it."""

    def fail_with(error: BaseException) -> None:
        def run(words: list[str]) -> None:
            raise error

        command = ModuleType("fedshard.cli.train")
        command.run = run  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "fedshard.cli.train", command)

    return fail_with


def exit_code(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return stopped.value.code


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_every_command_is_listed(capsys, words):
    main(words)
    said = capsys.readouterr()
    assert said.out.startswith(f"fedshard {fedshard.__version__}")
    assert all(f"\n  {name} " in said.out and line in said.out for name, line in COMMANDS.items())
    assert said.err == ""


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"{fedshard.__version__}\n"


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "-h"), ("train", "r.toml", "--help")])
def test_help_of_train_has_every_flag_and_key(capsys, words):
    main(words)
    lines = capsys.readouterr().out.splitlines()
    keys = set(all_keys())
    assert {"sync.outer.momentum", "model.path", "layout.groups"} <= keys
    told = {line.split()[0] for line in lines if line.startswith("  --")}
    assert told == {"--into", "--resume", "--stop-after", "--dry-run", "--json"} | {f"--{key}" for key in keys}


@pytest.mark.parametrize(
    ("word", "mend"),
    [("trian", "Did you mean train?"), ("deploy", f"Commands: {', '.join(COMMANDS)}."), ("--train", "Did you mean")],
)
def test_a_command_that_does_not_exist(capsys, word, mend):
    assert exit_code(word) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"fedshard: {word}: no such command. {mend}")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (WRONG, 2, "fedshard: sync.every: 0 steps. Set 1.\nfedshard: data.path: missing. Give it.\n"),
        (RunError("groups differ"), 1, "fedshard: groups differ\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(7), 7, ""),
    ],
)
def test_errors_become_a_message_and_an_exit_code(capsys, failing, error, code, said):
    failing(error)
    assert exit_code("train") == code
    assert capsys.readouterr().err == said


def test_a_fault_of_ours_keeps_its_traceback(failing):
    failing(ValueError("ours"))
    with pytest.raises(ValueError, match="ours"):
        main(["train"])


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [({"RANK": "0", "SLURM_PROCID": "3"}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "1"}, False), ({}, True)],
)
def test_of_many_ranks_the_first_one_tells_of_wrong_input(capsys, failing, monkeypatch, environ, speaks):
    """The others give it the time in which their launcher ends them."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    failing(WRONG)
    assert exit_code("train") == 2
    assert waits == ([] if speaks else [ECHO_SECONDS])
    assert "sync.every" in capsys.readouterr().err  # with no launcher to end it, it says so itself


TORCHLESS = """
import sys
from fedshard.cli.main import main
for words in (["--help"], ["train", "--help"], ["train", "--sync.evry", "3"], ["train", "--jsn"], ["trian"]):
    try:
        main(words)
    except SystemExit as stopped:
        print("exit code", stopped.code)
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def test_neither_help_nor_a_refused_recipe_loads_torch():
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    done = subprocess.run(
        [sys.executable, "-c", TORCHLESS], capture_output=True, text=True, timeout=30, check=True, env=environ
    )
    assert done.stdout.endswith("exit code 2\nexit code 2\nexit code 2\nFalse False\n")
    assert done.stderr.count("fedshard: ") == 3
