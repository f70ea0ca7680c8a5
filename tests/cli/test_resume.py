"""Stopping and going on as a user does it: kill, signal, `--stop-after`, `--resume` in its three forms."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedshard.cli.main import main
from fedshard.engine.checkpoint import complete_checkpoints

CLOCKS = {"seconds", "exposed_seconds", "inner_seconds", "tokens_per_second"}
SMALL = [
    "--layout.groups", "2", "--layout.shards", "1", "--train.device", "cpu", "--model.kind", "config",
    "--model.model_type", "llama", "--model.vocab_size", "257", "--model.hidden_size", "8",
    "--model.intermediate_size", "12", "--model.num_hidden_layers", "1", "--model.num_attention_heads", "2",
    "--model.num_key_value_heads", "1",
    "--data.sequence_length", "16", "--budget.steps", "12", "--sync.every", "4", "--sync.warmup_fraction", "0.17",
    "--sync.outer.kind", "nesterov", "--evaluate.every", "3", "--evaluate.sequences", "4", "--checkpoint.every", "5",
    "--log.profile_every", "0",
]  # fmt: skip
ALONE = [*SMALL, "--layout.groups", "1"]


@pytest.fixture(autouse=True)
def environment(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FEDSHARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("fedshard.engine.meter.live_tensor_bytes", lambda: 0)  # it looks at all that tests hold, too


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """A file of a run, without what clocks say."""
    lines = (run / name).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCKS} for line in lines]


def begin(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedshard", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_newest(run: Path, after: int) -> int:
    """The step of a complete checkpoint after that step, as soon as there is one."""
    deadline = time.monotonic() + 80
    while True:
        newest = [checkpoint.step for checkpoint in complete_checkpoints(run)][-1:]
        if newest > [after]:
            return newest[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_same_rows(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "rounds.jsonl", "evals.jsonl"):
        assert rows(one, name) == rows(other, name), name
    assert (one / "summary.json").exists()
    assert (other / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_stopped_by_a_signal_then_killed_then_resumed_is_the_straight_run(tmp_path):
    """What a SLURM job does on time-out and requeue: a signal, then the same command again. Two groups."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    words = [*SMALL, "--budget.steps", "40"]
    again = [
        *words,
        "--into",
        str(run),
        "--resume",
        "auto",
        "--checkpoint.every",
        "1",
        "--checkpoint.mid_round",
        "true",
    ]
    process = begin(*again)
    await_newest(run, after=0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"go on: fedshard train {run / 'recipe.toml'} --resume" in err
    stopped = await_newest(run, after=0)
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, stopped + 1))
    process = begin(*again)
    await_newest(run, after=stopped)
    process.kill()
    process.communicate(timeout=60)  # its ranks are gone too: they had the other ends
    main(["train", str(run / "recipe.toml"), "--resume", "--checkpoint.every", "100"])
    main(["train", *words, "--into", str(straight)])
    assert_same_rows(straight, run)


def test_one_process_stops_and_goes_on(tmp_path, capsys):
    straight, run = tmp_path / "straight", tmp_path / "run"
    main(["train", *ALONE, "--into", str(straight)])
    main(["train", *ALONE, "--into", str(run), "--resume", "auto", "--stop-after", "6"])
    assert "stopped after step 6 of 12" in capsys.readouterr().err
    main(["train", str(run / "recipe.toml"), "--resume", "--stop-after", "7"])
    main(["train", *ALONE, "--into", str(run), "--resume", "auto"])
    assert_same_rows(straight, run)
    capsys.readouterr()
    main(["train", str(run / "recipe.toml"), "--resume"])
    assert "is finished: step 12" in capsys.readouterr().out
    # J9: a smaller budget is refused, a larger one goes on
    assert refused("train", str(run / "recipe.toml"), "--resume", "--budget.steps", "11") == 2
    assert "ends at step 11, and the checkpoint is of step 12" in capsys.readouterr().err
    main(["train", str(run / "recipe.toml"), "--resume", "--budget.steps", "14"])
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(1, 15))
    # from an earlier one into a new folder, and in its own
    main(["train", "--resume", str(run / "checkpoints" / "step-000012"), "--into", str(tmp_path / "branch")])
    assert "is finished" in capsys.readouterr().out
    earlier = str(straight / "checkpoints" / "step-000008")
    main(["train", "--resume", earlier, "--into", str(tmp_path / "branch")])
    assert rows(tmp_path / "branch", "metrics.jsonl") == rows(straight, "metrics.jsonl")[8:]
    main(["train", "--resume", earlier])
    names = sorted(path.name for path in (straight / "checkpoints").iterdir())
    assert names == ["step-000008", "step-000012", "step-000012.aside"]


