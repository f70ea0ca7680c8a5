"""What is short where nothing fits, by how much, and the nearest that would do."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster
from fedshard.core.units import format_bytes
from fedshard.study.choice import WARMUP_FRACTION, Wanted
from fedshard.study.memory import memory
from fedshard.study.plan import Plan, is_even, layouts

SHORTEST = 256
"""Tokens of the shortest sequence that is looked at."""


@dataclass(frozen=True)
class Shortage:
    """Why nothing fits."""

    of: Literal["memory", "batch", "rounds"]
    missing: float
    """Bytes of a rank, tokens of a group's batch, or rounds of the run."""
    says: str
    would_do: tuple[str, ...]
    """What to ask for instead, each as words of `fedshard plan`."""


def shortage(plan: Plan, cluster: Cluster) -> Shortage:
    """What `plan`, which holds no choice, lacks; more ranks are looked for on the whole of `cluster`."""
    assert not plan.choices, "there are choices that fit"
    wanted = plan.wanted
    group = smallest_group(wanted)
    if group is None:
        return _of_memory(wanted, cluster)
    tokens = group * wanted.sequence_length
    return _of_batch(wanted, tokens) if tokens > wanted.max_batch_tokens else _of_rounds(plan)


def smallest_group(wanted: Wanted) -> int | None:
    """Ranks of the smallest group in which a replica fits with one sequence at a time. None where it fits in none."""
    fitting = [
        layout.group_ranks for layout in _even_layouts(wanted) if _least_bytes(wanted, layout) <= wanted.capacity_bytes
    ]
    return min(fitting, default=None)


def _of_memory(wanted: Wanted, cluster: Cluster) -> Shortage:
    held, shards = min((_least_bytes(wanted, layout), layout.shards) for layout in _even_layouts(wanted))
    missing = held - wanted.capacity_bytes
    says = (
        f"memory is short by {format_bytes(missing)} a rank: with one sequence at a time, recomputation and "
        f"{shards} shard{'s' * (shards > 1)}, a rank needs {format_bytes(held)}, and may fill "
        f"{format_bytes(wanted.capacity_bytes)}"
    )
    return Shortage("memory", missing, says, tuple(_more_memory(wanted, cluster)))


def _of_batch(wanted: Wanted, tokens: int) -> Shortage:
    limit = wanted.max_batch_tokens
    says = f"the smallest group that fits takes {tokens} tokens a step, {tokens - limit} more than are allowed"
    would_do = [f"--max-batch-tokens {tokens}"]
    length = wanted.sequence_length * limit // tokens
    if length >= SHORTEST:
        would_do.append(f"--sequence-length {length}")
    return Shortage("batch", tokens - limit, says, tuple(would_do))


def _of_rounds(plan: Plan) -> Shortage:
    wanted = plan.wanted
    most, least = max(plan.few_rounds.values()), wanted.min_rounds
    says = f"the budget of {wanted.budget} tokens has {most} rounds at most, {least - most} fewer than are wanted"
    steps = 1 + math.ceil(least / (1 - WARMUP_FRACTION))
    enough = steps * wanted.cluster.ranks * wanted.sequence_length
    return Shortage("rounds", least - most, says, (f"--min-rounds {most}", f"--tokens {enough}"))


def _more_memory(wanted: Wanted, cluster: Cluster) -> Iterator[str]:
    """On these ranks: bfloat16 throughout, or the longest shorter sequence that fits. Or the fewest ranks that do,
    with as long a sequence as they allow."""
    lengths = []
    while wanted.sequence_length >> len(lengths) >= SHORTEST:
        lengths.append(wanted.sequence_length >> len(lengths))
    shorter = [replace(wanted, sequence_length=length) for length in lengths]
    for changes in ([replace(wanted, precision="pure-bfloat16")], shorter[1:]):
        for changed in changes:
            group = smallest_group(changed)
            if group is not None:
                yield _words(wanted, changed, group)
                break
    for changed in shorter:
        ranks = _enough_ranks(changed, cluster)
        if ranks is not None:
            yield _words(wanted, replace(changed, cluster=cluster.job(ranks)), ranks)
            return


def _enough_ranks(wanted: Wanted, cluster: Cluster) -> int | None:
    """The fewest ranks on full nodes that one replica fits on. The more shards, the less each of them holds."""

    def fits(nodes: int) -> bool:
        ranks = nodes * cluster.ranks_per_node
        on_them = replace(wanted, cluster=cluster.job(ranks))
        return _least_bytes(on_them, Layout(1, 1, ranks)) <= wanted.capacity_bytes

    nodes = 1 + bisect_left(range(1, cluster.nodes + 1), True, key=fits)
    return nodes * cluster.ranks_per_node if nodes <= cluster.nodes else None


def _words(wanted: Wanted, changed: Wanted, group_ranks: int) -> str:
    """What differs, as words of the command; a larger batch too, where the group's is over the limit."""
    words = []
    if changed.precision != wanted.precision:
        words.append(f"--precision {changed.precision}")
    if changed.cluster.ranks != wanted.cluster.ranks:
        words.append(f"--gpus {changed.cluster.ranks}")
    if changed.sequence_length != wanted.sequence_length:
        words.append(f"--sequence-length {changed.sequence_length}")
    if group_ranks * changed.sequence_length > wanted.max_batch_tokens:
        words.append(f"--max-batch-tokens {group_ranks * changed.sequence_length}")
    return " ".join(words)


def _even_layouts(wanted: Wanted) -> Iterator[Layout]:
    job = wanted.cluster
    return (layout for layout in layouts(job.ranks) if is_even(layout, job.ranks_per_node))


def _least_bytes(wanted: Wanted, layout: Layout) -> float:
    """What a rank needs at least: one sequence at a time, computed again."""
    return memory(replace(wanted.setup(layout), recompute=True)).total_bytes
