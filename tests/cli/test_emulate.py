"""`fedshard emulate`: its words, its faults, its output, and what Ctrl-C leaves."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedshard.cli.emulate import FLAGS, read_rates
from fedshard.cli.main import main

TRIAL = "mount -t proc none /proc; ip link add one type veth peer name other; tc qdisc add dev one root handle 1: htb"


@pytest.fixture(scope="session")
def namespaces():
    """Skips the test where this system cannot emulate clusters, with the reason why; tried without fedshard."""
    options = "--user --map-root-user --net --mount --pid --fork"
    tried = subprocess.run(["sh", "-ec", f"unshare {options} sh -ec '{TRIAL}'"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"clusters cannot be emulated: {tried.stderr}")


def exit_code(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["emulate", *words])
    return stopped.value.code


@pytest.mark.parametrize("words", [("--help",), ("lab-fast", "-h", "--", "true")])
def test_help_has_every_flag(capsys, words):
    main(["emulate", *words])
    told = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    assert told == set(FLAGS) - {"--help"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["emulate: no cluster given", "emulate: no command given"]),
        (["lab-fast", "hostname"], ["hostname: one path too many"]),
        (["lab-fast", "--layout.groups", "2", "--", "true"], ["--layout.groups: no such option"]),
        (["lab-fast", "--rank", "2", "--", "true"], ["--rank: no such option. Did you mean --ranks?"]),
        (["lab-fast", "--ranks", "none", "--", "true"], ["--ranks: 'none' is no number of ranks"]),
        (["lab-fast", "--ranks", "6", "--", "true"], ["ranks: 6 ranks, and lab-fast has 4"]),
        (["lab-fast", "--rates", "cell=fast,far=3", "--", "true"], ["--rates: 'cell=fast' is", "--rates: 'far=3' is"]),
        (["lab-fast", "--rates", "wide=3", "--", "true"], ["rates.wide: lab-fast has no link of this tier"]),
        (["leonardo-nominal", "--", "true"], ["leonardo-nominal: 3456 nodes, and at most 64 are emulated"]),
        (["lab-fats", "--", "true"], ["cluster: no cluster 'lab-fats' comes with fedshard. Did you mean lab-fast?"]),
    ],
)
def test_wrong_words_are_refused(capsys, words, says):
    assert exit_code(*words) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(says)
    assert all(line.startswith(f"fedshard: {start}") for line, start in zip(told, says, strict=True)), told


def test_rates_are_bytes_per_second():
    assert read_rates("") == {}
    assert read_rates("global=3e6,wide=250") == {"global": 3e6, "wide": 250.0}


def test_a_part_of_a_cluster_runs_a_command_of_ones_own(namespaces, capfd):
    """Output of node 0 on stdout, what was sent on stderr; words behind -- are the command's, flags too."""
    main(["emulate", "leonardo-nominal", "--ranks", "8", "--", "echo", "{node}", "{address}", "--", "--help"])
    said = capfd.readouterr()
    assert said.out == "0 198.18.0.1 -- --help\n"
    assert said.err == "sent between nodes: cell 0 B\n"


def test_a_cluster_of_one_node(namespaces, capfd):
    main(["emulate", "workstation-8", "--", "sh", "-c", "echo $FEDSHARD_NODES"])
    said = capfd.readouterr()
    assert said.out == "1\n"
    assert said.err == "sent between nodes: nothing, there is one only\n"


def test_a_failing_command_is_told_and_its_code_is_not_zero(namespaces, capfd):
    assert exit_code("lab-fast", "--", "sh", "-c", "echo because >&2; exit $((7 * FEDSHARD_NODE))") == 1
    assert capfd.readouterr().err == "because\nfedshard: node 1: exit code 7\nbecause\n"


def test_what_is_lacking_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    """As an `unshare` says it that may not make namespaces."""
    refuse = tmp_path / "unshare"
    refuse.write_text("#!/bin/sh\necho unshare: unshare failed: Operation not permitted >&2\nexit 1\n")
    refuse.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert exit_code("lab-fast", "--", "true") == 2
    told = capsys.readouterr().err
    assert re.match(r"fedshard: emulation: not possible on this system \(.*\)\. It needs Linux with .*\n\Z", told)
    if sys.platform == "linux":
        assert "unshare failed: Operation not permitted" in told


def test_ctrl_c_reaches_the_commands_and_leaves_nothing(namespaces, tmp_path):
    """The command tidies up; what it started, and what does not heed, is gone too."""
    mark = f"21.{os.getpid()}"
    script = f"trap 'echo tidy >$0/$FEDSHARD_NODE; exit 0' INT; sleep {mark} & touch $0/started$FEDSHARD_NODE; wait"
    command = [sys.executable, "-m", "fedshard", "emulate", "lab-fast", "--", "sh", "-c", script, str(tmp_path)]
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore Ctrl-C
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        try:
            deadline = time.monotonic() + 20
            while len(list(tmp_path.glob("started*"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "")
    assert [(tmp_path / str(node)).read_text() for node in range(2)] == ["tidy\n", "tidy\n"]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True, timeout=10).stdout
    assert f"sleep {mark}" not in processes


@pytest.mark.parametrize("language", ["sh", "py"])
def test_the_pages_examples_run(namespaces, capfd, language):
    """They are no blocks that test_papers runs, because they cannot run everywhere."""
    page = (Path(__file__).parents[2] / "docs/emulate.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    command = ["sh", "-ec", f'fedshard() {{ "{sys.executable}" -m fedshard "$@"; }}\n{block}']
    subprocess.run(command if language == "sh" else [sys.executable, "-c", block], check=True, timeout=20)
    said = capfd.readouterr()
    if language == "sh":
        assert said.out == "node 0 of 4 at 198.18.0.1\n"
    else:
        assert said.out.startswith("node 0 has the address 198.18.0.1\n{")
