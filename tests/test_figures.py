"""Figures in README stand in a file that a benchmark wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| (.+?) \| ([\d.]+) \| .+? \| \[(\w+)\.json\]", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
)


def numbers(tree: object) -> set[str]:
    """Every number of a result file, to two decimals."""
    if isinstance(tree, dict | list):
        return set().union(*(numbers(each) for each in (tree.values() if isinstance(tree, dict) else tree)), set())
    return {f"{tree:.2f}"} if isinstance(tree, int | float) else set()


def test_readme_shows_figures():
    assert len(ROWS) >= 7


@pytest.mark.parametrize(("what", "figure", "name"), ROWS)
def test_a_figure_stands_in_its_file(what, figure, name):
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    assert {"commit", "command", "date", "machine"} <= set(result)
    assert figure in numbers(result), what
