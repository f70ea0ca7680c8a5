"""Reports: what curves, shares and ratios say of rows made by hand, and a page that needs nothing else."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import FL_FSDP, FSDP, HSDP, make_run

from fedshard.core.errors import InputError
from fedshard.lab import figures
from fedshard.lab.outcomes import Table, outcomes, tables
from fedshard.lab.report import DRAWINGS, notes, write_report
from fedshard.lab.runs import Run, first_reach, read_run, read_runs, shared_end, value_at


def three_runs(folder: Path) -> list[Run]:
    """FSDP: 16 s, evaluated at 8 and 16; HSDP: 8 s; FL+FSDP: 4 s and two rounds of 0.5, evaluated at 2.5 and 5."""
    return read_runs(
        [
            make_run(folder / "fsdp", FSDP, seconds=2.0, losses=[4.0, 3.0]),
            make_run(folder / "hsdp", HSDP, seconds=1.0, losses=[4.0, 3.1]),
            make_run(folder / "fl", FL_FSDP, seconds=0.5, losses=[4.2, 2.9]),
        ]
    )


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    return three_runs(tmp_path)


def count(run: Run, measured: dict[str, float], formula: dict[str, float]) -> Run:
    return replace(run, tier_bytes={"measured": measured, "formula": formula})


def table_of(runs: list[Run], heading: str) -> Table:
    return next(table for table in tables(runs) if table.heading == heading)


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_seconds_are_those_of_steps_and_of_rounds(runs):
    fsdp, _, fl = runs
    assert [fsdp.seconds_at[step] for step in (0, 4, 8)] == [0.0, 8.0, 16.0]
    assert [fl.seconds_at[step] for step in (3, 4, 8)] == [1.5, 2.5, 5.0]
    assert fl.sync_share_fraction == pytest.approx(1.0 / 5.0)
    assert fl.eval_curve("seconds") == ([2.5, 5.0], [4.2, 2.9])
    assert fl.eval_curve("steps")[0] == [4.0, 8.0]
    assert fl.curve("loss", "tokens")[0][-1] == 8 * fl.recipe.tokens_per_step


def test_seconds_end_where_the_run_ended(runs):
    """Of each step the slowest group's are known, and those of a round hold the wait for it: both together are more."""
    summary = {**(runs[2].summary or {}), "seconds": 4.0}
    assert replace(runs[2], summary=summary).seconds_at[4] == pytest.approx(2.5 * 4.0 / 5.0)


def test_speed_has_the_rounds_in_it(runs):
    fsdp, _, fl = runs
    tokens = fl.recipe.tokens_per_step
    assert fl.speed_curve() == ([4.0, 8.0], [4 * tokens / 2.5, 4 * tokens / 2.5])
    assert fsdp.speed_curve() == ([4.0, 8.0], [tokens / 2.0, tokens / 2.0])


def test_speed_of_a_run_without_one_whole_round(tmp_path):
    run = read_run(make_run(tmp_path / "run", FSDP, seconds=0.5, losses=[4.0]))
    short = replace(run, steps=run.steps[:3], summary=None)
    assert short.speed_curve() == ([3.0], [run.recipe.tokens_per_step / 0.5])


def test_where_a_steps_time_goes(runs):
    parts = runs[2].step_parts()  # of steps 2 to 8: the first tenth of eight is one
    assert parts == pytest.approx({"computing": 0.5 * 3 / 4, "inner": 0.5 / 4, "rounds": 2 * 0.5 / 7})
    unsampled = [{key: value for key, value in row.items() if key != "inner_seconds"} for row in runs[2].steps]
    assert replace(runs[2], steps=unsampled).step_parts() == pytest.approx({"steps": 0.5, "rounds": 2 * 0.5 / 7})


