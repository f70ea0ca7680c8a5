"""Collectives that others measured: reading their table, and what the model says about each row.

A row names a system, a collective, an algorithm, ranks, nodes and bytes. What is not known here is not guessed: such a
row is left out, with the reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedshard.core.cluster_file import read_cluster
from fedshard.core.topology import Cluster
from fedshard.study.collectives import NCCL, Algorithm, Kind, Library, Members, Protocol, collective_seconds

DATA = Path(__file__).parent / "data"

OPENMPI = Library(
    name="openmpi",
    # On Leonardo's hosts (HLC-Lab/pico): up to 32 KiB 1.4 µs + bytes / 4 GB/s a message, beyond that 22 µs to agree.
    protocols=(Protocol("eager", 1.0, 4e9), Protocol("rendezvous", 16.0)),
    base_seconds=1e-6,
    tree_factor=1.0,
    tree_rate_factor=1.0,
    adds_bytes_per_second=3.9e9,  # all-reduce rings less all-gather rings of the same chunk, on one core
    doubles=("all_reduce",),
)

COLUMNS = ("source", "system", "collective", "algo", "ranks", "nodes", "bytes", "median_us")
"""What is read of a row; a column that a table lacks is empty."""

KINDS: dict[str, Kind] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
SYSTEMS = {
    "leonardo booster nodes (cpu": str(DATA / "leonardo-host.toml"),
    "leonardo": "leonardo-nominal",
    "marenostrum": "marenostrum5",
    "lumi": "lumi",
    "alps": "alps",
    "jupiter": "jupiter",
}
"""How a row's system begins, and the cluster that stands for it; the first that fits is taken."""

ALGORITHMS: tuple[tuple[str, Algorithm], ...] = (
    ("nvlstree", "ring"),  # H100 nodes without a switch that reduces: NCCL falls back to what it would do without
    ("nvls", "best"),
    ("tree", "tree"),
    ("ring", "ring"),
    ("doubling", "doubling"),
    ("halving", "doubling"),
    ("rabenseifner", "doubling"),
    ("bruck", "doubling"),
)
"""Parts of a row's algorithm; where none fits, the library is taken to choose."""


@dataclass(frozen=True)
class Measured:
    """One row: what took how long, and what the model says."""

    source: str
    system: str
    kind: Kind
    algorithm: str
    ranks: int
    nodes: int
    message_bytes: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class LeftOut:
    """A row that nothing is said about."""

    row: str
    reason: str


def read_measured(path: Path) -> Iterator[Measured | LeftOut]:
    """Every row of a table of collectives, with its prediction or the reason why there is none."""
    with path.open(encoding="utf-8", newline="") as file:
        for line, raw in enumerate(csv.DictReader(file), start=2):
            row = {column: (raw.get(column) or "").strip() for column in COLUMNS}
            try:
                yield _predicted(row)
            except ValueError as error:
                yield LeftOut(f"line {line}: {row['system']} {row['collective']}", str(error))


def _predicted(row: dict[str, str]) -> Measured:
    """Raises ValueError, with what is missing or unknown, where nothing can be said."""
    ranks, nodes, message_bytes = (int(_number(row, key)) for key in ("ranks", "nodes", "bytes"))
    kind = KINDS.get((row["collective"].split() or [""])[0].replace("_", "").replace("-", "").lower())
    if kind is None:
        raise ValueError(f"no model of {row['collective']!r}")
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks are not spread evenly over {nodes} nodes")
    algorithm = _algorithm(row["algo"])
    if algorithm == "tree" and kind != "all_reduce":
        raise ValueError(f"no tree for {kind}")
    if algorithm == "doubling" and ranks > nodes > 1:
        raise ValueError("no model of recursive doubling with several ranks a node")
    members = Members.of(_cluster(row["system"], ranks, nodes), range(ranks))
    library = OPENMPI if "mpi" in row["algo"].lower() else NCCL
    seconds = collective_seconds(kind, message_bytes, members, algorithm, library)
    return Measured(
        source=row["source"],
        system=row["system"],
        kind=kind,
        algorithm=row["algo"],
        ranks=ranks,
        nodes=nodes,
        message_bytes=message_bytes,
        measured_seconds=_number(row, "median_us") * 1e-6,
        predicted_seconds=seconds,
    )


def _number(row: dict[str, str], key: str) -> float:
    try:
        number = float(row[key])
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{key} is {row[key]!r}, no positive number")
    return number


def _algorithm(told: str) -> Algorithm:
    for part, algorithm in ALGORITHMS:
        if part in told.lower():
            return algorithm
    return "best"


def _cluster(system: str, ranks: int, nodes: int) -> Cluster:
    """As many nodes of the system as the row has, with as many ranks on each."""
    name = next((cluster for begins, cluster in SYSTEMS.items() if system.lower().startswith(begins)), None)
    if name is None:
        raise ValueError(f"no cluster stands for {system!r}")
    return read_cluster(name).model_copy(update={"nodes": nodes, "ranks_per_node": ranks // nodes})
