"""What a run tells of itself: the rows of its folder, one class per file, whose fields are the keys; a contract.

Lists are over groups. A field with a default is a key only of rows that have a value for it.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a run is, after each step: what the terminal shows before groups have met. It is in no file."""

    step: int
    """The step just done, counted from 1."""
    steps: int
    """Of the whole run."""
    loss: float
    """Of this rank's group: between rounds it knows no other."""
    tokens_per_second: float
    """Of all groups, if they are as fast as this one."""
    next_round: int | None
    """The step that the next round follows; None where there are no rounds."""
    eta_seconds: float
    """Until the last step."""


@dataclass(frozen=True)
class StepRow:
    """A line of `metrics.jsonl`: one optimizer step of all groups."""

    step: int
    """Counted from 1."""
    tokens: int
    """Sequences × sequence length of all groups, up to and with this step."""
    loss: float
    """Σ −log p / Σ label tokens over all groups, so never above the highest of `group_losses`."""
    group_losses: list[float]
    """The same of each group's own tokens."""
    learning_rate: float
    """0 for a step that was not applied."""
    grad_norms: list[float]
    """Of each group's gradient before clipping."""
    tokens_per_second: float
    """Of all groups, in this step."""
    seconds: float
    """Wall time without the round; of the slowest group."""
    inner_seconds: float | None = None
    """Communication inside the group; only of sampled steps."""
    router_loss: float | None = None
    """Load-balancing loss of a mixture of experts."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0..1; only where the device's peak is known."""


@dataclass(frozen=True)
class RoundRow:
    """A line of `rounds.jsonl`: one round."""

    round: int
    """Counted from 1."""
    step: int
    """The step that it follows."""
    tokens: int
    """As in `StepRow`."""
    sent_bytes: int
    """What one rank sent to other groups; the largest over ranks."""
    seconds: float
    """Of the whole round."""
    exposed_seconds: float
    """The part of `seconds` in which no group trained."""
    delta_norm: float | None
    """‖anchor − mean‖; None where no anchor is kept."""
    group_delta_norms: list[float] | None
    """‖anchor − local‖ of each group; None where no anchor is kept."""
    agreement: float | None
    """√G·‖mean delta‖ / mean ‖delta‖: 1 = independent, √G = all alike; None where no anchor is kept."""
    spread: list[float] | None
    """‖local − mean‖ of each group; None where an anchor is kept."""
    weights: list[float]
    """What each group counted for; 0 for one that was left out."""
    excluded: list[int]
    """The groups that were left out."""


@dataclass(frozen=True)
class EvalRow:
    """A line of `evals.jsonl`: one evaluation of the global model."""

    step: int
    """The step that it follows."""
    tokens: int
    """As in `StepRow`."""
    loss: float
    """Σ −log p / Σ label tokens over the held-out sequences."""
    perplexity: float
    """e to the loss."""
    sequences: int
    """Held-out sequences that were used."""


@dataclass(frozen=True)
class Summary:
    """`summary.json`: what is left of a run."""

    strategy: str
    """The layout's name: FSDP, FL+HSDP, …"""
    layout: str
    """G×R×S."""
    tokens: int
    """Sequences × sequence length of all groups."""
    steps: int
    """Optimizer steps of each group."""
    rounds: int
    """How often the groups met."""
    seconds: float
    """Of training: steps and rounds, without start-up, evaluation and saving."""
    tokens_per_second: float
    """`tokens` over `seconds`."""
    steady_tokens_per_second: float
    """Over whole rounds after the warm-up; see `Meter.steady_tokens_per_second`."""
    train_loss: float
    """Of the last step."""
    eval_loss: float
    """Of the last evaluation."""
    eval_perplexity: float
    """Of the last evaluation."""
    round_sent_bytes: int
    """What one rank sends to other groups in a round; the largest over ranks."""
    peak_memory_bytes: int
    """Highest sum of live tensors of a rank: CUDA's allocator's; on the CPU, of the sampled steps."""
    rss_bytes: int
    """Highest resident memory of a rank's process."""
    mfu: float | None = None
    """As in `StepRow`, over `seconds`."""
    router_loss: float | None = None
    """Of the last step."""


Row = StepRow | RoundRow | EvalRow


def to_dict(row: Row | Summary) -> dict[str, Any]:
    """A row's keys and values as the files have them.

    JSON knows no NaN and no infinity: a number that is not finite is None, alone or in its list.

    >>> to_dict(EvalRow(10, 40960, 2.0, float("inf"), 256))
    {'step': 10, 'tokens': 40960, 'loss': 2.0, 'perplexity': None, 'sequences': 256}
    """
    values = [(field, getattr(row, field.name)) for field in fields(row)]
    return {field.name: _plain(value) for field, value in values if value is not None or field.default is MISSING}


def to_json(row: Row | Summary, indent: int | None = None) -> str:
    """A row as one JSON object, on one line without `indent`; floats read back equal."""
    return json.dumps(to_dict(row), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_plain(each) for each in value] if isinstance(value, list) else value
