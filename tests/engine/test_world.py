"""A rank finds its place under every launcher, all groups work, and closing never hangs."""

import itertools
import json
import multiprocessing
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fedshard.core.errors import InputError
from fedshard.core.layout import Layout, Place
from fedshard.core.recipe import LayoutSection, Recipe, SyncSection, TrainSection
from fedshard.engine.world import Launch, check_ranks, find_launch, make_world, open_world, own_device, record_failure

ALONE = Launch(0, 1, 0, 1, "127.0.0.1", 0, "none", cores=2)
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "lrdn[0001-0002]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def one_rank(**train):
    return Recipe(layout=LayoutSection(groups=1, shards=1), train=TrainSection(**train))


def test_nobody_started_this_process():
    launch = find_launch({"PATH": "/bin"})
    assert (launch.rank, launch.ranks, launch.local_ranks, launch.how) == (0, 1, 1, "none")


def test_torchrun_started_this_process():
    launch = find_launch(TORCHRUN)
    assert launch == Launch(5, 8, 1, 4, "n1", 29500, "torchrun", cores=launch.cores)


def test_torchrun_inside_srun_is_torchrun():
    assert find_launch(SRUN | TORCHRUN).how == "torchrun"


def test_srun_started_this_process():
    launch = find_launch(SRUN)
    assert launch == Launch(5, 8, 1, 4, "lrdn0001", 16_711, "srun", cores=launch.cores)


def test_what_the_user_said_about_the_address_wins():
    launch = find_launch(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (launch.address, launch.port) == ("head", 1234)


def test_the_host_file_says_where_rank_0_is(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("lrdn0002\nlrdn0001\n")
    assert find_launch(SRUN | {"SLURM_HOSTFILE": str(hosts)}).address == "lrdn0002"


def test_cores_that_srun_gave_each_task_are_its_own():
    assert find_launch(SRUN | {"SLURM_CPUS_PER_TASK": "8"}).cores == 32


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", ""), ("MASTER_ADDR", ""), ("LOCAL_RANK", "first")])
def test_half_an_environment_is_refused(name, value):
    with pytest.raises(InputError, match=name):
        find_launch(TORCHRUN | {name: value})


def test_another_number_of_ranks_is_refused_with_both():
    with pytest.raises(InputError, match="2×1×2 is 4 ranks, 8 were started"):
        check_ranks(Layout(2, 1, 2), find_launch(TORCHRUN))


def test_launchers_in_place_of_ranks_are_recognised():
    with pytest.raises(InputError, match="put torchrun between"):
        check_ranks(Layout(16, 1, 2), find_launch(SRUN | {"SLURM_GPUS_ON_NODE": "4"}))


def test_no_process_group_exists_when_the_ranks_are_too_few():
    with pytest.raises(InputError, match="4 ranks, 1 was started"), open_world(Recipe(), ALONE):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("asked", "how", "local_rank", "local_ranks", "visible", "device"),
    [
        ("auto", "torchrun", 3, 4, 4, "cuda:3"),
        ("auto", "torchrun", 3, 4, 2, "cpu"),
        ("auto", "torchrun", 0, 4, 1, "cpu"),  # four ranks would share it
        ("auto", "torchrun", 3, 4, 0, "cpu"),
        ("auto", "srun", 3, 4, 1, "cuda:0"),  # bound by SLURM
        ("auto", "none", 0, 1, 1, "cuda:0"),
        ("cpu", "torchrun", 0, 4, 4, "cpu"),
        ("cuda", "srun", 3, 4, 1, "cuda:0"),
        ("cuda", "torchrun", 1, 2, 8, "cuda:1"),
    ],
)
def test_device(asked, how, local_rank, local_ranks, visible, device):
    launch = Launch(local_rank, local_ranks, local_rank, local_ranks, "n1", 1, how, cores=8)
    assert own_device(asked, launch, visible) == torch.device(device)


@pytest.mark.parametrize("local_rank", range(4))
def test_cuda_for_more_ranks_than_devices_is_refused_by_all(local_rank):
    launch = Launch(local_rank, 4, local_rank, 4, "n1", 1, "torchrun", cores=8)
    with pytest.raises(InputError, match="4 local ranks, 2 CUDA devices"):
        own_device("cuda", launch, 2)


def test_a_world_of_one_rank(capsys):
    with open_world(one_rank(), ALONE) as world:
        assert (world.rank, world.layout, world.place) == (0, Layout(1, 1, 1), Place(0, 0, 0))
        assert world.device == torch.device("cpu")
        assert (world.mesh.mesh_dim_names, tuple(world.mesh.shape)) == (("group", "shard"), (1, 1))
        ones = torch.ones(2)
        for group in (world.peers, world.group, world.control):
            dist.all_reduce(ones, group=group)
        assert ones.tolist() == [1, 1]
    assert not dist.is_initialized()
    assert capsys.readouterr().err == "device: cpu (0 of 1 ranks have a CUDA device of their own)\n"


def test_a_device_that_was_asked_for_is_not_talked_of(capsys):
    with open_world(one_rank(device="cpu"), ALONE) as world:
        assert world.device == torch.device("cpu")
    assert capsys.readouterr().err == ""


def test_torch_is_set_up_for_the_block_only():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    launch = Launch(0, 1, 0, 1, "127.0.0.1", 0, "none", cores=3)
    with open_world(one_rank(deterministic=True), launch):
        assert torch.get_num_threads() == 3
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.equal(torch.get_rng_state(), before[2])  # nothing is seeded
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]