def test_outcomes(runs):
    fsdp, hsdp, fl = outcomes(runs)
    assert (fl.strategy, fl.layout, fl.finished, fl.steps) == ("FL+FSDP", "2×1×2", True, 8)
    assert (fsdp.speedup_over_fsdp, hsdp.speedup_over_fsdp, fl.speedup_over_fsdp) == (1.0, 2.0, 4.0)
    assert (fsdp.speedup_over_hsdp, fl.speedup_over_hsdp) == (0.5, 2.0)
    assert (fl.round_sent_bytes, fsdp.round_sent_bytes) == (1000, None)
    assert fl.equal_tokens_perplexity == fl.equal_steps_perplexity == fl.eval_perplexity == math.exp(2.9)
    # Equal seconds are FL's five: HSDP was evaluated at 4 s and at 8 s, FSDP not before 8 s.
    assert shared_end(runs, "seconds") == 5.0
    assert fl.equal_seconds_perplexity == math.exp(2.9)
    assert hsdp.equal_seconds_perplexity == pytest.approx(math.exp(4.0 - 0.9 / 4))
    assert fsdp.equal_seconds_perplexity is None
    # FL is at FSDP's 3.0 between 2.5 s, where it has 4.2, and 5 s, where it has 2.9; HSDP never is.
    assert fl.seconds_to_baseline == pytest.approx(2.5 + 2.5 * 1.2 / 1.3)
    assert (fsdp.seconds_to_baseline, hsdp.seconds_to_baseline) == (16.0, None)


def test_without_fsdp_hsdp_is_the_baseline(runs):
    hsdp, fl = outcomes(runs[1:])
    assert (hsdp.speedup_over_fsdp, fl.speedup_over_hsdp, hsdp.seconds_to_baseline) == (None, 2.0, 8.0)
    (fl,) = outcomes(runs[2:])
    assert (fl.speedup_over_fsdp, fl.speedup_over_hsdp, fl.seconds_to_baseline) == (None, None, None)


def test_a_run_without_an_evaluation_does_not_keep_others_from_being_compared(runs):
    young = replace(runs[0], evals=[], summary=None)
    fsdp, _, fl = outcomes([young, *runs[1:]])
    assert fl.equal_tokens_perplexity == math.exp(2.9)
    assert (fsdp.eval_perplexity, fsdp.equal_tokens_perplexity, fl.seconds_to_baseline) == (None, None, None)


def test_tables_say_it_in_words(runs):
    speed, quality = table_of(runs, "Speed"), table_of(runs, "Quality")
    assert column(speed, "run") == ["FSDP 1×1×4", "HSDP 1×2×2", "FL+FSDP 2×1×2"]
    assert column(speed, "× FSDP") == ["1.00", "2.00", "4.00"]
    assert column(speed, "waiting for rounds") == ["–", "–", "20.0%"]
    assert "predicted" not in speed.columns, "a column that has nothing to say"
    assert column(quality, "at 5.00 s") == ["–", "43.60", "18.17"]  # e to 3.775, and to 2.9
    assert column(quality, "time to the baseline's loss") == ["16.0 s", "–", "4.81 s"]
    alone = table_of(runs[2:], "Quality")
    assert alone.columns == ["run", "tokens", "steps", "time", "perplexity"]


def test_bytes_and_predictions_stand_beside_what_was_measured(runs):
    told = [runs[0], replace(count(runs[2], {"cell": 2e6}, {"cell": 1.6e6, "node": 1e3}),
                             predicted={"tokens_per_second": 2 * runs[2].steady_tokens_per_second})]  # fmt: skip
    assert table_of(told, "Bytes of a step").rows == [
        ["FL+FSDP 2×1×2", "cell", "2.00 MB", "1.60 MB", "1.250"],
        ["FL+FSDP 2×1×2", "node", "–", "1.00 kB", "–"],
    ]
    assert column(table_of(told, "Speed"), "measured / predicted") == ["–", "0.50"]


def test_what_recipes_differ_by(runs, tmp_path):
    table = table_of(runs, "What their recipes differ by")
    assert table.columns == ["run", "layout.groups", "layout.replicas", "layout.shards"]
    assert table.rows[1] == ["HSDP 1×2×2", "1", "2", "2"]
    assert [table.heading for table in tables(runs[:1])] == ["Speed", "Quality"]
    words = [*FL_FSDP, "--sync.outer.kind", "nesterov"]
    other = read_run(make_run(tmp_path / "other", words, seconds=0.5, losses=[4.0, 3.0]))
    table = table_of([runs[2], other], "What their recipes differ by")
    assert column(table, "sync.outer.momentum")[0] == "–"


