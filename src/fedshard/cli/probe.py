"""`fedshard probe`: measures links and devices on the ranks it is given, and writes a cluster's file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedshard.cli.words import Words, read_words
from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.recipe import LayoutSection, Recipe
from fedshard.core.recipe_file import read_recipe
from fedshard.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from fedshard.engine.probe import Asked, Findings
    from fedshard.engine.world import Launch

FLAGS = {
    "--into": "C.toml",
    "--nodes-per-cell": "N",
    "--nodes-per-site": "N",
    "--seconds": "S",
    "--json": "",
    "--help": "",
}

COUNTS = ("--nodes-per-cell", "--nodes-per-site")

DEFAULT_FILE = Path("cluster.toml")

HELP = """\
usage: fedshard probe [RECIPE.toml] [--section.key value …] [--into C.toml] [--nodes-per-cell N] [--nodes-per-site N]
                      [--seconds S] [--json]

Measures, on the recipe's ranks: latency and rate of all-gather, reduce-scatter and all-reduce over each axis of its
layout, FLOP/s of its decoder block, the rate of memory, and how much times scatter. It writes a cluster's file, which
plan and simulate read. Ranks start as `fedshard train` starts them; under torchrun or srun it joins theirs, and then,
without a recipe or --layout, groups are the nodes, and shards the ranks of a node.

  --into C.toml       the cluster's file (default: cluster.toml); must not exist
  --nodes-per-cell N  nodes whose links meet in one cell (default: all); links between cells are the global tier
  --nodes-per-site N  nodes of one site (default: all); links between sites are the wide tier
  --seconds S         how long each size of each collective is measured (default: 0.2)
  --json              all that was measured as JSON on stdout

"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    into = Path(given.flags.get("--into", DEFAULT_FILE))
    if faults := [*file_faults(into), *number_faults(given)]:
        raise InputError(faults)
    recipe = read_recipe(Path(given.paths[0]) if given.paths else None, given.overrides)
    start(recipe, given, into)


def start(recipe: Recipe, given: Words, into: Path) -> None:
    """Measure on ranks that run already, or on new local ones. Raises InputError with what is wrong before."""
    from fedshard.engine.launch import guard, preload, run_ranks

    if not {"RANK", "SLURM_PROCID"} & set(os.environ):
        preload()  # what ranks are forked from loads torch while this process looks for faults
    from fedshard.engine.probe import Asked
    from fedshard.engine.world import find_launch

    launch = find_launch()
    cell, site = (int(text) if (text := given.flags.get(name)) else None for name in COUNTS)
    asked = Asked(into.stem, cell, site, float(given.flags.get("--seconds", "0.2")))
    args = (recipe, asked, into, "--json" in given.flags)
    if launch.how == "none":
        ranks = recipe.shape.ranks
        check(recipe, replace(launch, ranks=ranks, local_ranks=ranks))
        run_ranks(probe_on_rank, args, ranks)
        return
    if not given.paths and not any(word.startswith("--layout") for word in given.overrides):
        args = (by_nodes(recipe, launch), *args[1:])
    guard(probe_on_rank)(*args)