def test_transformers_computes_the_perplexity_that_training_did(tmp_path, monkeypatch, capsys):
    """The ten lines of docs/checkpoints.md."""
    monkeypatch.chdir(tmp_path)
    main(["train", *ALONE, "--into", "runs/fsdp"])
    main(["export", "runs/fsdp", "--to", "exported"])
    capsys.readouterr()
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    exec(page.partition("```py\n")[2].partition("```")[0], {})
    told = float(capsys.readouterr().out)
    assert told == pytest.approx(rows(Path("runs/fsdp"), "evals.jsonl")[-1]["perplexity"], rel=1e-4)


def refused(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    os.environ["FEDSHARD_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    main(["train", *ALONE, "--into", str(folder), "--stop-after", "6"])
    return folder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed", "1"], "seed: the checkpoint was saved with 0, not 1"),
        (["--model.hidden_size", "16"], "model.hidden_size: the checkpoint was saved with 8, not 16"),
        (["--data.sequence_length", "8"], "data.sequence_length: the checkpoint was saved with 16, not 8"),
        (["--optimizer.kind", "sgd"], "optimizer.kind: the checkpoint was saved with 'adamw', not 'sgd'"),
        (["--budget.steps", "5"], "budget: ends at step 5, and the checkpoint is of step 6"),
    ],
)
def test_what_must_stay_as_it_was(run, capsys, words, says):
    assert refused("train", str(run / "recipe.toml"), "--resume", *words) == 2
    assert says in capsys.readouterr().err


def test_what_may_change_is_told(run, tmp_path, capsys):
    newest = str(run / "checkpoints" / "step-000006")
    words = ["--sync.every", "2", "--optimizer.learning_rate", "0.01", "--evaluate.every", "0"]
    main(["train", "--resume", newest, "--into", str(tmp_path / "changed"), *words])
    err = capsys.readouterr().err
    assert "from step 7 on sync.every is 2, it was 4" in err
    assert "from step 7 on optimizer.learning_rate is 0.01, it was 0.003" in err
    assert "evaluate" not in err.partition("step 7")[0]
    assert [row["step"] for row in rows(tmp_path / "changed", "rounds.jsonl")] == [8, 10, 12]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resume"], "--resume: needs to know which run goes on"),
        (["--resume", "nowhere"], "nowhere: no such checkpoint"),
        (["--resume", "--into", "empty"], "empty: has no complete checkpoint"),
        (["--stop-after", "0"], "--stop-after: '0' is no step"),
        (["--stop-after", "x"], "--stop-after: 'x' is no step"),
    ],
)
def test_what_cannot_be_resumed(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert refused("train", *words) == 2
    assert says in capsys.readouterr().err


def test_list_verify_and_export(run, tmp_path, capsys):
    main(["checkpoint", "list", str(run)])
    assert capsys.readouterr().out.split()[:2] == ["step", "6"]
    main(["checkpoint", "list", str(run), "--json"])
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [6]
    main(["checkpoint", "verify", str(run)])
    assert "all as they were written" in capsys.readouterr().out
    main(["export", str(run), "--to", str(tmp_path / "hf"), "--dtype", "bfloat16"])
    assert "rounded from float32 to bfloat16" in capsys.readouterr().err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "hf").iterdir()}
    damaged = run / "checkpoints" / "step-000006" / "group-00000" / "rank-00000.safetensors"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert refused("checkpoint", "verify", str(run)) == 1
    assert str(damaged) in capsys.readouterr().err
    damaged.write_bytes(good)
    for words in (
        ["export"],
        ["export", str(run), "--to", "x", "--dtype", "int8"],
        ["checkpoint"],
        ["checkpoint", "x"],
    ):
        assert refused(*words) == 2


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A run of its own, stopped after step 6, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "copied"))


def test_a_checkpoint_is_found_by_a_link_and_with_a_slash(copied, tmp_path, capsys):
    (tmp_path / "latest").symlink_to(copied / "checkpoints" / "step-000006")
    main(["train", "--resume", str(tmp_path / "latest"), "--stop-after", "7"])
    assert "stopped after step 7 of 12" in capsys.readouterr().err
    main(["train", "--resume", f"{copied}/checkpoints/step-000007/", "--stop-after", "8"])
    assert [row["step"] for row in rows(copied, "metrics.jsonl")] == list(range(1, 9))


