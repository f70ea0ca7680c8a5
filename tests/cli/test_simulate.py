"""`fedshard simulate`: its result in both forms, its figure, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedshard.cli.main import main

RECIPE = str(Path(__file__).parents[2] / "recipes/leonardo-8b-fl-fsdp.toml")


def told(capsys, *words: str) -> dict:
    main(["simulate", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_reference_experiment(capsys):
    result = told(capsys, RECIPE, "--cluster", "leonardo-observed", "--rounds", "1")
    assert (result["layout"], result["strategy"], result["steps"]) == ("128×1×4", "FL+FSDP", 8)
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["seconds"] >= 8 * result["step_seconds"]["median"]
    again = told(capsys, RECIPE, "--cluster", "leonardo-observed", "--rounds", "1")
    assert again == result
    quiet = told(capsys, RECIPE, "--cluster", "leonardo-observed", "--rounds", "1", "--quiet")
    assert quiet["seconds"] < result["seconds"]


def test_for_a_person(capsys, tmp_path):
    figure = tmp_path / "streams.svg"
    main(["simulate", "--cluster", "workstation-8", "--sync.every", "2", "--timeline", str(figure)])
    out, err = capsys.readouterr()
    assert "FL+FSDP 2×1×2, 4 ranks on workstation-8" in out
    assert "every 2 steps" in out
    assert "streams of ranks 0, 2, 3" in err
    assert "seconds" in figure.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--cluster: missing"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--cluster", "p5", "--rounds", "0"], "--rounds: '0' is no number from 1 on"),
        (["--cluster", "workstation-8", "--layout.groups", "64"], "128 ranks"),
    ],
)
def test_what_is_refused(capsys, words, says):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *words])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_no_torch_is_loaded():
    code = f"import sys; from fedshard.cli.main import main; main(['simulate', {RECIPE!r}, '--cluster', 'lumi']); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
