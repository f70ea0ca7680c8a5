"""`fedshard train`: starts the local ranks itself, or joins those of torchrun and srun."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe
from fedshard.core.recipe_keys import describe_keys

FLAGS = {"--into": "DIR", "--dry-run": "", "--json": "", "--help": ""}

HELP = """\
usage: fedshard train [RECIPE.toml] [--section.key value …] [--into DIR] [--dry-run] [--json]

Trains what the recipe says; without one, `tiny`: a small model on the Python standard library's source, in two groups
of two ranks on this machine. Under torchrun or srun it joins their ranks.

  --into DIR    the run folder (default: runs/NAME-TIME); must not exist
  --dry-run     print layout, memory, tokens per step and bytes per round, and stop
  --json        the result as JSON on stdout

Every key of the recipe can be set:

"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP + describe_keys(), end="")
        return
    path = Path(given.paths[0]) if given.paths else None
    recipe = read_recipe(path, given.overrides)
    if "--dry-run" in given.flags:
        from fedshard.cli.dry_run import dry_run

        dry_run(recipe, cache_folder())
        return
    name = path.stem if path else "tiny"
    into = Path(given.flags.get("--into") or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    start(recipe, into, "--json" in given.flags)


def start(recipe: Recipe, into: Path, as_json: bool) -> None:
    """Train on ranks that run already, or on new local ones. Raises InputError with all that is wrong before."""
    from fedshard.engine.launch import guard, preload, run_ranks

    launcher = {"RANK", "SLURM_PROCID"} & set(os.environ)
    if not launcher and recipe.shape.ranks > 1:
        preload()  # what ranks are forked from loads torch while this process looks for faults
    from fedshard.engine.train import train_on_rank
    from fedshard.engine.world import find_launch

    launch = find_launch()
    args = (recipe, into, cache_folder(), as_json)
    if launch.how != "none":
        guard(check_and_train)(*args)
        return
    check_all(*args)
    if recipe.shape.ranks == 1:
        guard(train_on_rank)(*args)
    else:
        run_ranks(train_on_rank, args, recipe.shape.ranks)


def check_and_train(recipe: Recipe, into: Path, cache: Path, as_json: bool) -> None:
    """What a rank of torchrun or srun does: each looks for faults itself, before any process group exists."""
    from fedshard.engine.train import train_on_rank
    from fedshard.engine.world import check_ranks, find_launch

    launch = find_launch()
    check_ranks(recipe.shape, launch)
    if launch.rank == 0:
        check_all(recipe, into, cache, as_json)
    train_on_rank(recipe, into, cache, as_json)


def check_all(recipe: Recipe, into: Path, cache: Path, as_json: bool) -> None:
    """All faults of recipe, model, data and folder at once. Raises InputError."""
    from fedshard.engine.job import check
    from fedshard.engine.trackers import missing_trackers

    faults = list(missing_trackers(recipe))
    if into.exists():
        faults.append(Fault(str(into), "exists already", "Give another folder with --into DIR."))
    try:
        check(recipe, cache)
    except InputError as error:
        faults += error.faults
    if faults:
        raise InputError(faults)


def cache_folder() -> Path:
    """Where tokenised data are kept: $FEDSHARD_CACHE, or fedshard in the user's cache folder."""
    given = os.environ.get("FEDSHARD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshard"
