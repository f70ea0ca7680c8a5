"""One rank's failure ends the whole job and is what the last line says; nothing is left behind."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.recipe import LayoutSection, Recipe, TrainSection
from fedshard.engine.failure import failure_of
from fedshard.engine.launch import FORWARDED, PRELOAD, guard, run_ranks
from fedshard.engine.world import find_launch, open_world

PAIR = Recipe(layout=LayoutSection(groups=2, shards=1), train=TrainSection(device="cpu"))
WRONG = InputError([Fault("sync.every", "0", "Set 1."), Fault("data.path", "missing", "Give it.")])


def note_launch(folder, text):
    launch = find_launch()
    line = f"{launch.rank} {launch.ranks} {launch.local_rank} {launch.local_ranks} {launch.how} {text}"
    (folder / str(launch.rank)).write_text(line)


def test_each_rank_runs_the_entry_with_its_arguments(tmp_path):
    run_ranks(note_launch, (tmp_path, "$$ ${local_rank}"), 3)
    notes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert notes == {str(rank): f"{rank} 3 {rank} 3 torchrun $$ ${{local_rank}}" for rank in range(3)}


def train(fail, layout, *args):
    """A small loop with a collective in every step; `fail(rank, *args)` is called before each third one."""
    with open_world(Recipe(layout=layout, train=TrainSection(device="cpu")), find_launch()) as world:
        for step in range(1, 1000):
            if step == 3:
                fail(world.rank, *args)
            dist.all_reduce(torch.ones(1), group=world.group)
            dist.all_reduce(torch.ones(1), group=world.peers)


def run_to_its_end(capfd, fail, *args, layout=None):
    """Exit code, standard error and seconds of a job in which `fail` happens."""
    began = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        run_ranks(train, (fail, layout or PAIR.layout, *args), (layout or PAIR.layout).groups)
    return caught.value.code, capfd.readouterr().err, time.monotonic() - began


def raise_on(rank, failing, error):
    if rank == failing:
        raise error


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_cause_is_printed_last_and_the_job_ends(capfd, failing):
    code, said, seconds = run_to_its_end(capfd, raise_on, failing, ValueError("boom"))
    assert code == 1
    assert said.endswith(f"\nrank {failing}: ValueError: boom\n")
    assert ", in raise_on\n" in said
    assert len(re.findall("^rank ", said, re.MULTILINE)) == 1  # not what the other rank made of it
    assert seconds < 15


def raise_one_after_another(rank):
    time.sleep(0.2 * (3 - rank))
    raise ValueError(f"number {rank}")


@pytest.mark.slow
def test_the_first_cause_goes_by_time_and_not_by_rank(capfd):
    code, said, _ = run_to_its_end(capfd, raise_one_after_another, layout=LayoutSection(groups=4, shards=1))
    assert code == 1
    assert said.endswith("\nrank 3: ValueError: number 3\n")
    assert "number 0" not in said


@pytest.mark.parametrize("failing", [1, "all"])
def test_wrong_input_is_told_once_and_gives_exit_code_2(capfd, failing):
    code, said, _ = run_to_its_end(capfd, raise_wrong_input, failing)
    assert (code, said) == (2, "sync.every: 0. Set 1.\ndata.path: missing. Give it.\n")


def raise_wrong_input(rank, failing):
    if failing in (rank, "all"):
        raise WRONG


def end_without_a_word(rank, failing, how):
    if rank == failing:
        how()


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once():
    os._exit(9)


@pytest.mark.parametrize(
    ("how", "words"),
    [(kill_oneself, "SIGKILL, out of memory?"), (exit_at_once, "exit code 9")],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_ends_without_a_word_is_the_first_cause(capfd, how, words, failing):
    code, said, seconds = run_to_its_end(capfd, end_without_a_word, failing, how)
    assert (code, said) == (1, f"rank {failing}: ended without a word ({words})\n")
    assert seconds < 15


class FailedLoad(BaseException):
    """As torch's error of a checkpoint that does not fit: no Exception."""


@pytest.mark.slow
@pytest.mark.parametrize("error", [FailedLoad("no such key"), SystemExit(3)])
def test_what_is_no_exception_is_told_too(capfd, error):
    code, said, _ = run_to_its_end(capfd, raise_on, 1, error)
    assert code == 1
    assert said.endswith(f"{type(error).__name__}: {error}\n")


def leave_early(folder):
    (folder / str(find_launch().rank)).touch()
    sys.exit(0)


def test_leaving_with_exit_code_0_is_no_failure(tmp_path):
    run_ranks(leave_early, (tmp_path,), 2)
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.slow
def test_signals_and_logging_are_as_before(capfd):
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    before = [signal.getsignal(each) for each in FORWARDED], [(one.propagate, one.handlers[:]) for one in loggers]
    run_to_its_end(capfd, raise_on, 1, ValueError("boom"))
    assert [signal.getsignal(each) for each in FORWARDED] == before[0]
    assert [(one.propagate, one.handlers) for one in loggers] == before[1]


def test_errors_on_purpose_need_no_traceback():
    assert failure_of(RunError("groups differ"), 3).words == "rank 3: groups differ"
    assert failure_of(WRONG, 3).words == str(WRONG)


def test_the_chain_of_an_error_is_kept():
    try:
        try:
            raise KeyError("key")
        except KeyError as cause:
            raise ValueError("value") from cause
    except ValueError as error:
        failure = failure_of(error, 2)
    assert "KeyError: 'key'" in failure.words
    assert failure.words.endswith("\nrank 2: ValueError: value")


