"""What a person at the terminal sees: one live line while training (stderr), and the result (stdout)."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedshard.core.units import format_bytes, format_count, format_seconds
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary, as_dict


class LiveSink:
    """On a terminal one line that updates by itself; elsewhere a line every `every` steps. Evaluations, and rounds that
    left a group out, get lines that stay."""

    def __init__(self, every: int, console: Console | None = None):
        self._every = every
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        if self._console.is_terminal:
            self._live.start()

    def progress(self, progress: Progress) -> None:
        if self._console.is_terminal:
            self._live.update(Text(progress_line(progress)), refresh=True)
        elif progress.step % self._every == 0 or progress.step == progress.steps:
            self._say(progress_line(progress))

    def step(self, row: StepRow) -> None:
        pass

    def round(self, row: RoundRow) -> None:
        if row.excluded:
            groups = ", ".join(str(group) for group in row.excluded)
            self._say(f"round {row.round} after step {row.step}: left out group {groups}")

    def evaluation(self, row: EvalRow) -> None:
        self._say(f"step {row.step}: evaluation loss {row.loss:.4f}, perplexity {row.perplexity:.4g}")

    def summary(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        self._live.stop()

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def progress_line(progress: Progress) -> str:
    """The line of one step.

    >>> progress_line(Progress(12, 196, 3.2704, 8123.4, 20, 75.0))
    'step 12/196 | loss 3.270 | 8.12 k tokens/s | round after step 20 | 1:15 left'
    """
    parts = [
        f"step {progress.step}/{progress.steps}",
        f"loss {progress.loss:.3f}",
        f"{format_count(progress.tokens_per_second)} tokens/s",
    ]
    if progress.next_round is not None:
        parts.append(f"round after step {progress.next_round}")
    return " | ".join([*parts, f"{format_seconds(progress.eta_seconds)} left"])


def print_summary(
    summary: Summary, *, federated: bool, fsdp_bytes: int, as_json: bool, console: Console | None = None
) -> None:
    """The result on stdout: a table on a terminal, plain lines elsewhere, or JSON.

    `fsdp_bytes` is what FSDP over all ranks would send between groups for each rank, from one round to the next.
    """
    console = console or Console(file=sys.stdout, highlight=False)
    if as_json:
        console.print(json.dumps(as_dict(summary), indent=2), soft_wrap=True)
        return
    lines = summary_lines(summary, fsdp_bytes if federated else None)
    if not console.is_terminal:
        for key, value in lines:
            console.print(f"{key:24} {value}", soft_wrap=True)
        return
    table = Table(show_header=False, title=f"{summary.strategy} {summary.layout}")
    for key, value in lines:
        table.add_row(key, value)
    console.print(table)


def summary_lines(summary: Summary, fsdp_bytes: int | None) -> list[tuple[str, str]]:
    """What the result says, as (name, value)."""
    lines = [
        ("strategy", f"{summary.strategy} {summary.layout}"),
        ("steps", f"{summary.steps} ({format_count(summary.tokens)} tokens)"),
        ("train loss", f"{summary.train_loss:.4f}"),
        ("evaluation perplexity", f"{summary.eval_perplexity:.4g} (loss {summary.eval_loss:.4f})"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f} (steady {summary.steady_tokens_per_second:,.0f})"),
        ("training time", format_seconds(summary.seconds)),
        ("peak memory per rank", format_bytes(summary.peak_memory_bytes)),
    ]
    if summary.mfu is not None:
        lines.append(("model FLOPs utilisation", f"{summary.mfu:.1%}"))
    if fsdp_bytes is not None:
        sent = summary.round_sent_bytes
        lines.append(("rounds", f"{summary.rounds}, {format_bytes(sent)} per rank and round to other groups"))
        if sent > 0:
            ratio = f"{fsdp_bytes / sent:.1f} times that"
            lines.append(("FSDP over all ranks", f"{format_bytes(fsdp_bytes)} between two rounds: {ratio}"))
    return lines
