"""How a cluster is wired when it is emulated: which bridges and links there are, and the commands that make them.

    node 0 ── node0 ─┐
    node 1 ── node1 ─┴ cell 0 ── cell0 ─┐
    node 2 ── node2 ─┐                  ├ site 0 ── site0 ─┐
    node 3 ── node3 ─┴ cell 1 ── cell1 ─┘                  ├ all sites
    …                                       … ── site1 ────┘

Cells, sites and "all sites" are bridges. Each uplink bears the name of what hangs on it. The names are those of the
uplinks' upper ends, all in one network namespace, so their counters are read in one place.

Rates mean what they mean in a cluster's file: `cell` and `global` are a node's, for what it exchanges within its cell
and beyond it; `wide` is a site's. So the uplink of a cell has no rate of its own: what crosses it has passed the
slower class of a node. Pure arithmetic: nothing is started here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedshard.core.errors import Fault, InputError
from fedshard.core.topology import Cluster, TierName

LARGEST = 64
"""Nodes of the largest cluster that is emulated; one machine computes for all of them."""

FRAME_BYTES_PER_BYTE = 1514 / 1448
"""What a full frame weighs over what it carries: the kernel limits frames, and rates of a cluster are goodput."""

QUEUE_SECONDS = 0.05
"""How much may wait in front of a link, at its rate. Less starves TCP, more delays the short messages behind it."""

SMALLEST_QUEUE_BYTES = 1_000_000
"""What may wait in front of a slow link all the same: a segment of 64 kB from each of a dozen connections."""

IPV6_OFF = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
"""The kernel's switch in each network namespace; there is none without IPv6."""

SILENCE = f"sh -c 'test ! -e {IPV6_OFF} || echo 1 > {IPV6_OFF}'"
"""Devices made from now on in a network namespace speak no IPv6. Otherwise they do so unasked, and are counted."""

QUANTUM_BYTES = 60_000
"""How much one class sends before the next; about one segment."""

WITHIN, BEYOND = "1:2", "1:3"
"""The classes of a node's uplink: for its own cell, and for all that lies outside."""


@dataclass(frozen=True)
class Port:
    """One end of an uplink, at which what leaves through it is limited. Rates are goodput, in bytes per second."""

    device: str
    namespace: str | None
    """The node's; None where the bridges are."""
    rate: float | None
    """For all that leaves here; None: as fast as the machine is."""
    beyond_rate: float | None = None
    """For what is exchanged with other cells, inside `rate`; None: no other."""
    cell_prefix: str = ""
    """The addresses of the own cell, which `beyond_rate` is not for."""
    cell_field: str = "dst"
    """Which address of a packet is the other node's: `dst` where the node sends, `src` where it receives."""

    def commands(self) -> Iterator[str]:
        """The `tc` commands."""
        tc = "tc" if self.namespace is None else f"tc -n {self.namespace}"
        if self.rate is None:
            return
        top = f"parent 1: classid 1:1 htb rate {_bits(self.rate)} quantum {QUANTUM_BYTES}"
        if self.beyond_rate is None:
            yield f"{tc} qdisc add dev {self.device} root handle 1: htb default 1"
            yield f"{tc} class add dev {self.device} {top}"
            yield f"{tc} qdisc add dev {self.device} parent 1:1 bfifo limit {_queue(self.rate)}"
            return
        yield f"{tc} qdisc add dev {self.device} root handle 1: htb default {BEYOND.removeprefix('1:')}"
        yield f"{tc} class add dev {self.device} {top}"
        for name, rate in ((WITHIN, self.rate), (BEYOND, self.beyond_rate)):
            # A class may send at its own `rate` whatever the class above it says; only what it borrows up to `ceil`
            # is limited by that. Two halves never exceed the whole.
            limits = f"rate {_bits(rate / 2)} ceil {_bits(rate)} quantum {QUANTUM_BYTES}"
            yield f"{tc} class add dev {self.device} parent 1:1 classid {name} htb {limits}"
            yield f"{tc} qdisc add dev {self.device} parent {name} bfifo limit {_queue(rate)}"
        match = f"u32 match ip {self.cell_field} {self.cell_prefix}"
        yield f"{tc} filter add dev {self.device} parent 1: protocol ip {match} flowid {WITHIN}"


