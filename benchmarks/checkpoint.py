"""Bytes of a checkpoint against the least there can be, and seconds that an asynchronous save holds training.

    python benchmarks/checkpoint.py

The least is parameters and anchor with outer momentum once, and moments once for each group. Four ranks on the CPU, two
groups of two shards, Nesterov. Saves of both kinds in turn, in one run, after a round; medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import save

from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.engine.checkpoint import open_checkpoint
from fedshard.engine.job import make_job
from fedshard.engine.log import Log
from fedshard.engine.meter import Meter
from fedshard.engine.parameters import named_parameters
from fedshard.engine.save import Saver
from fedshard.engine.sinks import Sinks
from fedshard.engine.step import Skips, take_step
from fedshard.testing import RankContext, RankPool

GROUPS = 2


def recipe_of(hidden: int, layers: int, *, asynchronous: bool) -> Recipe:
    """A Llama-type model."""
    model = {
        "kind": "config", "model_type": "llama", "vocab_size": 257, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    return make_recipe(
        {
            "layout": {"groups": GROUPS, "replicas": 1, "shards": 2},
            "model": model,
            "data": {"sequence_length": 32},
            "train": {"device": "cpu"},
            "sync": {"outer": {"kind": "nesterov"}},
            "checkpoint": {"async": asynchronous, "keep": 1},
        }
    )


def measure(context: RankContext, hidden: int, layers: int, repeats: int, folder: Path) -> dict[str, list[float] | int]:
    """Seconds that training was held by each save, by kind; bytes written and the least."""
    job = make_job(recipe_of(hidden, layers, asynchronous=False), context.world, folder / "cache")
    tokens = take_step(job, 1, synchronous=False).rank_label_tokens
    job.inner.zero_grad()
    job.federation.round(tokens)
    log = Log(job, Sinks([]), Meter(context.world.device, profile_every=0, warmup_steps=0))
    savers = {}
    for kind in ("synchronous", "asynchronous"):
        job.recipe = recipe_of(hidden, layers, asynchronous=kind == "asynchronous")
        savers[kind] = Saver(job, folder / kind)
    held: dict[str, list[float]] = {kind: [] for kind in savers}
    for step in range(1, repeats + 2):
        for kind, saver in savers.items():
            torch.distributed.barrier(context.world.control)
            before = saver.held_seconds
            saver.save(step, log, Skips(), 0, together=True)
            if step > 1:  # the first one touches its memory for the first time
                held[kind].append(saver.held_seconds - before)
            saver.wait()
            time.sleep(0.1)
    numel = sum(parameter.numel() for parameter in named_parameters(job.model).values())
    least = 4 * numel * (2 + 2 * GROUPS)  # weights, which are the anchor; momentum; two moments for each group
    last = open_checkpoint(folder / "synchronous" / "checkpoints" / f"step-{repeats + 1:06}")
    written = sum(known["bytes"] for known in last.files().values())
    return {**held, "written_bytes": written, "least_bytes": least}


def main() -> None:
    """Measure, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(4) as pool:
        layout = Layout(GROUPS, 1, 2)
        told = pool.run(measure, layout, given.hidden, given.layers, given.repeats, Path(folder), timeout=500)
    held = {kind: statistics.median(max(of_ranks) for of_ranks in zip(*(each[kind] for each in told), strict=True))
            for kind in ("synchronous", "asynchronous")}  # fmt: skip
    figures = {
        "written_bytes": told[0]["written_bytes"],
        "least_bytes": told[0]["least_bytes"],
        "bytes_ratio": told[0]["written_bytes"] / told[0]["least_bytes"],
        "held_seconds": held,
        "held_ratio": held["asynchronous"] / held["synchronous"],
        "targets": {"bytes_ratio": 1.05, "held_ratio": 0.25},
    }
    for name in ("bytes_ratio", "held_ratio"):
        print(f"{name:12} {figures[name]:.3f}   target ≤ {figures['targets'][name]}")
    save("checkpoint", figures)


if __name__ == "__main__":
    main()
