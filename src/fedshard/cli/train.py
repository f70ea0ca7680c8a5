"""`fedshard train`: starts the local ranks itself, or joins those of torchrun and srun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedshard.cli.begin import find_start
from fedshard.cli.words import read_words
from fedshard.core.course import Course
from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe
from fedshard.core.recipe_keys import describe_keys
from fedshard.engine.checkpoint import FOLDER, Start

if TYPE_CHECKING:
    from fedshard.engine.world import Launch

FLAGS = {
    "--into": "DIR",
    "--resume": "[PATH]",
    "--stop-after": "STEP",
    "--dry-run": "",
    "--json": "",
    "--help": "",
}

HELP = """\
usage: fedshard train [RECIPE.toml] [--section.key value …] [--into DIR] [--resume [PATH]] [--stop-after STEP]
                      [--dry-run] [--json]

Trains what the recipe says; without one, `tiny`: a small model on the Python standard library's source, in two groups
of two ranks on this machine. Under torchrun or srun it joins their ranks.

  --into DIR         the run folder (default: runs/NAME-TIME); must not exist
  --resume           go on from the newest complete checkpoint of the run whose recipe it is, or of --into
  --resume PATH      go on from that checkpoint; with --into in a new run folder
  --resume auto      go on if --into has a checkpoint, else start
  --stop-after STEP  stop after this step, with a checkpoint and without a round of its own
  --dry-run          print layout, memory, tokens per step and bytes per round, and stop
  --json             the result as JSON on stdout

Every key of the recipe can be set:

"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP + describe_keys(), end="")
        return
    path = Path(given.paths[0]) if given.paths else None
    if "--dry-run" in given.flags:
        from fedshard.cli.dry_run import dry_run

        dry_run(read_recipe(path, given.overrides), cache_folder())
        return
    into = Path(given.flags["--into"]) if "--into" in given.flags else None
    begin = find_start(path, into, given.flags.get("--resume"), given.flags.get("--stop-after"))
    if path is None and begin.checkpoint is not None:
        path = begin.checkpoint.path / "recipe.toml"
    start(read_recipe(path, given.overrides), begin, "--json" in given.flags)


def start(recipe: Recipe, begin: Start, as_json: bool) -> None:
    """Train on ranks that run already, or on new local ones. Raises InputError with all that is wrong before."""
    from fedshard.engine.launch import guard, preload, run_ranks

    launcher = {"RANK", "SLURM_PROCID"} & set(os.environ)
    if not launcher and recipe.shape.ranks > 1:
        preload()  # what ranks are forked from loads torch while this process looks for faults
    from fedshard.engine.train import train_on_rank
    from fedshard.engine.world import find_launch

    launch, ranks = find_launch(), recipe.shape.ranks
    args = (recipe, begin, cache_folder(), as_json)
    if launch.how != "none":
        guard(check_and_train)(*args)
        return
    check_all(recipe, begin, cache_folder(), replace(launch, ranks=ranks, local_ranks=ranks))
    if finished(recipe, begin):
        return
    if ranks == 1:
        guard(train_on_rank)(*args)
    else:
        run_ranks(train_on_rank, args, ranks, grace_seconds=recipe.checkpoint.grace_seconds)


def check_and_train(recipe: Recipe, begin: Start, cache: Path, as_json: bool) -> None:
    """What a rank of torchrun or srun does: each looks for faults itself, before any process group exists.

    All prepare the data, too: while one of them tokenises, the others wait for it here, where no time-out runs.
    """
    from fedshard.engine.job import check
    from fedshard.engine.train import train_on_rank
    from fedshard.engine.world import check_ranks, find_launch

    launch = find_launch()
    check_ranks(recipe.shape, launch)
    if launch.rank == 0:
        check_all(recipe, begin, cache, launch)
    else:
        check(recipe, cache)
    if not finished(recipe, begin, quiet=launch.rank > 0):
        train_on_rank(recipe, begin, cache, as_json)


def check_all(recipe: Recipe, begin: Start, cache: Path, launch: Launch) -> None:
    """All faults of recipe, model, data, folder, devices and checkpoint at once. Raises InputError."""
    import torch

    from fedshard.engine.job import check
    from fedshard.engine.resume import check_resume
    from fedshard.engine.trackers import missing_trackers
    from fedshard.engine.world import own_device

    for line in begin.passed_over:
        print(line, file=sys.stderr)
    faults = [*missing_trackers(recipe), *folder_faults(begin.into, may_exist=begin.resume)]
    devices = torch.cuda.device_count()

    def look_at_checkpoint() -> None:
        if begin.checkpoint is not None:
            for line in check_resume(begin.checkpoint, recipe, cache):
                print(line, file=sys.stderr)

    looks = (lambda: own_device(recipe.train.device, launch, devices), lambda: check(recipe, cache), look_at_checkpoint)
    for look in looks:
        try:
            look()
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(dict.fromkeys(faults))  # a folder that is gone is missed by two of them


def finished(recipe: Recipe, begin: Start, quiet: bool = False) -> bool:
    """Whether there is nothing left to train; then says so."""
    if begin.checkpoint is None or begin.checkpoint.step < Course.of(recipe, begin.checkpoint.cursor().done).steps:
        return False
    if not quiet:
        what = begin.checkpoint.run or begin.checkpoint.path
        print(f"{what} is finished: step {begin.checkpoint.step}; a larger budget would go on from it")
    return True


def folder_faults(into: Path, *, may_exist: bool) -> Iterator[Fault]:
    """Why a run cannot be written to `into`, as far as can be seen without making anything."""
    mend = "Give another folder with --into DIR."
    if os.path.lexists(into) and not may_exist:  # Path.exists fails at a name that no file can have
        yield Fault(str(into), "exists already", mend)
        return
    nearest = next(folder for folder in (into.absolute(), *into.absolute().parents) if os.path.lexists(folder))
    saved = into / FOLDER
    for folder in (nearest, saved) if os.path.lexists(saved) else (nearest,):
        if not folder.is_dir():
            yield Fault(str(into), f"{folder} is no folder", mend)
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Fault(str(into), f"{folder} cannot be written to", mend)


def cache_folder() -> Path:
    """Where tokenised data are kept: $FEDSHARD_CACHE, or fedshard in the user's cache folder."""
    given = os.environ.get("FEDSHARD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshard"
