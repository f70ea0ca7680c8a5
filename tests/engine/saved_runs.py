"""Small runs that save, for the tests of checkpoints: a recipe for any layout, and one run of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.engine.checkpoint import FOLDER, open_checkpoint
from fedshard.engine.job import Job, make_job
from fedshard.engine.parameters import named_parameters
from fedshard.engine.resume import take_up
from fedshard.engine.rows import to_dict
from fedshard.engine.save import Saver
from fedshard.engine.shard import reshard
from fedshard.engine.sinks import Sinks
from fedshard.engine.stop import Stop
from fedshard.engine.train import train
from fedshard.testing import RankContext

STEPS, SEQUENCES, LENGTH = 12, 4, 16
LLAMA = {  # 6 rows cut over 4 ranks: 2, 2, 2, 0
    "kind": "config", "model_type": "llama", "vocab_size": 257, "hidden_size": 6, "intermediate_size": 10,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "attention_dropout": 0.1,
    "max_position_embeddings": 64,
}  # fmt: skip
NESTEROV = {"kind": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
CLOCKS = {"seconds", "exposed_seconds", "inner_seconds", "tokens_per_second"}

Shape = tuple[int, int, int]
"""Groups, replicas, shards."""


def recipe_of(layout: Shape, **sections: dict[str, Any]) -> Recipe:
    """Twelve steps of four sequences, the first two synchronous, a round after every fourth of the others."""
    groups, replicas, shards = layout
    ranks = groups * replicas * shards
    raw: dict[str, Any] = {
        "layout": {"groups": groups, "replicas": replicas, "shards": shards},
        "model": LLAMA,
        "data": {"sequence_length": LENGTH},
        "train": {"micro_batch": 1, "accumulation": SEQUENCES // ranks, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-2},
        "budget": {"steps": STEPS},
        "sync": {"every": 4, "warmup_fraction": 0.17, "outer": NESTEROV},
        "evaluate": {"every": 3, "sequences": 4},
        "checkpoint": {"every": 1, "keep": -1, "mid_round": True},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return make_recipe(raw)


class Rows:
    """A sink that keeps the rows of the files, without what clocks say."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def keep(self, row: Any) -> None:
        values = {key: value for key, value in to_dict(row).items() if key not in CLOCKS}
        self.rows.append((type(row).__name__, values))

    step = round = evaluation = keep

    def progress(self, progress: object) -> None: ...
    def summary(self, summary: object) -> None: ...
    def close(self) -> None: ...


@dataclass
class Told:
    """What a run left: its rows, and every parameter whole."""

    rows: list[tuple[str, dict[str, Any]]]
    weights: dict[str, torch.Tensor]
    next_loss: float = 0.0
    cursor: int = 0


def whole(job: Job) -> dict[str, torch.Tensor]:
    """The parameters of this rank's group."""
    reshard(job.model)
    tensors = {name: each.detach() for name, each in named_parameters(job.model).items()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()}


def run(
    context: RankContext,
    recipe: Recipe,
    folder: Path,
    cache: Path,
    at: int = 0,
    stop_after: int | None = None,
    into: Path | None = None,
) -> Told:
    """A run from its start, or from the checkpoint of step `at` in `folder`, to its end or to `stop_after`.

    One from the start saves into `folder`, one that goes on only where it is told to: `into`.
    """
    checkpoint = open_checkpoint(folder / FOLDER / f"step-{at:06}") if at else None
    job = make_job(recipe, context.world, cache, checkpoint.cursor().done if checkpoint else None)
    cursor = take_up(job, checkpoint) if checkpoint else None
    job.stop = Stop(stop_after)
    rows = Rows()
    saved = into or (None if at else folder)
    with (  # looking closely takes its time
        mock.patch("fedshard.engine.meter.sample", return_value=nullcontext()),
        mock.patch("fedshard.engine.meter.live_tensor_bytes", return_value=0),
    ):
        train(job, Sinks([rows]), Saver(job, saved) if saved else None, cursor)
    return Told(rows.rows, whole(job))
