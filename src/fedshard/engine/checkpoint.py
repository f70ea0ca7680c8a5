"""Checkpoints on disk: what is in one, which of them are complete, and whether one is whole. No tensors here.

checkpoints/step-000120/
  global/            what all groups share, written once, its parts spread over all ranks
    index.json         where each part of a flattened tensor lies: kind → parameter → shape, [offset, length, file]
    rank-00000.safetensors, …
  group-00000/       what is one group's own: moments, and its weights where groups have trained on their own
    index.json, rank-00000.safetensors, …
  recipe.toml        as it was resolved
  config.json        the model's own, with every value that transformers gave it
  layout.json        groups, replicas, shards
  cursor.json        how far the run is: `Cursor`
  COMPLETE           size and SHA-256 of every file; written last

It is built under another name and then renamed, so that what is called `step-…` is whole. Weights come from
safetensors and all else from JSON and TOML: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedshard.core.course import Done
from fedshard.core.errors import Fault, InputError
from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe

FOLDER = "checkpoints"
GLOBAL, COMPLETE = "global", "COMPLETE"
NAME = re.compile(r"step-(\d{6,})")
UNFINISHED, ASIDE = ".unfinished", ".aside"
"""Behind a name: still being written, or never to be finished; of a run that was later resumed from before it."""

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Cursor:
    """How far a run is, beside its tensors. Lists are over groups."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: int
    """The last step taken."""
    tokens: int
    """Sequences × sequence length of all groups."""
    round: int
    """Rounds so far."""
    warmup_steps: int
    """Where the synchronous warm-up ends or ended."""
    federated: bool
    """Whether the run has rounds at all."""
    together: bool
    """Whether all groups hold the same weights: after a round, in the warm-up, and without rounds."""
    synchronous: bool
    """Whether gradients have been averaged since the last round."""
    last_evaluated: int
    """The step of the last evaluation."""
    training_seconds: float
    """Of all steps and rounds so far."""
    sequences: list[int]
    """Place in the data: `Feed.cursor`."""
    label_tokens: list[int]
    """Since the last round."""
    skipped: list[int]
    """Steps in a row that were not applied."""
    data: list[str]
    """Fingerprint of what each group reads."""

    @property
    def done(self) -> Done:
        """What a course goes on from."""
        return Done(self.step, self.tokens, self.warmup_steps, self.federated)


@dataclass(frozen=True)
class KnownFile:
    """A file of a checkpoint as it was written."""

    bytes: int
    """Its size."""
    sha256: str
    """As hex."""


@dataclass(frozen=True)
class Complete:
    """What `COMPLETE` holds."""

    files: dict[str, KnownFile]
    """By the name below the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path

    @property
    def step(self) -> int:
        """By its name."""
        return step_of(self.path)

    @property
    def run(self) -> Path | None:
        """The run folder that it lies in; None for one that was copied elsewhere, or was set aside."""
        path = self.path.resolve()
        return path.parent.parent if path.parent.name == FOLDER and NAME.fullmatch(path.name) else None

    def cursor(self) -> Cursor:
        """How far the run was. Raises InputError where the file is damaged, or is another checkpoint's."""
        file = self.path / "cursor.json"
        cursor, groups = read_json(file, Cursor), self.layout().groups
        if cursor.step != self.step:
            raise InputError([damaged(file, f"is of step {cursor.step}")])
        if {len(each) for each in (cursor.sequences, cursor.label_tokens, cursor.skipped, cursor.data)} != {groups}:
            raise InputError([damaged(file, f"is not of {groups} groups")])
        return cursor

    def layout(self) -> Layout:
        """The layout that saved it. Raises InputError where the file is damaged."""
        return read_json(self.path / "layout.json", Layout)

    def recipe(self) -> Recipe:
        """The recipe that it was saved with. Raises InputError where the file is damaged."""
        return read_recipe(self.path / "recipe.toml")

    def config(self) -> dict[str, Any]:
        """The model's config, field by field. Raises InputError where the file is damaged."""
        return read_json(self.path / "config.json", dict[str, Any])

    def files(self) -> dict[str, KnownFile]:
        """What was written, by the name below the checkpoint. Raises InputError where the list is damaged."""
        known = read_json(self.path / COMPLETE, Complete).files
        for name in known:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise InputError([damaged(self.path / COMPLETE, f"names {name}, which is outside")])
        return known

    def check_sizes(self) -> list[Fault]:
        """Files that are missing or have another size; quick, since nothing is read."""
        faults = []
        for name, known in self.files().items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != known.bytes:
                says = "is missing" if size is None else f"is {size} bytes, and was written with {known.bytes}"
                faults.append(damaged(file, says))
        return faults

    def verify(self) -> list[Fault]:
        """Every file that is not as it was written, by size and hash; reads all of them."""
        faults = self.check_sizes()
        wrong = {fault.key for fault in faults}
        for name, known in self.files().items():
            file = self.path / name
            if str(file) not in wrong and sha256(file) != known.sha256:
                faults.append(damaged(file, "does not hold what was written: its SHA-256 differs"))
        return faults