def test_notes_say_what_was_compared(runs):
    odd = [row | {"excluded": [1]} if row["round"] == 2 else row for row in runs[2].rounds]
    said = notes([runs[0], replace(runs[2], rounds=odd)])
    assert "The baseline is FSDP 1×1×4." in said
    assert "H = 4, 0 synchronous steps, outer optimizer mean; 4 ranks on 2 hosts with Abacus" in said[-1]
    assert "reduce-scatter by a ring" in said[-1]
    assert said[-1].endswith("groups were left out of rounds 2.")
    assert "H =" not in said[-2]


def test_runs_that_are_alike_are_told_apart(tmp_path):
    paths = [make_run(tmp_path / name, FSDP, seconds=1.0, losses=[4.0]) for name in ("a/seed0", "a/seed1", "b/seed1")]
    names = [run.name for run in read_runs(paths)]
    assert names[0] == "FSDP 1×1×4 (seed0)"
    assert names[1:] == [f"FSDP 1×1×4 (seed1) ({path})" for path in paths[1:]]


@pytest.mark.parametrize(("place", "value"), [(0.5, None), (1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (3.5, None)])
def test_between_points_it_is_straight_and_outside_unknown(place, value):
    assert value_at(([1.0, 3.0], [4.0, 2.0]), place) == value


@pytest.mark.parametrize(("value", "place"), [(4.5, 1.0), (4.0, 1.0), (3.0, 2.0), (2.0, 3.0), (1.0, None)])
def test_the_first_place_that_reaches_a_value(value, place):
    assert first_reach(([1.0, 3.0, 4.0], [4.0, 2.0, 2.5]), value) == place


def test_an_unfinished_run_is_reported_as_far_as_it_is(tmp_path):
    path = make_run(tmp_path / "run", FL_FSDP, seconds=0.5, losses=[4.0, 3.0], done=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tok')  # as a killed run leaves it
    with (path / "evals.jsonl").open("a") as file:
        file.write('{"step": 12, "tokens": 24576, "loss": 2.0, "perplexity": 7.4, "sequences": 8}\n')
    run = read_run(path)
    (told,) = outcomes([run])
    assert (told.finished, told.steps, told.seconds) == (False, 8, 5.0)
    assert told.steady_tokens_per_second == pytest.approx(7 * run.recipe.tokens_per_step / (7 * 0.5 + 2 * 0.5))
    assert told.eval_perplexity == math.exp(3.0), "an evaluation after the last known step has no place"
    assert column(table_of([run], "Speed"), "run") == ["FL+FSDP 2×1×2, unfinished"]


def test_numbers_that_were_not_finite_have_no_point(runs):
    rows = [row | {"loss": None} if row["step"] == 3 else row for row in runs[0].steps]
    assert replace(runs[0], steps=rows).curve("loss", "steps")[0] == [1, 2, 4, 5, 6, 7, 8]


def test_what_cannot_be_reported_is_told_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    young, damaged = (make_run(tmp_path / name, FSDP, seconds=1.0, losses=[4.0]) for name in ("young", "damaged"))
    (young / "metrics.jsonl").write_text("")
    (damaged / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n')
    with pytest.raises(InputError) as caught:
        read_runs([tmp_path / "empty", young, damaged, damaged])
    assert [(fault.key, fault.says) for fault in caught.value.faults] == [
        (str(damaged), "is given 2 times"),
        (str(tmp_path / "empty"), "is no run folder"),
        (str(young), "has no step yet"),
        *[(f"{damaged}/metrics.jsonl:2", "is no JSON object")] * 2,
    ]


def test_figures_with_nothing_to_show_are_left_out(runs):
    assert figures.round_bytes(runs[:2]) is None
    assert figures.drift(runs[:2]) is None
    assert figures.tier_bytes(runs) is None
    assert figures.predictions(runs) is None
    assert figures.eval_perplexity([replace(runs[0], evals=[])]) is None


def lines_of(figure) -> list:
    return [line for panel in figure.axes for line in panel.get_lines()]


def test_curves_are_told_apart_without_colour(runs):
    curves = figures.loss(runs * 3).axes[0].get_lines()
    assert len({(line.get_linestyle(), line.get_marker()) for line in curves}) == len(curves) == 9


def test_axes_have_units(runs):
    assert [panel.get_xlabel() for panel in figures.loss(runs).axes] == list(figures.AXES.values())
    for draw in (figures.loss, figures.eval_perplexity, figures.speed, figures.drift):
        assert draw(runs).axes[0].get_ylabel(), draw.__name__
    for draw in (figures.step_time, figures.round_bytes):
        assert draw(runs).axes[0].get_xlabel(), draw.__name__


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path):
    run = read_run(make_run(tmp_path / "run", FSDP, seconds=1.0, losses=[4.0], every=1500))
    places = lines_of(figures.loss([run]))[1].get_xdata()
    assert len(places) <= figures.MOST_POINTS
    assert places[-1] == 1500


def test_drift_is_of_deltas_with_an_anchor_and_of_spread_without(runs, tmp_path):
    words = [*FL_FSDP, "--sync.anchor", "true"]
    anchored = read_run(make_run(tmp_path / "anchored", words, seconds=0.5, losses=[4.0, 3.0]))
    figure = figures.drift([runs[0], runs[2], anchored])
    deltas, spread, agreement = figure.axes
    assert deltas.get_ylabel() == "‖anchor − local‖ of groups"
    assert [list(line.get_ydata()) for line in deltas.get_lines()] == [[1.5, 1.5]]
    assert [list(line.get_ydata()) for line in spread.get_lines()] == [[1.5, 1.5]]
    assert [list(line.get_ydata()) for line in agreement.get_lines()] == [[1.2, 1.2]]
    assert len(figures.drift([runs[2]]).axes) == 1


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report that has every figure there is."""
    folder = tmp_path_factory.mktemp("report")
    fsdp, *others = three_runs(folder)
    counted = replace(count(fsdp, {"node": 2e6, "cell": 1e5}, {"node": 1.9e6}), predicted={"tokens_per_second": 1e4})
    return write_report([counted, *others], folder / "new/report")


@pytest.mark.slow
def test_a_page_that_needs_nothing_else(page):
    html = page.read_text()
    assert not re.findall(r"""<(?:script|link|img|iframe|object)|\bsrc=|@import|url\((?!#)""", html)
    assert set(re.findall(r'\bhref="(?!#)([^"]+)"', html)) == {
        f"figures/{drawing.name}.{kind}" for drawing in DRAWINGS for kind in ("svg", "png")
    }
    assert html.count("<svg") == len(DRAWINGS)
    for drawing in DRAWINGS:
        assert f'aria-label="{drawing.heading}"' in html.replace("&#39;", "'")
        assert (page.parent / f"figures/{drawing.name}.png").stat().st_size > 5000
        assert (page.parent / f"figures/{drawing.name}.svg").read_text().startswith("<?xml")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_a_second_report_leaves_no_figure_of_the_first(runs, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/predictions.svg").touch()
    write_report(runs[:1], tmp_path)
    assert not (tmp_path / "figures/predictions.svg").exists()
    assert (tmp_path / "figures/loss.svg").exists()


@pytest.mark.slow
def test_in_a_browser(page):
    """Chromium shows every figure within the window, asks for nothing but the page, and complains of nothing."""
    if importlib.util.find_spec("PySide6") is None or importlib.util.find_spec("PySide6.QtWebEngineCore") is None:
        pytest.skip("no browser: pip install PySide6-WebEngine")
    environment = os.environ | {
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu",
        "QTWEBENGINE_DISABLE_SANDBOX": "1",  # which root cannot have
    }
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), str(page)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if "ImportError" in done.stderr:
        pytest.skip(f"no browser: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["console"] == []
    assert seen["requests"] == [page.as_uri()]
    assert [figure["name"] for figure in seen["figures"]] == [drawing.name for drawing in DRAWINGS]
    for figure in seen["figures"]:
        assert figure["left"] >= 0
        assert 300 < figure["right"] <= 1280
        assert figure["height"] > 80
        assert len(figure["words"]) > 3
        assert figure["lost"] == [], "what a figure refers to is there"


def test_neither_torch_nor_pyplot_is_loaded(tmp_path):
    path = make_run(tmp_path / "run", FL_FSDP, seconds=0.5, losses=[4.0, 3.0])
    code = f"""
import sys
from pathlib import Path
from fedshard.lab.report import write_report
from fedshard.lab.runs import read_runs
runs = read_runs([Path({str(path)!r})])
print("matplotlib" in sys.modules)
write_report(runs, Path({str(path)!r}))
print(*{{"torch", "transformers", "matplotlib.pyplot"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n\n"
