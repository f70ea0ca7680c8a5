"""Where a job's nodes really land: cells that the scheduler found room in, not the fewest that would do."""

from __future__ import annotations

import numpy as np

from fedshard.core.topology import Cluster

SPREAD = 0.35
"""Standard deviation of the logarithm of how many cells a job gets: jobs of 128 nodes were seen in 3 to 19 cells, most
in about 10 (HLC-Lab/pico, 43 jobs)."""


def landed_cells(cluster: Cluster, chance: np.random.Generator) -> np.ndarray:
    """The cell of each node of a job on `cluster` (a job's: see `Cluster.job`): (nodes,), rising.

    The number of cells scatters around what the cluster's placement says, and nodes fall into cells at random; the
    scheduler then numbers them cell by cell. Without a placement they are packed.
    """
    packed = np.arange(cluster.nodes) // cluster.nodes_per_cell
    if cluster.placement is None or cluster.nodes == 1:
        return packed
    median = cluster.placement.cells_of(cluster.nodes)
    cells = round(median * np.exp(SPREAD * chance.standard_normal()))
    cells = int(np.clip(cells, 1, cluster.nodes))
    return np.sort(chance.integers(cells, size=cluster.nodes))
