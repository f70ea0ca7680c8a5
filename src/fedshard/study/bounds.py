"""What follows from volume alone, whatever the schedule: which links hide FSDP, and how much rounds can gain.

Derivations: docs/formal/bounds.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedshard.core.layout import Layout
from fedshard.study.cost import leaving_bytes, step_seconds
from fedshard.study.setup import Setup
from fedshard.study.work import step_work


@dataclass(frozen=True)
class SpeedupBound:
    """How many times as fast as a baseline a setup can be at most, by two arguments."""

    traffic: float
    """What leaves a node, baseline's over setup's: reached where links are so slow that computing takes no time."""
    compute: float
    """The baseline's step over the setup's with all communication taken off."""

    @property
    def least(self) -> float:
        """The tighter one."""
        return min(self.traffic, self.compute)


def balance_bytes_per_second(
    flops_per_second: float, rank_tokens: float, gather_bytes: float = 2.0, reduce_bytes: float = 2.0
) -> float:
    """Rate that a node's links need for FSDP over many nodes to hide its traffic; model and ranks cancel.

    `flops_per_second` is what one rank achieves, `rank_tokens` what it takes in one micro-batch; bytes are of one
    element. Equation (bounds-balance).

    >>> round(balance_bytes_per_second(0.43 * 312e12, 4096) / 1e9, 1)
    32.8
    """
    return (2 * gather_bytes + reduce_bytes) / 6 * flops_per_second / rank_tokens


def break_even_every(
    layout: Layout, *, sliced: bool = True, reduce_bytes: float = 2.0, round_bytes: float = 2.0
) -> float:
    """The H from which FL+HSDP sends less out of a node than HSDP over the same ranks.

    For shards that fill a node and replicas on nodes of their own. What HSDP saves by smaller replica rings and what
    rounds cost are in proportion to the model, which cancels. Equation (bounds-break-even).

    >>> break_even_every(Layout(groups=16, replicas=8, shards=4), sliced=False)
    8.0
    """
    groups, replicas = layout.groups, layout.replicas
    assert groups > 1, f"{layout} has no rounds"
    apart = (groups - 1) / groups
    owners = replicas if sliced else 1
    inside = (replicas - 1) / replicas if sliced else 0.0
    of_a_round = round_bytes * (2 * apart / owners + inside)
    saved = reduce_bytes * 2 * apart / replicas
    return of_a_round / saved


def speedup_bound(baseline: Setup, setup: Setup) -> SpeedupBound:
    """What `setup` can gain over `baseline` at most, tokens for tokens. Equation (bounds-speedup).

    Both take the same tokens in a step and lie on the same cluster.
    """
    assert baseline.tokens_per_step == setup.tokens_per_step, "steps of unequal tokens cannot be compared"
    left = leaving_bytes(setup, "node")
    time = step_seconds(step_work(setup), setup)
    least = time.compute_seconds + time.optimizer_seconds
    return SpeedupBound(
        traffic=leaving_bytes(baseline, "node") / left if left else float("inf"),
        compute=step_seconds(step_work(baseline), baseline).total_seconds / least,
    )
