"""Tokens per second of fedshard's training against a hand-written FSDP2 loop, on the same model and data, side by side.

    python benchmarks/loop.py

Two ranks, layout 1×1×2, the `tiny` model. The hand-written loop is what a good one looks like without fedshard:
blocks and root sharded, fused AdamW, clipping, a loss over shifted labels. It runs with gloo's own reduce-scatter, and
with the ring that fedshard installs, so that the loop and the collective are told apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import read_recipe
from fedshard.engine.job import make_job
from fedshard.engine.ring import RingReduceScatter
from fedshard.engine.shard import units
from fedshard.engine.sinks import Sinks
from fedshard.engine.train import train
from fedshard.engine.world import find_launch, open_world

RANKS = 2


def by_hand(recipe: Recipe, job, ring: bool) -> float:
    """Seconds of the steps of a hand-written loop, without its set-up."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(job.config)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    for unit in units(model) if ring else []:
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_reduce_scatter(RingReduceScatter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    job.feed.cursor = 0
    began = time.perf_counter()
    for _ in range(recipe.steps):
        (batch,) = job.feed.next_step()
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return time.perf_counter() - began


def measure(rank: int, steps: int, repeats: int, port: int, cache: str, queue: mp.SimpleQueue) -> None:
    """On each rank: the three loops in turn, `repeats` times."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port),
                   "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}  # fmt: skip
    words = [
        "--layout.groups",
        "1",
        "--layout.shards",
        str(RANKS),
        "--budget.steps",
        str(steps),
        "--log.profile_every",
        "0",
    ]
    recipe = read_recipe(overrides=[*words, "--evaluate.sequences", "1", "--evaluate.every", "0"])
    seconds: dict[str, list[float]] = {"fedshard": [], "by hand": [], "by hand, ring": []}
    with open_world(recipe, find_launch()) as world:
        for _ in range(repeats + 1):
            job = make_job(recipe, world, Path(cache))
            dist.barrier()
            seconds["fedshard"].append(train(job, Sinks([])).seconds)
            seconds["by hand"].append(by_hand(recipe, job, ring=False))
            seconds["by hand, ring"].append(by_hand(recipe, job, ring=True))
    if rank == 0:
        tokens = steps * recipe.tokens_per_step
        queue.put({name: [round(tokens / each, 1) for each in values[1:]] for name, values in seconds.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as cache:
        mp.spawn(measure, (given.steps, given.repeats, 29900 + os.getpid() % 90, cache, queue), nprocs=RANKS)
    speeds = queue.get()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {name: round(medians["fedshard"] / medians[name], 3) for name in ("by hand", "by hand, ring")}
    for name, median in medians.items():
        print(f"{name:14} {median:9.0f} tokens/s")
    print("fedshard /", ratios)
    save("loop", {"target": 0.97, "layout": "1×1×2", "steps": given.steps, "tokens_per_second": speeds,
                  "medians": medians, "fedshard_over": ratios})  # fmt: skip


if __name__ == "__main__":
    main()
