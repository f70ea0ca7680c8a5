"""`fedshard simulate`: a recipe's steps and rounds on a cluster, as discrete events."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshard.cli.train import folder_faults
from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError
from fedshard.core.units import format_count, format_seconds

if TYPE_CHECKING:
    from fedshard.core.recipe import Recipe
    from fedshard.study.setup import Setup
    from fedshard.study.simulate import Simulation

FLAGS = {
    "--cluster": "NAME|C.toml",
    "--rounds": "N",
    "--seed": "N",
    "--quiet": "",
    "--slow": "RANK:FACTOR,…",
    "--fail": "STEP",
    "--into": "DIR",
    "--json": "",
    "--help": "",
}

HELP = """\
usage: fedshard simulate [RECIPE.toml] --cluster NAME|C.toml [--section.key value …] [--rounds N] [--seed N] [--quiet]
                         [--slow RANK:FACTOR,…] [--fail STEP] [--into DIR] [--json]

Runs the recipe's steps and rounds as discrete events on every rank of the cluster, with all that its file knows of:
jitter of collectives, uneven ranks, nodes that land in cells as jobs do, links that axes share.

  --cluster C     a cluster's name, or its file (`fedshard probe` writes one)
  --rounds N      rounds that are simulated (default: 3); of a layout without rounds, as many steps
  --seed N        seed of all chance (default: 0)
  --quiet         none of it: the closed form
  --slow R:F,…    rank R computes F times as long as others
  --fail STEP     after this step a group fails, and the job begins again from its last checkpoint
  --into DIR      write simulation.json there, and the streams of a few ranks in the first round's last step as
                  timeline.svg and timeline.png; DIR must not exist
  --json          the result as JSON on stdout
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS)
    if "--help" in given.flags:
        print(HELP, end="")
        return
    if faults := list(_faults(given.flags)):
        raise InputError(faults)
    from fedshard.core.cluster_file import read_cluster
    from fedshard.core.recipe_file import read_recipe
    from fedshard.study.setup import Setup

    recipe = read_recipe(Path(given.paths[0]) if given.paths else None, given.overrides)
    setup = Setup.from_recipe(recipe, read_cluster(given.flags["--cluster"]))
    told, watched = _simulate(recipe, setup, given.flags)
    result = described(setup, told)
    if "--into" in given.flags:
        _write(Path(given.flags["--into"]), setup, told, result)
        print(f"{given.flags['--into']}: result, and streams of ranks {', '.join(map(str, watched))}", file=sys.stderr)
    if "--json" in given.flags:
        print(json.dumps(result, indent=2))
    else:
        _show(list(lines(setup, result)))


def described(setup: Setup, told: Simulation) -> dict[str, Any]:
    """The result as `--json` has it: seconds, tokens, fractions."""
    from fedshard.study.cost import step_seconds
    from fedshard.study.work import step_work

    quiet_step = step_seconds(step_work(setup), setup).total_seconds
    steps, rounds = sorted(told.step_seconds), told.round_seconds
    return {
        "cluster": setup.cluster.name,
        "strategy": setup.layout.strategy,
        "layout": str(setup.layout),
        "steps": len(steps),
        "rounds": len(rounds),
        "seconds": told.seconds,
        "step_seconds": {
            "median": statistics.median(steps),
            "p99": steps[int(0.99 * (len(steps) - 1))],
            "longest": steps[-1],
        },
        "round_seconds": {"mean": statistics.fmean(rounds), "longest": max(rounds)} if rounds else None,
        "tokens_per_second": told.tokens_per_second,
        "closed_form_tokens_per_second": setup.tokens_per_step / quiet_step,
        "shares": told.shares,
    }


