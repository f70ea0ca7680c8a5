"""Saving under bad conditions: killed ranks, full disks, slow ones, training that goes on; and what is written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from saved_runs import recipe_of, run, whole

from fedshard.core.errors import RunError
from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.engine import save
from fedshard.engine.checkpoint import FOLDER, GLOBAL, complete_checkpoints, group_folder, newest_whole, open_checkpoint
from fedshard.engine.job import Job, make_job
from fedshard.engine.log import Log
from fedshard.engine.meter import Meter
from fedshard.engine.parameters import local_part
from fedshard.engine.resume import take_up
from fedshard.engine.save import Saver
from fedshard.engine.sinks import Sinks
from fedshard.engine.slices import Slices
from fedshard.engine.step import Skips, take_step
from fedshard.engine.world import World, find_launch, make_world, open_world
from fedshard.testing import RankContext, RankPool


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def begin(recipe: Recipe, world: World, folder: Path, cache: Path) -> tuple[Job, Saver, Log]:
    """A job that has taken one step, so that it has moments, and what saves it."""
    job = make_job(recipe, world, cache)
    take_step(job, 1, synchronous=False)
    job.inner.zero_grad()
    log = Log(job, Sinks([]), Meter(world.device, profile_every=0, warmup_steps=0))
    return job, Saver(job, folder), log


def fill(job: Job, value: float) -> None:
    """Every parameter."""
    with torch.no_grad():
        for parameter in job.model.parameters():
            local_part(parameter).fill_(value)


def values(folder: Path, kind: str = "weights") -> set[float]:
    """All that a folder holds of a kind."""
    with Slices(folder) as slices:
        parts = [
            slices.read(kind, name, range(torch.Size(shape).numel())) for name, shape in slices.shapes(kind).items()
        ]
    return set(torch.cat(parts).tolist())


# Values


def fill_by_group(context: RankContext, folder: Path, cache: Path) -> None:
    job, saver, log = begin(recipe_of((2, 1, 2)), context.world, folder, cache)
    fill(job, 1.0 + context.world.place.group)
    saver.save(1, log, Skips(), 0, together=False)


def test_each_group_gets_back_its_own(ranks: RankPool, tmp_path, cache):
    """A11, X1: a world-wide save of groups that differ would be a mixture."""
    ranks.run(fill_by_group, Layout(2, 1, 2), tmp_path, cache)
    path = tmp_path / FOLDER / "step-000001"
    assert [values(path / group_folder(group)) for group in range(2)] == [{1.0}, {2.0}]
    assert len(values(path / GLOBAL, "anchor")) > 100


def change_while_saving(context: RankContext, folder: Path, cache: Path) -> None:
    job, saver, log = begin(recipe_of((2, 1, 1), checkpoint={"async": True}), context.world, folder, cache)
    fill(job, 1.0)
    slow = threading.Event()
    real = save.write_files

    def wait_first(*args: object) -> object:
        assert slow.wait(20)
        return real(*args)

    with mock.patch.object(save, "write_files", wait_first):
        saver.save(1, log, Skips(), 0, together=True)
        fill(job, 2.0)
        assert not (folder / FOLDER / "step-000001").exists()
        slow.set()
        saver.wait()


def test_an_asynchronous_save_has_the_values_of_its_call(ranks: RankPool, tmp_path, cache):
    """J5."""
    ranks.run(change_while_saving, Layout(2, 1, 1), tmp_path, cache)
    assert values(tmp_path / FOLDER / "step-000001" / GLOBAL) == {1.0}


@pytest.mark.parametrize(("shape", "outer"), [((2, 2, 1), "nesterov"), ((1, 1, 4), "mean"), ((4, 1, 1), "mean")])
def test_everything_is_written_once(ranks: RankPool, tmp_path, cache, shape, outer):
    """Weights, anchor and outer state once, moments once for each group; the rest is small."""
    recipe = recipe_of(shape, checkpoint={"every": 0}, sync={"outer": {"kind": outer}})
    weights = ranks.run(run, Layout(*shape), recipe, tmp_path, cache, 0, 6)[0].weights  # after its second round
    model = sum(each.numel() for each in weights.values()) * 4
    path = tmp_path / FOLDER / "step-000006"
    written = {"weights": model, "outer.momentum": model * (outer == "nesterov"), "moment.exp_avg": model}
    for kind, expected in written.items():
        folders = [GLOBAL] if kind in ("weights", "outer.momentum") else map(group_folder, range(shape[0]))
        for folder in folders:
            index = json.loads((path / folder / "index.json").read_text())
            lengths = [part[1] for entry in index.get(kind, {}).values() for part in entry["parts"]]
            assert sum(lengths) * 4 == expected


# Bad conditions


def fill_the_disk(context: RankContext, folder: Path, cache: Path) -> str:
    """A first save goes well; in the second, one rank may write no more than 500 bytes."""
    _, saver, log = begin(recipe_of((2, 1, 2)), context.world, folder, cache)
    saver.save(1, log, Skips(), 0, together=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        saver.save(2, log, Skips(), 0, together=True)
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "went well"


def test_a_full_disk_is_one_clear_error_on_every_rank(ranks: RankPool, tmp_path, cache):
    said = ranks.run(fill_the_disk, Layout(2, 1, 2), tmp_path, cache)
    assert len(set(said)) == 1
    assert said[0].startswith("the checkpoint of step 2 cannot be written: rank 2: ")
    assert os.strerror(errno.EFBIG) in said[0]
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-000001"]
    assert open_checkpoint(tmp_path / FOLDER / "step-000001").verify() == []


def save_into(context: RankContext, folder: Path, cache: Path) -> str:
    _, saver, log = begin(recipe_of((2, 1, 1)), context.world, folder, cache)
    try:
        saver.save(1, log, Skips(), 0, together=True)
    except RunError as error:
        return str(error)
    return "went well"


def test_a_folder_that_cannot_be_written_to(ranks: RankPool, tmp_path, cache):
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    said = ranks.run(save_into, Layout(2, 1, 1), tmp_path, cache)
    assert [each.partition(": rank")[0] for each in said] == ["the checkpoint of step 1 cannot be written"] * 2


def save_apart(context: RankContext, folder: Path, cache: Path) -> str:
    return save_into(context, folder / f"node-{context.rank}", cache)


def test_ranks_that_do_not_share_the_folder(ranks: RankPool, tmp_path, cache):
    """Such a checkpoint would be complete by its name, and half of it on other machines."""
    for said in ranks.run(save_apart, Layout(2, 1, 1), tmp_path, cache):
        assert "rank 0 does not see global/rank-00001.safetensors" in said
    assert not complete_checkpoints(tmp_path / "node-0")


def save_slowly(context: RankContext, folder: Path, cache: Path) -> None:
    """Training's time-out is 1 s, and one rank's disk takes 2."""
    short, long = timedelta(seconds=1), timedelta(seconds=30)
    world = make_world(context.layout, context.rank, context.rank, torch.device("cpu"), short, saving_timeout=long)
    _, saver, log = begin(recipe_of((2, 1, 1)), world, folder, cache)
    real = save.write_files

    def slow(*args: object) -> object:
        time.sleep(2.0 * context.rank)
        return real(*args)

    with mock.patch.object(save, "write_files", slow):
        saver.save(1, log, Skips(), 0, together=True)


@pytest.mark.slow
def test_a_disk_slower_than_training_s_time_out(ranks: RankPool, tmp_path, cache):
    """N3."""
    ranks.run(save_slowly, Layout(2, 1, 1), tmp_path, cache)
    assert [each.step for each in complete_checkpoints(tmp_path)] == [1]


# Kills


def save_again_and_again(job: Job, saver: Saver, log: Log, folder: Path, rank: int) -> None:
    """Steps 1, 2, …, as fast as they go; `done` holds the last one that is complete."""
    for step in range(1, 10_000):
        fill(job, float(step))
        saver.save(step, log, Skips(), 0, together=True)
        if rank == 0 and saver._section.async_ is False:
            (folder / "done.new").write_text(str(step))
            (folder / "done.new").rename(folder / "done")
        (folder / f"pid-{rank}").write_text(str(os.getpid()))


def with_others(context: RankContext, folder: Path, cache: Path) -> None:
    recipe = recipe_of((2, 1, 1), checkpoint={"keep": 2, "async": True})
    save_again_and_again(*begin(recipe, context.world, folder, cache), folder, context.rank)


def await_file(file: Path) -> str:
    deadline = time.monotonic() + 40
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.005)
    return file.read_text()


def check_what_is_left(folder: Path) -> int:
    """The newest complete checkpoint is as it was written, and of one step in all its parts."""
    newest, skipped = newest_whole(folder)
    assert newest is not None
    assert skipped == []
    assert newest.verify() == []
    assert values(newest.path / GLOBAL) == {float(newest.step)}
    return newest.step


def tell_rank_0(written: object, every: list[object], group: object) -> None:
    """`gather_object` of one rank."""
    every[0] = written


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_moment_the_newest_complete_checkpoint_loads(tmp_path, cache, monkeypatch):
    """J1: 30 moments of a rank by itself; the ones with several ranks follow.

    Each is a fork of one job, which costs little; the threads of its process group stay behind, and are not needed.
    """
    monkeypatch.setattr(save.dist, "gather_object", tell_rank_0)
    monkeypatch.setattr(save.dist, "broadcast_object_list", lambda *_, **__: None)
    with open_world(recipe_of((1, 1, 1), checkpoint={"keep": 2}), find_launch({})) as world:
        job, _, log = begin(recipe_of((1, 1, 1), checkpoint={"keep": 2}), world, tmp_path, cache)
        for seed in range(30):
            folder = tmp_path / str(seed)
            folder.mkdir()
            saver = Saver(job, folder)
            process = multiprocessing.get_context("fork").Process(
                target=save_again_and_again, args=(job, saver, log, folder, 0)
            )
            process.start()
            await_file(folder / "pid-0")
            time.sleep(random.Random(seed).uniform(0.0, 0.06))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            assert check_what_is_left(folder) >= int((folder / "done").read_text())


def load_last(context: RankContext, folder: Path, cache: Path) -> set[float]:
    newest, _ = newest_whole(folder)
    assert newest is not None
    job = make_job(recipe_of((2, 1, 1)), context.world, cache, newest.cursor().done)
    take_up(job, newest)
    return {value for each in whole(job).values() for value in each.view(-1).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_one_rank_or_all_killed(tmp_path, cache, seed):
    """Saving asynchronously; after every third kill the run goes on from what is left."""
    chance = random.Random(seed)
    with RankPool(2) as pool:
        failed: list[BaseException] = []

        def train() -> None:
            try:
                pool.run(with_others, Layout(2, 1, 1), tmp_path, cache)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        pids = [int(await_file(tmp_path / f"pid-{rank}")) for rank in range(2)]
        await_complete(tmp_path)
        time.sleep(chance.uniform(0.0, 0.1))
        for pid in pids if seed % 2 else pids[-1:]:
            os.kill(pid, signal.SIGKILL)
        thread.join()
        assert failed
        step = check_what_is_left(tmp_path)
        if seed % 3 == 0:
            assert pool.run(load_last, Layout(2, 1, 1), tmp_path, cache)[0] == {float(step)}


def await_complete(folder: Path) -> None:
    deadline = time.monotonic() + 40
    while newest_whole(folder)[0] is None:
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
