"""`fedshard report`: where the page goes, what stands on stdout, and what is refused."""

from __future__ import annotations

import json

import pytest

from fedshard.cli.main import main
from lab.made_runs import FL_FSDP, FSDP, make_run


@pytest.fixture
def paths(tmp_path) -> list[str]:
    fsdp = make_run(tmp_path / "fsdp", FSDP, seconds=2.0, losses=[4.0, 3.0])
    return [str(fsdp), str(make_run(tmp_path / "fl", FL_FSDP, seconds=0.5, losses=[4.2, 2.9]))]


@pytest.mark.slow
def test_one_run_goes_into_its_own_folder(paths, capsys):
    main(["report", paths[0]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Speed"
    assert lines[1].split() == ["run", "tokens/s", "steady", "×", "FSDP"]
    assert lines[2].split() == ["FSDP", "1×1×4", "1.02", "k", "1.02", "k", "1.00"]
    assert lines[-1] == f"{paths[0]}/report.html"


@pytest.mark.slow
def test_several_as_json(paths, tmp_path, capsys):
    main(["report", *paths, "--into", str(tmp_path / "both"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(tmp_path / "both/report.html")
    assert (tmp_path / "both/report.html").exists()
    assert [run["layout"] for run in told["runs"]] == ["1×1×4", "2×1×2"]
    assert told["runs"][1]["speedup_over_fsdp"] == 4.0
    assert told["runs"][0]["round_sent_bytes"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--into: missing, and there are 2 runs"),
        (["--bogus.key", "1"], "--bogus.key: no such option"),
        (["--into"], "--into: has no value"),
        (["nowhere", "--into", "x"], "nowhere: is no run folder"),
    ],
)
def test_what_is_refused(paths, capsys, more, said):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *paths, *more])
    assert stopped.value.code == 2
    assert f"fedshard: {said}" in capsys.readouterr().err


def test_without_a_run(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "fedshard: RUN: missing. Write fedshard report RUN.\n"


def test_a_folder_that_cannot_be_written_to(paths, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["report", paths[0], "--into", str(tmp_path / "file")])
    assert stopped.value.code == 2
    assert f"{tmp_path}/file: cannot be written to" in capsys.readouterr().err


def test_help(capsys):
    main(["report", "-h"])
    assert capsys.readouterr().out.startswith("usage: fedshard report RUN…")
