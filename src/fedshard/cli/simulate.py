"""`fedshard simulate`: a recipe's steps and rounds on a cluster, as discrete events."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError
from fedshard.core.units import format_count, format_seconds

if TYPE_CHECKING:
    from fedshard.study.setup import Setup
    from fedshard.study.simulate import Simulation

FLAGS = {
    "--cluster": "NAME|C.toml",
    "--rounds": "N",
    "--seed": "N",
    "--quiet": "",
    "--timeline": "FILE.svg",
    "--json": "",
    "--help": "",
}

HELP = """\
usage: fedshard simulate [RECIPE.toml] --cluster NAME|C.toml [--section.key value …] [--rounds N] [--seed N] [--quiet]
                         [--timeline FILE.svg] [--json]

Runs the recipe's steps and rounds as discrete events on every rank of the cluster, with the noise that its file knows
of: jitter of collectives, uneven ranks, nodes that land in cells as jobs do.

  --cluster C       a cluster's name, or its file (`fedshard probe` writes one)
  --rounds N        rounds that are simulated (default: 3)
  --seed N          seed of the noise (default: 0)
  --quiet           no noise at all: then it is the closed form
  --timeline FILE   a figure of the streams of a few ranks, in a step and the round after it (.svg, .png)
  --json            the result as JSON on stdout
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    faults = [*_count_faults(given.flags)]
    if "--cluster" not in given.flags:
        from fedshard.core.cluster_file import cluster_names

        faults.append(Fault("--cluster", "missing", f"Give a file, or one of {', '.join(cluster_names())}."))
    if faults:
        raise InputError(faults)
    from fedshard.core.cluster_file import read_cluster
    from fedshard.core.recipe_file import read_recipe
    from fedshard.study.setup import Setup
    from fedshard.study.simulate import NOTHING, Chance, simulate

    recipe = read_recipe(Path(given.paths[0]) if given.paths else None, given.overrides)
    setup = Setup.from_recipe(recipe, read_cluster(given.flags["--cluster"]))
    chance = NOTHING if "--quiet" in given.flags else Chance(int(given.flags.get("--seed", "0")))
    figure = given.flags.get("--timeline")
    watched = _watched(setup) if figure else ()
    told = simulate(setup, int(given.flags.get("--rounds", "3")), chance, watch=watched)
    if figure:
        from fedshard.study.timeline import draw_timeline

        before, step = sum(told.step_seconds[: setup.every - 1]), told.step_seconds[setup.every - 1]
        draw_timeline(told, Path(figure), before, before + step + sum(told.round_seconds[:1]))
        print(f"{figure}: streams of ranks {', '.join(map(str, watched))}", file=sys.stderr)
    result = described(setup, told)
    if "--json" in given.flags:
        print(json.dumps(result, indent=2))
        return
    for name, value in lines(setup, result):
        print(f"{name:28} {value}")


def described(setup: Setup, told: Simulation) -> dict[str, Any]:
    """The result as `--json` has it. Seconds, tokens, fractions."""
    steps = sorted(told.step_seconds)
    return {
        "layout": str(setup.layout),
        "strategy": setup.layout.strategy,
        "steps": len(steps),
        "seconds": told.seconds,
        "step_seconds": {
            "median": statistics.median(steps),
            "p99": steps[min(len(steps) - 1, int(0.99 * len(steps)))],
            "longest": steps[-1],
        },
        "round_seconds": statistics.fmean(told.round_seconds) if told.round_seconds else 0.0,
        "tokens_per_second": told.tokens_per_second,
        "shares": told.shares,
    }


def lines(setup: Setup, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The result for a person, as (name, value)."""
    step = result["step_seconds"]
    yield "strategy", f"{result['strategy']} {result['layout']}, {setup.layout.ranks} ranks on {setup.cluster.name}"
    yield "step", f"{format_seconds(step['median'])} median, {format_seconds(step['p99'])} of 99 in 100"
    if result["round_seconds"]:
        yield "round", f"{format_seconds(result['round_seconds'])}, every {setup.every} steps"
    yield "tokens/s", format_count(result["tokens_per_second"])
    for name, share in result["shares"].items():
        if share > 0:
            yield f"  {name}", f"{share:.1%}"


def _watched(setup: Setup) -> tuple[int, ...]:
    """The first rank of each of the first two groups, and the last rank of all."""
    layout = setup.layout
    return tuple(dict.fromkeys([0, (layout.groups > 1) * layout.group_ranks, layout.ranks - 1]))


def _count_faults(flags: dict[str, str]) -> Iterator[Fault]:
    for name, least in (("--rounds", 1), ("--seed", 0)):
        text = flags.get(name, str(least))
        if not text.isdecimal() or int(text) < least:
            yield Fault(name, f"{text!r} is no number from {least} on", f"Write {name} N.")
