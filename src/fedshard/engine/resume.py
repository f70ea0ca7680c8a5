"""Going on from a checkpoint: whether this recipe may, and a job that stands where the saved one stood."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fedshard.core.course import Course
from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_changes import changed_keys, forbidden_changes
from fedshard.engine.checkpoint import GLOBAL, Checkpoint, Cursor, group_folder
from fedshard.engine.config import read_config
from fedshard.engine.job import Job, open_corpus
from fedshard.engine.merge import open_own, open_shared
from fedshard.engine.model import build_on_meta, some_of
from fedshard.engine.parameters import named_parameters
from fedshard.engine.slices import Slices
from fedshard.engine.state import restore

UNBOUND = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Fields of a config that say nothing of the model's values."""


def check_resume(checkpoint: Checkpoint, recipe: Recipe, cache: Path) -> list[str]:
    """What the run will do differently from here on, in words. Raises InputError with all that it must not."""
    saved, cursor = checkpoint.recipe(), checkpoint.cursor()
    faults = list(forbidden_changes(saved, recipe))
    steps = Course.of(recipe, cursor.done).steps
    if steps < cursor.step:
        says = f"ends at step {steps}, and the checkpoint is of step {cursor.step}"
        faults.append(Fault("budget", says, "Give a larger one."))
    faults += _anchor_faults(checkpoint, cursor, saved, recipe)
    if not faults:
        faults += _data_faults(cursor, recipe, cache)
        faults += _model_faults(checkpoint, cursor, recipe)
    if faults:
        raise InputError(faults)
    quiet = ("budget.", "checkpoint.", "log.", "evaluate.")
    changes = [each for each in changed_keys(saved, recipe) if not each[0].startswith(quiet)]
    return [f"from step {cursor.step + 1} on {key} is {now}, it was {before}" for key, before, now in changes]


def take_up(job: Job, checkpoint: Checkpoint) -> Cursor:
    """Give a job that was made empty all that was saved; where it stands now.

    Raises InputError where the checkpoint cannot be read.
    """
    saved, groups, timetable = checkpoint.cursor(), job.world.layout.groups, job.course.timetable
    cursor, regrouped = saved, checkpoint.layout().groups != groups
    if regrouped and not saved.together:  # the round that was pending is done while loading
        cursor = replace(cursor, round=cursor.round + 1, together=True, synchronous=False)
    warming_up = job.federation.federates and timetable.synchronous(saved.step + 1)
    if cursor.together and not warming_up:  # whatever comes now begins here, as after a round
        cursor = replace(cursor, synchronous=False, label_tokens=[0] * groups)
    if regrouped:
        cursor = replace(cursor, label_tokens=[0] * groups, skipped=[0] * groups)
    with ExitStack() as files:
        restore(
            job,
            open_shared(checkpoint, saved, groups, files),
            open_own(checkpoint, job.world.place, groups, job.recipe.checkpoint.moments, files),
            rounds=cursor.round,
            synchronous=cursor.synchronous,
            anchored=cursor.synchronous or not saved.synchronous,
            same_outer=checkpoint.recipe().sync.outer.kind == job.recipe.sync.outer.kind,
        )
    job.feed.cursor = cursor.sequences[0 if regrouped else job.world.place.group]
    return cursor


def _anchor_faults(checkpoint: Checkpoint, cursor: Cursor, saved: Recipe, now: Recipe) -> Iterator[Fault]:
    """In mid-round the anchor is nowhere but in the checkpoint."""
    kept, wanted = (each.sync.anchor or each.sync.outer.kind != "mean" for each in (saved, now))
    same = saved.layout.groups == now.layout.groups
    if same and wanted and not kept and not cursor.together:
        says = f"needs the anchor, and {checkpoint.path.name}, saved between two rounds, has none"
        yield Fault("sync.outer.kind", says, "Resume as it was, or from a checkpoint at a round's end.")


def _data_faults(cursor: Cursor, recipe: Recipe, cache: Path) -> Iterator[Fault]:
    config = read_config(recipe.model)
    sources = recipe.data.sources or (None,)
    for source, fingerprint in zip(sources, cursor.data, strict=False):  # groups without sources read the same
        if open_corpus(recipe, config, cache, source, quiet=True).fingerprint != fingerprint:
            says = (
                f"{source or recipe.data.path or recipe.data.kind} holds other data than when the checkpoint was saved"
            )
            yield Fault("data", says, "Give the same files.")


def _model_faults(checkpoint: Checkpoint, cursor: Cursor, recipe: Recipe) -> Iterator[Fault]:
    """The config and the tensors of the checkpoint against those of the model."""
    config, before = read_config(recipe.model), checkpoint.config()
    now = json.loads(config.to_json_string(use_diff=False))
    for key in sorted(before.keys() & now.keys() - UNBOUND):  # other releases of transformers may have other fields
        if before[key] != now[key]:
            says = f"is {now[key]!r}, and was {before[key]!r} when the checkpoint was saved"
            yield Fault(f"model.{key}", says, "Resume with the model that was saved.")
    with Slices(checkpoint.path / (GLOBAL if cursor.together else group_folder(0))) as slices:
        saved = slices.shapes("weights")
    wanted = {name: tuple(parameter.shape) for name, parameter in named_parameters(build_on_meta(config)).items()}
    differ = [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]
    if differ:
        says = f"differs from the checkpoint's in {some_of(differ)}"
        yield Fault("model", says, "Resume with the model that was saved.")
