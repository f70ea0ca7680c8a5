"""What a person at the terminal sees: one live line while training (stderr), and the result (stdout)."""

from __future__ import annotations

import math

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedshard.core.units import format_bytes, format_count, format_seconds
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary, to_json


class LiveSink:
    """On a terminal one line that is drawn anew, elsewhere a line every `every` steps.

    Lines that stay: evaluations, rounds that left a group out, steps that were not applied.
    """

    def __init__(self, every: int, console: Console | None = None):
        self._every = every
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        if self._console.is_interactive:
            # drawn by a thread of its own, so that short steps do not wait for the terminal; stdout stays the result's
            self._live = Live(console=self._console, transient=True, refresh_per_second=4, redirect_stdout=False)
            self._live.start()

    def progress(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(Text(progress_line(progress), no_wrap=True, overflow="ellipsis"))
        elif progress.step % self._every == 0 or progress.step == progress.steps:
            self._say(progress_line(progress))

    def step(self, row: StepRow) -> None:
        lost = [group for group, norm in enumerate(row.grad_norms) if not math.isfinite(norm)]
        if lost:
            self._say(f"step {row.step}: gradient not finite, step not applied in {_groups(lost)}")

    def round(self, row: RoundRow) -> None:
        if row.excluded:
            self._say(f"round {row.round} after step {row.step}: without {_groups(row.excluded)}")

    def evaluation(self, row: EvalRow) -> None:
        self._say(f"step {row.step}: evaluation loss {row.loss:.4f}, perplexity {row.perplexity:.4g}")

    def summary(self, summary: Summary) -> None:
        """The result is for stdout: `print_summary`."""

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _say(self, line: str) -> None:
        self._console.out(line, highlight=False)


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
    summary: Summary, *, federated: bool, fsdp_bytes: int | None, as_json: bool, console: Console | None = None
) -> None:
    """The result on stdout: a table on a terminal, plain lines elsewhere, or the JSON of `summary.json`.

    `federated`: whether there were rounds to speak of. `fsdp_bytes` is what FSDP over all ranks would send between
    groups for each rank, from one round to the next; None where nobody knows.
    """
    console = console or Console()
    if as_json:
        console.out(to_json(summary, indent=2), highlight=False)
        return
    lines = summary_lines(summary, federated, fsdp_bytes)
    if console.is_terminal:
        table = Table(show_header=False, title=f"{summary.strategy} {summary.layout}")
        for name, value in lines:
            table.add_row(name, value)
        console.print(table)
    else:
        for name, value in lines:
            console.out(f"{name:24}  {value}", highlight=False)


def summary_lines(summary: Summary, federated: bool, fsdp_bytes: int | None) -> list[tuple[str, str]]:
    """What the result says, as (name, value); arguments as in `print_summary`."""
    speed, steady = summary.tokens_per_second, summary.steady_tokens_per_second
    memory, resident = format_bytes(summary.peak_memory_bytes), format_bytes(summary.rss_bytes)
    lines = [
        ("strategy", f"{summary.strategy} {summary.layout}"),
        ("steps", f"{summary.steps} ({format_count(summary.tokens)} tokens)"),
        ("train loss", f"{summary.train_loss:.4f}"),
        ("evaluation perplexity", f"{summary.eval_perplexity:.4g} (loss {summary.eval_loss:.4f})"),
        ("training time", format_seconds(summary.seconds)),
        ("tokens/s", f"{format_count(speed)} (steady {format_count(steady)})"),
        ("peak memory per rank", f"{memory} of tensors ({resident} resident)"),
    ]
    if summary.mfu is not None:
        lines.append(("model FLOPs utilisation", f"{summary.mfu:.1%}"))
    if summary.router_loss is not None:
        lines.append(("router loss", f"{summary.router_loss:.4f}"))
    if federated:
        sent = summary.round_sent_bytes
        lines.append(("rounds", f"{summary.rounds}, each {format_bytes(sent)} per rank to other groups"))
        if fsdp_bytes is not None and sent > 0:
            more = f"{fsdp_bytes / sent:.3g} times as much"
            lines.append(("FSDP over all ranks", f"{format_bytes(fsdp_bytes)} in the same steps: {more}"))
    return lines


def _groups(numbers: list[int]) -> str:
    """`group 3`, `groups 0, 2`."""
    return f"group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