def probe_on_rank(recipe: Recipe, asked: Asked, into: Path, as_json: bool) -> None:
    """One rank's part; rank 0 writes the file and tells what is in it."""
    from fedshard.engine.probe import probe, write_cluster
    from fedshard.engine.world import check_ranks, find_launch, open_world

    launch = find_launch()
    check_ranks(recipe.shape, launch)
    check(recipe, launch)
    with open_world(recipe, launch) as world, progress(shown=world.rank == 0) as say:
        found = probe(recipe, world, launch, asked, say)
    if launch.rank > 0:
        return
    try:
        into.write_text(write_cluster(found.cluster), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{into} cannot be written ({error})") from None
    print_findings(found, as_json)
    print(f"written to {into}", file=sys.stderr)


def check(recipe: Recipe, launch: Launch) -> None:
    """Raises InputError where there is nothing to measure, a device is lacking, or the model has faults."""
    import torch

    from fedshard.engine.config import check_positions, read_config
    from fedshard.engine.world import own_device

    if recipe.shape.ranks == 1:
        says = f"{recipe.shape} is one rank, which has no links"
        raise InputError([Fault("layout", says, "Give it two ranks or more, such as --layout.shards 2.")])
    own_device(recipe.train.device, launch, torch.cuda.device_count())
    fault = check_positions(read_config(recipe.model), recipe.data.sequence_length)
    if fault is not None:
        raise InputError([fault])


def by_nodes(recipe: Recipe, launch: Launch) -> Recipe:
    """The recipe on the ranks that were started: a group for each node, a shard for each of its ranks."""
    nodes = max(1, launch.ranks // launch.local_ranks)
    return recipe.model_copy(update={"layout": LayoutSection(groups=nodes, shards=launch.ranks // nodes)})


def file_faults(into: Path) -> Iterator[Fault]:
    """Why the cluster's file cannot be made at `into`, as far as can be seen without making it."""
    if into.suffix != ".toml":
        yield Fault("--into", f"{into} is no .toml file", "Clusters are read from .toml files.")
    elif os.path.lexists(into):
        yield Fault("--into", f"{into} exists already", "Give another file with --into C.toml.")
    elif not os.access(into.absolute().parent, os.W_OK | os.X_OK):
        yield Fault("--into", f"{into.absolute().parent} cannot be written to", "Give another file.")


def number_faults(given: Words) -> Iterator[Fault]:
    """What is wrong with the numbers of nodes, and with the seconds."""
    for name in COUNTS:
        text = given.flags.get(name, "1")
        if not text.isdecimal() or int(text) < 1:
            yield Fault(name, f"{text!r} is no number of nodes", f"Write {name} 2.")
    text = given.flags.get("--seconds", "1")
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        yield Fault("--seconds", f"{text!r} is no time", "Write --seconds 0.5.")


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[str], None]]:
    """Takes what is measured next: on a terminal one line that is drawn anew, elsewhere a line each."""
    from rich.console import Console

    console = Console(stderr=True)
    if not shown:
        yield lambda line: None
    elif console.is_interactive:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda line: console.out(line, highlight=False)


def print_findings(found: Findings, as_json: bool) -> None:
    """The result on stdout: tables on a terminal, plain lines elsewhere, or JSON."""
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    if as_json:
        told = {"links": [asdict(row) for row in found.links], "device": asdict(found.device)}
        print(json.dumps({"cluster": found.cluster.model_dump(mode="json", exclude_none=True)} | told, indent=2))
        return
    console = Console()
    for head, *rows in (link_lines(found), device_lines(found)):
        if console.is_terminal:
            table = Table(*head)
            for row in rows:
                table.add_row(*row)
            console.print(table)
            continue
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.out(line.rstrip(), highlight=False)


def link_lines(found: Findings) -> Iterator[tuple[str, ...]]:
    """Each collective over each axis, and under them what the tiers come to."""
    yield ("tier", "axis", "collective", "ranks", "rings at once", "latency of a hop", "rate", "off by")
    for row in found.links:
        latency, rate = format_seconds(row.latency_seconds), f"{format_bytes(row.ring_bytes_per_second)}/s"
        counts = (str(row.ranks), str(row.rings_per_port))
        kind, off = row.kind.replace("_", "-"), f"{row.error_fraction:.0%}"
        yield (row.tier, row.axis, kind, *counts, latency, rate, off)
    for name, tier in found.cluster.tiers.items():
        latency, rate = tier.latency_seconds, tier.link_bytes_per_second
        told = (format_seconds(latency.value), f"{format_bytes(rate.value)}/s")
        yield (name, "all", "together", "", "", *told, "" if rate.confidence == "measured" else rate.confidence)


def device_lines(found: Findings) -> Iterator[tuple[str, str]]:
    """What one rank computes."""
    times, device = found.device, found.cluster.device
    yield ("device", device.name)
    yield ("decoder block, forward and backward", f"{times.block_flops_per_second / 1e9:,.1f} GFLOP/s")
    peak, fraction = device.peak_flops_per_second, device.achievable_fraction.value
    yield ("of the peak", f"{fraction:.1%} of {peak.value / 1e9:,.1f} GFLOP/s ({peak.confidence})")
    yield ("copies in memory", f"{format_bytes(times.copied_bytes_per_second)}/s")
    yield ("memory", format_bytes(times.memory_bytes))
    yield ("deviation from call to call", f"{times.deviation_fraction:.1%}")
    yield ("slowest rank", f"{times.slowest_factor:.2f} of the mean time")
