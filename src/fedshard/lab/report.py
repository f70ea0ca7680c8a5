"""One page about one or several runs: a table, figures, and what they were compared by. Opens without a network."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedshard.core.units import format_bytes, format_count, format_seconds
from fedshard.lab.figures import FIGURES
from fedshard.lab.runs import Axis, Run, first_reach, shared_end, value_at

NONE = "–"


def write_report(runs: Sequence[Run], into: Path) -> Path:
    """`report.html` and `figures/` in a folder; returns the page."""
    import matplotlib as mpl
    from jinja2 import Environment

    drawn = []
    (into / "figures").mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedshard", "font.size": 9}):
        for name, (heading, draw) in FIGURES.items():
            figure = draw(runs)
            if figure is None:
                continue
            svg = io.StringIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            figure.savefig(into / "figures" / f"{name}.png", dpi=150)
            (into / "figures" / f"{name}.svg").write_text(svg.getvalue(), encoding="utf-8")
            drawn.append((name, heading, svg.getvalue().partition("<svg")[1] + svg.getvalue().partition("<svg")[2]))
    template = files("fedshard.lab").joinpath("report.html.j2").read_text(encoding="utf-8")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs of one recipe"
    page = Environment(autoescape=True).from_string(template)
    html = page.render(title=title, rows=table(runs), notes=notes(runs), figures=drawn)
    (into / "report.html").write_text(html, encoding="utf-8")
    return into / "report.html"


def table(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each run, as the terminal and the page show them."""
    fsdp, hsdp = (_baseline(runs, strategy) for strategy in ("FSDP", "HSDP"))
    baseline = fsdp or hsdp
    target = baseline.curve("eval_loss", "seconds")[1][-1:] if baseline else []
    ends: dict[Axis, float] = {axis: shared_end(runs, axis) for axis in ("tokens", "steps", "seconds")}
    rows = []
    for run in runs:
        steady = run.steady_tokens_per_second
        reached = first_reach(run.curve("eval_loss", "seconds"), target[0]) if target else None
        rows.append(
            {
                "run": run.name + ("" if run.summary else " (unfinished)"),
                "steps": str(run.steps[-1]["step"]),
                "tokens/s": format_count(run.tokens_per_second),
                "steady": format_count(steady),
                "× FSDP": _ratio(steady, fsdp),
                "× HSDP": _ratio(steady, hsdp),
                "perplexity at equal tokens": _perplexity(run, "tokens", ends),
                "… steps": _perplexity(run, "steps", ends),
                "… seconds": _perplexity(run, "seconds", ends),
                "to baseline's loss": format_seconds(reached) if reached is not None else NONE,
                "rounds' share": f"{run.sync_share:.1%}" if run.rounds else NONE,
                "sent per round": format_bytes(run.rounds[-1]["sent_bytes"]) if run.rounds else NONE,
            }
        )
    return rows


def notes(runs: Sequence[Run]) -> list[str]:
    """What the table's numbers are of."""
    ends = ", ".join(f"{shared_end(runs, axis):,.0f} {axis}" for axis in ("tokens", "steps", "seconds"))
    said = [f"Perplexities are compared at {ends}: the farthest that every run was evaluated at; straight in between."]
    baseline = _baseline(runs, "FSDP") or _baseline(runs, "HSDP")
    if baseline is not None:
        said.append(f"“To baseline's loss”: training time until the last evaluation loss of {baseline.name}.")
    said += [
        f"{run.name}: a step of one group is {format_count(run.recipe.group_tokens)} tokens, of all groups "
        f"{format_count(run.recipe.tokens_per_step)}"
        + (f"; H = {run.recipe.sync.every}, {run.recipe.timetable.warmup_steps} synchronous steps, outer optimizer "
           f"{run.recipe.sync.outer.kind}" if run.recipe.federates else "") + "."
        for run in runs
    ]  # fmt: skip
    return said


def _baseline(runs: Sequence[Run], strategy: str) -> Run | None:
    return next((run for run in runs if run.recipe.strategy == strategy), None)


def _ratio(speed: float, baseline: Run | None) -> str:
    return NONE if baseline is None else f"{speed / baseline.steady_tokens_per_second:.2f}"


def _perplexity(run: Run, axis: Axis, ends: dict[Axis, float]) -> str:
    loss = value_at(run.curve("eval_loss", axis), ends[axis])
    return NONE if loss is None else f"{math.exp(min(loss, 700.0)):.4g}"
