"""Figures of runs: curves and bars that are told apart in grey too, with units on their axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedshard.lab.runs import Axis, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's: told apart by the colour-blind."""
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
GREYS = ("0.85", "0.6", "0.3")
HATCHES = ("", "//", "xx")

AXES: dict[Axis, str] = {"tokens": "tokens", "steps": "optimizer steps", "seconds": "training time (s)"}
SMOOTHED = 15
"""Steps that a curve of single steps is averaged over."""


def loss(runs: Sequence[Run]) -> Figure:
    """Training loss over tokens, steps and seconds."""
    return _three(
        runs, "training loss (nats per token)", lambda run, axis: _smooth(*run.curve("loss", axis)), marks=False
    )


def perplexity(runs: Sequence[Run]) -> Figure:
    """Evaluation perplexity over tokens, steps and seconds."""

    def points(run: Run, axis: Axis) -> tuple[list[float], list[float]]:
        places, losses = run.curve("eval_loss", axis)
        return places, [math.exp(min(each, 700.0)) for each in losses]

    return _three(runs, "evaluation perplexity", points, marks=True)


def speed(runs: Sequence[Run]) -> Figure:
    """Tokens per second, step by step."""
    figure, axes = _figure(1)
    for index, run in enumerate(runs):
        axes[0].plot(*_smooth(*run.curve("tokens_per_second", "steps")), label=run.name, **_line(index))
    axes[0].set(xlabel="optimizer steps", ylabel="tokens per second (without rounds)", ylim=(0, None))
    _legend(figure, axes[0], len(runs))
    return figure


def step_time(runs: Sequence[Run]) -> Figure:
    """Where the time of a step goes: computing, communication inside the group where it was sampled, rounds."""
    figure, axes = _figure(1)
    for place, run in enumerate(runs):
        steps = len(run.steps)
        round_seconds = sum(row["exposed_seconds"] for row in run.rounds) / steps
        whole = sum(row["seconds"] for row in run.steps) / steps
        inner = whole * (run.inner_share or 0.0)
        parts = {"computing and all else": whole - inner, "communication inside groups": inner, "rounds": round_seconds}
        left = 0.0
        for (name, seconds), grey, hatch in zip(parts.items(), GREYS, HATCHES, strict=True):
            label = name if place == 0 else None
            axes[0].barh(place, seconds, left=left, color=grey, hatch=hatch, edgecolor="white", label=label)
            left += seconds
    axes[0].set_yticks(range(len(runs)), [run.name for run in runs])
    axes[0].invert_yaxis()
    axes[0].set_xlabel("seconds of a step")
    _legend(figure, axes[0], 3)
    return figure


def tier_bytes(runs: Sequence[Run]) -> Figure | None:
    """Bytes of one step by tier, measured beside the formula; None where no run has them."""
    counted = [run for run in runs if run.tier_bytes]
    if not counted:
        return None
    tiers = list(dict.fromkeys(tier for run in counted for tier in run.tier_bytes["formula"]))
    figure, axes = _figure(len(counted), width=3.2)
    for panel, run in zip(axes, counted, strict=True):
        for shift, (kind, grey, hatch) in enumerate((("measured", "0.7", ""), ("formula", "0.3", "//"))):
            heights = [run.tier_bytes.get(kind, {}).get(tier, 0.0) / 1e6 for tier in tiers]
            places = [at + 0.4 * shift - 0.2 for at in range(len(tiers))]
            panel.bar(places, heights, 0.38, color=grey, hatch=hatch, edgecolor="white", label=kind)
        panel.set_xticks(range(len(tiers)), tiers)
        panel.set_title(run.name)
    axes[0].set_ylabel("MB of one step, all ranks")
    _legend(figure, axes[0], 2)
    return figure


def drift(runs: Sequence[Run]) -> Figure | None:
    """How far groups move apart from round to round; None where there were no rounds."""
    federated = [run for run in runs if run.rounds]
    if not federated:
        return None
    figure, axes = _figure(2)
    for index, run in enumerate(federated):
        numbers = [row["round"] for row in run.rounds]
        apart = [_mean(row["group_delta_norms"] or row["spread"]) for row in run.rounds]
        axes[0].plot(numbers, apart, label=run.name, **_line(index))
        agreed = [(row["round"], row["agreement"]) for row in run.rounds if row["agreement"] is not None]
        axes[1].plot([number for number, _ in agreed], [value for _, value in agreed], **_line(index))
    axes[0].set(xlabel="rounds", ylabel="mean ‖delta‖ of groups (spread without an anchor)")
    axes[1].set(xlabel="rounds", ylabel="agreement: 1 independent, √G alike")
    _legend(figure, axes[0], len(federated))
    return figure


def predictions(runs: Sequence[Run]) -> Figure | None:
    """Tokens per second predicted beside measured; None where nothing was predicted."""
    told = [run for run in runs if run.predicted]
    if not told:
        return None
    figure, axes = _figure(1)
    for shift, (kind, grey, hatch) in enumerate((("predicted", "0.3", "//"), ("measured", "0.7", ""))):
        speeds = [run.predicted["tokens_per_second"] if shift == 0 else run.steady_tokens_per_second for run in told]
        places = [at + 0.4 * shift - 0.2 for at in range(len(told))]
        axes[0].bar(places, speeds, 0.38, color=grey, hatch=hatch, edgecolor="white", label=kind)
    axes[0].set_xticks(range(len(told)), [run.name for run in told])
    axes[0].set_ylabel("tokens per second, steady")
    _legend(figure, axes[0], 2)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Sequence[Run]], Figure | None]]] = {
    "loss": ("Training loss", loss),
    "perplexity": ("Evaluation perplexity", perplexity),
    "speed": ("Tokens per second", speed),
    "step-time": ("Where a step's time goes", step_time),
    "bytes": ("Bytes by tier", tier_bytes),
    "drift": ("How far groups move apart", drift),
    "predictions": ("Predicted and measured", predictions),
}
"""File's name → heading, and what draws it."""


def _three(
    runs: Sequence[Run], what: str, points: Callable[[Run, Axis], tuple[list[float], list[float]]], *, marks: bool
) -> Figure:
    figure, axes = _figure(3)
    for panel, (axis, name) in zip(axes, AXES.items(), strict=True):
        for index, run in enumerate(runs):
            style = _line(index) | ({"marker": MARKS[index % len(MARKS)]} if marks else {})
            panel.plot(*points(run, axis), label=run.name, **style)
        panel.set_xlabel(name)
    axes[0].set_ylabel(what)
    _legend(figure, axes[0], len(runs))
    return figure


def _figure(panels: int, width: float = 4.0) -> tuple[Figure, list[Any]]:
    """A figure of panels side by side, that is drawn by no window system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, width * panels), 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0].tolist()
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Any, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, 4), frameon=False)


def _line(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def _smooth(places: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Means over the last few steps."""
    means = [_mean(values[max(0, at + 1 - SMOOTHED) : at + 1]) for at in range(len(values))]
    return places, means


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
