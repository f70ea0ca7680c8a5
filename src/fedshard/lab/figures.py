"""Figures of runs: curves and bars that are told apart without colour too, with units on their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedshard.core.units import format_bytes, format_count
from fedshard.lab.runs import Axis, Curve, Run, perplexity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "hatch.color": "white",
}
"""Over matplotlib's defaults: words stay words in SVG, and the same runs draw the same file."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's, which differ for colour-blind eyes too."""
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")
MOST_MARKS = 12
"""Of a curve."""

AXES: dict[Axis, str] = {"tokens": "tokens", "steps": "optimizer steps", "seconds": "training time (s)"}
MOST_SMOOTHED = 15
"""Steps that a curve of single steps is averaged over, if it is twenty times as long."""
MOST_POINTS = 500
"""Of a curve, however long the run."""


@dataclass(frozen=True)
class Bar:
    """One kind of bar or of part of a bar: its values by run, and how it looks."""

    label: str
    values: Sequence[float]
    grey: str
    hatch: str = ""


def loss(runs: Sequence[Run]) -> Figure:
    """Training loss over tokens, steps and seconds."""

    def points(run: Run, axis: Axis) -> Curve:
        return _thin(_smooth(run.curve("loss", axis)))

    return _over_three_axes(runs, "training loss (nats per token), smoothed", points)


def eval_perplexity(runs: Sequence[Run]) -> Figure | None:
    """Evaluation perplexity over tokens, steps and seconds; None where nothing was evaluated yet."""
    evaluated = [run for run in runs if run.eval_curve("steps")[0]]
    if not evaluated:
        return None

    def points(run: Run, axis: Axis) -> Curve:
        places, losses = run.eval_curve(axis)
        return places, [perplexity(each) for each in losses]

    return _over_three_axes(evaluated, "evaluation perplexity", points, logarithmic=True)


def speed(runs: Sequence[Run]) -> Figure:
    """Tokens per second over steps, rounds included."""
    figure, (panel,) = _panels(1, len(runs))
    for index, run in enumerate(runs):
        _draw(panel, run, _thin(run.speed_curve()), index)
    panel.set(xlabel=AXES["steps"], ylabel="tokens per second, rounds included", ylim=(0, None))
    panel.yaxis.set_major_formatter(lambda value, _: format_count(value))
    _legend(figure, panel)
    return figure


def step_time(runs: Sequence[Run]) -> Figure:
    """Where the time of a step goes: computing, communication inside the group where it was sampled, rounds."""
    looks = {
        "computing": ("computing, and what hides behind it", "0.8", ""),
        "inner": ("communication inside groups", "0.55", "//"),
        "steps": ("computing and communication, not sampled", "0.68", ".."),
        "rounds": ("waiting for rounds", "0.25", "xx"),
    }
    parts = [run.step_parts() for run in runs]
    bars = [Bar(label, [each.get(part, 0.0) for each in parts], *look) for part, (label, *look) in looks.items()]
    figure, (panel,) = _panels(1, 0, rows=len(runs))
    _stack(panel, [bar for bar in bars if any(bar.values)])
    _name_rows([panel], runs)
    panel.set_xlabel("seconds of a mean step")
    panel.margins(x=0.05)
    _legend(figure, panel)
    return figure


def tier_bytes(runs: Sequence[Run]) -> Figure | None:
    """Bytes of a step by tier, measured beside the formula; None where they were not counted."""
    counted = [run for run in runs if run.tier_bytes]
    kinds = {"measured": ("0.7", ""), "formula": ("0.3", "//")}
    tiers = list(dict.fromkeys(tier for run in counted for kind in kinds for tier in run.tier_bytes.get(kind, {})))
    if not tiers:
        return None
    figure, panels = _panels(len(tiers), 0, rows=2 * len(counted))
    for panel, tier in zip(panels, tiers, strict=True):
        values = {kind: [run.tier_bytes.get(kind, {}).get(tier, 0.0) for run in counted] for kind in kinds}
        _side_by_side(panel, [Bar(kind, values[kind], *look) for kind, look in kinds.items()], format_bytes)
        panel.set(title=f"tier {tier}", xlabel="bytes of a step, all ranks")
    _name_rows(panels, counted)
    _legend(figure, panels[0])
    return figure


def round_bytes(runs: Sequence[Run]) -> Figure | None:
    """Bytes that a rank sends to other groups, of runs whose tiers were not counted; None where all were."""
    shown = [run for run in runs if run.rounds and not run.tier_bytes]
    if not shown:
        return None
    figure, panels = _panels(2, 0, rows=len(shown))
    for_round = [run.round_sent_bytes or 0.0 for run in shown]
    for_step = [sum(row["sent_bytes"] for row in run.rounds) / len(run.steps) for run in shown]
    for panel, values, what in zip(panels, (for_round, for_step), ("round", "step"), strict=True):
        _side_by_side(panel, [Bar("", values, "0.6")], format_bytes)
        panel.set_xlabel(f"bytes that a rank sends to other groups, for each {what}")
    _name_rows(panels, shown)
    return figure


def drift(runs: Sequence[Run]) -> Figure | None:
    """How far groups move apart from round to round, and how much they agree; None where there were no rounds."""
    panels_of = {
        "group_delta_norms": "‖anchor − local‖ of groups",
        "spread": "‖local − mean‖ of groups (no anchor)",
        "agreement": "agreement: 1 independent, √G alike",
    }
    known = {key: [run for run in runs if any(row[key] is not None for row in run.rounds)] for key in panels_of}
    shown = {key: what for key, what in panels_of.items() if known[key]}
    if not shown:
        return None
    figure, panels = _panels(len(shown), len(runs))
    for panel, (key, what) in zip(panels, shown.items(), strict=True):
        for index, run in enumerate(runs):
            if run in known[key]:
                _plot_rounds(panel, run, key, index)
        panel.set(xlabel="rounds", ylabel=what, ylim=(0, None))
        panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, *panels)
    return figure


def predictions(runs: Sequence[Run]) -> Figure | None:
    """Tokens per second predicted beside measured; None where nothing was predicted."""
    told = [run for run in runs if run.predicted]
    if not told:
        return None
    figure, (panel,) = _panels(1, 0, rows=2 * len(told))
    predicted = Bar("predicted", [run.predicted["tokens_per_second"] for run in told], "0.3", "//")
    measured = Bar("measured, steady", [run.steady_tokens_per_second for run in told], "0.7")
    _side_by_side(panel, [predicted, measured], format_count)
    _name_rows([panel], told)
    panel.set_xlabel("tokens per second")
    _legend(figure, panel)
    return figure


def _over_three_axes(
    runs: Sequence[Run], what: str, points: Callable[[Run, Axis], Curve], *, logarithmic: bool = False
) -> Figure:
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, panels = _panels(3, len(runs))
    for panel, (axis, name) in zip(panels, AXES.items(), strict=True):
        for index, run in enumerate(runs):
            _draw(panel, run, points(run, axis), index)
        panel.set_xlabel(name)
        if axis == "tokens":
            panel.xaxis.set_major_formatter(lambda value, _: format_count(value))
        if logarithmic:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel(what)
    _legend(figure, panels[0])
    return figure


def _plot_rounds(panel: Any, run: Run, key: str, index: int) -> None:
    """A value of each round; where it is a list over groups, its mean, within a band from the least to the largest."""
    rows = [(row["round"], row[key]) for row in run.rounds if row[key] is not None]
    known = [(number, _finite(value if isinstance(value, list) else [value])) for number, value in rows]
    numbers = [number for number, values in known if values]
    lists = [values for _, values in known if values]
    _draw(panel, run, (numbers, [sum(values) / len(values) for values in lists]), index)
    least, largest = [min(values) for values in lists], [max(values) for values in lists]
    panel.fill_between(numbers, least, largest, color=COLOURS[index % len(COLOURS)], alpha=0.2, linewidth=0)


def _draw(panel: Any, run: Run, curve: Curve, index: int) -> None:
    """A run's curve: line and marks tell it apart where colours do not, and marks of several do not hide each other."""
    every = -(-len(curve[0]) // MOST_MARKS) or 1
    panel.plot(
        *curve,
        label=run.name,
        color=COLOURS[index % len(COLOURS)],
        linestyle=LINES[index % len(LINES)],
        marker=MARKS[index % len(MARKS)],
        markersize=4,
        markevery=(index % every, every),
    )


def _panels(count: int, curves: int, rows: int = 0) -> tuple[Figure, list[Any]]:
    """Panels side by side, as high as their rows of bars and a legend of so many curves need; no window shows them."""
    from matplotlib.figure import Figure

    height = (3.3 if curves else 1.3 + 0.34 * rows) + 0.2 * -(-curves // 4)
    figure = Figure(figsize=(11, height) if count > 1 else (7.5, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0].tolist()
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _stack(panel: Any, bars: Sequence[Bar]) -> None:
    """Bars of one row for each run, one behind the other."""
    ends = [0.0] * len(bars[0].values)
    for bar in bars:
        look = {"color": bar.grey, "hatch": bar.hatch, "edgecolor": "white"}
        panel.barh(range(len(ends)), bar.values, 0.7, left=ends, label=bar.label, **look)
        ends = [end + value for end, value in zip(ends, bar.values, strict=True)]


def _side_by_side(panel: Any, bars: Sequence[Bar], form: Callable[[float], str]) -> None:
    """Bars under each other in the row of each run, with their values behind them."""
    thick = 0.8 / len(bars)
    for index, bar in enumerate(bars):
        places = [row + (index - (len(bars) - 1) / 2) * thick for row in range(len(bar.values))]
        drawn = panel.barh(
            places, bar.values, thick, color=bar.grey, hatch=bar.hatch, edgecolor="white", label=bar.label
        )
        panel.bar_label(drawn, [form(value) for value in bar.values], padding=3, fontsize=8)
    panel.margins(x=0.25)  # room for the values
    panel.xaxis.set_major_formatter(lambda value, _: form(value))
    panel.xaxis.get_major_locator().set_params(nbins=4)


def _name_rows(panels: Sequence[Any], runs: Sequence[Run]) -> None:
    """The runs' names beside the first panel, the first run on top of each."""
    for panel in panels:
        panel.set_yticks(range(len(runs)), [run.name if panel is panels[0] else "" for run in runs])
        panel.set_ylim(len(runs) - 0.4, -0.6)


def _legend(figure: Figure, *panels: Any) -> None:
    """Above the panels, each name once."""
    named = {}
    for panel in panels:
        named |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    style: Mapping[str, Any] = {"frameon": False, "handlelength": 3.2}
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=min(len(named), 4), **style)


def _smooth(curve: Curve) -> Curve:
    """Means over the last few steps: fewer where there are few."""
    places, values = curve
    steps = max(1, min(MOST_SMOOTHED, len(values) // 20))
    windows = [values[max(0, end - steps) : end] for end in range(1, len(values) + 1)]
    return places, [sum(window) / len(window) for window in windows]


def _thin(curve: Curve) -> Curve:
    """Every n-th point, and the last."""
    every = -(-len(curve[0]) // MOST_POINTS) or 1
    places, values = (list(reversed(each[::-1][::every])) for each in curve)
    return places, values


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
