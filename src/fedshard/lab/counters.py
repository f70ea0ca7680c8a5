"""What passed the links of an emulated cluster, as the kernel counted it at the uplinks' upper ends.

A packet counts at every uplink that it passes: at the nodes', and further out at those of cells and sites. What
belongs to a tier is what passed its own uplinks but none further out.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedshard.core.topology import TierName
from fedshard.lab.wiring import Wiring


@dataclass(frozen=True)
class Traffic:
    """Bytes that passed one uplink, headers and all."""

    sent_bytes: int
    """By what hangs on the uplink."""
    received_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


@dataclass(frozen=True)
class Counters:
    """The traffic of all uplinks. The difference of two is what passed between them.

    >>> one, other = Traffic(700, 300), Traffic(300, 700)
    >>> Counters(nodes=(one, other, one, other), cells=(Traffic(400, 0), Traffic(0, 400)), sites=()).tier_bytes
    {'global': 400, 'cell': 1600}
    """

    nodes: tuple[Traffic, ...]
    cells: tuple[Traffic, ...]
    """Empty where no site has two cells."""
    sites: tuple[Traffic, ...]
    """Empty where there is one site."""

    def __sub__(self, earlier: Counters) -> Counters:
        def since(now: tuple[Traffic, ...], then: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
            return tuple(after - before for after, before in zip(now, then, strict=True))

        return Counters(
            since(self.nodes, earlier.nodes), since(self.cells, earlier.cells), since(self.sites, earlier.sites)
        )

    @property
    def tier_bytes(self) -> dict[TierName, int]:
        """Bytes that all nodes sent, by the outermost tier that they crossed."""
        uplinks: dict[TierName, tuple[Traffic, ...]] = {"cell": self.nodes, "global": self.cells, "wide": self.sites}
        tiers: dict[TierName, int] = {}
        further = 0
        for tier in ("wide", "global", "cell"):
            if uplinks[tier]:
                passed = sum(each.sent_bytes for each in uplinks[tier])
                tiers[tier], further = passed - further, passed
        return tiers


def read_counters(wiring: Wiring, devices: str) -> Counters:
    """The counters of `wiring` from the text of /proc/net/dev in the namespace of its bridges."""
    counted: dict[str, Traffic] = {}
    for line in devices.splitlines():
        name, colon, fields = line.partition(":")
        if colon:
            numbers = fields.split()  # eight of what the device received, eight of what it sent
            counted[name.strip()] = Traffic(sent_bytes=int(numbers[0]), received_bytes=int(numbers[8]))

    def of(names: tuple[str, ...]) -> tuple[Traffic, ...]:
        return tuple(counted[name] for name in names)

    return Counters(of(wiring.nodes), of(wiring.cells), of(wiring.sites))
