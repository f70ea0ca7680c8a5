"""A figure of what the streams of a few ranks do, from a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedshard.study.simulate import Simulation

STREAMS = ("compute", "shard", "replica", "group")
SHADES = {
    "forward": "0.85",
    "backward": "0.65",
    "gather": "0.45",
    "reduce": "0.25",
    "all-reduce": "0.15",
    "round": "0.0",
}
HATCHES = {"gather": "//", "reduce": "\\\\", "all-reduce": "xx"}


def draw_timeline(simulation: Simulation, file: Path, begin: float, until: float) -> None:
    """Write the figure (SVG or PNG by its name): a row for each stream of each watched rank, between two seconds.

    Readable in grey: shades and hatching tell kinds apart.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = _rows(simulation)
    figure = Figure(figsize=(11, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    for height, bars in enumerate(rows.values()):
        for kind, start, end in bars:
            if start < until and end > begin:
                box = (max(start, begin), min(end, until) - max(start, begin))
                style = {"facecolor": SHADES[kind], "hatch": HATCHES.get(kind), "edgecolor": "white", "linewidth": 0.2}
                axes.broken_barh([box], (height - 0.4, 0.8), **style)
    axes.set_yticks(range(len(rows)), [f"rank {rank}: {stream}" for rank, stream in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(begin, until)
    axes.set_xlabel("seconds")
    kinds = {kind for bars in rows.values() for kind, *_ in bars}
    patches = [
        Patch(facecolor=shade, hatch=HATCHES.get(kind), edgecolor="white", label=kind)
        for kind, shade in SHADES.items()
        if kind in kinds
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    figure.savefig(file)


def _rows(simulation: Simulation) -> dict[tuple[int, str], list[tuple[str, float, float]]]:
    """By rank and stream: kind, begin and end of what it did."""
    rows: dict[tuple[int, str], list[tuple[str, float, float]]] = {}
    for rank, stream, name, begin, end in simulation.intervals:
        rows.setdefault((rank, stream), []).append((name.split()[0], begin, end))
    return dict(sorted(rows.items(), key=lambda row: (row[0][0], STREAMS.index(row[0][1]))))
