"""Checkpoints as folders: which is the newest, which are whole, which go; and what is never read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.engine.checkpoint import (
    COMPLETE,
    FOLDER,
    Checkpoint,
    Cursor,
    complete_checkpoints,
    doomed,
    incomplete_checkpoints,
    newest_whole,
    open_checkpoint,
    sha256,
    write_json,
)
from fedshard.engine.save import prune, set_aside
from fedshard.engine.slices import INDEX, Slice, Slices, merge_entries, write_slices


def make(run: Path, step: int, name: str | None = None) -> Path:
    """A checkpoint with one file."""
    path = run / FOLDER / (name or f"step-{step:06}")
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"12345678")
    write_json(path / COMPLETE, {"files": {"data": {"bytes": 8, "sha256": sha256(path / "data")}}})
    return path


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (-1, 0, [2, 9, 10, 100]),
        (1, 0, [100]),
        (2, 0, [10, 100]),
        (1, 5, [10, 100]),
        (3, 9, [9, 10, 100]),
        (10, 0, [2, 9, 10, 100]),
    ],
)
def test_which_checkpoints_stay(tmp_path, keep, keep_every, left):
    """J3: by number, not by text; −1 keeps all."""
    for step in (2, 10, 9, 100):
        make(tmp_path, step)
    prune(tmp_path, keep, keep_every)
    assert [each.step for each in complete_checkpoints(tmp_path)] == left
    assert doomed([2, 10, 9, 100], keep, keep_every) == [step for step in (2, 9, 10, 100) if step not in left]


def test_steps_are_sorted_as_numbers(tmp_path):
    for step in (9000, 10000, 1_000_000, 999_999):
        make(tmp_path, step)
    assert [each.step for each in complete_checkpoints(tmp_path)] == [9000, 10000, 999_999, 1_000_000]
    assert newest_whole(tmp_path)[0] == Checkpoint(tmp_path / FOLDER / "step-1000000")


def test_what_is_not_complete_is_passed_over_and_told_of(tmp_path):
    """J1: no marker, cut short, empty, still called unfinished."""
    whole = make(tmp_path, 10)
    (make(tmp_path, 20) / COMPLETE).unlink()
    (make(tmp_path, 30) / "data").write_bytes(b"1234")
    (tmp_path / FOLDER / "step-000040").mkdir()
    make(tmp_path, 50, "step-000050.unfinished")
    (make(tmp_path, 60) / "data").unlink()
    (make(tmp_path, 70) / COMPLETE).write_text("{")
    newest, skipped = newest_whole(tmp_path)
    assert newest == Checkpoint(whole)
    assert [Path(fault.key).parent.name for fault in skipped] == ["step-000070", "step-000060", "step-000030"]
    unfinished = [path.name for path in incomplete_checkpoints(tmp_path)]
    assert unfinished == ["step-000020", "step-000040", "step-000050.unfinished"]
    with pytest.raises(InputError, match="is 4 bytes, and was written with 8"):
        open_checkpoint(tmp_path / FOLDER / "step-000030")
    with pytest.raises(InputError, match="was not finished"):
        open_checkpoint(tmp_path / FOLDER / "step-000020")


def test_verify_names_the_damaged_file(tmp_path):
    path = make(tmp_path, 10)
    assert Checkpoint(path).verify() == []
    (path / "data").write_bytes(b"12345679")
    (fault,) = Checkpoint(path).verify()
    assert fault.key == str(path / "data")
    assert "SHA-256" in fault.says


def test_a_run_that_goes_back_keeps_what_came_later_aside(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    assert [path.name for path in set_aside(tmp_path, 10)] == ["step-000020.aside", "step-000030.aside"]
    assert [each.step for each in complete_checkpoints(tmp_path)] == [10]
    make(tmp_path, 20)
    assert [path.name for path in set_aside(tmp_path, 10)] == ["step-000020.aside-2"]  # the first is kept too
    prune(tmp_path, 1, 0)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "step-000010", "step-000020.aside", "step-000020.aside-2", "step-000030.aside",
    ]  # fmt: skip


def test_pruning_removes_nothing_that_is_somebody_else_s(tmp_path):
    """A copy or notes beside them, and what a link leads to."""
    archived = make(tmp_path / "archive", 10)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "step-000010").symlink_to(archived)
    (tmp_path / FOLDER / "step-000020-notes").mkdir()
    for step in (20, 30):
        make(tmp_path, step)
    make(tmp_path, 25, "step-000025.unfinished")
    prune(tmp_path, 1, 0)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["step-000020-notes", "step-000030"]
    assert Checkpoint(archived).verify() == []


def slices_of(folder: Path, tensors: dict[str, torch.Tensor], cuts: list[list[int]]) -> Slices:
    """Tensors cut into so many elements for each rank, as ranks would write them."""
    folder.mkdir()
    entries = []
    for rank in range(len(cuts[0])):
        mine = {}
        for (name, tensor), lengths in zip(tensors.items(), cuts, strict=True):
            start = sum(lengths[:rank])
            part = tensor.view(-1)[start : start + lengths[rank]]
            mine["weights", name] = Slice(start, tuple(tensor.shape), part)
        entries.append(write_slices(folder / f"rank-{rank:05}.safetensors", mine))
    write_json(folder / INDEX, merge_entries(entries))
    return Slices(folder)


def test_any_range_is_read_back_whatever_it_was_cut_into(tmp_path):
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5, dtype=torch.bfloat16)}
    with slices_of(tmp_path / "x", tensors, [[5, 0, 7], [1, 4, 0]]) as slices:
        assert slices.shapes("weights") == {"a": (4, 3), "b": (5,)}
        for name, tensor in tensors.items():
            for start in range(tensor.numel()):
                for stop in range(start + 1, tensor.numel() + 1):
                    part = slices.read("weights", name, range(start, stop))
                    assert torch.equal(part, tensor.view(-1)[start:stop])
                    assert part.dtype == tensor.dtype


def test_what_is_read_can_be_changed_and_read_again(tmp_path):
    with slices_of(tmp_path / "x", {"a": torch.arange(6.0)}, [[6]]) as slices:
        slices.read("weights", "a", range(1, 5)).zero_()
        assert slices.read("weights", "a", range(6)).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_gap_is_named(tmp_path):
    slices_of(tmp_path / "x", {"a": torch.arange(6.0)}, [[2, 2, 2]])
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    del index["weights"]["a"]["parts"][1]
    write_json(tmp_path / "x" / INDEX, index)
    with Slices(tmp_path / "x") as slices, pytest.raises(InputError, match="nothing holds elements 2 to 6 of weights"):
        slices.read("weights", "a", range(6))


class Bomb:
    """What a hostile file would bring along."""

    def __reduce__(self):
        return Path("boom").write_text, ("exploded",)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", INDEX])
def test_nothing_is_ever_unpickled(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    slices_of(tmp_path / "x", {"a": torch.arange(6.0)}, [[6]])
    (tmp_path / "x" / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="cannot be read"), Slices(tmp_path / "x") as slices:
        slices.read("weights", "a", range(6))
    assert not Path("boom").exists()


@pytest.mark.parametrize("file", ["../y/rank-00000.safetensors", "/etc/passwd"])
def test_files_outside_the_checkpoint_are_not_read(tmp_path, file):
    slices_of(tmp_path / "y", {"a": torch.arange(6.0)}, [[6]])
    slices_of(tmp_path / "x", {"a": torch.arange(6.0)}, [[6]])
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    index["weights"]["a"]["parts"][0][2] = file
    write_json(tmp_path / "x" / INDEX, index)
    with Slices(tmp_path / "x") as slices, pytest.raises(InputError, match="outside"):
        slices.read("weights", "a", range(6))


CURSOR = Cursor(10, 640, 2, 2, True, False, False, 6, 1.5, [40, 40], [64, 63], [0, 1], ["a", "a"])


def describe(path: Path) -> None:
    """Its layout and cursor, as if two groups had saved it."""
    write_json(path / "layout.json", asdict(Layout(2, 1, 1)))
    write_json(path / "cursor.json", asdict(CURSOR))


def test_a_cursor_is_read_back_and_another_s_is_refused(tmp_path):
    path = make(tmp_path, 10)
    describe(path)
    assert Checkpoint(path).cursor() == CURSOR
    for change, says in [
        ({"new": 1}, "new: Unexpected"),
        ({"step": 20}, "is of step 20"),
        ({"skipped": [0]}, "is not of 2 groups"),
    ]:
        write_json(path / "cursor.json", asdict(CURSOR) | change)
        with pytest.raises(InputError, match=says):
            Checkpoint(path).cursor()


def broken(tree: Any) -> Iterator[Any]:
    """The tree with each of its values replaced by one of another type, and without each of its keys."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        if isinstance(tree, dict):
            yield {other: value for other, value in tree.items() if other != key}
        inner = broken(tree[key]) if isinstance(tree[key], dict | list) else ()
        for worse in (*inner, {"a": []}, None):
            copied = tree.copy()
            copied[key] = worse
            yield copied


