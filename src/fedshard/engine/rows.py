"""The rows of a run folder: one class per file, whose fields are the keys. Lists are over groups."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

OPTIONAL = ("inner_seconds", "router_loss", "mfu")
"""Keys that a row has only where there is a value."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, after each step: what the terminal shows before groups have met. It is in no file."""

    step: int
    steps: int
    loss: float
    """Of this rank's group."""
    tokens_per_second: float
    next_round: int | None
    """The step that the next round follows; None where there are no rounds."""
    eta_seconds: float


@dataclass(frozen=True)
class StepRow:
    """A line of metrics.jsonl."""

    step: int
    tokens: int
    """Sequences × sequence length over all groups, up to and with this step."""
    loss: float
    """Weighted by label tokens over groups."""
    group_losses: list[float]
    learning_rate: float
    grad_norms: list[float]
    """Before clipping."""
    tokens_per_second: float
    seconds: float
    """Of the slowest group's step, without its round."""
    inner_seconds: float | None = None
    """Of this step spent in communication inside the group; only on steps that are sampled."""
    router_loss: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class RoundRow:
    """A line of rounds.jsonl."""

    round: int
    step: int
    tokens: int
    sent_bytes: int
    """What one rank sent to other groups; the largest over ranks."""
    seconds: float
    exposed_seconds: float
    delta_norm: float | None
    group_delta_norms: list[float] | None
    agreement: float | None
    spread: list[float] | None
    weights: list[float]
    excluded: list[int]


@dataclass(frozen=True)
class EvalRow:
    """A line of evals.jsonl."""

    step: int
    tokens: int
    loss: float
    perplexity: float
    sequences: int


@dataclass(frozen=True)
class Summary:
    """summary.json."""

    strategy: str
    layout: str
    tokens: int
    steps: int
    rounds: int
    seconds: float
    """Of training: steps and rounds, without start-up, evaluation and saving."""
    tokens_per_second: float
    steady_tokens_per_second: float
    """Over whole rounds after the warm-up."""
    train_loss: float
    eval_loss: float
    eval_perplexity: float
    round_sent_bytes: int
    peak_memory_bytes: int
    rss_bytes: int
    mfu: float | None = None


Row = StepRow | RoundRow | EvalRow


def as_dict(row: Row | Summary) -> dict[str, Any]:
    """A row's keys and values as the files have them: what is not finite is null, for JSON knows no NaN.

    >>> as_dict(EvalRow(10, 40960, 2.0, float("inf"), 256))
    {'step': 10, 'tokens': 40960, 'loss': 2.0, 'perplexity': None, 'sequences': 256}
    """
    return {key: _plain(value) for key, value in asdict(row).items() if value is not None or key not in OPTIONAL}


def as_json(row: Row | Summary) -> str:
    """A row as one line of JSON; floats read back equal."""
    return json.dumps(as_dict(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_plain(each) for each in value] if isinstance(value, list) else value
