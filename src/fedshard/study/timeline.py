"""A figure of what the streams of a few ranks do, from a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshard.study.ranks import Interval

STREAMS = ("compute", "shard", "replica", "group")


@dataclass(frozen=True)
class Look:
    """How one kind of event is drawn."""

    label: str
    color: str
    hatch: str = ""


# Okabe and Ito's colours, from light to dark, so that they are told apart by colour-blind eyes and in grey; what is not
# computed is hatched too.
LOOKS = {
    "forward": Look("forward", "#f0e442"),
    "backward": Look("backward", "#e69f00"),
    "gather": Look("gather of parameters", "#56b4e9", "//"),
    "reduce": Look("reduction of gradients", "#0072b2", "\\\\"),
    "round": Look("round", "#000000", "xx"),
}


def draw_timeline(intervals: Iterable[Interval], file: Path, begin: float, end: float) -> None:
    """Write the figure (SVG or PNG, by its name): a row for each stream of each rank, between two seconds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = bars_of(intervals, begin, end)
    kinds = {kind for bars in rows.values() for kind in bars}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 9, "hatch.linewidth": 0.5}):
        figure = Figure(figsize=(11, 1.4 + 0.32 * len(rows)), layout="constrained")
        axes: Any = figure.subplots()
        for height, bars in enumerate(rows.values()):
            for kind, spans in bars.items():
                look, border = LOOKS[kind], 0.0 if LOOKS[kind].hatch else 0.3  # a border would hide short collectives
                style = {"facecolor": look.color, "hatch": look.hatch, "edgecolor": "white", "linewidth": border}
                axes.broken_barh(spans, (height - 0.4, 0.8), **style)
        axes.set_yticks(range(len(rows)), [f"rank {rank}: {stream}" for rank, stream in rows])
        axes.set(xlim=(0, (end - begin) * 1000), ylim=(len(rows) - 0.4, -0.6), xlabel="milliseconds")
        shown = [look for kind, look in LOOKS.items() if kind in kinds]
        patches = [Patch(facecolor=each.color, hatch=each.hatch, edgecolor="white", label=each.label) for each in shown]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})


def bars_of(
    intervals: Iterable[Interval], begin: float, end: float
) -> dict[tuple[int, str], dict[str, list[tuple[float, float]]]]:
    """By rank and stream, and then by kind: (milliseconds after `begin`, milliseconds long) within the figure."""
    rows: dict[tuple[int, str], dict[str, list[tuple[float, float]]]] = {}
    for each in intervals:
        since, until = max(each.begin, begin), min(each.end, end)
        if since < until:
            kind = each.name.split()[0]
            bars = rows.setdefault((each.rank, each.stream), {})
            bars.setdefault(kind, []).append(((since - begin) * 1000, (until - since) * 1000))
    return dict(sorted(rows.items(), key=lambda row: (row[0][0], STREAMS.index(row[0][1]))))
