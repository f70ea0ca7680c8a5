"""`fedshard plan`: the table, JSON, the recipe that it writes, what it says where nothing fits, and what it refuses."""

import json
import resource
import subprocess
import sys

import pytest

from fedshard.cli.main import main
from fedshard.core.recipe_file import read_recipe

WORDS = ["plan", "--model", "llama-3.1-8b", "--cluster", "leonardo-nominal", "--gpus", "64"]
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "rope_scaling": None,
}  # fmt: skip


def told(capsys, *words: str) -> dict:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_table(capsys):
    main([*WORDS, "--rows", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama-3.1-8b on 64 ranks of leonardo-nominal, sequences of 4096 tokens, precision mixed"
    assert lines[1].split() == [
        "layout", "micro", "×", "acc", "recompute", "H", "tokens/s", "MFU", "memory", "between/step", "batch", "sync",
        "days",
    ]  # fmt: skip
    rows = [line.split()[0] for line in lines[2:] if " none " in line or " full " in line]
    assert 3 <= len(rows) <= 5
    assert {"FSDP", "HSDP"} <= set(rows)  # below the three rows that were asked for, if not among them
    for said in ("nominal links", "links at 0.5 of their rate", "with noise", "not in this version", "GPU-hours"):
        assert any(said in line for line in lines[2 + len(rows) :])


@pytest.mark.parametrize(("columns", "is_table"), [("160", True), ("80", False)])
def test_the_table_on_a_terminal(capsys, monkeypatch, columns, is_table):
    """Nothing of it is cut off, however narrow the terminal is."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    main([*WORDS[:2], "gpt2", *WORDS[3:-1], "8"])
    out = capsys.readouterr().out
    assert ("┃" in out) == is_table
    assert "…" not in out
    assert "FSDP 1×1×8" in out


def test_json(capsys):
    result = told(capsys, *WORDS, "--max-batch-tokens", "1_000_000")
    assert result["fits"] is True
    assert (result["ranks"], result["max_batch_tokens"], result["min_rounds"]) == (64, 1_000_000, 50)
    speeds = [row["tokens_per_second"] for row in result["choices"]]
    assert speeds == sorted(speeds, reverse=True)
    assert {"FSDP", "HSDP"} == set(result["baselines"])
    assert result["baselines"]["FSDP"]["layout"] == {"groups": 1, "replicas": 1, "shards": 64}
    assert all(row["group_tokens"] <= 1_000_000 for row in result["choices"])
    for band in result["speedups"].values():
        assert list(band) == ["nominal links", "links at 0.5 of their rate", "with noise"]
    assert {each["needs"] for each in result["what_if"]} >= {"not in this version", "--precision pure-bfloat16"}


def test_a_budget_in_days(capsys):
    row = told(capsys, *WORDS, "--tokens", "10_000_000_000")["baselines"]["FSDP"]
    assert row["days"] == pytest.approx(1e10 / row["tokens_per_second"] / 86400, rel=1e-3)
    assert row["gpu_hours"] == pytest.approx(24 * 64 * row["days"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2"])
def test_the_recipe_is_one_that_train_takes(tmp_path, capsys, monkeypatch, model):
    monkeypatch.setenv("FEDSHARD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "r.toml"
    words = ["plan", "--model", model, "--cluster", "leonardo-nominal", "--gpus", "16", "--write", str(file)]
    first = told(capsys, *words)["choices"][0]
    main(["train", str(file), "--dry-run"])
    out = capsys.readouterr().out
    layout = "×".join(map(str, first["layout"].values()))
    assert f"{first['strategy']} {layout}" in out
    assert f"{first['group_tokens']:,}" in out


@pytest.mark.slow
@pytest.mark.parametrize("named", ["", "config.json"])
def test_a_config_of_ones_own(tmp_path, capsys, monkeypatch, named):
    monkeypatch.setenv("FEDSHARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    recipe = tmp_path / "r.toml"
    words = ["plan", "--cluster", "workstation-8", "--gpus", "8", "--write", str(recipe)]
    main([*words, "--model", str(tmp_path / named)])
    assert "sequences of 128 tokens" in capsys.readouterr().out
    assert read_recipe(recipe).model.path == str(tmp_path)
    main(["train", str(recipe), "--dry-run"])
    assert "8 on a node" in capsys.readouterr().out


def test_a_config_of_another_name_is_planned_for_but_not_written(tmp_path, capsys):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = ["plan", "--model", str(tmp_path / "small.json"), "--cluster", "workstation-8", "--gpus", "8"]
    assert told(capsys, *words)["fits"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--write", str(tmp_path / "r.toml")])
    assert stopped.value.code == 2
    assert "Call the file config.json" in capsys.readouterr().err
    assert not (tmp_path / "r.toml").exists()


def test_where_nothing_fits_the_answer_is_the_result(capsys):
    words = ["plan", "--model", "llama-3.1-405b", "--cluster", "leonardo-nominal", "--gpus", "8"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 1
    out, err = capsys.readouterr()
    assert "memory is short by 792 GB a rank" in out
    assert "would do: --gpus 864 --sequence-length 2048" in out
    assert err == "fedshard: no choice fits\n"
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is False
    assert result["short"]["of"] == "memory"
    assert result["short"]["would_do"] == ["--gpus 864 --sequence-length 2048"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "--model: missing"),
        ([*WORDS[:-1], "none"], "--gpus: 'none' is no number from 1 on"),
        ([*WORDS[:-1], "0"], "--gpus: '0' is no number from 1 on"),
        ([*WORDS, "--rows", "²"], "--rows: '²' is no number from 1 on"),
        ([*WORDS, "--precision", "fp8"], "'fp8' is none of mixed, bfloat16-reductions, pure-bfloat16"),
        ([*WORDS, "--sync.every", "4"], "--sync.every: no such option"),
        (["plan", "--model", "llama-9", "--cluster", "p5", "--gpus", "8"], "no model 'llama-9' is known"),
        (["plan", "--model", "gpt2", "--cluster", "p5", "--gpus", "8", "--sequence-length", "4096"], "1024 positions"),
        ([*WORDS[:-1], "6"], "do not fill nodes"),
        ([*WORDS[:-1], "99999996"], "leonardo-nominal has 13824"),
        ([*WORDS[:4], "no-such", *WORDS[5:]], "no cluster 'no-such' comes with fedshard"),
        ([*WORDS, "--write", "/"], "exists already"),
        ([*WORDS, "--write", "/no/such/r.toml"], "cannot be written"),
    ],
)
def test_what_is_refused(capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_it_answers_at_once_and_without_torch():
    """Under two seconds of the processor, imports included: a busy machine makes any wall clock late."""
    words = [*WORDS[:-1], "512"]
    code = f"import sys; from fedshard.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 2
