"""`fedshard train`: what bad input gets, what a failing rank does to the job, and what a run writes."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fedshard.cli.main import main
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe
from fedshard.engine.checkpoint import Start
from fedshard.engine.launch import run_ranks
from fedshard.engine.train import train_on_rank

SMALL = {
    "model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 1, "data.sequence_length": 32,
    "budget.steps": 7, "sync.every": 3, "sync.warmup_fraction": 0.3, "evaluate.every": 4, "evaluate.sequences": 6,
}  # fmt: skip


def words(**changes: object) -> list[str]:
    """SMALL with changes (`__` for the dot), as a command line."""
    given = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("FEDSHARD_CACHE", str(folder))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """What `fedshard train` says on stderr when it refuses; it exits with 2, and no run folder is made."""
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--into", "nowhere", *given])
    assert stopped.value.code == 2
    assert not Path("nowhere").exists()
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([*words(), "--sync.evry", "3"], ["sync.evry: no such key", "sync.every?"]),
        (words(sync__every=0), ["sync.every", "greater than or equal to 1", "0 given"]),
        (words(sync__every=50), ["sync.every: no round fits: 7 steps, of which 2 are", "every 50", "at most 5"]),
        (words(data__sequence_length=1024), ["data.sequence_length", "1024", "512"]),
        (words(model__vocab_size=200), ["256", "200"]),
        (words(model__model_type="t5"), ["model.model_type", "t5", "no causal language model"]),
        (words(data__kind="text"), ["data.path: missing"]),
        (words(data__kind="text", data__path="/no/such/folder"), ["/no/such/folder"]),
        (words(data__kind="text", data__assignment="by-source"), ["data.sources: 0 sources for 2 groups"]),
        (words(sync__delay=1), ["sync.delay: overlap is not in this version"]),
        (words(sync__outer__kind="adam"), ["sync.outer.kind", "adam", "nesterov"]),
        (["--seed"], ["--seed: has no value"]),
        (["one.toml", "two.toml"], ["two.toml: one path too many"]),
        (["no.toml"], ["no.toml: no such file"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(capsys, given, parts):
    said = refused(capsys, *given)
    for part in parts:
        assert part in said


def test_all_faults_are_told_at_once(capsys):
    said = refused(capsys, *words(layout__groups=0, sync__evry=1, optimizer__weigth_decay=0.1))
    for key in ("layout.groups", "sync.evry", "optimizer.weigth_decay"):
        assert f"fedshard: {key}: " in said
    said = refused(capsys, *words(data__sequence_length=600, data__kind="text", data__path="/no/such"))
    assert "data.sequence_length" in said
    assert "/no/such" in said


def test_a_group_without_data_is_named(capsys, tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir(), empty.mkdir()
    for number in range(9):
        (full / f"{number}.txt").write_text("some words of a document " * 20, encoding="utf-8")
    sources = json.dumps([str(full), str(empty)])
    said = refused(capsys, *words(data__kind="text", data__assignment="by-source", data__sources=sources))
    assert str(empty) in said
    assert f"{full} holds" not in said


def test_ids_beyond_the_vocabulary(capsys, tmp_path):
    np.save(tmp_path / "ids.npy", np.full(5000, 300, dtype=np.uint16))
    said = refused(capsys, *words(data__kind="tokens", data__path=str(tmp_path / "ids.npy")))
    assert "300" in said
    assert "257" in said


def test_tied_against_untied(capsys, tmp_path):
    import transformers

    config = transformers.LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=2, tie_word_embeddings=False)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"tie_word_embeddings": True}))
    model = {"model.kind": "folder", "model.path": str(tmp_path)}
    given = [word for key, value in model.items() for word in (f"--{key}", value)]
    assert "tie_word_embeddings" in refused(capsys, *given, "--data.sequence_length", "32")


def test_a_run_folder_that_exists(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words(), "--into", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"{tmp_path}: exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_more_ranks_than_were_started(tmp_path):
    """Under torchrun the message is ours, with both numbers; the code is torchrun's."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fedshard", "train"]
    done = subprocess.run(
        [*launch, *words(layout__groups=3, layout__shards=1), "--into", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "layout: 3×1×1 is 3 ranks, 2 were started" in done.stderr
    assert not (tmp_path / "run").exists()


# A rank that fails


def fail_at_step_3(where: str, recipe: Recipe, into: Path, cache: Path) -> None:
    """The entry of each rank: rank 1 fails in step 3, in its round, in its evaluation, or when it saves."""
    name = {"step": "fedshard.engine.train.take_step", "round": "fedshard.engine.exchange.Exchange.run",
            "evaluation": "fedshard.engine.evaluate.eval_batches",
            "saving": "fedshard.engine.save.capture"}[where]  # fmt: skip
    real, calls = pkgutil.resolve_name(name), [0]

    def failing(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if os.environ["RANK"] == "1" and (calls[0] == 3 or where != "step"):
            raise ValueError(f"the first cause, in {where}")
        return real(*args, **kwargs)

    with mock.patch(name, failing):
        train_on_rank(recipe, Start(into), cache, False)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("where", ["step", "round", "evaluation", "saving"])
def test_a_failing_rank_ends_the_job_with_the_first_cause_last(capfd, tmp_path, cache, where):
    """Trap N5."""
    recipe = read_recipe(overrides=words(sync__warmup_fraction=0.0))
    began = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        run_ranks(fail_at_step_3, (where, recipe, tmp_path / "run", cache), 4)
    assert stopped.value.code == 1
    assert time.monotonic() - began < 45  # start-up on a busy machine, and at most 15 s from the failure to the end
    last = [line for line in capfd.readouterr().err.splitlines() if line.strip()][-1]
    assert f"the first cause, in {where}" in last
    assert "rank 1" in last


# A whole run


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_whole_run_keeps_the_contract(tmp_path, cache):
    """As a user starts it: exit code 0, the result as JSON on stdout, all files in the folder."""
    into = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "fedshard", "train", *words(), "--into", str(into), "--json"],
        capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((into / "summary.json").read_text())
    names = {"recipe.toml", "environment.json", "metrics.jsonl", "rounds.jsonl", "evals.jsonl", "summary.json"}
    names |= {"checkpoints"}
    assert {each.name for each in into.iterdir()} == names
    assert read_recipe(into / "recipe.toml") == read_recipe(overrides=words())
    assert "step 7/7" in done.stderr
