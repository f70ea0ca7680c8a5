"""Reports: what curves, shares and ratios say of rows made by hand, and a page that needs nothing else."""

import json
import math
import re
from html import escape
from pathlib import Path

import pytest

from fedshard.cli.main import main
from fedshard.core.errors import InputError
from fedshard.core.recipe_file import read_recipe, write_recipe
from fedshard.lab.figures import FIGURES
from fedshard.lab.report import notes, table, write_report
from fedshard.lab.runs import Run, first_reach, read_run, shared_end, value_at

FSDP = ["--layout.groups", "1", "--layout.shards", "4"]


def make_run(folder: Path, words: list[str], seconds: float, losses: list[float], *, done: bool = True) -> Run:
    """Eight steps of `seconds` each, evaluated after the fourth and the last, with rounds of 0.5 s if it federates."""
    folder.mkdir()
    steps = 8
    recipe = read_recipe(overrides=[*words, "--budget.steps", str(steps), "--sync.every", "4",
                                    "--sync.warmup_fraction", "0"])  # fmt: skip
    (folder / "recipe.toml").write_text(write_recipe(recipe))
    groups, rows = recipe.layout.groups, {"metrics": [], "rounds": [], "evals": []}
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": step * recipe.tokens_per_step}
        row = common | {
            "loss": 5.0 - step / 10,
            "seconds": seconds,
            "tokens_per_second": recipe.tokens_per_step / seconds,
        }
        rows["metrics"].append(row | ({"inner_seconds": seconds / 4} if step == 5 else {}))
        if step % 4 == 0:
            loss = losses[step // 4 - 1]
            rows["evals"].append(common | {"loss": loss, "perplexity": math.exp(loss), "sequences": 8})
        if step % 4 == 0 and groups > 1:
            rows["rounds"].append(common | {
                "round": step // 4, "sent_bytes": 1000, "seconds": 0.5, "exposed_seconds": 0.5, "delta_norm": None,
                "group_delta_norms": None, "agreement": None, "spread": [1.0, 2.0],
                "weights": [0.5, 0.5], "excluded": [],
            })  # fmt: skip
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        speed = recipe.tokens_per_step / seconds
        summary = {"tokens_per_second": speed, "steady_tokens_per_second": speed}
        (folder / "summary.json").write_text(json.dumps(summary))
    return read_run(folder)


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    return [make_run(tmp_path / "fsdp", FSDP, 2.0, [4.0, 3.0]), make_run(tmp_path / "fl", [], 0.5, [4.2, 2.9])]


def test_seconds_are_those_of_steps_and_rounds(runs):
    assert runs[0].seconds_at[8] == 16.0
    assert runs[1].seconds_at[8] == 8 * 0.5 + 2 * 0.5
    assert runs[1].sync_share == pytest.approx(1.0 / 5.0)
    assert runs[1].inner_share == 0.25


def test_the_table(runs):
    fsdp, fl = table(runs)
    assert (fsdp["run"], fl["run"]) == ("FSDP 1×1×4", "FL+FSDP 2×1×2")
    assert (fsdp["× FSDP"], fl["× FSDP"], fl["× HSDP"]) == ("1.00", "4.00", "–")
    assert fl["perplexity at equal tokens"] == f"{math.exp(2.9):.4g}"
    # equal seconds: FL's end at 5 s; FSDP was last evaluated at 8 s, so it has nothing to show there
    assert shared_end(runs, "seconds") == 5.0
    assert (fsdp["… seconds"], fl["… seconds"]) == ("–", f"{math.exp(2.9):.4g}")
    # FL is at FSDP's 3.0 between its evaluations at 2.5 s (4.2) and 5 s (2.9)
    assert first_reach(runs[1].curve("eval_loss", "seconds"), 3.0) == pytest.approx(2.5 + 2.5 * 1.2 / 1.3)
    assert fl["rounds' share"] == "20.0%"
    assert any("H = 4" in line for line in notes(runs))


@pytest.mark.parametrize(("place", "value"), [(0.5, None), (1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (3.5, None)])
def test_between_points_it_is_straight_and_outside_unknown(place, value):
    assert value_at(([1.0, 3.0], [4.0, 2.0]), place) == value


def test_a_page_that_needs_nothing_else(runs, tmp_path):
    (runs[1].path / "bytes.json").write_text(json.dumps({"measured": {"node": 2e6}, "formula": {"node": 1.9e6}}))
    (runs[1].path / "predicted.json").write_text(json.dumps({"tokens_per_second": 4000.0}))
    again = [read_run(run.path) for run in runs]
    page = write_report(again, tmp_path / "report").read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)
    assert "@import" not in page
    for name, (heading, _) in FIGURES.items():
        assert escape(heading, quote=False).replace("'", "&#39;") in page
        assert f'id="{name}"' in page
        assert (tmp_path / f"report/figures/{name}.png").stat().st_size > 5000
    for unit in ("optimizer steps", "training time (s)", "evaluation perplexity", "MB of one step"):
        assert unit in page
    assert page.count("<svg") == len(FIGURES)


def test_an_unfinished_run_is_reported_as_far_as_it_is(tmp_path):
    run = make_run(tmp_path / "run", [], 0.5, [4.0, 3.0], done=False)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tok')  # as a killed run leaves it
    (row,) = table([read_run(run.path)])
    assert row["run"] == "FL+FSDP 2×1×2 (unfinished)"
    assert row["steps"] == "8"


def test_what_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is no run folder"):
        read_run(tmp_path)
    make_run(tmp_path / "run", [], 0.5, [4.0, 3.0])
    (tmp_path / "run/metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has no step yet"):
        read_run(tmp_path / "run")


def test_the_command(runs, tmp_path, capsys):
    main(["report", str(runs[0].path)])
    assert str(runs[0].path / "report.html") in capsys.readouterr().out
    assert (runs[0].path / "report.html").exists()
    main(["report", *(str(run.path) for run in runs), "--into", str(tmp_path / "both"), "--json"])
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    for words in ([], [str(run.path) for run in runs], [str(runs[0].path), "--bogus.key", "1"]):
        with pytest.raises(SystemExit) as stopped:
            main(["report", *words])
        assert stopped.value.code == 2
