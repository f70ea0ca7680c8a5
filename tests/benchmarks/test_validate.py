"""Predictions held against published figures: tables are read with care, targets are met, and no row is special."""

from __future__ import annotations

import csv
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = {"within": ("median", "p90"), "across": ("median",), "collectives": ("median",)}


@pytest.fixture(scope="module")
def validate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("validate")


@pytest.fixture(scope="module")
def comparison(validate: ModuleType):
    return validate.compare(validate.DATA / "throughput_published.csv", validate.DATA / "collectives_measured.csv")


ROW = {
    "source": "a test",
    "model": "Llama-3.1-8B",
    "params": "8030261248",
    "gpu": "h100_80gb",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "internode_gbps_per_node": "3200",
    "strategy": "FSDP2",
    "seq_len": "4096",
    "micro_batch": "2",
    "global_batch_tokens": "65536",
    "tokens_per_s_per_gpu": "8000",
    "mfu_pct": "",
    "tflops_per_gpu": "",
    "notes": "",
}
COLLECTIVE = {
    "source": "a test",
    "system": "MareNostrum5 ACC",
    "collective": "allgather",
    "algo": "nccl_ring",
    "ranks": "64",
    "nodes": "16",
    "bytes": "67108864",
    "median_us": "1000",
}


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(validate: ModuleType, folder: Path, **changes: str) -> Any:
    """What is made of one row of throughput with these changes."""
    (row,) = validate.read_published(table(folder / "one.csv", ROW | changes))
    return row


# what is judged


@pytest.mark.slow
def test_targets_are_met(comparison):
    figures = comparison.figures()
    for name, measures in TARGETS.items():
        for measure in measures:
            assert figures[name][measure] <= figures["targets"][name][measure], (name, measure)
    assert figures["order"]["reproduced"] == figures["order"]["pairs"] >= 5
    assert figures["within"]["count"] >= 57
    assert figures["collectives"]["count"] >= 244


@pytest.mark.slow
def test_the_kept_figures_are_what_the_code_gives(comparison):
    kept = json.loads((ROOT / "benchmarks/results/validate.json").read_text(encoding="utf-8"))
    figures = comparison.figures()
    assert kept["order"] == figures["order"]
    assert kept["left_out"] == figures["left_out"]
    for name, measures in TARGETS.items():
        for measure in ("count", *measures):
            assert kept[name][measure] == pytest.approx(figures[name][measure], abs=5e-3), (name, measure)


@pytest.mark.slow
def test_each_collective_of_nccl_is_met(comparison):
    """By system: no group of rows hides behind another."""
    by_system = comparison.figures()["collectives"]["by_system"]
    assert by_system["MareNostrum5 ACC"]["median"] <= 0.10
    assert by_system["Leonardo Booster"]["median"] <= 0.10


# reading rows


def test_sizes_are_met_to_the_element(validate, tmp_path):
    """MPT's, from their number of parameters alone: heads and widths follow."""
    for params, width, blocks in ((125311488, 768, 12), (6658859008, 4096, 32), (64862437376, 8192, 80)):
        model = read(validate, tmp_path, model="MPT", params=str(params)).setup.architecture
        assert (model.total, model.width, model.blocks) == (params, width, blocks)


def test_a_model_is_found_by_size_or_name(validate, tmp_path):
    assert read(validate, tmp_path, model="LLaMA-7B", params="6738415616").setup.architecture.name == "llama-2-7b"
    assert read(validate, tmp_path, params="").setup.architecture.name == "llama-3.1-8b"
    guessed = read(validate, tmp_path, model="somebody's", params="18e9").setup.architecture
    assert guessed.total == pytest.approx(18e9, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "layout", "near"),
    [
        ("FSDP FULL_SHARD +AC", "1×1×64", None),
        ("DeepSpeed ZeRO-3", "1×1×64", None),
        ("DeepSpeed ZeRO++ (no quant)", "1×1×64", "1×8×8"),
        ("DeepSpeed MiCS (8x1)", "1×8×8", None),
        ("HSDP", "1×8×8", None),
        ("HYBRID_SHARD (16)", "1×4×16", None),
        ("DDP", "1×64×1", None),
    ],
)
def test_strategies_are_layouts(validate, tmp_path, strategy, layout, near):
    row = read(validate, tmp_path, n_gpus="64", global_batch_tokens="", strategy=strategy)
    assert (str(row.setup.layout), row.near and str(row.near)) == (layout, near)


