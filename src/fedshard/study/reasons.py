"""Why a choice lost: one line for each class of losers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedshard.core.units import format_bytes, format_count
from fedshard.study.bands import Band, rates, speedup
from fedshard.study.choice import Choice
from fedshard.study.plan import ALIKE, Plan
from fedshard.study.setup import Axis

STRATEGIES = ("FSDP", "HSDP", "DDP", "FL+FSDP", "FL+HSDP", "FL+DDP")

BARELY = 0.005
"""Of a step: a cause that takes less is not worth naming."""


def losers(plan: Plan) -> Iterator[tuple[Choice, Band]]:
    """The first row of each strategy that did not win, and the winner over the best of that strategy."""
    winner = plan.rows[0]
    fastest = rates([winner])
    for strategy in STRATEGIES:
        row = plan.best(strategy)
        if row is not None and strategy != winner.strategy:
            yield row, speedup(fastest, rates(plan.of(strategy)))


def reasons(plan: Plan, lost: Iterable[tuple[Choice, Band]]) -> Iterator[str]:
    """What became of each strategy that did not win (`losers`), and of what does not fit, may not be, or is not looked
    at."""
    if plan.rows:
        winner = plan.rows[0]
        for row, band in lost:
            yield f"{winner.strategy} over {row.strategy} {row.setup.layout}: {band}; {cause(row, winner)}"
        soonest = min(plan.rows, key=lambda row: row.run_seconds)
        if soonest.run_seconds < (1 - ALIKE) * winner.run_seconds:
            yield (
                f"{soonest.strategy} {soonest.setup.layout} ends sooner, in {soonest.days:.3g} days instead of "
                f"{winner.days:.3g}: its synchronous warm-up is shorter"
            )
    yield from _left_out(plan)


def _left_out(plan: Plan) -> Iterator[str]:
    """What does not fit, is over a limit, or is not looked at."""
    fitting = {row.setup.layout for row in plan.rows}
    shards_fit = {layout.shards for layout in fitting}
    lacking = {shards: held for shards, held in plan.least_bytes.items() if shards not in shards_fit}
    if lacking:
        shards, held = max(lacking.items())
        which = f"{shards} shard{'s' * (shards > 1)}" + " or fewer" * (len(lacking) > 1)
        capacity = format_bytes(plan.wanted.capacity_bytes)
        yield f"{which} of a replica: a rank needs {format_bytes(held)}, and may fill {capacity}"
    if plan.too_large:
        layout, tokens = min(plan.too_large.items(), key=lambda each: each[1])
        least, limit = format_count(tokens), format_count(plan.wanted.max_batch_tokens)
        which = f"groups of {layout.group_ranks} ranks or more"
        yield f"{which}: {least} tokens a step at least, and at most {limit} are allowed"
    short = {layout: rounds for layout, rounds in plan.few_rounds.items() if layout not in fitting}
    if short:
        rounds, least = max(short.values()), plan.wanted.min_rounds
        yield f"{len(short)} layouts: the budget has {rounds} rounds at most, and {least} are wanted"
    if plan.uneven:
        yield f"{plan.uneven} layouts whose shards or groups cut nodes unevenly: not looked at"


def cause(row: Choice, winner: Choice) -> str:
    """What takes the most time more for each token than it takes the winner."""
    own, other = _seconds_per_token(row), _seconds_per_token(winner)
    name = max(own, key=lambda each: own[each] - other[each])
    if own[name] - other[name] < BARELY * sum(own.values()):
        return "no one cause stands out"
    axes: dict[str, Axis] = {"gathers": "shard", "reductions": "shard", "rounds": "group"}
    if name == "reductions" and row.setup.layout.replicas > 1:
        axes[name] = "replica"
    where = _over(row, axes[name]) if name in axes else ""
    return f"{own[name] / sum(own.values()):.0%} of its step goes to {name}{where}"


def _seconds_per_token(choice: Choice) -> dict[str, float]:
    """Where the time goes that is not the model's own computation, for each token of all ranks, and the rest."""
    time, setup = choice.time, choice.setup
    again = sum(unit.forward_seconds for unit in choice.work.units[1:]) * setup.accumulation * setup.recompute
    parts = {
        "gathers": time.gather_exposed_seconds,
        "reductions": time.reduction_exposed_seconds,
        "rounds": time.round_exposed_seconds,
        "clipping and the optimizer": time.clip_seconds + time.optimizer_seconds,
        "computing activations again": again,
        "computing": time.compute_seconds - again,
    }
    return {name: seconds / setup.tokens_per_step for name, seconds in parts.items()}


def _over(choice: Choice, axis: Axis) -> str:
    """Which ranks the collectives of an axis join, and over which tier."""
    members = choice.setup.rings(axis)[0].tolist()
    tier = choice.setup.cluster.tier_between(members)
    return f" over {len(members)} ranks, {'inside nodes' if tier == 'node' else f'across the {tier} tier'}"
