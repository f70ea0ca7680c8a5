"""The formulas against what others published: throughput of training, and seconds of collectives.

    python benchmarks/validate.py [--table CSV] [--collectives CSV]

One efficiency is calibrated on the row with the fewest accelerators of each family (source, model, accelerator,
strategy), and the family's other rows are predicted; then one for each kind of accelerator, and all rows are. Nothing
is fitted to single rows. What is left out is named with its reason. Terms and constants: docs/formal/validation.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from common import save
from measured import DATA, LeftOut, Measured, read_measured
from predict import Family, Pair, Prediction, across, efficiencies, families, order
from published import Published, read_published

from fedshard.core.units import MIB

WITHIN_MEDIAN, WITHIN_P90, ACROSS_MEDIAN, COLLECTIVES_MEDIAN = 0.05, 0.12, 0.12, 0.25
"""Targets for absolute errors, as fractions."""

LONG_BYTES = MIB
"""Shorter messages are all latency; they are listed, and not judged."""

# Okabe and Ito's colours, which differ for colour-blind eyes too.
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]


Known = TypeVar("Known", Published, Measured)
Error = TypeVar("Error", Prediction, Measured)


@dataclass(frozen=True)
class Comparison:
    """All that is said about two tables."""

    found: list[Family]
    within: list[Prediction]
    constants: dict[str, float]
    """The one efficiency of each kind of accelerator."""
    across: list[Prediction]
    pairs: list[Pair]
    measured: list[Measured]
    left_out: list[LeftOut]

    @property
    def long(self) -> list[Measured]:
        """Collectives that are judged."""
        return [each for each in self.measured if each.message_bytes >= LONG_BYTES]

    def figures(self) -> dict[str, Any]:
        """What is kept of it."""
        return {
            "targets": {
                "within": {"median": WITHIN_MEDIAN, "p90": WITHIN_P90},
                "across": {"median": ACROSS_MEDIAN},
                "collectives": {"median": COLLECTIVES_MEDIAN},
            },
            "within": summary(self.within) | {"by_source": _by(self.within, lambda each: each.row.source)},
            "across": summary(self.across) | {"by_accelerator": _by(self.across, lambda each: each.row.accelerator)},
            "efficiencies": {name: round(value, 4) for name, value in self.constants.items()},
            "order": {"pairs": len(self.pairs), "reproduced": sum(pair.reproduced for pair in self.pairs)},
            "collectives": summary(self.long) | {"by_system": _by(self.long, lambda each: each.system)},
            "rows": [_told(each) for each in self.within],
            "left_out": [{"row": each.row, "reason": each.reason} for each in self.left_out],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="The formulas against what others published.")
    parser.add_argument("--table", type=Path, default=DATA / "throughput_published.csv")
    parser.add_argument("--collectives", type=Path, default=DATA / "collectives_measured.csv")
    given = parser.parse_args()
    for table in (given.table, given.collectives):
        if not table.is_file():
            parser.error(f"no such table: {table}")
    comparison = compare(given.table, given.collectives)
    print_within(comparison.found)
    print_across(comparison.across, comparison.constants)
    print_order(comparison.pairs)
    print_collectives(comparison.long)
    print("\nleft out")
    for each in comparison.left_out:
        print(f"  {each.row}: {each.reason}")
    path = save("validate", comparison.figures())
    draw(comparison.within, path.with_suffix(".svg"))


def compare(table: Path, collectives: Path) -> Comparison:
    """Everything that can be said about a table of throughputs and one of collectives."""
    rows, unread = _split(read_published(table), Published)
    measured, unknown = _split(read_measured(collectives), Measured)
    found, unexplained = families(rows)
    constants = efficiencies(found)
    everywhere = across(rows, constants)
    return Comparison(
        found=found,
        within=[each for family in found for each in family.within()],
        constants=constants,
        across=everywhere,
        pairs=order(everywhere),
        measured=measured,
        left_out=[*unread, *unexplained, *unknown],
    )


def summary(errors: Sequence[Prediction | Measured]) -> dict[str, Any]:
    """How many there are, and the median, 90th percentile and largest of their absolute errors; nothing of none."""
    if not errors:
        return {"count": 0}
    sizes = np.abs([each.error for each in errors])
    return {
        "count": len(errors),
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.percentile(sizes, 90)), 4),
        "largest": round(float(sizes.max()), 4),
    }


def print_within(found: Iterable[Family]) -> None:
    """Each family that grew: its efficiency, and row by row what was published and what was predicted."""
    print("within families: tokens/s per accelerator, from an efficiency calibrated on the fewest accelerators")
    for family in found:
        if not family.others:
            continue
        first = family.smallest[0].row
        print(f"  {first.model}, {first.accelerator}, {first.strategy} ({first.source[:48]})")
        for each in sorted(family.within(), key=lambda each: each.row.ranks):
            print(f"    {each.row.ranks:5} from {first.ranks:4} {_numbers(each)}")
    _print_summary("within families", [each for family in found for each in family.within()], WITHIN_MEDIAN, WITHIN_P90)


def print_across(everywhere: Sequence[Prediction], constants: dict[str, float]) -> None:
    """Every kind of accelerator with its one efficiency, and the errors of all rows on it."""
    print("\nacross families: one efficiency for each kind of accelerator")
    for accelerator, efficiency in constants.items():
        own = [each for each in everywhere if each.row.accelerator == accelerator]
        print(f"  {accelerator:24} {efficiency:.3f}  {_line(own)}")
    _print_summary("across families", everywhere, ACROSS_MEDIAN)


def print_order(pairs: Iterable[Pair]) -> None:
    """Ways to shard the same model: which is faster, and whether that is predicted."""
    print("\norder of ways to shard")
    for pair in pairs:
        fast, slow = pair.faster.row, pair.slower.row
        print(
            f"  {fast.model} on {fast.ranks} {fast.accelerator}: {fast.strategy} over {slow.strategy}, published "
            f"×{fast.rank_tokens_per_second / slow.rank_tokens_per_second:.2f}, predicted "
            f"×{pair.faster.rank_tokens_per_second / pair.slower.rank_tokens_per_second:.2f}"
            f"{'' if pair.reproduced else '  NOT REPRODUCED'}"
        )


def print_collectives(long: Sequence[Measured]) -> None:
    """Every system and algorithm, for messages long enough to be judged."""
    print(f"\ncollectives of at least {LONG_BYTES} bytes")
    groups = _grouped(long, lambda each: f"{each.system[:28]:28} {each.kind:14} {each.algorithm.split(';')[0]}")
    for name, own in groups.items():
        print(f"  {name:72} {_line(own)}")
    _print_summary("collectives", long, COLLECTIVES_MEDIAN)


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Predicted against published tokens per second, one colour for each source, with a band of ±12 %."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "validate", "font.size": 9})
    figure, axes = plt.subplots(figsize=(5.2, 4.8))
    sources = _grouped(predictions, lambda each: each.row.source)
    for (source, own), color in zip(sources.items(), cycle(COLORS), strict=False):
        published = [each.row.rank_tokens_per_second for each in own]
        foretold = [each.rank_tokens_per_second for each in own]
        axes.loglog(
            published, foretold, "o", ms=4, color=color, alpha=0.7, label=source.removeprefix("github.com/")[:34]
        )
    ends = np.array(axes.get_xlim())
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.fill_between(ends, ends * (1 - WITHIN_P90), ends * (1 + WITHIN_P90), color="black", alpha=0.12, lw=0)
    axes.set(xlabel="published tokens/s per accelerator", ylabel="predicted tokens/s per accelerator", xlim=ends)
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _split(rows: Iterable[Known | LeftOut], kind: type[Known]) -> tuple[list[Known], list[LeftOut]]:
    """Rows that something can be said about, and the others."""
    read = list(rows)
    return [row for row in read if isinstance(row, kind)], [row for row in read if isinstance(row, LeftOut)]


def _grouped(errors: Iterable[Error], name: Callable[[Error], str]) -> dict[str, list[Error]]:
    groups: dict[str, list[Error]] = defaultdict(list)
    for each in errors:
        groups[name(each)].append(each)
    return groups


def _by(errors: Iterable[Error], name: Callable[[Error], str]) -> dict[str, dict[str, Any]]:
    return {key: summary(own) for key, own in _grouped(errors, name).items()}


def _told(each: Prediction) -> dict[str, Any]:
    row = each.row
    return {
        "line": row.line,
        "model": row.model,
        "accelerator": row.accelerator,
        "strategy": row.strategy,
        "ranks": row.ranks,
        "efficiency": round(each.efficiency, 4),
        "published": round(row.rank_tokens_per_second, 1),
        "predicted": round(each.rank_tokens_per_second, 1),
        "error": round(each.error, 4),
    }


def _numbers(each: Prediction) -> str:
    return (
        f"at {each.efficiency:.3f}: published {each.row.rank_tokens_per_second:9.0f} predicted "
        f"{each.rank_tokens_per_second:9.0f} {each.error:+7.1%}"
    )


def _line(errors: Sequence[Prediction | Measured]) -> str:
    told = summary(errors)
    if not told["count"]:
        return "no rows"
    return (
        f"{told['count']:4} rows  median {told['median']:6.1%}  p90 {told['p90']:6.1%}  largest {told['largest']:.0%}"
    )


def _print_summary(name: str, errors: Sequence[Prediction | Measured], median: float, p90: float | None = None) -> None:
    target = f"median ≤ {median:.0%}" + (f", p90 ≤ {p90:.0%}" if p90 is not None else "")
    print(f"{name}: {_line(errors)}  (target: {target})")


if __name__ == "__main__":
    main()