def test_details_of_a_setup(validate, tmp_path):
    def setup(**changes: str) -> Any:
        return read(validate, tmp_path, **changes).setup

    assert [setup(strategy=f"FSDP {told}").recompute for told in ("+AC", "noAC", "SAC", "no AC")] == [True] + [
        False
    ] * 3
    assert [setup(notes=f"ckpt_layers={layers}").recompute for layers in (0, 16, 32)] == [False, False, True]
    assert setup(strategy="FSDP SHARD_GRAD_OP").reshard_after_forward is False
    assert [setup(notes=told).reduce_bytes for told in ("precision=bf16 PURE", "amp_bf16 DEFAULT")] == [2.0, 4.0]
    assert setup(strategy="FSDP2 +float8 (float8 all-gather)").gather_bytes == 1.0
    assert [setup(global_batch_tokens=told).accumulation for told in ("262144", "1M", "")] == [4, 16, 1]
    assert setup(notes="grad_accum=3").accumulation == 3
    assert setup(n_gpus="16", internode_gbps_per_node="800", global_batch_tokens="").cluster.tiers[
        "cell"
    ].link_bytes_per_second.value == pytest.approx(90e9)


def test_throughput_is_taken_from_what_is_told(validate, tmp_path):
    flops = 6 * (8030261248 - 128256 * 4096) + 12 * 32 * 4096 * 4096
    nothing = {"tokens_per_s_per_gpu": ""}
    assert read(validate, tmp_path).rank_tokens_per_second == 8000
    assert read(validate, tmp_path, **nothing, notes="iteration_time_s=2").rank_tokens_per_second == 4096
    by_mfu = read(validate, tmp_path, **nothing, mfu_pct="40").rank_tokens_per_second
    assert by_mfu == pytest.approx(0.4 * 989e12 / flops)
    by_flops = read(validate, tmp_path, **nothing, tflops_per_gpu="400").rank_tokens_per_second
    assert by_flops == pytest.approx(400e12 / flops)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": "128-512"}, "n_gpus is '128-512'"),
        ({"micro_batch": "8/16"}, "micro_batch is '8/16'"),
        ({"seq_len": ""}, "seq_len is ''"),
        ({"gpu": "tpu_v4"}, "no cluster stands for 'tpu_v4'"),
        ({"model": "a mystery", "params": ""}, "neither the parameters of 'a mystery'"),
        ({"params": "12"}, "no plain architecture"),
        ({"strategy": "FSDP + Megatron TP"}, "cuts the model in other ways"),
        ({"strategy": "pure luck"}, "no model of the strategy"),
        ({"tokens_per_s_per_gpu": "", "mfu_pct": ">50"}, "no throughput that is one number"),
        ({"n_gpus": "12", "global_batch_tokens": ""}, "12 ranks do not fill nodes of 8"),
        ({"global_batch_tokens": "100000"}, "no whole number of micro-batches"),
        ({"strategy": "HSDP (16)", "n_gpus": "40", "global_batch_tokens": ""}, "no whole number of 16 shards"),
    ],
)
def test_rows_that_say_too_little_are_left_out(validate, tmp_path, changes, reason):
    row = read(validate, tmp_path, **changes)
    assert isinstance(row, validate.LeftOut)
    assert row.row.startswith("line 2: ")
    assert reason in row.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"system": "Frontier"}, "no cluster stands for 'Frontier'"),
        ({"collective": "broadcast"}, "no model of 'broadcast'"),
        ({"algo": "nccl_tree"}, "no tree for all_gather"),
        ({"nodes": "15"}, "64 ranks are not spread evenly over 15 nodes"),
        ({"algo": "recursive_doubling_ompi"}, "several ranks a node"),
        ({"median_us": "-"}, "median_us is '-'"),
    ],
)
def test_collectives_that_say_too_little_are_left_out(validate, tmp_path, changes, reason):
    (row,) = validate.read_measured(table(tmp_path / "one.csv", COLLECTIVE | changes))
    assert isinstance(row, validate.LeftOut)
    assert reason in row.reason


# predictions


