"""Why a choice lost: one line for each class of losers."""

from __future__ import annotations

from collections.abc import Iterator

from fedshard.core.units import format_bytes, format_count
from fedshard.study.plan import Choice, Plan
from fedshard.study.setup import Axis

STRATEGIES = ("FSDP", "HSDP", "DDP", "FL+FSDP", "FL+HSDP", "FL+DDP")


def reasons(plan: Plan) -> Iterator[str]:
    """What became of each strategy that did not win, and of what does not fit or may not be."""
    if plan.choices:
        winner = plan.choices[0]
        for strategy in STRATEGIES:
            best = plan.best(strategy)
            if best is not None and strategy != winner.strategy:
                yield f"{strategy} {best.setup.layout}: {_slower(best, winner)}"
    fitting = {choice.setup.layout.shards for choice in plan.choices}
    lacking = {shards: held for shards, held in plan.least_bytes.items() if shards not in fitting}
    if lacking:
        shards, held = max(lacking.items())
        which = f"{shards} shard{'s' * (shards > 1)}" + " or fewer" * (len(lacking) > 1)
        may_fill = format_bytes(plan.capacity_bytes)
        yield f"{which} of a replica: a rank needs {format_bytes(held)}, and may fill {may_fill}"
    if plan.too_large:
        layout, tokens = min(plan.too_large.items(), key=lambda each: each[1])
        limit = format_count(plan.wanted.max_batch_tokens)
        yield (
            f"groups of {layout.group_ranks} ranks or more: {format_count(tokens)} tokens a step at least, and "
            f"--max-batch-tokens is {limit}"
        )


def shortage(plan: Plan) -> str:
    """What is short, and by how much, where nothing fits."""
    if not plan.least_bytes:
        return f"no layout stays within {format_count(plan.wanted.max_batch_tokens)} tokens a step"
    shards, held = min(plan.least_bytes.items(), key=lambda each: each[1])
    short = format_bytes(held - plan.capacity_bytes)
    return (
        f"memory is short by {short} a rank: in {shards} shards, with one sequence at a time and recomputation, a rank "
        f"needs {format_bytes(held)}, and may fill {format_bytes(plan.capacity_bytes)}"
    )


def _slower(choice: Choice, winner: Choice) -> str:
    """By how much, and what it waits for."""
    ratio = choice.tokens_per_second / winner.tokens_per_second
    shares = choice.time.shares
    waits = {
        "gathers": (shares["gather"], "shard"),
        "reductions": (shares["reduction"], "replica" if choice.setup.layout.replicas > 1 else "shard"),
        "rounds": (shares["round"], "group"),
    }
    name, (share, axis) = max(waits.items(), key=lambda each: each[1][0])
    said = f"{ratio:.0%} of the tokens per second"
    if share < 0.01:
        return f"{said}; it waits for nothing much, but computes less at a time or more often"
    return f"{said}; {share:.0%} of a step waits for {name}{_over(choice, axis)}"


def _over(choice: Choice, axis: str) -> str:
    names: dict[str, Axis] = {"shard": "shard", "replica": "replica", "group": "group"}
    rings = choice.setup.rings(names[axis])
    tier = choice.setup.cluster.tier_between(rings[0].tolist())
    return f" over {rings.shape[1]} ranks, {'inside nodes' if tier == 'node' else f'across the {tier} tier'}"
