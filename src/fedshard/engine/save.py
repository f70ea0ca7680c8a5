"""Saving a checkpoint: every rank writes its slices, the first one makes it complete.

training thread        copies the state (asynchronous), or waits for all that follows
each rank              writes its files, under a name that says "unfinished"
rank 0                 hears from all (a process group of its own, with its own time-out), then indices, recipe,
                       cursor, COMPLETE, rename, and older checkpoints go
all ranks              hear whether it went well
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedshard.core.errors import RunError
from fedshard.core.recipe_file import write_recipe
from fedshard.engine.agree import agree
from fedshard.engine.checkpoint import (
    ASIDE,
    COMPLETE,
    FOLDER,
    UNFINISHED,
    Complete,
    Cursor,
    KnownFile,
    complete_checkpoints,
    doomed,
    folder_name,
    incomplete_checkpoints,
    sha256,
    write_json,
)
from fedshard.engine.job import Job
from fedshard.engine.log import Log
from fedshard.engine.slices import INDEX, Slice, merge_entries, write_slices
from fedshard.engine.state import State, capture
from fedshard.engine.step import Skips


@dataclass(frozen=True)
class Written:
    """What one rank has done for a checkpoint."""

    files: dict[str, KnownFile]
    """By name below the checkpoint."""
    indices: dict[str, dict[str, Any]]
    """By folder: entries of the index."""
    error: str | None = None


class Saver:
    """Saves the state of one run into its folder; the same calls in the same order on every rank."""

    def __init__(self, job: Job, run: Path, saved_step: int = 0):
        """`saved_step`: the step of the checkpoint that the run goes on from, if it lies in this run."""
        self.held_seconds = 0.0
        """How long training was held up by all saves so far."""
        self.last_step = saved_step
        self._job, self._folder, self._section = job, run / FOLDER, job.recipe.checkpoint
        self._thread = ThreadPoolExecutor(1, "checkpoint") if self._section.async_ else None
        self._writing: Future[None] | None = None
        self._copies: State = {}
        fingerprints: list[str] = [""] * job.world.layout.ranks
        dist.all_gather_object(fingerprints, job.corpus.fingerprint, group=job.world.control)
        self._data = fingerprints[:: job.world.layout.group_ranks]  # one for each group

    def due(self, step: int, *, together: bool) -> bool:
        """Whether a checkpoint is saved after this step: what is due between rounds waits for the round."""
        every = self._section.every
        return every > 0 and step // every > self.last_step // every and (together or self._section.mid_round)

    def save(self, step: int, log: Log, skips: Skips, label_tokens: int, *, together: bool) -> None:
        """Save the state after `step`. Asynchronous: returns when it is copied; an earlier save is waited for.

        `label_tokens`: this rank's since the last round. `together` as in `Cursor`.
        Raises RunError, on every rank, where this checkpoint (or the earlier one) could not be written.
        """
        began = time.perf_counter()
        self.wait()
        cursor = self._cursor(step, log, skips, label_tokens, together)
        state = capture(self._job, together=together)
        self.last_step = step
        if self._thread is None:
            self._write(state, cursor)
        else:
            self._copies = copied(state, self._copies)
            self._writing = self._thread.submit(self._write, self._copies, cursor)
        self.held_seconds += time.perf_counter() - began

    def _cursor(self, step: int, log: Log, skips: Skips, label_tokens: int, together: bool) -> Cursor:
        """Where the run stands; what only a group knows, all learn here."""
        job, world = self._job, self._job.world
        known = torch.zeros(world.layout.groups, 3, dtype=torch.float64)
        known[world.place.group, 0] = label_tokens
        if world.rank % world.layout.group_ranks == 0:
            known[world.place.group, 1:] = torch.tensor([job.feed.cursor, skips.in_a_row])
        tokens, sequences, skipped = agree(known, world.mesh).long().T.tolist()
        return Cursor(
            step=step,
            tokens=job.course.tokens(step),
            round=job.federation.rounds,
            warmup_steps=job.course.timetable.warmup_steps,
            federated=job.federation.federates,
            together=together,
            synchronous=job.federation.synchronous,
            last_evaluated=log.last_evaluated,
            training_seconds=log.meter.training_seconds,
            sequences=sequences,
            label_tokens=tokens,
            skipped=skipped,
            data=self._data,
        )

    def wait(self) -> None:
        """Until nothing is being written. Raises RunError where it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, state: State, cursor: Cursor) -> None:
        """One rank's part, to the end: files, then word from all, then the rest by the first rank."""
        world = self._job.world
        unfinished = self._folder / (folder_name(cursor.step) + UNFINISHED)
        written = write_files(unfinished, state, world.rank)
        every: list[Written] | None = [written] * world.layout.ranks if world.rank == 0 else None
        dist.gather_object(written, every, group=world.saving)
        outcome: list[str | None] = [None]
        if every is not None:
            outcome = [self._finish(unfinished, every, cursor)]
        dist.broadcast_object_list(outcome, src=0, group=world.saving)
        if outcome[0] is not None:
            raise RunError(f"the checkpoint of step {cursor.step} {outcome[0]}")

    def _finish(self, unfinished: Path, every: list[Written], cursor: Cursor) -> str | None:
        """Rank 0, when all have written: make it complete, and forget older ones. What went wrong, if anything did."""
        failed = [f"rank {rank}: {written.error}" for rank, written in enumerate(every) if written.error is not None]
        if failed:
            shutil.rmtree(unfinished, ignore_errors=True)
            return f"cannot be written: {failed[0]}"
        try:
            if hidden := unseen(unfinished, every):
                return f"cannot be written: rank 0 does not see {hidden}; all ranks must share the run folder"
            complete(unfinished, every, self._job, cursor)
        except OSError as error:
            return f"cannot be written: {error}"
        try:
            prune(self._folder.parent, self._section.keep, self._section.keep_every)
        except OSError as error:
            return f"is written, but older ones cannot be removed: {error}"
        return None