def invented(
    validate: ModuleType, folder: Path, *sizes: int, efficiency: float, **changes: str
) -> list[dict[str, str]]:
    """Rows whose throughput is what the formulas give at this efficiency."""
    predict, rows = importlib.import_module("predict"), []
    for ranks in sizes:
        facts = {"n_gpus": str(ranks), "global_batch_tokens": ""} | changes
        foretold = predict.predicted(read(validate, folder, **facts), efficiency)
        rows.append(ROW | facts | {"tokens_per_s_per_gpu": str(foretold.rank_tokens_per_second)})
    return rows


def test_a_family_that_obeys_the_formulas_is_met(validate, tmp_path):
    """Two models at the same efficiency: each family from its smallest, all rows from the one efficiency."""
    rows = invented(validate, tmp_path, 8, 64, 512, efficiency=0.6)
    rows += invented(validate, tmp_path, 16, 128, efficiency=0.6, model="Llama 2 7B", params="6738415616")
    found = validate.compare(table(tmp_path / "all.csv", *rows), table(tmp_path / "one.csv", COLLECTIVE))
    assert found.constants == {"h100_80gb": pytest.approx(0.6, rel=1e-6)}
    assert [each.row.ranks for each in found.within] == [64, 512, 128]
    assert [each.error for each in (*found.within, *found.across)] == pytest.approx([0.0] * 8, abs=1e-6)
    assert (found.left_out, len(found.measured)) == ([], 1)


def test_an_error_is_predicted_over_published(validate, tmp_path):
    """A row that was published a quarter slower than the formulas say is a third over."""
    rows = invented(validate, tmp_path, 8, 64, efficiency=0.6)
    rows[1]["tokens_per_s_per_gpu"] = str(0.75 * float(rows[1]["tokens_per_s_per_gpu"]))
    (within,) = validate.compare(table(tmp_path / "all.csv", *rows), table(tmp_path / "one.csv", COLLECTIVE)).within
    assert within.error == pytest.approx(1 / 3, abs=1e-6)
    assert validate.summary([within]) == {"count": 1, "median": 0.3333, "p90": 0.3333, "largest": 0.3333}


def test_of_several_smallest_the_most_alike_is_calibrated_on(validate, tmp_path):
    rows = [
        row
        for sequence_length, efficiency in ((2048, 0.3), (8192, 0.7))
        for row in invented(validate, tmp_path, 8, 64, efficiency=efficiency, seq_len=str(sequence_length))
    ]
    found = validate.compare(table(tmp_path / "all.csv", *rows), table(tmp_path / "one.csv", COLLECTIVE))
    assert [each.error for each in found.within] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_row_that_no_efficiency_explains_is_left_out(validate, tmp_path):
    rows = [ROW | {"tokens_per_s_per_gpu": "1e9"}, ROW | {"n_gpus": "64", "global_batch_tokens": ""}]
    found = validate.compare(table(tmp_path / "all.csv", *rows), table(tmp_path / "one.csv", COLLECTIVE))
    assert (found.within, found.across) == ([], [])
    assert "where communication and memory alone take" in found.left_out[0].reason


def test_the_script_prints_keeps_and_draws(validate, tmp_path, monkeypatch, capsys):
    table(tmp_path / "all.csv", *invented(validate, tmp_path, 8, 64, efficiency=0.6), ROW | {"gpu": "tpu_v4"})
    table(tmp_path / "one.csv", COLLECTIVE)
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    words = ["--table", str(tmp_path / "all.csv"), "--collectives", str(tmp_path / "one.csv")]
    monkeypatch.setattr("sys.argv", ["validate.py", *words])
    validate.main()
    printed = capsys.readouterr().out
    assert re.search(r"within families:\s+1 rows  median\s+0\.0%", printed)
    assert "tpu_v4" in printed.partition("left out")[2]
    assert json.loads((tmp_path / "validate.json").read_text())["within"]["count"] == 1
    assert "predicted tokens/s" in (tmp_path / "validate.svg").read_text()


def test_a_table_that_is_not_there_is_told(validate, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["validate.py", "--table", "nowhere.csv"])
    with pytest.raises(SystemExit, match="2"):
        validate.main()
    assert "no such table: nowhere.csv" in capsys.readouterr().err