@dataclass(frozen=True)
class Start:
    """Where a run begins and where it writes."""

    into: Path
    """The run folder. It is made, unless `resume`."""
    resume: bool = False
    """Whether the folder may exist already."""
    checkpoint: Checkpoint | None = None
    """What to go on from."""
    stop_after: int | None = None
    """Stop after this step, if the run has not ended by then."""
    passed_over: tuple[str, ...] = ()
    """What was not gone on from though it is newer, and why."""


def folder_name(step: int) -> str:
    """The name of the checkpoint after `step`.

    >>> folder_name(120)
    'step-000120'
    """
    return f"step-{step:06}"


def group_folder(group: int) -> str:
    """Where a group's own state lies in a checkpoint.

    >>> group_folder(3)
    'group-00003'
    """
    return f"group-{group:05}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name. Raises InputError where it is no such name."""
    match = NAME.match(path.name)
    if match is None:
        raise InputError([Fault(str(path), "is no checkpoint", "Give a folder such as RUN/checkpoints/step-000120.")])
    return int(match[1])


def open_checkpoint(path: Path) -> Checkpoint:
    """As `find_checkpoint`; raises InputError also where files are missing or cut short."""
    checkpoint = find_checkpoint(path)
    if faults := checkpoint.check_sizes():
        raise InputError(faults)
    return checkpoint


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or where a link there leads. Raises InputError where there is none, or one that was
    not finished."""
    path = path.resolve() if path.is_symlink() else path
    if not path.is_dir():
        raise InputError([Fault(str(path), "no such checkpoint", "See `fedshard checkpoint list RUN`.")])
    step_of(path)
    if not (path / COMPLETE).is_file():
        raise InputError([Fault(str(path), "was not finished", "Take an earlier one: --resume takes the newest.")])
    return Checkpoint(path)


def complete_checkpoints(run: Path) -> list[Checkpoint]:
    """A run's complete checkpoints, the oldest first: by the number of their step, which is not how text sorts."""
    found = [path for path in _folders(run) if NAME.fullmatch(path.name) and (path / COMPLETE).is_file()]
    return [Checkpoint(path) for path in sorted(found, key=step_of)]


def incomplete_checkpoints(run: Path) -> list[Path]:
    """What was begun and not finished, by its name alone; other folders there are somebody's, and none of ours."""
    begun = [path for path in _folders(run) if NAME.fullmatch(path.name.removesuffix(UNFINISHED))]
    return [path for path in begun if path.name.endswith(UNFINISHED) or not (path / COMPLETE).is_file()]


def newest_whole(run: Path) -> tuple[Checkpoint | None, list[Fault]]:
    """The newest complete checkpoint whose files are all there, and what is wrong with those after it."""
    skipped: list[Fault] = []
    for checkpoint in reversed(complete_checkpoints(run)):
        try:
            faults = checkpoint.check_sizes()
        except InputError as error:
            faults = list(error.faults)
        if not faults:
            return checkpoint, skipped
        skipped += faults
    return None, skipped


def passed_over(run: Path, skipped: Iterable[Fault]) -> list[str]:
    """What a user should know of checkpoints that are not taken though they may be newer, in words. `skipped` as of
    `newest_whole`."""
    lines = [f"{path} was not finished, and is passed over" for path in incomplete_checkpoints(run)]
    return lines + [f"{fault.key} {fault.says}; its checkpoint is passed over" for fault in skipped]


def doomed(steps: list[int], keep: int, keep_every: int) -> list[int]:
    """Of the saved steps those that go: all but the newest `keep` (−1: all stay) and multiples of `keep_every`.

    >>> doomed([2, 10, 9, 100], keep=2, keep_every=0)
    [2, 9]
    """
    newest = sorted(steps) if keep < 0 else sorted(steps)[-keep:]
    return [step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)]


def read_json(file: Path, kind: type[Tree]) -> Tree:
    """A JSON file of a checkpoint, every value of the type that `kind` says. Raises InputError where it is damaged."""
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError([damaged(file, f"cannot be read ({place or 'JSON'}: {first['msg']})")]) from None
    except OSError as error:
        raise InputError([damaged(file, f"cannot be read ({error})")]) from None


def write_json(file: Path, tree: Any, indent: int | None = 1) -> None:
    """As JSON: readable, or, without `indent`, as fast as many ranks' worth of it needs."""
    file.write_text(json.dumps(tree, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(file: Path) -> str:
    """As `sha256sum` prints it."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def damaged(file: Path, says: str) -> Fault:
    """A file of a checkpoint that is not as it was written."""
    return Fault(str(file), says, "Take another checkpoint: see `fedshard checkpoint list RUN`.")


def _folders(run: Path) -> Iterator[Path]:
    folder = run / FOLDER
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.is_dir() and NAME.match(path.name))