def lines(setup: Setup, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The result for a person, as (name, value)."""
    step, each_round = result["step_seconds"], result["round_seconds"]
    yield "strategy", f"{result['strategy']} {result['layout']}, {setup.layout.ranks} ranks on {result['cluster']}"
    yield "simulated", f"{result['steps']} steps in {format_seconds(result['seconds'])}"
    yield "step", f"median {format_seconds(step['median'])}, longest {format_seconds(step['longest'])}"
    if each_round is not None:
        longest = format_seconds(each_round["longest"])
        yield "round", f"mean {format_seconds(each_round['mean'])}, longest {longest}; every {setup.every} steps"
    yield "tokens/s", format_count(result["tokens_per_second"])
    yield "tokens/s, closed form", format_count(result["closed_form_tokens_per_second"])
    for phase, share in result["shares"].items():
        if share > 0:
            yield f"time in {phase}", f"{share:.1%}"


def _simulate(recipe: Recipe, setup: Setup, flags: dict[str, str]) -> tuple[Simulation, tuple[int, ...]]:
    """What happens, and the ranks that were watched. Raises InputError where a rank or a step is not simulated."""
    from fedshard.study.simulate import QUIET, Effects, Failure, simulate

    rounds, layout = int(flags.get("--rounds", "3")), setup.layout
    slow = dict(_slow(flags["--slow"])) if "--slow" in flags else {}
    failed = int(flags.get("--fail", "0"))
    faults = [
        Fault("--slow", f"rank {rank}, and there are {layout.ranks}", f"Ranks go from 0 to {layout.ranks - 1}.")
        for rank in slow
        if rank >= layout.ranks
    ]
    if failed > rounds * setup.every:
        says = f"step {failed}, and {rounds * setup.every} are simulated"
        faults.append(Fault("--fail", says, "Give an earlier one, or more --rounds."))
    if faults:
        raise InputError(faults)
    # The first ranks of the first two groups, and the last of all.
    watched = tuple(dict.fromkeys([0, (layout.groups > 1) * layout.group_ranks, layout.ranks - 1]))
    told = simulate(
        setup,
        rounds,
        QUIET if "--quiet" in flags else Effects(int(flags.get("--seed", "0"))),
        slow=slow,
        failure=Failure(failed, recipe.checkpoint.every or failed + 1) if failed else None,
        watch=watched if "--into" in flags else (),
    )
    return told, watched


def _write(folder: Path, setup: Setup, told: Simulation, result: dict[str, Any]) -> None:
    """The result and the figure, of the step before the first round, and of that round."""
    from fedshard.study.timeline import draw_timeline

    folder.mkdir(parents=True)
    (folder / "simulation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    begins = [*told.begin_seconds, told.seconds]
    for kind in ("svg", "png"):
        draw_timeline(told.intervals, folder / f"timeline.{kind}", begins[setup.every - 1], begins[setup.every])


def _show(shown: Sequence[tuple[str, str]]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        for name, value in shown:
            print(f"{name:24} {value}")
        return
    table = Table(show_header=False)
    for name, value in shown:
        table.add_row(name, value)
    console.print(table)


def _slow(text: str) -> Iterator[tuple[int, float]]:
    """Ranks and factors. Raises ValueError where they are none."""
    for each in text.split(","):
        rank, _, factor = each.partition(":")
        if int(rank) < 0 or not 0 < float(factor) < float("inf"):
            raise ValueError(each)
        yield int(rank), float(factor)


def _faults(flags: dict[str, str]) -> Iterator[Fault]:
    """What is wrong with the flags by themselves."""
    for name, least in (("--rounds", 1), ("--seed", 0), ("--fail", 1)):
        text = flags.get(name, str(least))
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            yield Fault(name, f"{text!r} is no number from {least} on", f"Write {name} N.")
    try:
        list(_slow(flags.get("--slow", "0:1")))
    except ValueError:
        yield Fault("--slow", f"{flags['--slow']!r} is no list of RANK:FACTOR", "Write for example --slow 0:1.5,7:2.")
    if "--into" in flags:
        yield from folder_faults(Path(flags["--into"]), may_exist=False)
    if "--cluster" not in flags:
        from fedshard.core.cluster_file import cluster_names

        yield Fault("--cluster", "missing", f"Give a file, or one of {', '.join(cluster_names())}.")
