"""The reference experiment: what is printed, kept and quoted is the same, and follows from the formulas.

And the page on validation, which quotes the figures of another script.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paper():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("paper")


@pytest.fixture(scope="module")
def kept() -> dict[str, object]:
    return json.loads((ROOT / "benchmarks/results/paper.json").read_text(encoding="utf-8"))


def numbers(tree: object) -> Iterator[float]:
    """Every number of a result file."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from numbers(each)
    elif isinstance(tree, int | float):
        yield tree


def quoted(page: str) -> list[str]:
    """Numbers with decimals on a page, but for those in names."""
    return re.findall(r"(?<![\w.:-])−?\d+\.\d+(?!\w)", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_kept_figures_are_what_the_code_gives(paper, kept):
    figures = paper.figures()
    for name, told in figures["step_seconds"].items():
        assert kept["step_seconds"][name] == pytest.approx(told, abs=0.05), name
    for name, told in figures["slicing"].items():
        assert kept["slicing"][name] == pytest.approx(told, abs=0.05), name
    assert kept["efficiency"] == pytest.approx(figures["efficiency"], abs=0.01)


def test_the_page_quotes_what_is_kept(kept):
    figures = quoted("docs/formal/paper.md")
    assert len(figures) > 120
    known = list(numbers(kept))
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert figure.replace("−", "-") in {f"{number:.{digits}f}" for number in known}, figure


def test_the_page_on_validation_quotes_what_is_kept():
    kept = json.loads((ROOT / "benchmarks/results/validate.json").read_text(encoding="utf-8"))
    percents = re.findall(r"(\d+\.\d+) %", (ROOT / "docs/formal/validation.md").read_text(encoding="utf-8"))
    assert len(percents) == 11
    known = {f"{100 * number:.2f}" for number in numbers(kept)}
    assert [percent for percent in percents if percent not in known] == []


def test_every_speedup_is_one_of_two_step_times(kept):
    for name, speedups in kept["speedups"].items():
        seconds = kept["step_seconds"][name]
        for pair, speedup in speedups.items():
            fast, slow = pair.split(" over ")
            assert speedup == pytest.approx(seconds[slow] / seconds[fast], abs=0.02), (name, pair)


def test_the_published_speedup_appears_where_it_is_said_to(kept):
    """Under no assumption about links and overlap, and in both ways to force it."""
    assert max(speedups["FL+FSDP over FSDP"] for speedups in kept["speedups"].values()) < 2.5
    for way in kept["needed"].values():
        seconds = way["step_seconds"]
        assert seconds["FSDP"] / seconds["FL+FSDP"] == pytest.approx(8.04, abs=0.05)
    assert kept["largest_by_traffic"] > 8.04


def test_untuned_is_the_sum_of_all_pieces(paper):
    """And tuned is between computing alone and that, on every link."""
    for assumption in paper.ASSUMPTIONS[:2]:
        assert str(assumption) == ("nominal, tuned" if assumption.tuned else "nominal, untuned")
    tuned, untuned = (paper.methods(each, 0.643) for each in paper.ASSUMPTIONS[:2])
    assert all(tuned[name] < untuned[name] for name in tuned)


def test_ranks_that_are_checked_by_hand(paper):
    """33 units; FSDP: 33 gathers, 32 again, 33 reductions over 512 ranks. HSDP: over 4, and 33 times over 128. A round
    is one collective each 8th step."""
    checked = {name: paper.ranks_checked(setup) for name, setup in paper.setups("nominal").items()}
    inside = 98 * 4
    assert checked == {
        "FSDP": 98 * 512,
        "HSDP": inside + 33 * 128,
        "FL+FSDP": inside + 128 / 8,
        "FL+HSDP": inside + 33 * 8 + 16 / 8,
    }


def test_slower_links_are_slower_outside_the_node_only(paper):
    cluster = paper.read_cluster("leonardo-nominal")
    slow = paper.scaled(cluster, 0.1)
    assert slow.tiers["node"] == cluster.tiers["node"]
    assert slow.tiers["global"].link_bytes_per_second.value == pytest.approx(4.5e9)
    assert slow.tiers["cell"].rank_bytes_per_second.value == pytest.approx(1.46e9)
