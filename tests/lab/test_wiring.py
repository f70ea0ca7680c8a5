"""How clusters are wired: names, addresses, which rate holds where, and what is refused. Nothing is built here."""

from itertools import pairwise

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import InputError
from fedshard.lab.counters import Counters, Traffic, read_counters
from fedshard.lab.wiring import FRAME_BYTES_PER_BYTE, Wiring


def limits(wiring: Wiring, device: str) -> list[tuple[str, float]]:
    """The classes at one end of an uplink, with their goodput in bytes per second."""
    lines = [line.split() for line in wiring.commands() if f"class add dev {device} " in line]
    values = [(words[words.index("classid") + 1], dict(pairwise(words))) for words in lines]
    bits = [(name, float(value.get("ceil", value["rate"]).removesuffix("bit"))) for name, value in values]
    return [(name, pytest.approx(value / 8 / FRAME_BYTES_PER_BYTE, rel=1e-6)) for name, value in bits]


def test_a_plain_cluster_is_nodes_on_one_bridge():
    wiring = Wiring.of(read_cluster("lab-fast"))
    assert (wiring.nodes, wiring.cells, wiring.sites) == (("node0", "node1"), (), ())
    assert wiring.addresses == ("198.18.0.1", "198.18.0.2")
    assert limits(wiring, "node0") == limits(wiring, "eth0")[:1] == [("1:1", 500e6)]


def test_a_nodes_uplink_has_a_class_for_other_cells():
    wiring = Wiring.of(read_cluster("lab-two-cells"))
    assert wiring.cells == ("cell0", "cell1")
    assert wiring.addresses == ("198.18.0.1", "198.18.0.2", "198.18.1.3", "198.18.1.4")
    assert limits(wiring, "node3") == [("1:1", 125e6), ("1:2", 125e6), ("1:3", 25e6)]
    assert limits(wiring, "cell1") == [], "what crosses it was limited at the nodes"
    filters = [line.partition(" parent ")[2] for line in wiring.commands() if "filter" in line and "node3" in line]
    within = "1: protocol ip u32 match ip {} 198.18.1.0/24 flowid 1:2"
    assert filters == [within.format("dst"), within.format("src")], "in the node, and at the bridge"


def test_a_sites_uplink_is_shared_by_its_nodes():
    wiring = Wiring.of(read_cluster("lab-two-sites"))
    assert (wiring.cells, wiring.sites) == ((), ("site0", "site1"))
    assert wiring.addresses[2] == "198.18.1.3"
    assert limits(wiring, "site0") == limits(wiring, "site0-up") == [("1:1", 12.5e6)]
    assert limits(wiring, "node0") == [("1:1", 125e6)]


def test_other_rates_take_the_place_of_the_files():
    wiring = Wiring.of(read_cluster("lab-scarce"), {"global": 7e6})
    assert wiring.rates == {"cell": 500e6, "global": 7e6}
    assert limits(wiring, "node0")[2] == ("1:3", 7e6)
    fast = Wiring.of(read_cluster("lab-scarce"), {"global": 600e6})
    assert limits(fast, "node0") == [("1:1", 500e6)], "a node sends no faster to other cells than to its own"


@pytest.mark.parametrize(
    ("cluster", "rates", "says"),
    [
        (
            "lab-fast",
            {"global": 1e6},
            "rates.global: lab-fast has no link of this tier between its nodes. It has cell.",
        ),
        ("lab-fast", {"node": 1e9}, "rates.node: lab-fast has no link of this tier between its nodes. It has cell."),
        ("lab-fast", {"cell": 0}, "rates.cell: 0 bytes per second. Give a positive number."),
        (
            "workstation-8",
            {"cell": 1e6},
            "rates.cell: workstation-8 has no link of this tier between its nodes. It has",
        ),
        ("leonardo-nominal", {}, "leonardo-nominal: 3456 nodes, and at most 64 are emulated. Take fewer ranks of it."),
    ],
)
def test_what_cannot_be_emulated_is_refused(cluster, rates, says):
    with pytest.raises(InputError) as caught:
        Wiring.of(read_cluster(cluster), rates)
    assert str(caught.value).startswith(says)


def test_bytes_belong_to_the_outermost_tier_that_they_cross():
    """Two sites of two cells of one node: node 0 sent 10 to its site's other cell, and 5 to the other site."""
    sent, nothing = Traffic(15, 0), Traffic(0, 0)
    nodes = (sent, Traffic(0, 10), Traffic(0, 5), nothing)
    counters = Counters(nodes, nodes, (Traffic(5, 0), Traffic(0, 5)))
    assert counters.tier_bytes == {"cell": 0, "global": 10, "wide": 5}
    assert (counters - counters).tier_bytes == {"cell": 0, "global": 0, "wide": 0}


def test_counters_are_read_from_the_bridges_side():
    """What a bridge's port received is what the node behind it sent."""
    devices = "Inter-| Receive\n face |bytes packets\n  lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n"
    devices += " node0: 700 7 0 0 0 0 0 0 300 3 0 0 0 0 0 0\nnode1:300 3 0 0 0 0 0 0 700 7 0 0 0 0 0 0\n"
    counters = read_counters(Wiring.of(read_cluster("lab-fast")), devices)
    assert counters.nodes == (Traffic(700, 300), Traffic(300, 700))
    assert counters.tier_bytes == {"cell": 1000}
