"""A cluster on this machine: nodes are network namespaces, links are limited, and the kernel counts what passes them.

    with Emulation(read_cluster("lab-two-cells")) as emulation:
        before = emulation.counters()
        emulation.run(emulation.torchrun(["-m", "fedshard", "train", "recipe.toml"]))
        print((emulation.counters() - before).tier_bytes)

It needs Linux, but no rights. Nothing of it can be seen from outside, so several may run at once; and nothing is left
of it, however this process ends. Latency is that of this machine: a few microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from fedshard.core.errors import RunError
from fedshard.core.topology import Cluster, TierName
from fedshard.lab.counters import Counters, read_counters
from fedshard.lab.job import Job
from fedshard.lab.namespaces import Namespaces
from fedshard.lab.wiring import Wiring

MASTER_PORT = 29500
"""Where node 0 listens for torchrun; nobody else does so, the node being its own."""


class Emulation:
    """`cluster`, built when entered as a context manager and gone when left.

    `rates` replace those of its file, by tier, in bytes of goodput per second: of a node for `cell` and `global`, of a
    site for `wide`. What ranks of one node exchange is never limited. Raises InputError for a cluster or rates that
    cannot be, and, when entered, where this system lacks what is needed.
    """

    def __init__(self, cluster: Cluster, rates: Mapping[TierName, float] | None = None):
        self._wiring = Wiring.of(cluster, rates)
        self._namespaces: Namespaces | None = None
        self._jobs: list[Job] = []

    def __enter__(self) -> Emulation:
        self._namespaces = Namespaces(self._wiring.commands())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        namespaces, self._namespaces = self._built, None
        try:
            for job in self._jobs:
                job.stop(0)
        finally:
            namespaces.close()

    @property
    def cluster(self) -> Cluster:
        """What is emulated."""
        return self._wiring.cluster

    @property
    def rates(self) -> dict[TierName, float]:
        """The rates that hold, in bytes of goodput per second."""
        return dict(self._wiring.rates)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Each node's IPv4 address."""
        return self._wiring.addresses

    def counters(self) -> Counters:
        """What has passed each uplink since the cluster was built. Take differences: bridges send a few hundred bytes
        of their own when they are built."""
        return read_counters(self._wiring, self._built.devices())

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Run a command on every node, as `start` does, and return when all have ended well.

        Raises RunError with the first failure; it and Ctrl-C end the others.
        """
        self.start(command, environment).wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Job:
        """Start a command on every node, with {node} and {address} in its words filled in.

        It runs in the present folder, with the environment of this process, with `environment`, and with

            FEDSHARD_NODE, FEDSHARD_NODES, FEDSHARD_ADDRESS     which node it is, of how many, and its address
            MASTER_ADDR, MASTER_PORT                            where node 0 may listen
            GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME                the device that leads to the others
        """
        filled = [
            [word.replace("{node}", str(node)).replace("{address}", address) for word in command]
            for node, address in enumerate(self.addresses)
        ]
        return self.start_each(filled, environment)

    def start_each(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> Job:
        """Start on each node a command of its own; otherwise like `start`."""
        self._jobs = [job for job in self._jobs if job.running]
        assert len(commands) == self.cluster.nodes, "one command for each node"
        starts = []
        for node, command in enumerate(commands):
            given = {**(environment or {}), **self._environment(node)}
            variables = [f"{name}={value}" for name, value in given.items()]
            starts.append((self._built.enter(self._wiring.nodes[node]), ["env", *variables, *command]))
        job = Job(starts)
        self._jobs.append(job)
        return job

    def torchrun(self, words: Sequence[str], ranks_per_node: int | None = None) -> list[str]:
        """The command for `run` and `start` that starts these words under torchrun, with the cluster's ranks."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.cluster.nodes), "--node-rank", "{node}"),
            *("--nproc-per-node", str(ranks_per_node or self.cluster.ranks_per_node)),
            *("--master-addr", self.addresses[0], "--master-port", str(MASTER_PORT), "--local-addr", "{address}"),
            *words,
        ]

    def _environment(self, node: int) -> dict[str, str]:
        return {
            "FEDSHARD_NODE": str(node),
            "FEDSHARD_NODES": str(self.cluster.nodes),
            "FEDSHARD_ADDRESS": self.addresses[node],
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
        }

    @property
    def _built(self) -> Namespaces:
        if self._namespaces is None:
            raise RunError("the emulation is not running: use it in a `with` block")
        return self._namespaces
