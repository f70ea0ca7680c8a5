"""Where a run of `fedshard train` begins: at the start, or where a checkpoint left it.

--resume         the newest complete checkpoint of the run folder
--resume PATH    that checkpoint, in its own run folder or, with --into, in a new one
--resume auto    the newest of --into, or the start where there is none
"""

from __future__ import annotations

import time
from pathlib import Path

from fedshard.core.errors import Fault, InputError
from fedshard.engine.checkpoint import FOLDER, Start, newest_whole, open_checkpoint, passed_over


def find_start(recipe: Path | None, into: Path | None, resume: str | None, stop_after: str | None) -> Start:
    """From the recipe's path and the values of --into, --resume and --stop-after (None: not given, "": alone).

    Raises InputError where there is nothing to go on from.
    """
    stop = _step(stop_after)
    if resume is None:
        name = recipe.stem if recipe else "tiny"
        return Start(into or Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"), stop_after=stop)
    if resume not in ("", "auto"):
        return _from_checkpoint(Path(resume), into, stop)
    folder = into or (recipe.parent if recipe and (recipe.parent / FOLDER).is_dir() else None)
    if folder is None:
        says = "needs to know which run goes on"
        mend = "Give its own recipe, RUN/recipe.toml, or --into RUN, or --resume RUN/checkpoints/step-…"
        raise InputError([Fault("--resume", says, mend)])
    checkpoint, skipped = newest_whole(folder)
    if checkpoint is None and resume == "":
        says = "has no complete checkpoint"
        mend = "Start anew, or write --resume auto to start where there is none."
        raise InputError([*skipped, Fault(str(folder), says, mend)])
    if checkpoint is None and skipped:  # to start anew would throw away what may be mended
        mend = "Mend it, or move the run folder away to start anew."
        raise InputError([*skipped, Fault(str(folder), "has checkpoints, and all of them are damaged", mend)])
    return Start(folder, True, checkpoint, stop, tuple(passed_over(folder, skipped)))


def _from_checkpoint(path: Path, into: Path | None, stop: int | None) -> Start:
    if path.is_file():
        raise InputError([Fault("--resume", f"{path} is no checkpoint", f"Write fedshard train {path} --resume.")])
    checkpoint = open_checkpoint(path)
    run = checkpoint.run
    if into is None and run is None:
        says = f"{path} is not among the checkpoints of a run"
        raise InputError([Fault("--resume", says, "Say with --into NEW where to go on.")])
    folder = into or run
    assert folder is not None
    return Start(folder, folder.resolve() == run, checkpoint, stop)


def _step(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError([Fault("--stop-after", f"{text!r} is no step", "Steps count from 1.")])
    return int(text)
