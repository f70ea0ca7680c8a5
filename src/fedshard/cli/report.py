"""`fedshard report`: a page and figures about runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError

if TYPE_CHECKING:
    from fedshard.lab.outcomes import Table

FLAGS = {"--into": "DIR", "--json": "", "--help": ""}

HELP = """\
usage: fedshard report RUN… [--into DIR] [--json]

Writes report.html and figures/ about one or several runs: loss and perplexity over tokens, steps and seconds, tokens
per second, where a step's time goes, bytes, how far groups move apart. A run that is not finished is reported as far as
it is. The page needs no network.

  --into DIR   where; of a single run, its own folder if not given
  --json       the outcomes as JSON on stdout
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS, most_paths=len(words))
    if "--help" in given.flags:
        print(HELP, end="")
        return
    faults = [Fault(word, "no such option", "See fedshard report --help.") for word in given.overrides[::2]]
    if not given.paths:
        faults.append(Fault("RUN", "missing", "Write fedshard report RUN."))
    if len(given.paths) > 1 and "--into" not in given.flags:
        faults.append(Fault("--into", f"missing, and there are {len(given.paths)} runs", "Write --into DIR."))
    if faults:
        raise InputError(faults)
    from fedshard.lab.outcomes import outcomes, tables
    from fedshard.lab.report import write_report
    from fedshard.lab.runs import read_runs

    runs = read_runs([Path(path) for path in given.paths])
    page = write_report(runs, Path(given.flags.get("--into", given.paths[0])))
    if "--json" in given.flags:
        result = {"report": str(page), "runs": [asdict(outcome) for outcome in outcomes(runs)]}
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return
    for table in tables(runs):
        show(table)
    print(page)


def show(table: Table) -> None:
    """A table on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console()
    if console.is_terminal:
        drawn = Drawn(title=table.heading)
        for index, name in enumerate(table.columns):
            drawn.add_column(name, justify="right" if index else "left")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    print(table.heading)
    for name, *cells in (table.columns, *table.rows):
        print(
            "  ".join(
                [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
            )
        )