def test_what_lies_elsewhere_or_was_set_aside_goes_on_in_a_new_run_only(copied, tmp_path, capsys):
    """Its run folder has the rows of another run, or is none."""
    saved = copied / "checkpoints" / "step-000006"
    elsewhere = shutil.copytree(saved, tmp_path / "elsewhere" / saved.name)
    aside = saved.rename(saved.with_name("step-000006.aside"))
    for path in (elsewhere, aside):
        assert refused("train", "--resume", str(path)) == 2
        assert "not among the checkpoints of a run" in capsys.readouterr().err
    assert refused("train", "--resume", str(aside), "--into", str(copied)) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(path.name for path in elsewhere.parent.iterdir()) == [saved.name]
    new = tmp_path / "new"
    main(["train", "--resume", str(aside), "--into", str(new), "--stop-after", "6"])  # the step that it was saved after
    main(["train", str(new / "recipe.toml"), "--resume", "--stop-after", "7"])
    assert [row["step"] for row in rows(new, "metrics.jsonl")] == [7]


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "auto"]])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(copied, capsys, words):
    """J1: it would throw away the rows of all that was trained."""
    damaged = copied / "checkpoints" / "step-000006" / "cursor.json"
    damaged.write_text("")
    assert refused("train", str(copied / "recipe.toml"), *words) == 2
    err = capsys.readouterr().err
    assert f"{damaged}: is 0 bytes" in err
    assert "damaged" in err.splitlines()[-1] or "no complete checkpoint" in err.splitlines()[-1]
    assert len(rows(copied, "metrics.jsonl")) == 6


def test_a_recipe_behind_resume_is_told_where_it_belongs(run, capsys):
    recipe = str(run / "recipe.toml")
    assert refused("train", "--resume", recipe) == 2
    assert f"Write fedshard train {recipe} --resume." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["copied", "copied/checkpoints"])
def test_a_run_folder_that_is_a_file_or_cannot_be_written_to(copied, monkeypatch, capsys, name):
    monkeypatch.chdir(copied.parent)
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: real(path, mode) and Path(path).absolute() != Path(name).absolute()
    )
    assert refused("train", "copied/recipe.toml", "--resume") == 2
    assert f"{name} cannot be written to" in capsys.readouterr().err
    Path("file").write_text("")
    assert refused("train", *ALONE, "--resume", "auto", "--into", "file") == 2
    assert "is no folder" in capsys.readouterr().err


def test_damaged_checkpoints_are_listed_verified_and_passed_over(copied, tmp_path, capsys):
    folder = copied / "checkpoints"
    for step in (7, 8):
        shutil.copytree(folder / "step-000006", folder / f"step-{step:06}")
    (folder / "step-000007" / "COMPLETE").write_text("{}")
    (folder / "step-000008" / "cursor.json").write_text("{}")
    main(["checkpoint", "list", str(copied)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:1]] == [["step", "6"]]
    assert [line.split()[0] for line in lines[1:]] == [
        str(folder / "step-000007" / "COMPLETE"),
        str(folder / "step-000008" / "cursor.json"),
    ]
    assert refused("checkpoint", "verify", str(copied)) == 1
    said = capsys.readouterr()
    assert "step-000006" in said.out
    assert all(name in said.err for name in ("step-000007/COMPLETE", "step-000008/cursor.json"))
    main(["export", str(copied), "--to", str(tmp_path / "deep" / "hf")])
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path / 'deep' / 'hf'}: step 6 of ")
    assert said.err.count("its checkpoint is passed over") == 2
    shutil.rmtree(folder / "step-000006")
    for words in (["export", str(copied), "--to", "x"], ["checkpoint", "verify", str(tmp_path)]):
        assert refused(*words) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_files_may_move_but_not_change(run, tmp_path, monkeypatch, capsys):
    """A model's folder and the data's: what decides the run is compared with what was saved."""
    monkeypatch.chdir(tmp_path)
    main(["export", str(run), "--to", "model"])
    Path("data").mkdir()
    for number in range(12):
        Path(f"data/{number}.txt").write_text(f"abc{number}" * 30)
    given = ["--model.kind", "folder", "--model.path", "model", "--data.kind", "text", "--data.path", "data"]
    main(["train", *ALONE, *given, "--data.eval_fraction", "0.3", "--into", "run", "--stop-after", "2"])
    capsys.readouterr()
    Path("model").rename("model2")
    Path("data").rename("data2")
    assert refused("train", "run/recipe.toml", "--resume") == 2
    err = capsys.readouterr().err
    assert err.count("no folder model") == err.count("data does not exist") == 1
    main(["export", "run", "--to", "exported"])  # as on a machine that has the checkpoint alone
    assert json.loads(Path("exported/config.json").read_text())["rms_norm_eps"] == 1e-6

    moved = ["train", "run/recipe.toml", "--resume", "--model.path", "model2", "--data.path", "data2"]
    main([*moved, "--stop-after", "3"])
    err = capsys.readouterr().err
    assert "from step 3 on model.path is model2, it was model" in err
    config = json.loads(Path("model2/config.json").read_text())
    Path("model2/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    Path("data2/3.txt").write_text("other" * 30)
    assert refused(*moved) == 2
    err = capsys.readouterr().err
    assert "model.rms_norm_eps: is 0.5, and was 1e-06 when the checkpoint was saved" in err
    assert "data: data2 holds other data than when the checkpoint was saved" in err
