"""`fedshard COMMAND …`: finds the command, and turns its errors into a message and an exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

import fedshard
from fedshard.core.errors import Fault, FedshardError, InputError

COMMANDS = {
    "train": "train a model: in groups, by rounds, on the ranks of this machine or of torchrun and srun",
    "export": "write a checkpoint as a Hugging Face folder",
    "probe": "measure links and devices, and write them as a cluster's file",
    "plan": "which layout, which batch, which H, does it fit, how fast",
    "simulate": "a recipe's steps and rounds on a cluster, as discrete events",
    "checkpoint": "list a run's checkpoints, or verify them",
    "report": "a page and figures about runs",
    "emulate": "run any command on every node of a cluster that exists on this machine only",
}
"""The commands, each with its line of help; `fedshard.cli.NAME` holds it as `run(words)`."""

USAGE = f"""\
fedshard {fedshard.__version__}: federated averaging of FSDP and HSDP shards

usage: fedshard COMMAND …

""" + "".join(f"  {name:10} {line}\n" for name, line in COMMANDS.items())

OTHER = "\n  -h, --help     this text; after a command, the command's\n  --version      the version\n"


def main(words: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    try:
        dispatch(list(sys.argv[1:] if words is None else words))
    except InputError as error:
        _let_rank_0_speak()
        for fault in error.faults:
            print(f"fedshard: {fault}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except FedshardError as error:
        print(f"fedshard: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def dispatch(words: list[str]) -> None:
    """Call the command that the first word names. Raises InputError if there is none of that name."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE + OTHER, end="")
    elif words[0] == "--version":
        print(fedshard.__version__)
    elif words[0] in COMMANDS:
        import_module(f"fedshard.cli.{words[0]}").run(words[1:])
    else:
        raise InputError([_no_such_command(words[0])])


def _let_rank_0_speak() -> None:
    """Every rank of a launcher reads the same words and finds the same faults: the first one tells of them, and its
    launcher then stops the others."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        from fedshard.engine.launch import ECHO_SECONDS

        time.sleep(ECHO_SECONDS)


def _no_such_command(word: str) -> Fault:
    import difflib

    nearest = difflib.get_close_matches(word, COMMANDS, 1)
    mend = f"Did you mean {nearest[0]}?" if nearest else f"Commands: {', '.join(COMMANDS)}."
    return Fault(word, "no such command", mend)
