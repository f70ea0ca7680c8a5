"""What is in a run folder, and what of it survives a run that was killed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_rows import EVALUATION, ROUND, STEP, SUMMARY

from fedshard.core.errors import InputError
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe, write_recipe
from fedshard.engine.rows import to_json
from fedshard.engine.run_folder import RunFolder, describe_environment, find_commit, read_rows


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "a", "seed = 3\n", {"ranks": 4})


def lines(folder: RunFolder, name: str) -> list[str]:
    return (folder.path / name).read_text(encoding="utf-8").splitlines()


def test_a_new_folder_holds_recipe_and_environment(tmp_path: Path):
    recipe = Recipe(seed=3)
    folder = RunFolder.create(tmp_path / "runs" / "a", write_recipe(recipe), {"hosts": ["zürich-1"]})
    assert read_recipe(folder.path / "recipe.toml") == recipe
    assert json.loads((folder.path / "environment.json").read_text(encoding="utf-8")) == {"hosts": ["zürich-1"]}
    assert [lines(folder, name) for name in ("metrics.jsonl", "rounds.jsonl", "evals.jsonl")] == [[], [], []]


def test_an_existing_folder_is_refused_untouched(tmp_path: Path):
    with pytest.raises(InputError) as refused:
        RunFolder.create(tmp_path, "", {})
    assert str(tmp_path) in str(refused.value)
    assert "--into" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_wrong_input(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "run", "", {})


def steps(folder: RunFolder, name: str) -> list[int]:
    return [row["step"] for row in read_rows(folder.path / name)]


def test_each_row_is_on_disk_as_a_whole_line_at_once(folder: RunFolder):
    for step in (1, 2):
        folder.append(replace(STEP, step=step))
        assert steps(folder, "metrics.jsonl") == list(range(1, step + 1))
    folder.append(ROUND)
    folder.append(EVALUATION)
    assert lines(folder, "rounds.jsonl") == [to_json(ROUND)]
    assert lines(folder, "evals.jsonl") == [to_json(EVALUATION)]


def test_the_summary_is_written_whole(folder: RunFolder):
    folder.write_summary(SUMMARY)
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8")) == json.loads(to_json(SUMMARY))
    assert [path.name for path in folder.path.iterdir() if "unfinished" in path.name] == []


def test_cutting_back_leaves_what_came_up_to_a_step(folder: RunFolder):
    for step in range(1, 13):
        folder.append(replace(STEP, step=step))
    for step in (4, 8, 12):
        folder.append(replace(ROUND, step=step))
        folder.append(replace(EVALUATION, step=step))
    folder.write_summary(SUMMARY)
    folder.cut_back(8)
    assert steps(folder, "metrics.jsonl") == list(range(1, 9))
    assert steps(folder, "rounds.jsonl") == steps(folder, "evals.jsonl") == [4, 8]
    assert not (folder.path / "summary.json").exists()
    folder.append(replace(STEP, step=9))
    assert steps(folder, "metrics.jsonl")[-1] == 9


def test_rows_are_read_as_they_were_written(folder: RunFolder):
    folder.append(ROUND)
    assert read_rows(folder.path / "metrics.jsonl") == []
    (row,) = read_rows(folder.path / "rounds.jsonl")
    assert type(ROUND)(**row) == ROUND


def test_a_line_that_was_never_finished_is_neither_read_nor_kept(folder: RunFolder):
    folder.append(replace(STEP, step=1))
    with (folder.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(to_json(replace(STEP, step=2))[:40])
    assert steps(folder, "metrics.jsonl") == [1]
    folder.cut_back(8)
    assert lines(folder, "metrics.jsonl") == [to_json(replace(STEP, step=1))]


def test_the_environment_tells_versions_hosts_and_devices_but_no_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "a-secret-value")
    environment = describe_environment(4, torch.device("cpu"), ["n1", "n2"])
    assert set(environment) == {"started", "versions", "commit", "system", "ranks", "hosts", "devices"}
    assert environment["versions"]["torch"] == torch.__version__
    assert (environment["ranks"], environment["hosts"]) == (4, ["n1", "n2"])
    assert environment["devices"]["type"] == "cpu"
    assert environment["devices"]["name"]
    assert "a-secret-value" not in json.dumps(environment)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path):
    package = tmp_path / "src"
    package.mkdir()
    (package / "__init__.py").touch()
    assert find_commit(package) is None  # no checkout
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "something else")
    assert find_commit(package) is None  # it lies in a checkout, but does not belong to it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert find_commit(package) == commit
    (package / "__init__.py").write_text("changed")
    assert find_commit(package) == f"{commit}-dirty"


def test_no_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(tmp_path) is None
