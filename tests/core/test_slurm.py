"""Every form that SLURM's variables take in the wild, and the faults that public bug reports tell of."""

import pytest

from fedshard.core.errors import InputError
from fedshard.core.slurm import SlurmTask, device_index, expand_nodes, expand_tasks, in_step, slurm_task, step_port

TWO_NODES = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "lrdn[0001-0002]",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("lrdn[0001-0004,0010]", ["lrdn0001", "lrdn0002", "lrdn0003", "lrdn0004", "lrdn0010"]),
        ("node1,node[2-5,12]", ["node1", "node2", "node3", "node4", "node5", "node12"]),
        ("compute-permanent-node-[583,752,801,869]", [f"compute-permanent-node-{n}" for n in (583, 752, 801, 869)]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("rack[0-1]n[00-03]", [f"rack{r}n{n:02}" for r in range(2) for n in range(4)]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("zeta-ia810", ["zeta-ia810"]),
        ("zeta-ia[810-812]", ["zeta-ia810", "zeta-ia811", "zeta-ia812"]),
        ("node[1-2]-ib", ["node1-ib", "node2-ib"]),
    ],
)
def test_node_list(text, hosts):
    assert expand_nodes(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "node[1-3", "node1-3]", "node[]", "node[3-1]", "node[a-b]", "a,,b", "a,", "n[1-2-3]", "n[1,]", "n[[1]]"],
)
def test_a_broken_node_list_is_named(text):
    with pytest.raises(InputError, match="node list") as caught:
        expand_nodes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("4(x2),3", [4, 4, 3]), ("1(x16)", [1] * 16), ("7", [7])],
)
def test_tasks_per_node(text, tasks):
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize("text", ["", "4(2)", "x4", "4,,3", "4(x2"])
def test_broken_tasks_per_node_are_named(text):
    with pytest.raises(InputError, match="tasks per node"):
        expand_tasks(text)


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(3, 4, 3), (3, 1, 0), (0, 0, None), (0, 2, 0)])
def test_device_index(local_rank, visible, index):
    assert device_index(local_rank, visible) == index


def test_a_rank_without_a_device_is_told_both_numbers():
    with pytest.raises(InputError, match=r"local rank 3 .* 2 are visible"):
        device_index(3, 2)


@pytest.mark.parametrize("rank", range(8))
def test_two_nodes_of_four(rank):
    environ = TWO_NODES | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 4),
        "SLURM_NODEID": str(rank // 4),
    }
    assert slurm_task(environ) == SlurmTask(
        rank=rank,
        ranks=8,
        local_rank=rank % 4,
        local_ranks=4,
        address="lrdn0001",
        port=16_711,
        cores=None,
        launcher_ranks=None,
    )


@pytest.mark.parametrize(("node", "local_ranks"), [(0, 4), (1, 4), (2, 3)])
def test_local_ranks_of_uneven_nodes(node, local_ranks):
    environ = {
        "SLURM_NNODES": "3",
        "SLURM_NTASKS": "11",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
        "SLURM_NODELIST": "n[1-3]",
        "SLURM_PROCID": str(4 * node),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
    }
    assert slurm_task(environ).local_ranks == local_ranks


def test_one_launcher_per_node_would_be_sixty_four_ranks():
    environ = {
        "SLURM_NNODES": "16",
        "SLURM_NTASKS": "16",
        "SLURM_TASKS_PER_NODE": "1(x16)",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_NODELIST": "n[01-16]",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "5",
    }
    task = slurm_task(environ)
    assert (task.ranks, task.local_ranks, task.launcher_ranks) == (16, 1, 64)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_step_wins_over_the_job(rank):
    task = slurm_task({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)})
    assert (task.rank, task.ranks, task.local_rank, task.local_ranks) == (rank, 2, rank, 2)


def test_the_steps_own_nodes_and_tasks_win():
    environ = TWO_NODES | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "lrdn0002",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
    }
    task = slurm_task(environ)
    assert (task.ranks, task.local_ranks, task.address) == (2, 2, "lrdn0002")


def test_rank_0_is_where_the_host_file_puts_it():
    environ = {
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_JOB_NODELIST": "compute-permanent-node-[583,752,801,869]",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    hosts = [f"compute-permanent-node-{number}" for number in (801, 869, 583, 752)]
    assert slurm_task(environ).address == hosts[2]  # SLURM's list is sorted
    assert slurm_task(environ, "\n".join(hosts) + "\n").address == hosts[0]


def test_cores_of_one_task():
    environ = TWO_NODES | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "8"}
    assert slurm_task(environ).cores == 8


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        ({"SLURM_NTASKS": "7"}, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_a_missing_or_broken_variable_is_named(change, name):
    environ = TWO_NODES | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"} | change
    with pytest.raises(InputError) as caught:
        slurm_task(environ)
    assert [fault.key for fault in caught.value.faults] == [name]


@pytest.mark.parametrize(
    ("environ", "joined"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "8"}, False),  # the shell of salloc
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, False),  # a batch script
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),  # srun --pty bash
    ],
)
def test_which_environment_is_a_step_of_many(environ, joined):
    assert in_step(environ) is joined


def test_jobs_and_steps_side_by_side_meet_at_different_ports():
    ports = [step_port(job, step) for job in range(4711, 4761) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32_768 for port in ports)
