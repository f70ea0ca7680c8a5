"""`fedshard report`: a page and figures about runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedshard.cli.words import read_words
from fedshard.core.errors import Fault, InputError

FLAGS = {"--into": "DIR", "--json": "", "--help": ""}
MOST_RUNS = 100

HELP = """\
usage: fedshard report RUN… [--into DIR] [--json]

Writes report.html and figures/ about one or several runs: loss and perplexity over tokens, steps and seconds, tokens
per second, where a step's time goes, bytes, how far groups move apart. The page needs no network.

  --into DIR   where (default: the run's own folder; of several runs, a folder must be given)
  --json       the table as JSON on stdout
"""


def run(words: Sequence[str]) -> None:
    """The command."""
    given = read_words(["--help" if word == "-h" else word for word in words], FLAGS, most_paths=MOST_RUNS)
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
    from fedshard.lab.report import table, write_report
    from fedshard.lab.runs import read_run

    runs = [read_run(Path(path)) for path in given.paths]
    page = write_report(runs, Path(given.flags.get("--into", given.paths[0])))
    rows = table(runs)
    if "--json" in given.flags:
        print(json.dumps({"report": str(page), "runs": rows}, indent=2, ensure_ascii=False))
        return
    for row in rows:
        print("  ".join(f"{name} {cell}" for name, cell in row.items()))
    print(page)