def copied(state: State, before: State) -> State:
    """The same values in memory of their own, on the CPU, so that training can go on.

    The copies of the save `before` are written over where they fit: fresh memory costs more than the copying.
    """

    def copy(values: torch.Tensor, old: Slice | None) -> torch.Tensor:
        if old is None or (old.values.shape, old.values.dtype) != (values.shape, values.dtype):
            return values.to("cpu", copy=True)
        return old.values.copy_(values)

    return {
        folder: {
            key: Slice(each.offset, each.shape, copy(each.values, before.get(folder, {}).get(key)))
            for key, each in slices.items()
        }
        for folder, slices in state.items()
    }


def write_files(unfinished: Path, state: State, rank: int) -> Written:
    """This rank's slices, one file for each folder. An error is kept, so that the others hear of it."""
    files: dict[str, KnownFile] = {}
    indices: dict[str, dict[str, Any]] = {}
    try:
        for folder, slices in state.items():
            file = unfinished / folder / f"rank-{rank:05}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            indices[folder] = write_slices(file, slices)
            if file.is_file():
                files |= describe(unfinished, file)
    except Exception as error:  # safetensors has an error of its own, and says of a full disk what the system says
        return Written({}, {}, str(error))
    return Written(files, indices)


def unseen(unfinished: Path, every: list[Written]) -> str | None:
    """The first file that a rank has written and this one does not see, as on disks that nodes do not share."""
    for written in every:
        for name, known in written.files.items():
            file = unfinished / name
            if not file.is_file() or file.stat().st_size != known.bytes:
                return name
    return None


def complete(unfinished: Path, every: list[Written], job: Job, cursor: Cursor) -> None:
    """What is left to write once all slices are there; then the checkpoint gets its name."""
    files = {name: known for written in every for name, known in written.files.items()}
    for path in unfinished.rglob("*"):
        if path.is_file() and str(path.relative_to(unfinished)) not in files:
            path.unlink()  # of an earlier try, by more ranks
    folders = sorted({folder for written in every for folder in written.indices})
    for folder in folders:
        index = merge_entries(each.indices.get(folder, {}) for each in every)
        write_json(unfinished / folder / INDEX, index, indent=None)
        files |= describe(unfinished, unfinished / folder / INDEX)
    (unfinished / "recipe.toml").write_text(write_recipe(job.recipe), encoding="utf-8")
    (unfinished / "config.json").write_text(job.config.to_json_string(use_diff=False), encoding="utf-8")
    write_json(unfinished / "layout.json", asdict(job.world.layout))
    write_json(unfinished / "cursor.json", asdict(cursor))
    for name in ("recipe.toml", "config.json", "layout.json", "cursor.json"):
        files |= describe(unfinished, unfinished / name)
    write_json(unfinished / COMPLETE, asdict(Complete(files)))
    for path in (*(unfinished / folder for folder in folders), unfinished / COMPLETE, unfinished):
        sync_to_disk(path)
    named = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    if named.exists():
        named.rename(aside_name(named))
    unfinished.rename(named)
    sync_to_disk(named.parent)


def prune(run: Path, keep: int, keep_every: int) -> None:
    """Remove older checkpoints, and what earlier tries left unfinished."""
    there = {checkpoint.step: checkpoint.path for checkpoint in complete_checkpoints(run)}
    going = [there[step] for step in doomed(list(there), keep, keep_every)]
    for path in [*going, *incomplete_checkpoints(run)]:
        if path.is_symlink():
            path.unlink()  # what it leads to is kept somewhere by somebody
            continue
        marker = path / COMPLETE
        marker.unlink(missing_ok=True)  # first, so that half of a removed one is not taken for whole
        shutil.rmtree(path)


def set_aside(run: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that they are kept and none of them is the newest."""
    later = [checkpoint.path for checkpoint in complete_checkpoints(run) if checkpoint.step > step]
    return [path.rename(aside_name(path)) for path in later]


def aside_name(path: Path) -> Path:
    """A name for `path` that takes it out of the run's checkpoints, and that nothing has yet."""
    endings = chain([""], (f"-{number}" for number in count(2)))
    names = (path.with_name(f"{path.name}{ASIDE}{ending}") for ending in endings)
    return next(name for name in names if not name.exists())


def describe(root: Path, file: Path) -> dict[str, KnownFile]:
    """A file's size and hash by its name below `root`; by then it is on the disk."""
    sync_to_disk(file)
    return {str(file.relative_to(root)): KnownFile(file.stat().st_size, sha256(file))}


def sync_to_disk(path: Path) -> None:
    """What was written to a file, or into a folder, outlasts a power cut from here on."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
