"""`fedshard probe`: its words, its faults, and what it writes and prints."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedshard.cli.main import main
from fedshard.cli.probe import FLAGS, by_nodes
from fedshard.core.cluster_file import read_cluster
from fedshard.core.recipe import Recipe
from fedshard.engine.world import Launch

TWO = ["--layout.groups", "2", "--layout.shards", "1", "--train.device", "cpu", "--data.sequence_length", "32"]
BRIEFLY = ["--seconds", "0.01"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The faults that `fedshard probe` tells, one a line; it exits with 2."""
    with pytest.raises(SystemExit) as stopped:
        main(["probe", *words])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_help_has_every_flag(capsys):
    main(["probe", "-h"])
    told = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    assert told == set(FLAGS) - {"--help"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--into", "c.json"], ["--into: c.json is no .toml file"]),
        (["--into", "there.toml"], ["--into: there.toml exists already"]),
        (["--into", "no/c.toml"], ["--into: {here}/no cannot be written to"]),
        (["--nodes-per-cell", "0", "--nodes-per-site=x"], ["--nodes-per-cell: '0' is", "--nodes-per-site: 'x' is"]),
        (["--seconds", "0"], ["--seconds: '0' is no time"]),
        (["--layout.groups", "1", "--layout.shards", "1"], ["layout: 1×1×1 is one rank, which has no links"]),
        (["--train.device", "cuda"], ["train.device: 4 local ranks, 0 CUDA devices visible"]),
        (["--data.sequence_length", "600"], ["data.sequence_length: 600 tokens, and the model has 512 positions"]),
        (["--layout.goups", "2"], ["layout.goups: no such key. Did you mean layout.groups?"]),
        (["one.toml"], ["one.toml: no such file"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    Path("there.toml").touch()
    told = refused(capsys, *words)
    assert len(told) == len(says)
    for line, start in zip(told, says, strict=True):
        assert line.startswith(f"fedshard: {start.format(here=tmp_path)}"), line
    assert list(tmp_path.iterdir()) == [tmp_path / "there.toml"]


@pytest.mark.parametrize(("ranks", "local", "layout"), [(8, 4, "2×1×4"), (4, 4, "1×1×4"), (3, 1, "3×1×1")])
def test_without_a_layout_groups_are_nodes(ranks, local, layout):
    launch = Launch(0, ranks, 0, local, "127.0.0.1", 1, "torchrun", 1)
    assert str(by_nodes(Recipe(), launch).shape) == layout


@pytest.mark.slow
def test_a_probe_of_this_machine(tmp_path):
    """On ranks of its own: a table on stdout, progress on stderr, and a file that is read as a cluster."""
    command = [sys.executable, "-m", "fedshard", "probe", *TWO, *BRIEFLY, "--into", str(tmp_path / "here.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "here.toml")
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node, list(cluster.tiers)) == ("here", 1, 2, ["node"])
    rows = re.findall(r"^node  group  (\S+) +2      1 .* ([\d.]+ .B/s) +(\d+)%$", done.stdout, re.M)
    assert [kind for kind, _, _ in rows] == ["all-gather", "reduce-scatter", "all-reduce"]
    assert re.search(r"^node  all    together ", done.stdout, re.M)
    assert re.search(r"^decoder block, forward and backward  [\d.,]+ GFLOP/s$", done.stdout, re.M)
    assert "all-reduce over the group axis (2 ranks, node tier, all rings at once)\n" in done.stderr
    assert done.stderr.endswith(f"written to {tmp_path}/here.toml\n")


@pytest.mark.slow
def test_ranks_of_a_launcher_are_joined(tmp_path):
    """Two ranks as on two nodes, each a cell: what they say to each other is of the global tier, and the tiers inside
    it, which have no second rank, are assumed to be like it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = ["--json", "--nodes-per-cell", "1", "--train.device=cpu", "--data.sequence_length=32", *BRIEFLY]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "fedshard", "probe", *words, "--into", str(tmp_path / "two.toml")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | given | {"RANK": str(rank), "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    (told, progress), (nothing, silence) = (rank.communicate(timeout=100) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], progress + silence
    assert (nothing, silence) == ("", "")
    assert progress.endswith(f"written to {tmp_path}/two.toml\n")
    found = json.loads(told)
    assert {(row["tier"], row["axis"], row["ranks"]) for row in found["links"]} == {("global", "group", 2)}
    assert found["device"]["block_flops_per_second"] > 0
    cluster = read_cluster(tmp_path / "two.toml")
    assert cluster.model_dump(mode="json", exclude_none=True) == found["cluster"]
    assert (cluster.nodes, cluster.ranks_per_node, cluster.nodes_per_cell) == (2, 1, 1)
    assert {name: tier.latency_seconds.confidence for name, tier in cluster.tiers.items()} == {
        "node": "assumed", "cell": "assumed", "global": "measured",
    }  # fmt: skip
