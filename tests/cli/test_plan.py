"""`fedshard plan`: the table, the recipe that it writes, JSON, and what it refuses."""

import json
import subprocess
import sys

import pytest

from fedshard.cli.main import main
from fedshard.core.recipe_file import read_recipe

WORDS = ["plan", "--model", "llama-3.1-8b", "--cluster", "leonardo-nominal", "--gpus", "64"]


def test_the_table(capsys):
    main(WORDS)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("llama-3.1-8b on 64 ranks of leonardo-nominal, sequences of 4096 tokens")
    assert lines[1].split()[:2] == ["layout", "micro"]
    for said in (
        "FSDP 1×1×64",
        "HSDP 1×",
        "FL+",
        "over FSDP at its best: ",
        "days",
        "GPU-hours",
        "does not train with",
    ):
        assert said in out


def test_json(capsys):
    main([*WORDS, "--json", "--max-batch-tokens", "1_000_000"])
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 64
    assert {"FSDP", "HSDP"} == set(told["baselines"])
    assert all(row["group_tokens"] <= 1_000_000 for row in told["choices"])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-0.5b"])
def test_the_recipe_is_one_that_train_takes(tmp_path, capsys, monkeypatch, model):
    monkeypatch.setenv("FEDSHARD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "r.toml"
    main(["plan", "--model", model, "--cluster", "leonardo-nominal", "--gpus", "16", "--write", str(file),
          "--pure-bfloat16"])  # fmt: skip
    recipe = read_recipe(file)
    assert recipe.shape.ranks == 16
    capsys.readouterr()
    main(["train", str(file), "--dry-run"])
    assert "16" in capsys.readouterr().out


def test_a_folder_s_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    }))  # fmt: skip
    main(
        ["plan", "--model", str(tmp_path), "--cluster", "workstation-8", "--gpus", "8", "--write", str(tmp_path / "r")]
    )
    assert "sequences of 128 tokens" in capsys.readouterr().out
    assert read_recipe(tmp_path / "r").model.path == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--model: missing"),
        ([*WORDS[:-1], "none"], "--gpus: 'none' is no number from 1 on"),
        ([*WORDS, "--sync.every", "4"], "--sync.every: no such option"),
        (["plan", "--model", "llama-9", "--cluster", "p5", "--gpus", "8"], "no model 'llama-9' is known"),
        (["plan", "--model", "gpt2", "--cluster", "p5", "--gpus", "8", "--sequence-length", "4096"], "1024 positions"),
        ([*WORDS[:-1], "6"], "do not fill nodes"),
    ],
)
def test_what_is_refused(capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        main(words or ["plan"])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_what_does_not_fit(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", "llama-3.1-405b", "--cluster", "leonardo-nominal", "--gpus", "8"])
    assert stopped.value.code == 1
    err = capsys.readouterr().err
    assert "memory is short by" in err
    assert "1024 ranks with sequences of 2048 tokens would do" in err


def test_no_torch_is_loaded():
    code = f"import sys; from fedshard.cli.main import main; main({WORDS!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
