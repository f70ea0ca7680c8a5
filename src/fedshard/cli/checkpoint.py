"""`fedshard checkpoint list|verify`: which checkpoints a run has, and whether they are as they were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.units import format_bytes, format_count
from fedshard.engine.checkpoint import (
    COMPLETE,
    FOLDER,
    Checkpoint,
    complete_checkpoints,
    incomplete_checkpoints,
    open_checkpoint,
)

FLAGS = {"--json": "", "--help": ""}

HELP = """\
usage: fedshard checkpoint list RUN [--json]
       fedshard checkpoint verify RUN|CHECKPOINT

list     a run's checkpoints: step, tokens, layout, size
verify   reads every file of them and compares sizes and SHA-256; names what is damaged, and then exits with 1
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS, most_paths=2)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    faults = [Fault(word, "no such option", "See fedshard checkpoint --help.") for word in given.overrides[::2]]
    if len(given.paths) < 2 or given.paths[0] not in ("list", "verify"):
        faults.append(Fault(" ".join(given.paths) or "checkpoint", "says too little", "Write list RUN or verify RUN."))
    if faults:
        raise InputError(faults)
    path = Path(given.paths[1])
    if given.paths[0] == "list":
        show(path, as_json="--json" in given.flags)
    else:
        verify(path)


def show(run_folder: Path, *, as_json: bool) -> None:
    """The table on stdout. Raises InputError where there is no such run."""
    if not run_folder.is_dir():
        raise InputError([Fault(str(run_folder), "no such run", "Give a run folder.")])
    rows = [describe(each) for each in complete_checkpoints(run_folder)]
    unfinished = [path.name for path in incomplete_checkpoints(run_folder)]
    if as_json:
        print(json.dumps({"checkpoints": rows, "unfinished": unfinished}, indent=2))
        return
    for row in rows:
        between = "" if row["round_end"] else "  between two rounds"
        size, tokens = format_bytes(row["bytes"]), format_count(row["tokens"])
        print(
            f"step {row['step']:>8}  {tokens:>8} tokens  round {row['round']:>5}  {row['layout']:10} {size:>9}{between}"
        )
    for name in unfinished:
        print(f"{name}: not finished")
    if not rows and not unfinished:
        print(f"{run_folder} has no checkpoints")


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """One row of the table."""
    cursor = checkpoint.cursor()
    return {
        "step": checkpoint.step,
        "tokens": cursor.tokens,
        "round": cursor.round,
        "round_end": cursor.together,
        "layout": str(checkpoint.layout()),
        "bytes": sum(known.bytes for known in checkpoint.files().values()),
        "path": str(checkpoint.path),
    }


def verify(path: Path) -> None:
    """One line for each checkpoint that is whole. Raises RunError that names what is damaged."""
    checkpoints = complete_checkpoints(path) if (path / FOLDER).is_dir() else [Checkpoint(path)]
    if not checkpoints or not (checkpoints[0].path / COMPLETE).is_file():
        open_checkpoint(path)  # says what is wrong with it
    faults: list[Fault] = []
    for checkpoint in checkpoints:
        found = checkpoint.verify()
        faults += found
        if not found:
            print(f"{checkpoint.path}: {len(checkpoint.files())} files, all as they were written")
    if faults:
        raise RunError("; ".join(f"{fault.key} {fault.says}" for fault in faults))