def guarded(entry, file, args):
    """A process that runs a guarded entry, its standard error in a file; its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=_guarded, args=(entry, file, args))
    process.start()
    process.join(20)
    return process.exitcode


def _guarded(entry, file, args):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    guard(entry)(*args)


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (WRONG, 2, "data.path: missing. Give it."),
        (ValueError("boom"), 1, "rank 0: ValueError: boom"),
        (RunError("groups differ"), 1, "rank 0: groups differ"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_rank_under_nobodys_launcher_tells_its_own_failure(ranks, tmp_path, error, code, last):
    assert guarded(raise_on, tmp_path / "err", (0, 0, error)) == code
    assert (tmp_path / "err").read_text().splitlines()[-1:] == ([last] if last else [])


def test_a_guarded_entry_that_ends_well_returns(ranks, tmp_path):
    assert guarded(raise_on, tmp_path / "err", (0, 1, ValueError("boom"))) == 0
    assert (tmp_path / "err").read_text() == ""


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import LayoutSection, Recipe, TrainSection
from fedshard.engine import launch
from fedshard.engine.world import find_launch, open_world

RECIPE = Recipe(layout=LayoutSection(groups=2, shards=1), train=TrainSection(device="cpu"))
folder = Path(sys.argv[1])

def note_and_go_on(number, frame):
    (folder / f"signal-{os.environ['RANK']}").write_text(signal.Signals(number).name)

def train(what):
    with open_world(RECIPE, find_launch()) as world:
        if what == "stubborn":
            signal.signal(signal.SIGTERM, note_and_go_on)
            signal.signal(signal.SIGUSR1, note_and_go_on)
        sys.stdout.write(f"rank {world.rank} talks\\n")  # in one piece, unlike print
        sys.stdout.flush()
        (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        for step in range(1, 10_000):
            if what == "wrong":
                raise InputError([Fault("sync.every", "0", "Set 1.")])
            if what == "boom" and world.rank == 1 and step == 3:
                raise ValueError("boom")
            if what == "stuck" and world.rank == 1:
                time.sleep(1000)
            if what == "deadlocked":
                dist.recv(torch.ones(1), 1 - world.rank)
            if what == "short" and step == 3:
                break
            dist.all_reduce(torch.ones(1), group=world.peers)
            time.sleep(0.01)

if __name__ == "__main__":
    if "RANK" in os.environ:
        launch.guard(train)(sys.argv[2])
    else:
        launch.PRELOAD = ("torch.distributed.launcher.api",)  # the model code is not needed here
        launch.run_ranks(train, (sys.argv[2],), 2, grace_seconds=1)
"""


@pytest.fixture
def job(tmp_path):
    """Start the script above as a process: `job("stuck")`, with `before` as the command that starts it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    jobs = []

    def begin(what, *before):
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        command = [sys.executable, *before, str(script), str(folder), what]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, start_new_session=True, **pipes))
        return jobs[-1], folder

    yield begin
    for each in jobs:
        each.kill()
        each.wait()
        each.stdout.close()
        each.stderr.close()


def pids_of(folder):
    """The ranks' processes, once both have said that they run."""
    return [int(await_text(folder / f"pid-{rank}")) for rank in range(2)]


def await_text(file, seconds=80):
    deadline = time.monotonic() + seconds
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"no {file.name} after {seconds} s"
        time.sleep(0.02)
    return file.read_text()


def gone(pids, seconds=5):
    """Whether all these processes are gone within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("state", ["stuck", "deadlocked"])
def test_ctrl_c_ends_all_with_130(job, state):
    process, folder = job(state)
    pids = pids_of(folder)
    time.sleep(0.2)  # for the ranks to get there
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=15)
    assert (process.returncode, err) == (130, "stopped by SIGINT\n")
    assert sorted(out.splitlines()) == ["rank 0 talks", "rank 1 talks"]
    assert gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_ranks_which_are_killed_when_their_grace_is_over(job, number):
    process, folder = job("stubborn")
    pids = pids_of(folder)
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    assert (process.returncode, err) == (128 + number, f"stopped by {number.name}\n")
    assert [(folder / f"signal-{rank}").read_text() for rank in range(2)] == ["SIGUSR1"] * 2
    assert 1 <= time.monotonic() - began < 10
    assert gone(pids)


@pytest.mark.slow
def test_no_rank_outlives_a_parent_that_was_killed(job):
    process, folder = job("stuck")
    pids = pids_of(folder)
    process.kill()
    assert gone(pids)


@pytest.mark.slow
def test_two_runs_at_the_same_time_do_not_meet(job):
    processes = [job("short")[0] for _ in range(2)]
    assert [process.communicate(timeout=60)[1] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_under_torchrun_wrong_input_is_told_once(job):
    process, _ = job("wrong", *TORCHRUN)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1  # torchrun's, whatever the rank's is
    assert [line for line in err.splitlines() if line == "sync.every: 0. Set 1."] == ["sync.every: 0. Set 1."]


@pytest.mark.slow
def test_under_torchrun_only_the_first_cause_is_told(job):
    process, _ = job("boom", *TORCHRUN)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert [line for line in err.splitlines() if line.startswith("rank ")] == ["rank 1: ValueError: boom"]


@pytest.mark.slow
def test_nothing_that_is_loaded_before_the_fork_asks_for_cuda_devices():
    watch = """
import importlib, sys, torch
asked = []
for owner, name in [(torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "_lazy_init")]:
    setattr(owner, name, lambda *_, name=name: asked.append(name) or 0)
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not asked, asked
"""
    subprocess.run([sys.executable, "-c", watch, *PRELOAD], check=True, timeout=100)