def test_an_error_closes_the_world_and_the_first_record_of_it_stays(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ValueError, match="first"), open_world(one_rank(), ALONE):
        raise ValueError("first")
    assert not dist.is_initialized()
    record_failure(ValueError("second"), 0)
    record = json.loads(file.read_text())
    assert record["message"]["message"] == "ValueError: first"
    assert record["fedshard"]["words"].endswith("rank 0: ValueError: first")


def test_an_error_is_recorded_before_the_other_ranks_feel_it(tmp_path, monkeypatch):
    file, close, told = tmp_path / "error.json", dist.destroy_process_group, []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (told.append(file.exists()), close()))
    with pytest.raises(ValueError, match="boom"), open_world(one_rank(), ALONE):
        raise ValueError("boom")
    assert told == [True]


def test_ctrl_c_is_no_failure(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record_failure(KeyboardInterrupt(), 0)
    assert not file.exists()


def sums_over_all_groups(context):
    world = context.world
    groups = {name: context.mesh.get_group(name) for name in context.mesh.mesh_dim_names}
    groups |= {"peers": world.peers, "lock-step": world.group, "control": world.control}
    sums = {}
    for name, group in groups.items():
        bits = torch.tensor(2**context.rank)
        dist.all_reduce(bits, group=group)
        sums[name] = int(bits)
    return sums


def bits_of(ranks):
    return sum(2**rank for rank in ranks)


@pytest.mark.parametrize("grs", [(2, 1, 2), (3, 1, 1), (4, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1)])
def test_collectives_in_every_group_and_across(ranks, grs):
    layout = Layout(*grs)
    for rank, sums in enumerate(ranks.run(sums_over_all_groups, layout)):
        place = layout.place(rank)
        replica = [layout.rank(Place(place.group, place.replica, shard)) for shard in range(layout.shards)]
        same_shard = [layout.rank(Place(place.group, each, place.shard)) for each in range(layout.replicas)]
        expected = {
            "group": bits_of(layout.peers(rank)),
            "shard": bits_of(replica),
            "peers": bits_of(layout.peers(rank)),
            "lock-step": bits_of(layout.group_of(rank)),
            "control": bits_of(range(layout.ranks)),
        }
        if layout.replicas > 1:
            expected["replica"] = bits_of(same_shard)
        assert sums == expected


def places_of(context):
    return context.mesh.mesh_dim_names, context.mesh.mesh.tolist(), context.world.place


@pytest.mark.slow
def test_the_axes_of_eight_ranks(ranks):
    layout = Layout(2, 2, 2)
    for rank, (names, mesh, place) in enumerate(ranks.run(places_of, layout)):
        assert names == ("group", "replica", "shard")
        assert mesh == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert place == layout.place(rank)


def sharded_step(context):
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=context.mesh["replica", "shard"])
    model(torch.full((1, 4), float(context.rank))).sum().backward()
    return model.weight.grad.full_tensor()


