"""Predicted speed-ups as bands: each end is an assumption with a name, never one number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedshard.core.topology import Cluster, Constant, Tier
from fedshard.study.cost import step_seconds
from fedshard.study.plan import Choice
from fedshard.study.stragglers import waiting, with_jitter
from fedshard.study.work import StepWork, step_work

LINKS_LEFT = 0.5
"""Of the links' rate, what is left in the worse case: production networks were seen to lose half of it at 1,024 ranks
(text about arXiv 2408.14090)."""


@dataclass(frozen=True)
class Band:
    """By assumption, how many times as many tokens per second one choice makes as another."""

    by_assumption: dict[str, float]

    @property
    def low(self) -> float:
        """The least."""
        return min(self.by_assumption.values())

    @property
    def high(self) -> float:
        """The most."""
        return max(self.by_assumption.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{ratio:.2f} {name}" for name, ratio in self.by_assumption.items())
        return f"{self.low:.2f}–{self.high:.2f}× ({parts})"


def speedup(choice: Choice, baseline: Choice) -> Band:
    """`choice` over `baseline` with links as the cluster's file has them, at half their rate, and with noise."""
    slower, than = (_at_links(each, LINKS_LEFT) for each in (choice, baseline))
    return Band(
        {
            "links as given": choice.tokens_per_second / baseline.tokens_per_second,
            f"at {LINKS_LEFT:g} of their rate": slower / than,
            "with noise": _with_noise(choice) / _with_noise(baseline),
        }
    )


def _at_links(choice: Choice, left: float) -> float:
    """Tokens per second where all links that leave a node have so much of their rate."""
    setup = replace(choice.setup, cluster=slowed(choice.setup.cluster, left))
    return setup.tokens_per_step / step_seconds(step_work(setup), setup).total_seconds


def _with_noise(choice: Choice) -> float:
    """Tokens per second with collectives as long as they are on average, and uneven ranks."""
    setup = choice.setup
    noisy: StepWork = with_jitter(choice.work, setup)
    seconds = step_seconds(noisy, setup).total_seconds
    return setup.tokens_per_step / (seconds + waiting(setup, choice.time.compute_seconds).total_seconds)


def slowed(cluster: Cluster, left: float) -> Cluster:
    """The cluster with so much of the rate of every link that leaves a node."""

    def part(constant: Constant | None) -> Constant | None:
        return None if constant is None else constant.model_copy(update={"value": constant.value * left})

    def slow(tier: Tier) -> Tier:
        rates = {name: part(getattr(tier, name)) for name in ("link_bytes_per_second", "rank_bytes_per_second")}
        return tier.model_copy(update=rates)

    tiers = {name: tier if name == "node" else slow(tier) for name, tier in cluster.tiers.items()}
    return cluster.model_copy(update={"tiers": tiers})
