"""`fedshard simulate`: its result in both forms, its files, and what it refuses."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from fedshard.cli.main import main
from fedshard.core.cluster_file import read_cluster
from fedshard.core.recipe_file import read_recipe
from fedshard.study.cost import step_seconds
from fedshard.study.setup import Setup
from fedshard.study.work import step_work

RECIPE = str(Path(__file__).parents[2] / "recipes/leonardo-8b-fl-fsdp.toml")


def told(capsys, *words: str) -> dict:
    main(["simulate", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_reference_experiment(capsys):
    words = (RECIPE, "--cluster", "leonardo-observed", "--rounds", "1")
    result = told(capsys, *words)
    assert (result["layout"], result["strategy"], result["cluster"]) == ("128×1×4", "FL+FSDP", "leonardo-observed")
    assert (result["steps"], result["rounds"]) == (8, 1)
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["tokens_per_second"] == pytest.approx(8 * 512 * 2 * 2048 / result["seconds"])
    assert result["tokens_per_second"] < result["closed_form_tokens_per_second"]
    assert told(capsys, *words) == result
    assert told(capsys, *words, "--seed", "1") != result


def test_quiet_is_the_closed_form(capsys):
    result = told(capsys, RECIPE, "--cluster", "leonardo-observed", "--quiet")
    setup = Setup.from_recipe(read_recipe(Path(RECIPE)), read_cluster("leonardo-observed"))
    assert result["seconds"] == pytest.approx(24 * step_seconds(step_work(setup), setup).total_seconds, rel=1e-9)
    assert result["tokens_per_second"] == pytest.approx(result["closed_form_tokens_per_second"], rel=1e-9)


def test_slow_ranks_and_a_group_that_fails(capsys):
    words = (RECIPE, "--cluster", "leonardo-observed", "--rounds", "2", "--quiet")
    quiet = told(capsys, *words)
    slow = told(capsys, *words, "--slow", "0:1.5,511:2")
    assert slow["seconds"] > 1.8 * (quiet["seconds"] - 2 * quiet["round_seconds"]["mean"])
    failed = told(capsys, *words, "--fail", "11", "--checkpoint.every", "8")
    step = quiet["step_seconds"]["median"]
    assert failed["seconds"] - quiet["seconds"] == pytest.approx(60 + 3 * step)
    assert failed["shares"]["lost"] == pytest.approx((60 + 3 * step) / failed["seconds"])
    never_saved = told(capsys, *words, "--fail", "11", "--checkpoint.every", "0")
    assert never_saved["seconds"] - quiet["seconds"] == pytest.approx(60 + 11 * step + quiet["round_seconds"]["mean"])


def test_a_layout_without_rounds(capsys):
    result = told(capsys, RECIPE, "--cluster", "leonardo-observed", "--layout.groups", "1", "--layout.replicas", "128")
    assert (result["strategy"], result["steps"], result["rounds"]) == ("HSDP", 24, 0)
    assert result["round_seconds"] is None


def test_for_a_person(capsys):
    main(["simulate", "--cluster", "workstation-8", "--sync.every", "2", "--rounds", "1"])
    out, err = capsys.readouterr()
    assert "FL+FSDP 2×1×2, 4 ranks on workstation-8\n" in out
    assert "2 steps in " in out
    assert "every 2 steps" in out
    assert "time in compute" in out
    assert err == ""


def test_on_a_terminal_it_is_a_table(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=shown, force_terminal=True, width=100))
    main(["simulate", "--cluster", "workstation-8", "--quiet"])
    assert "│ strategy " in shown.getvalue()


def test_what_is_written(capsys, tmp_path):
    folder = tmp_path / "new" / "simulated"
    words = ["--cluster", "workstation-8", "--sync.every", "2", "--into", str(folder)]
    result = told(capsys, *words)
    assert json.loads((folder / "simulation.json").read_text()) == result
    drawn = {text.strip() for text in ElementTree.parse(folder / "timeline.svg").getroot().itertext() if text.strip()}
    assert {f"rank {rank}: {stream}" for rank in (0, 2, 3) for stream in ("compute", "shard", "group")} <= drawn
    assert {"forward", "backward", "gather of parameters", "reduction of gradients", "round", "milliseconds"} <= drawn
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *words])
    assert stopped.value.code == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["--cluster: missing"]),
        (["--cluster", "nowhere"], ["nowhere"]),
        (
            ["--rounds", "0", "--seed", "x", "--fail", "-1", "--slow", "3"],
            [
                "--cluster: missing",
                "--rounds: '0' is no number from 1 on",
                "--seed: 'x' is no number from 0 on",
                "--fail: '-1' is no number from 1 on",
                "--slow: '3' is no list of RANK:FACTOR",
            ],
        ),
        (["--cluster", "workstation-8", "--slow", "1:0"], ["no list of RANK:FACTOR"]),
        (
            ["--cluster", "workstation-8", "--slow", "4:2", "--fail", "31"],
            ["--slow: rank 4, and there are 4", "--fail: step 31, and 30 are simulated"],
        ),
        (["--cluster", "workstation-8", "--layout.groups", "64"], ["128 ranks"]),
    ],
)
def test_what_is_refused(capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *words])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert [each for each in says if each not in err] == []


@pytest.mark.parametrize(
    ("words", "unloaded"),
    [
        (["--help"], {"torch", "numpy", "matplotlib", "rich"}),
        ([RECIPE, "--cluster", "lumi"], {"torch", "matplotlib"}),
    ],
)
def test_only_what_is_needed_is_loaded(words, unloaded):
    code = f"import sys; from fedshard.cli.main import main; main({['simulate', *words]!r}); "
    code += f"sys.exit(str({unloaded!r} & set(sys.modules)) if {unloaded!r} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
