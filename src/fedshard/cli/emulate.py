"""`fedshard emulate`: any command on every node of a cluster that exists on this machine only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fedshard.cli.words import read_words
from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import Fault, InputError
from fedshard.core.topology import TIERS, Cluster, TierName
from fedshard.core.units import format_bytes

FLAGS = {"--ranks": "N", "--rates": "TIER=RATE,…", "--torchrun": "", "--help": ""}

HELP = """\
usage: fedshard emulate CLUSTER [--ranks N] [--rates TIER=RATE,…] [--torchrun] -- COMMAND …

Builds the cluster (a name, or a .toml file) on this Linux machine, from network namespaces, and runs the command on
each of its nodes. The first failure ends it on all. Nothing is left afterwards, and nothing needs root.

  --ranks N            only the part of the cluster that a job of N ranks gets
  --rates TIER=RATE,…  other rates than the cluster's own, in bytes per second: global=3e6,cell=125e6
  --torchrun           COMMAND is a script, or -m MODULE, with its words; torchrun starts the cluster's ranks with it

Output is that of node 0; of another node it is shown when that node fails. At the end stderr has the bytes that the
nodes sent to each other, by tier. {node} and {address} in COMMAND are filled in. The command's environment has:

  FEDSHARD_NODE, FEDSHARD_NODES   which node it is, from 0, and of how many
  FEDSHARD_ADDRESS                the node's address
  MASTER_ADDR, MASTER_PORT        where node 0 may listen
  GLOO_SOCKET_IFNAME              the device that leads to the other nodes

"""


def run(words: Sequence[str]) -> None:
    """The command."""
    own, command = _split(list(words))
    given = read_words(["--help" if word == "-h" else word for word in own], FLAGS)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    if faults := list(_faults(given.paths, given.overrides, command)):
        raise InputError(faults)
    cluster = _part(read_cluster(given.paths[0]), given.flags.get("--ranks"))
    emulate(cluster, read_rates(given.flags.get("--rates", "")), command, "--torchrun" in given.flags)


def emulate(cluster: Cluster, rates: dict[TierName, float], command: list[str], torchrun: bool) -> None:
    """Run the command on every node of `cluster`, and tell what they sent to each other."""
    from fedshard.lab.emulate import Emulation

    with Emulation(cluster, rates) as emulation:
        before = emulation.counters()
        emulation.run(emulation.torchrun(command) if torchrun else command)
        sent = (emulation.counters() - before).tier_bytes
    told = [f"{tier} {format_bytes(max(0, sent[tier]))}" for tier in emulation.rates]
    print(f"sent between nodes: {', '.join(told) or 'nothing, there is one only'}", file=sys.stderr)


def read_rates(text: str) -> dict[TierName, float]:
    """Rates by tier, as the command line gives them. Raises InputError with all that are none.

    >>> read_rates("global=3e6,cell=125e6")
    {'global': 3000000.0, 'cell': 125000000.0}
    """
    tiers: dict[str, TierName] = {tier: tier for tier in TIERS}
    rates: dict[TierName, float] = {}
    faults: list[Fault] = []
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            rates[tiers[name]] = float(value)
        except (KeyError, ValueError):
            faults.append(Fault("--rates", f"{part!r} is no rate of a tier", "Write global=3e6, in bytes per second."))
    if faults:
        raise InputError(faults)
    return rates


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the command for the nodes behind `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _faults(paths: list[str], overrides: list[str], command: list[str]) -> Iterator[Fault]:
    if not paths:
        yield Fault("emulate", "no cluster given", "Write fedshard emulate lab-two-cells -- COMMAND.")
    for name in overrides[::2]:
        yield Fault(name, "no such option", f"There are {', '.join(FLAGS)}.")
    if not command:
        yield Fault("emulate", "no command given", "Write it behind --.")


def _part(cluster: Cluster, ranks: str | None) -> Cluster:
    """The part of the cluster that a job of so many ranks gets; None: all of it."""
    if ranks is None:
        return cluster
    if not ranks.isdecimal() or int(ranks) < 1:
        raise InputError([Fault("--ranks", f"{ranks!r} is no number of ranks", "Write --ranks 8.")])
    return cluster.job(int(ranks))