def test_the_mesh_is_one_that_fsdp_takes(ranks):
    mean_of_inputs = sum(range(4)) / 4
    for gradient in ranks.run(sharded_step, Layout(1, 2, 2)):
        assert torch.equal(gradient, torch.full((4, 4), mean_of_inputs))


def wait_alone(context, timeout):
    world = make_world(context.layout, context.rank, context.rank, torch.device("cpu"), timeout)
    if context.rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="imed out"):
            dist.all_reduce(torch.ones(1), group=world.peers)
        return time.monotonic() - began
    return None


def test_a_rank_waits_for_the_others_no_longer_than_asked(ranks):
    assert 0.3 <= ranks.run(wait_alone, Layout(2, 1, 1), timedelta(seconds=0.3))[0] < 3


def start(function, environs, *args):
    """A process for each environment, which runs `function(*args)` in it; their exit codes."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=in_environment, args=(environ, function, args)) for environ in environs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def in_environment(environ, function, args):
    os.environ.update(environ)
    function(*args)


@pytest.fixture
def step_of_two():
    """The environments of an srun step of two tasks on this machine."""
    step = SRUN | {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(next(STEPS)),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    return [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


STEPS = itertools.count()
TWO_GROUPS = Recipe(
    layout=LayoutSection(groups=2, shards=1), train=TrainSection(device="cpu"), sync=SyncSection(timeout_seconds=20)
)


def meet_and_sum(folder):
    with open_world(TWO_GROUPS, find_launch()) as world:
        total = torch.tensor(world.rank + 1)
        dist.all_reduce(total, group=world.peers)
        (folder / str(world.rank)).write_text(str(int(total)))


def test_the_ranks_of_an_srun_step_meet(ranks, step_of_two, tmp_path):
    assert start(meet_and_sum, step_of_two, tmp_path) == [0, 0]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "3", "1": "3"}


def leave_after_the_other_died(folder):
    with open_world(TWO_GROUPS, find_launch()) as world:
        dist.barrier()
        if world.rank == 1:
            os._exit(9)
        time.sleep(0.2)
        began = time.monotonic()
    (folder / "seconds").write_text(str(time.monotonic() - began))


def test_closing_does_not_wait_for_a_rank_that_died(ranks, step_of_two, tmp_path):
    assert start(leave_after_the_other_died, step_of_two, tmp_path) == [0, 9]
    assert float((tmp_path / "seconds").read_text()) < 2


def fail_with_work_under_way(folder):
    left = folder / "seconds"
    try:
        with open_world(TWO_GROUPS, find_launch()) as world:
            dist.barrier()
            if world.rank == 1:  # alive, but not coming
                await_file(left, 15)
                os._exit(0)
            work = dist.all_reduce(torch.ones(1), group=world.peers, async_op=True)
            assert work is not None
            del world  # as long as somebody holds the groups, closing them does nothing
            began = time.monotonic()
            raise ValueError("boom")
    except ValueError:
        left.write_text(str(time.monotonic() - began))
        os._exit(0)


def await_file(file, seconds):
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_failing_rank_does_not_wait_for_its_own_collective(ranks, step_of_two, tmp_path):
    assert start(fail_with_work_under_way, step_of_two, tmp_path) == [0, 0]
    assert float((tmp_path / "seconds").read_text()) < 5
