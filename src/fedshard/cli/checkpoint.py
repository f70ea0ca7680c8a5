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
    FOLDER,
    Checkpoint,
    complete_checkpoints,
    find_checkpoint,
    incomplete_checkpoints,
)

FLAGS = {"--json": "", "--help": ""}

HELP = """\
usage: fedshard checkpoint list RUN [--json]
       fedshard checkpoint verify RUN|CHECKPOINT

list     a run's checkpoints: step, tokens, layout, size; those that are not finished, or cut short
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
    rows, faults = [], list[Fault]()
    for checkpoint in complete_checkpoints(run_folder):
        try:
            found = checkpoint.check_sizes()
            rows += [describe(checkpoint)] if not found else []
        except InputError as error:
            found = error.faults
        faults += found
    unfinished = [path.name for path in incomplete_checkpoints(run_folder)]
    if as_json:
        tree = {"checkpoints": rows, "unfinished": unfinished, "damaged": [fault.key for fault in faults]}
        print(json.dumps(tree, indent=2))
        return
    for row in rows:
        between = "" if row["round_end"] else "  between two rounds"
        size, tokens = format_bytes(row["bytes"]), format_count(row["tokens"])
        print(
            f"step {row['step']:>8}  {tokens:>8} tokens  round {row['round']:>5}  {row['layout']:10} {size:>9}{between}"
        )
    for name in unfinished:
        print(f"{name}: not finished")
    for fault in faults:
        print(f"{fault.key} {fault.says}")
    if not rows and not unfinished and not faults:
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
    is_run = (path / FOLDER).is_dir()
    checkpoints = complete_checkpoints(path) if is_run else [find_checkpoint(path)]
    if not checkpoints:
        raise InputError([Fault(str(path), "has no complete checkpoint", "Give another run.")])
    faults: list[Fault] = []
    for checkpoint in checkpoints:
        try:
            found = checkpoint.verify()
        except InputError as error:
            found = error.faults
        faults += found
        if not found:
            print(f"{checkpoint.path}: {len(checkpoint.files())} files, all as they were written")
    if faults:
        raise RunError("; ".join(f"{fault.key} {fault.says}" for fault in faults))
