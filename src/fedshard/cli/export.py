"""`fedshard export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError

FLAGS = {"--to": "DIR", "--dtype": "float32|bfloat16", "--help": ""}

HELP = """\
usage: fedshard export CHECKPOINT --to DIR [--dtype float32|bfloat16]

Writes the global model of a checkpoint as a folder that transformers' `from_pretrained` reads: safetensors, config,
tokenizer. CHECKPOINT is RUN/checkpoints/step-…, or RUN for its newest. Training can start from the folder:
`--model.kind folder --model.path DIR`.

  --to DIR       the new folder
  --dtype TYPE   type of the weights in the files (default: float32, as they are stored)
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    dtype = given.flags.get("--dtype", "float32")
    faults = []
    if not given.paths:
        faults.append(Fault("CHECKPOINT", "missing", "Write fedshard export RUN/checkpoints/step-… --to DIR."))
    if "--to" not in given.flags:
        faults.append(Fault("--to", "missing", "Write --to DIR."))
    if dtype not in ("float32", "bfloat16"):
        faults.append(Fault("--dtype", f"no type {dtype!r}", "Types: float32, bfloat16."))
    faults += [Fault(word, "no such option", "See fedshard export --help.") for word in given.overrides[::2]]
    if faults:
        raise InputError(faults)
    import torch

    from fedshard.engine.checkpoint import FOLDER, newest_whole, open_checkpoint, passed_over
    from fedshard.engine.export import export

    path, to = Path(given.paths[0]), Path(given.flags["--to"])
    newest, skipped = newest_whole(path)
    if newest is None and (path / FOLDER).is_dir():
        raise InputError([*skipped, Fault(str(path), "has no complete checkpoint", "Give another run.")])
    checkpoint = newest or open_checkpoint(path)
    for line in [*passed_over(path, skipped), *export(checkpoint, to, getattr(torch, dtype))]:
        print(line, file=sys.stderr)
    print(f"{to}: step {checkpoint.step} of {checkpoint.run or checkpoint.path}, {dtype}")
