"""Draws round.svg: one round of layout 2×2×2, in its four parts. `python docs/figures/round.py [FOLDER]`"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

# Okabe and Ito's colours, which differ for colour-blind eyes too.
BEFORE = ["#56b4e9", "#e69f00"]  # each group's own values
MEAN, AFTER = "#cc79a7", "#009e73"  # of the groups; the new global values
SLOW, FAST = "#d55e00", "#0072b2"

WIDTH, HEIGHT = 1.0, 0.5  # of one rank's shard; its left half is the first replica's to own, its right the second's
COLUMNS, ROWS = [0.0, 1.35], [0.0, -1.0]  # shards, replicas
GROUPS = [0.0, -2.7]

TITLES = [
    "1. agree\nflags and weights",
    "2. average\nowned slices, over groups",
    "3. outer step\non owned slices",
    "4. gather\nslices, over replicas",
]


def main(folder: Path) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "round", "font.family": "sans-serif", "font.size": 9})
    figure, panels = plt.subplots(1, 4, figsize=(11, 4.4))
    for part, (panel, title) in enumerate(zip(panels, TITLES, strict=True), 1):
        panel.set_title(title, fontsize=10)
        draw_ranks(panel, part)
        draw_messages(panel, part)
        panel.set(xlim=(-0.75, 2.6), ylim=(-3.9, 0.9), aspect="equal")
        panel.axis("off")
    values = [Rectangle((0, 0), 1, 1, color=color) for color in (*BEFORE, MEAN, AFTER)]
    owned = Rectangle((0, 0), 1, 1, fill=False, lw=1.6)
    links = [Line2D([], [], color=color, lw=2.2) for color in (SLOW, FAST)]
    names = [
        "group 0's",
        "group 1's",
        "mean of the groups",
        "new global",
        "owned",
        "between groups",
        "between replicas",
    ]
    figure.legend([*values, owned, *links], names, loc="lower center", ncols=7, frameon=False)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.88, bottom=0.08, wspace=0.02)
    figure.savefig(folder / "round.svg", metadata={"Date": None})


def draw_ranks(panel: Axes, part: int) -> None:
    """Every rank's shard, its owned half framed; what is new at the end of this part is green."""
    for group, bottom in enumerate(GROUPS):
        panel.text(-0.2, bottom + (ROWS[1] + HEIGHT) / 2, f"group {group}", rotation=90, ha="right", va="center")
        for replica, row in enumerate(ROWS):
            for column in COLUMNS:
                for half in range(2):
                    owned = half == replica
                    left = column + half * WIDTH / 2
                    color = BEFORE[group]
                    if part == 4 or (part == 3 and owned):
                        color = AFTER
                    elif part == 2 and owned:
                        color = MEAN
                    panel.add_patch(Rectangle((left, bottom + row), WIDTH / 2, HEIGHT, color=color, lw=0))
                    if owned:
                        panel.add_patch(Rectangle((left, bottom + row), WIDTH / 2, HEIGHT, fill=False, lw=1.6))
        for replica, row in enumerate(ROWS):
            label = f"replica {replica}"
            panel.text(
                COLUMNS[1] + WIDTH + 0.06, bottom + row + HEIGHT / 2, label, va="center", fontsize=7, rotation=90
            )
    for shard, column in enumerate(COLUMNS):
        panel.text(column + WIDTH / 2, GROUPS[0] + HEIGHT + 0.08, f"shard {shard}", ha="center", fontsize=7)


def draw_messages(panel: Axes, part: int) -> None:
    """What travels in this part."""
    upper, lower = GROUPS
    for column in COLUMNS:
        for replica, row in enumerate(ROWS):
            x = column + (replica + 0.5) * WIDTH / 2
            ends = (x, upper + row), (x, lower + row + HEIGHT)
            if part == 1:
                arrow(panel, *ends, SLOW, "dotted", 0.8)
            if part == 2:
                arrow(panel, *ends, SLOW, "solid", 2.2)
        if part == 4:
            for bottom in GROUPS:
                x, top, down = column + WIDTH / 2, bottom + ROWS[0], bottom + ROWS[1] + HEIGHT
                arrow(panel, (x, top), (x, down), FAST, "solid", 2.2)


def arrow(
    panel: Axes, begin: tuple[float, float], end: tuple[float, float], color: str, style: str, width: float
) -> None:
    shape = FancyArrowPatch(begin, end, arrowstyle="<|-|>", mutation_scale=9, color=color, linestyle=style, lw=width)
    panel.add_patch(shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
