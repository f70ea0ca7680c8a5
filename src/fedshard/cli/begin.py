"""Where a run of `fedshard train` begins: at the start, or where a checkpoint left it.

--resume         the newest complete checkpoint of the run folder
--resume PATH    that checkpoint, in its own run folder or, with --into, in a new one
--resume auto    the newest of --into, or the start where there is none
"""

from __future__ import annotations

import time
from pathlib import Path

from fedshard.core.errors import Fault, InputError
from fedshard.engine.checkpoint import FOLDER, Start, incomplete_checkpoints, newest_whole, open_checkpoint


def find_start(recipe: Path | None, into: Path | None, resume: str | None, stop_after: str | None) -> Start:
    """From the recipe's path and the values of --into, --resume and --stop-after (None: not given, "": alone).

    Raises InputError where there is nothing to go on from.
    """
    stop = _step(stop_after)
    if resume is None:
        name = recipe.stem if recipe else "tiny"
        return Start(into or Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"), stop_after=stop)
    if resume not in ("", "auto"):
        checkpoint = open_checkpoint(Path(resume))
        folder = into or checkpoint.run
        return Start(folder, folder.resolve() == checkpoint.run, checkpoint, stop)
    folder = into or (recipe.parent if recipe and (recipe.parent / FOLDER).is_dir() else None)
    if folder is None:
        says = "needs to know which run goes on"
        mend = "Give its own recipe, RUN/recipe.toml, or --into RUN, or --resume RUN/checkpoints/step-…"
        raise InputError([Fault("--resume", says, mend)])
    checkpoint, skipped = newest_whole(folder)
    if checkpoint is None and resume == "":
        says = "has no complete checkpoint"
        raise InputError([Fault(str(folder), says, "Start anew, or write --resume auto to start where there is none.")])
    passed_over = [f"{path} was not finished, and is passed over" for path in incomplete_checkpoints(folder)]
    passed_over += [f"{fault.key} {fault.says}; its checkpoint is passed over" for fault in skipped]
    return Start(folder, True, checkpoint, stop, tuple(passed_over))


def _step(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError([Fault("--stop-after", f"{text!r} is no step", "Steps count from 1.")])
    return int(text)
