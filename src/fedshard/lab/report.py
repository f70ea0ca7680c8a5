"""One page about one or several runs: tables, figures, and what the runs differ by. It opens without a network."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fedshard.core.errors import Fault, InputError
from fedshard.lab import figures
from fedshard.lab.outcomes import baseline, tables
from fedshard.lab.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure of the page."""

    name: str
    """Of its files."""
    heading: str
    says: str
    """What it shows, and how to read it."""
    draw: Callable[[Sequence[Run]], Figure | None]


DRAWINGS = (
    Drawing("loss", "Training loss", "A mean over a twentieth of the steps, at most 15.", figures.loss),
    Drawing(
        "perplexity",
        "Evaluation perplexity",
        "On held-out sequences, which are the same for each run that has the same data and the same seed.",
        figures.eval_perplexity,
    ),
    Drawing("speed", "Tokens per second", "One point for each H steps and the round that ends them.", figures.speed),
    Drawing(
        "step-time",
        "Where a step's time goes",
        "A mean step after the warm-up and the first tenth. Communication inside groups is what sampled steps spent in "
        "it; where a step was never sampled (log.profile_every), it is not told from computing.",
        figures.step_time,
    ),
    Drawing(
        "bytes", "Bytes by tier", "What crossed the links of each tier, and what the formula says.", figures.tier_bytes
    ),
    Drawing("round-bytes", "Bytes between groups", "Of the rank that sends most.", figures.round_bytes),
    Drawing(
        "drift",
        "How far groups move apart",
        "The mean over groups, in a band from the least to the largest of them.",
        figures.drift,
    ),
    Drawing("predictions", "Predicted and measured", "Tokens per second, by the cost model.", figures.predictions),
)
"""In the order of the page; one that has nothing to show is left out."""


def write_report(runs: Sequence[Run], into: Path) -> Path:
    """`report.html` and `figures/` in a folder; returns the page. Raises InputError where they cannot be written."""
    from jinja2 import Environment

    try:
        (into / "figures").mkdir(parents=True, exist_ok=True)
        drawn = list(_draw_all(runs, into / "figures"))
        template = files("fedshard.lab").joinpath("report.html.j2").read_text(encoding="utf-8")
        page = Environment(autoescape=True, trim_blocks=True).from_string(template)
        title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
        html = page.render(title=title, tables=tables(runs), notes=notes(runs), drawn=drawn)
        (into / "report.html").write_text(html, encoding="utf-8")
    except OSError as error:
        raise InputError([Fault(str(into), f"cannot be written to ({error})", "Give a folder with --into.")]) from None
    return into / "report.html"


def notes(runs: Sequence[Run]) -> list[str]:
    """What the numbers are of, and what a reader of one run cannot see in its curves."""
    said = [
        "Tokens are sequences × sequence length over all groups.",
        "Seconds are training time: starting, evaluating and saving are in nobody's.",
    ]
    if len(runs) > 1:
        said.append(
            "Perplexities are compared at the farthest place that every run was evaluated at or after; between two "
            "evaluations their losses are joined by a straight line."
        )
        if first := baseline(runs):
            said.append(f"The baseline is {first.name}.")
    return said + [f"{run.name}: {'; '.join(_about(run))}." for run in runs]


def _about(run: Run) -> Iterator[str]:
    recipe, ran = run.recipe, run.environment
    yield f"a step of a group is {recipe.group_tokens:,} tokens, of all groups {recipe.tokens_per_step:,}"
    if recipe.federates:
        warmup = recipe.timetable.warmup_steps
        yield f"H = {recipe.sync.every}, {warmup} synchronous steps, outer optimizer {recipe.sync.outer.kind}"
    if ran:
        on_cpu = ran["devices"]["type"] == "cpu"
        hosts = len(set(ran["hosts"]))
        yield f"{ran['ranks']} ranks on {hosts} {'host' if hosts == 1 else 'hosts'} with {ran['devices']['name']}"
        yield f"reduce-scatter {'by a ring, which sends what the formula says' if on_cpu else 'by NCCL'}"
        yield f"commit {ran['commit'] or 'unknown'}"
    if left_out := [str(row["round"]) for row in run.rounds if row["excluded"]]:
        yield f"groups were left out of rounds {', '.join(left_out)}"


def _draw_all(runs: Sequence[Run], folder: Path) -> Iterator[tuple[Drawing, str]]:
    """Each figure as SVG and PNG files, and as SVG that can stand in a page with others."""
    from matplotlib import style

    with style.context(["default", figures.STYLE]):
        for drawing in DRAWINGS:
            figure = drawing.draw(runs)
            for kind in ("svg", "png"):  # of a report before this one
                (folder / f"{drawing.name}.{kind}").unlink(missing_ok=True)
            if figure is None:
                continue
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            (folder / f"{drawing.name}.svg").write_text(file.getvalue(), encoding="utf-8")
            figure.savefig(folder / f"{drawing.name}.png", dpi=150)
            yield drawing, _inline(file.getvalue(), drawing)


def _inline(svg: str, drawing: Drawing) -> str:
    """The SVG element without what stands before it, its ids made its own: those of two figures are alike."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{drawing.name}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{drawing.heading}" ', 1)