@dataclass(frozen=True)
class Wiring:
    """The bridges and links of a cluster, with its rates or others."""

    cluster: Cluster
    rates: Mapping[TierName, float]
    """Bytes per second of goodput in one direction, for each limited tier that the cluster reaches over."""

    @staticmethod
    def of(cluster: Cluster, rates: Mapping[TierName, float] | None = None) -> Wiring:
        """The wiring of `cluster`, with `rates` in place of its own where given.

        Raises InputError for a cluster of too many nodes, and for rates of tiers that it does not reach over.
        """
        limited: list[TierName] = [tier for tier in cluster.crossed(cluster.nodes) if tier != "node"]
        given = dict(rates or {})
        faults = []
        if cluster.nodes > LARGEST:
            says = f"{cluster.nodes} nodes, and at most {LARGEST} are emulated"
            faults.append(Fault(cluster.name, says, "Take fewer ranks of it."))
        for tier, rate in given.items():
            if tier not in limited:
                says = f"{cluster.name} has no link of this tier between its nodes"
                faults.append(Fault(f"rates.{tier}", says, f"It has {', '.join(limited) or 'one node only'}."))
            elif not 0 < rate < float("inf"):
                faults.append(Fault(f"rates.{tier}", f"{rate} bytes per second", "Give a positive number."))
        if faults:
            raise InputError(faults)
        own: dict[TierName, float] = {tier: cluster.tiers[tier].link_bytes_per_second.value for tier in limited}
        return Wiring(cluster, own | given)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, of their namespaces and of their uplinks."""
        return tuple(f"node{node}" for node in range(self.cluster.nodes))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nodes' addresses, 198.18.cell.node with nodes from 1: the network that is set aside for measurements."""
        return tuple(f"{self._prefix(node)}.{node + 1}" for node in range(self.cluster.nodes))

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells' uplinks; none where no site has two cells."""
        return _names("cell", self.cluster.cell_of(self.cluster.ranks - 1) + 1) if self._sites_have_cells else ()

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites' uplinks; none where there is one site."""
        count = self.cluster.site_of(self.cluster.ranks - 1) + 1
        return _names("site", count) if count > 1 else ()

    def commands(self) -> list[str]:
        """The shell's commands that build all, in order, in a mount and a network namespace that have nothing yet."""
        lines = [SILENCE, "ip link set lo up", *self._hosts()]
        for bridge in ("top", *(f"{name}-in" for name in (*self.cells, *self.sites))):
            lines += _bridge(bridge)
        for node, name in enumerate(self.nodes):
            lines += _node_link(name, self._above_node(node), self.addresses[node])
        for cell, name in enumerate(self.cells):
            lines += _bridge_link(name, self._above_cell(cell))
        for name in self.sites:
            lines += _bridge_link(name, "top")
        return [*lines, *(line for port in self._ports() for line in port.commands())]

    @property
    def _sites_have_cells(self) -> bool:
        return "global" in self.cluster.crossed(self.cluster.nodes)

    def _prefix(self, node: int) -> str:
        return f"198.18.{self.cluster.cell_of(node * self.cluster.ranks_per_node)}"

    def _hosts(self) -> list[str]:
        """The nodes' names in /etc/hosts: torch asks whose address it speaks to, and waits for a name server."""
        named = "\\n".join(
            f"{address} {name}\\n::ffff:{address} {name}"
            for address, name in zip(self.addresses, self.nodes, strict=True)
        )
        return [f"{{ cat /etc/hosts; printf '{named}\\n'; }} > /run/hosts", "mount --bind /run/hosts /etc/hosts"]

    def _above_node(self, node: int) -> str:
        """The bridge that a node hangs on: its cell's, or that of what has one cell only."""
        rank = node * self.cluster.ranks_per_node
        if self.cells:
            return f"cell{self.cluster.cell_of(rank)}-in"
        return f"site{self.cluster.site_of(rank)}-in" if self.sites else "top"

    def _above_cell(self, cell: int) -> str:
        """The bridge that a cell hangs on."""
        if not self.sites:
            return "top"
        rank = next(rank for rank in range(self.cluster.ranks) if self.cluster.cell_of(rank) == cell)
        return f"site{self.cluster.site_of(rank)}-in"

    def _ports(self) -> Iterator[Port]:
        """Both ends of each limited uplink: at one leaves what is sent, at the other what is received."""
        cell, beyond = self.rates.get("cell"), self.rates.get("global")
        rate = beyond if cell is None else cell
        if cell is None or beyond is None or beyond >= cell:
            beyond = None  # one class serves: all is within the cell, or beyond it, or that makes no difference
        for node, name in enumerate(self.nodes):
            prefix = f"{self._prefix(node)}.0/24"
            yield Port("eth0", name, rate, beyond, prefix, "dst")
            yield Port(name, None, rate, beyond, prefix, "src")
        for name in self.sites:
            yield Port(f"{name}-up", None, self.rates["wide"])
            yield Port(name, None, self.rates["wide"])


def _names(what: str, count: int) -> tuple[str, ...]:
    return tuple(f"{what}{index}" for index in range(count))


def _bridge(name: str) -> list[str]:
    return [f"ip link add {name} type bridge", f"ip link set {name} up"]


def _bridge_link(name: str, above: str) -> list[str]:
    """The uplink of bridge `name-in` to another bridge."""
    return [
        f"ip link add {name} type veth peer name {name}-up",
        f"ip link set {name} master {above} up",
        f"ip link set {name}-up master {name}-in up",
    ]


def _node_link(name: str, above: str, address: str) -> list[str]:
    """A node's namespace and its uplink to a bridge."""
    return [
        f"ip netns add {name}",
        f"ip netns exec {name} {SILENCE}",
        f"ip link add {name} type veth peer name eth0 netns {name}",
        f"ip link set {name} master {above} up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} address add {address}/16 dev eth0",
    ]


def _bits(rate: float) -> str:
    """A rate of goodput as the rate of frames that `tc` is given."""
    return f"{round(8 * rate * FRAME_BYTES_PER_BYTE)}bit"


def _queue(rate: float) -> int:
    return max(SMALLEST_QUEUE_BYTES, round(rate * QUEUE_SECONDS))
