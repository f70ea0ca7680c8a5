"""Clusters: where ranks stand, which link a ring crosses, what is left of its rate, and what a bad file gets."""

import copy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.cluster_file import cluster_names, make_cluster, read_cluster
from fedshard.core.errors import Fault, InputError
from fedshard.core.topology import TIERS, Efficiency, Placement

ROOT = Path(__file__).parents[2]
NAMES = [
    "alps",
    "dgx-a100",
    "dgx-h100",
    "jupiter",
    "lab-fast",
    "lab-scarce",
    "lab-two-cells",
    "lab-two-sites",
    "leonardo-nominal",
    "leonardo-observed",
    "lumi",
    "marenostrum5",
    "p4d",
    "p5",
    "two-sites-10g",
    "workstation-8",
]


def constant(value: float) -> dict:
    return {"value": value, "source": "made up", "confidence": "assumed"}


def small() -> dict:
    """Two sites of two cells of two nodes of two ranks, as a file would give it."""
    tier = {"latency_seconds": constant(1e-6), "link_bytes_per_second": constant(1e9)}
    device = {
        "name": "made up",
        **{key: constant(1e9) for key in ("peak_flops_per_second", "memory_bytes", "memory_bytes_per_second")},
        **{key: constant(0.5) for key in ("achievable_fraction", "deviation_fraction")},
    }
    sizes = {"nodes": 8, "ranks_per_node": 2, "nodes_per_cell": 2, "nodes_per_site": 4}
    tiers = {name: copy.deepcopy(tier) for name in TIERS}
    return {"name": "small", "about": "made up", **sizes, "device": device, "tiers": tiers}


def faults(raw: dict) -> list[Fault]:
    with pytest.raises(InputError) as caught:
        make_cluster(raw, "small.toml")
    return list(caught.value.faults)


def test_all_promised_clusters_are_there():
    assert cluster_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_cluster_reads_and_is_named_as_its_file(name):
    cluster = read_cluster(name)
    assert cluster.name == name
    assert cluster == read_cluster(ROOT / "clusters" / f"{name}.toml")
    rates = [cluster.tiers[tier].link_bytes_per_second.value for tier in cluster.crossed(cluster.nodes)]
    whole_node = [rates[0] * cluster.ranks_per_node, *rates[1:]]
    assert whole_node == sorted(whole_node, reverse=True), "no tier is faster than the one inside it"


def test_leonardo_is_the_machine_of_its_documents():
    """3,456 nodes of four A100 64 GB; 180 nodes a cell; 4 × 100 Gb/s a node, of which 90 % are counted on."""
    leonardo = read_cluster("leonardo-nominal")
    assert (leonardo.ranks, leonardo.nodes_per_cell * leonardo.ranks_per_node) == (13_824, 720)
    assert leonardo.device.memory_bytes.value == 64e9
    assert leonardo.tiers["cell"].link_bytes_per_second.value == pytest.approx(0.9 * 4 * 100e9 / 8)


@pytest.mark.parametrize(
    ("ranks", "tier"),
    [([5], "node"), ([0, 1], "node"), ([0, 2], "cell"), ([0, 1, 3], "cell"), ([3, 4], "global"), ([0, 8], "wide")],
)
def test_a_ring_is_as_slow_as_the_outermost_tier_it_crosses(ranks, tier):
    assert make_cluster(small()).tier_between(ranks) == tier


def test_cells_do_not_reach_over_sites():
    raw = small() | {"nodes": 6, "nodes_per_site": 3}  # each site: a cell of two nodes and one of a single node
    cluster = make_cluster(raw)
    assert [cluster.cell_of(2 * node) for node in range(6)] == [0, 0, 1, 2, 2, 3]
    assert cluster.tier_between([4, 6]) == "wide"


@given(st.lists(st.integers(0, 15), min_size=1, max_size=6), st.integers(0, 15))
def test_one_more_rank_never_makes_a_ring_faster(ranks, another):
    cluster = make_cluster(small())
    before, after = cluster.tier_between(ranks), cluster.tier_between([*ranks, another])
    assert TIERS.index(after) >= TIERS.index(before)


@given(st.integers(1, 8))
def test_a_jobs_ranks_cross_the_tiers_that_its_nodes_reach(nodes):
    cluster = make_cluster(small())
    assert cluster.job(2 * nodes).tier_between(range(2 * nodes)) == cluster.crossed(nodes)[-1]


def test_a_job_is_spread_over_cells_as_jobs_really_are():
    """128 nodes fit into one cell of Leonardo, and were seen on ten."""
    packed, spread = (read_cluster(f"leonardo-{kind}").job(512) for kind in ("nominal", "observed"))
    assert packed.tier_between(range(512)) == "cell"
    assert spread.tier_between(range(512)) == "global"
    assert len({spread.cell_of(rank) for rank in range(512)}) == 10


