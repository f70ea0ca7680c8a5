"""`fedshard train --dry-run`: what a recipe would do, without a rank."""

from __future__ import annotations

import os
from pathlib import Path

from fedshard.core.layout import rows_of
from fedshard.core.recipe import Recipe
from fedshard.core.units import format_bytes, format_count


def dry_run(recipe: Recipe, cache: Path) -> None:
    """Print layout, steps, bytes and memory on stdout. Raises InputError with all that is wrong with model or data."""
    from fedshard.engine.job import check

    check(recipe, cache)
    for name, value in [*layout_lines(recipe), *size_lines(recipe)]:
        print(f"{name:36} {value}")


def layout_lines(recipe: Recipe) -> list[tuple[str, str]]:
    """What the recipe alone tells."""
    shape, timetable = recipe.shape, recipe.timetable
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or shape.ranks)
    lines = [
        ("strategy", f"{recipe.strategy} {shape}: groups × replicas × shards"),
        ("ranks", f"{shape.ranks}, {local} on a node"),
        ("group 0", f"ranks 0–{shape.group_ranks - 1}"),
        ("tokens per step, a group", f"{recipe.group_tokens:,}"),
        ("tokens per step, all groups", f"{recipe.tokens_per_step:,}"),
        ("steps of a group", f"{recipe.steps:,} ({format_count(recipe.steps * recipe.tokens_per_step)} tokens)"),
    ]
    if recipe.federates:
        warmup = f", after {timetable.warmup_steps} synchronous steps" if timetable.warmup_steps else ""
        lines.append(("rounds", f"{timetable.rounds()}, every {timetable.every} steps{warmup}"))
    return lines


def size_lines(recipe: Recipe) -> list[tuple[str, str]]:
    """What the model's shapes add: bytes of a round, and memory of the first rank, which holds most."""
    import torch

    from fedshard.engine.config import read_config
    from fedshard.engine.model import build_on_meta, decoder_blocks
    from fedshard.engine.parameters import named_parameters
    from fedshard.engine.shard import compute_dtype, stored_dtype

    model = build_on_meta(read_config(recipe.model), stored_dtype(recipe.train))
    parameters = list(named_parameters(model).values())
    shape, item = recipe.shape, stored_dtype(recipe.train).itemsize
    local = [len(rows_of(0, shape.shards, each.shape[0])) * each.shape[1:].numel() for each in parameters]
    owned = sum(-(-numel // shape.replicas) for numel in local)
    blocks = [sum(each.numel() for each in block.parameters()) for _, block in decoder_blocks(model)]
    root = sum(each.numel() for each in parameters) - sum(blocks)
    cuda = recipe.train.device != "cpu" and torch.cuda.is_available()
    gathered = compute_dtype(recipe.train, "cuda" if cuda else "cpu").itemsize
    moments = 2 if recipe.optimizer.kind == "adamw" else 0
    copies = (recipe.sync.anchor or recipe.sync.outer.kind != "mean") + (recipe.sync.outer.kind != "mean")
    vocabulary = model.config.get_text_config().vocab_size
    logits = recipe.train.micro_batch * recipe.data.sequence_length * vocabulary
    memory = {
        "weights, gradients, moments": sum(local) * item * (2 + moments),
        "anchor and outer state": owned * 4 * copies,
        "gathered units": (root + 2 * max(blocks)) * gathered,
        "logits": logits * 10,  # in the type of computation, in float32, and their gradient
    }
    lines = [("parameters", f"{sum(each.numel() for each in parameters):,}")]
    if recipe.federates:
        sent = 2 * (shape.groups - 1) * owned * 4 // shape.groups
        lines.append(("round, sent by a rank", f"{format_bytes(sent)} to other groups"))
    lines += [(f"memory, {name}", format_bytes(count)) for name, count in memory.items() if count]
    return [*lines, ("memory without activations", f"{format_bytes(sum(memory.values()))} on a rank")]