def read_all(path: Path) -> tuple[Cursor, list[float]] | str:
    """All that going on needs of a checkpoint made here, or the file that is damaged."""
    try:
        with Slices(path / "global") as slices:
            return open_checkpoint(path).cursor(), slices.read("weights", "a", range(6)).tolist()
    except InputError as error:
        return error.faults[0].key


@pytest.mark.parametrize("name", ["cursor.json", "layout.json", COMPLETE, f"global/{INDEX}"])
def test_a_damaged_file_is_named_whatever_it_holds(tmp_path, name):
    """J1: cut short, empty, of other types, without a key; never anything but our own error."""
    path = make(tmp_path, 10)
    describe(path)
    slices_of(path / "global", {"a": torch.arange(6.0)}, [[2, 4]])
    good = (path / name).read_text()
    trees = [json.dumps(tree) for tree in broken(json.loads(good))]
    assert len(trees) > 5
    for bad in ["", good[: len(good) // 2], "[]", "null", "7", '"a"', *trees]:
        (path / name).write_text(bad)
        told = read_all(path)
        if bad == '{"files": {}}':  # what it does not name is found all the same
            assert told == (CURSOR, [0, 1, 2, 3, 4, 5])
        else:
            assert isinstance(told, str), bad
            assert told.startswith(str(path))


@pytest.mark.parametrize("outside", ["/etc/passwd", "../step-000020/data", "global/../../x"])
def test_a_list_of_files_names_none_outside(tmp_path, outside):
    path = make(tmp_path, 10)
    write_json(path / COMPLETE, {"files": {outside: {"bytes": 8, "sha256": ""}}})
    with pytest.raises(InputError, match="which is outside"):
        Checkpoint(path).verify()
    assert newest_whole(tmp_path)[0] is None


def test_a_file_that_holds_less_than_its_index_says(tmp_path):
    slices_of(tmp_path / "x", {"a": torch.arange(6.0)}, [[6]])
    index = json.loads((tmp_path / "x" / INDEX).read_text())
    index["weights"]["a"]["parts"] = [[0, 9, "rank-00000.safetensors"]]
    write_json(tmp_path / "x" / INDEX, index)
    with Slices(tmp_path / "x") as slices, pytest.raises(InputError, match="in another size than"):
        slices.read("weights", "a", range(9))