def test_a_part_of_one_node_is_a_job():
    job = read_cluster("leonardo-nominal").job(3)
    assert (job.ranks, job.nodes) == (3, 1)


@pytest.mark.parametrize(
    ("ranks", "says", "mend"),
    [(9, "9 ranks do not fill nodes of 8", "Ask for 16, or for 8."), (80, "80 ranks, and two-sites-10g has 64", "Ask")],
)
def test_a_job_that_does_not_fit_is_refused(ranks, says, mend):
    with pytest.raises(InputError) as caught:
        read_cluster("two-sites-10g").job(ranks)
    (fault,) = caught.value.faults
    assert fault.says == says
    assert fault.mend.startswith(mend)


TABLE = Efficiency(
    message_bytes=(1e6, 1e8),
    ranks=(8, 512),
    fractions=((0.4, 0.8), (0.2, 0.6)),
    source="made up",
    confidence="assumed",
)


@pytest.mark.parametrize(
    ("message_bytes", "ranks", "fraction"),
    [
        (1e6, 8, 0.4),
        (1e8, 512, 0.6),
        (1e7, 8, 0.6),  # half-way in the logarithm of bytes
        (1e6, 64, 0.3),  # half-way in the logarithm of ranks
        (1e7, 64, 0.5),
        (1, 2, 0.4),  # outside, the edge
        (1e12, 4096, 0.6),
    ],
)
def test_efficiency_is_interpolated_and_stays_at_the_edge(message_bytes, ranks, fraction):
    assert TABLE.at(message_bytes, ranks) == pytest.approx(fraction)


@given(st.floats(1, 1e12), st.integers(1, 10_000))
def test_efficiency_stays_within_its_table(message_bytes, ranks):
    assert 0.2 <= TABLE.at(message_bytes, ranks) <= 0.8


def test_a_tier_without_a_table_gives_its_whole_rate():
    assert make_cluster(small()).tiers["cell"].rate(1e6, 64) == 1e9


def test_placement_stays_at_its_edges():
    placement = Placement(job_nodes=(4, 16), cells=(2, 4), source="made up", confidence="assumed")
    assert [placement.cells_of(nodes) for nodes in (1, 2, 4, 8, 16, 100)] == [1, 2, 2, 3, 4, 4]


def test_every_fault_is_named_with_its_key_and_a_mend():
    raw = small()
    del raw["tiers"]["cell"]["latency_seconds"]["source"]
    raw["tiers"]["node"]["latency_secnds"] = constant(1)
    raw["device"]["memory_bytes"]["value"] = -1
    raw["device"]["peak_flops_per_second"]["confidence"] = "sure"
    found = {fault.key.removeprefix("small.toml: "): fault for fault in faults(raw)}
    assert set(found) == {
        "tiers.cell.latency_seconds.source",
        "tiers.node.latency_secnds",
        "device.memory_bytes.value",
        "device.peak_flops_per_second.confidence",
    }
    assert found["tiers.node.latency_secnds"].mend == "Did you mean latency_seconds?"
    assert "-1" in found["device.memory_bytes.value"].says


def test_a_tier_that_the_nodes_reach_must_be_given():
    raw = small()
    del raw["tiers"]["wide"]
    (fault,) = faults(raw)
    assert fault.says == "8 nodes reach over tiers that are not given: wide"


def test_a_table_of_the_wrong_form_is_refused():
    raw = small()
    raw["tiers"]["cell"]["efficiency"] = TABLE.model_dump() | {"ranks": [8, 64, 512]}
    (fault,) = faults(raw)
    assert fault.says == "fractions must be 3 rows (ranks) of 2 (message_bytes)"
    raw["tiers"]["cell"]["efficiency"] = TABLE.model_dump() | {"ranks": [512, 8]}
    (fault,) = faults(raw)
    assert fault.says == "ranks must rise, [512, 8] given"


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InputError) as caught:
        read_cluster("leonardo-nominl")
    assert caught.value.faults[0].mend.startswith("Did you mean leonardo-nominal? There are alps, ")


@pytest.mark.parametrize(("text", "says"), [(None, "no such file"), ("nodes = = 3", "is not TOML")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, says):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_cluster(path)
    assert caught.value.faults[0].key == str(path)


@pytest.mark.slow
def test_a_wheel_carries_the_clusters(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    names = subprocess.run(
        [sys.executable, "-c", "from fedshard.core.cluster_file import cluster_names; print(*cluster_names())"],
        cwd=tmp_path / "site",
        env={"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert names.stdout.split() == NAMES
