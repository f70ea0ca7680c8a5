"""Predicted speed-ups as bands: each end is an assumption with a name, never one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fedshard.core.layout import Layout
from fedshard.core.topology import Cluster, Constant, Tier
from fedshard.study.choice import Choice
from fedshard.study.cost import step_seconds
from fedshard.study.plan import scaled
from fedshard.study.stragglers import waiting, with_jitter
from fedshard.study.work import StepWork, step_work

LINKS_LEFT = 0.5
"""Of the links' rate, what is left where a cluster's file does not say how it falls: production networks were seen to
lose half of it at 1,024 ranks (text about arXiv 2408.14090)."""


Rates = dict[str, float]
"""Tokens per second by assumption."""


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


@dataclass(frozen=True)
class Assumption:
    """What the links give, and whether times scatter."""

    name: str
    cluster: Cluster
    noise: bool = False
    easier: bool = False
    """Whether anything may be faster under it than as the cluster's file has it."""

    def most(self, choices: Iterable[Choice]) -> float:
        """Tokens per second of the best of `choices` under it. Those that cannot be the best are not worked out.

        A choice keeps its H, which a recipe would hold.
        """
        bound = _ideal if self.easier else _given
        works: dict[Layout, StepWork] = {}
        best = 0.0
        for choice in sorted(choices, key=bound, reverse=True):
            if bound(choice) <= best:
                break
            best = max(best, self._tokens_per_second(choice, works))
        return best

    def _tokens_per_second(self, choice: Choice, works: dict[Layout, StepWork]) -> float:
        """Of one choice; `works` keeps the pieces of a layout, which its other choices need too."""
        setup, layout = replace(choice.setup, cluster=self.cluster), choice.setup.layout
        if self.cluster is choice.setup.cluster and not self.noise:
            return choice.tokens_per_second
        if layout not in works:
            work = step_work(replace(setup, micro_batch=1, recompute=False))
            works[layout] = with_jitter(work, setup) if self.noise else work
        seconds = step_seconds(scaled(works[layout], setup.micro_batch, setup.recompute), setup).total_seconds
        if self.noise:
            seconds += waiting(setup, choice.time.compute_seconds).total_seconds
        return setup.tokens_per_step / seconds


def assumptions(cluster: Cluster) -> list[Assumption]:
    """Nominal links, links as they were observed, and noise as the cluster's file has it.

    A file that says how rates fall with size and ranks is observed, and nominal without that; one that does not is
    nominal, and half of its rates stand for what may be observed.
    """
    noise = Assumption("with noise", cluster, noise=True)
    if any(tier.efficiency for name, tier in cluster.tiers.items() if name != "node"):
        return [
            Assumption("nominal links", _outside(cluster, _without_loss), easier=True),
            Assumption("observed links", cluster),
            noise,
        ]
    slower = Assumption(f"links at {LINKS_LEFT:g} of their rate", slowed(cluster, LINKS_LEFT))
    return [Assumption("nominal links", cluster), slower, noise]


def rates(choices: Sequence[Choice]) -> Rates:
    """What the best of `choices` makes, sought anew under each assumption. They lie on one cluster."""
    return {each.name: each.most(choices) for each in assumptions(choices[0].setup.cluster)}


def speedup(faster: Rates, slower: Rates) -> Band:
    """The one over the other."""
    return Band({name: faster[name] / slower[name] for name in faster})


def slowed(cluster: Cluster, left: float) -> Cluster:
    """The cluster with so much of the rate of every link that leaves a node."""

    def part(constant: Constant | None) -> Constant | None:
        return None if constant is None else constant.model_copy(update={"value": constant.value * left})

    def slow(tier: Tier) -> Tier:
        rates = {name: part(getattr(tier, name)) for name in ("link_bytes_per_second", "rank_bytes_per_second")}
        return tier.model_copy(update=rates)

    return _outside(cluster, slow)


def _outside(cluster: Cluster, change: Callable[[Tier], Tier]) -> Cluster:
    """The cluster with every link changed that leaves a node."""
    tiers = {name: tier if name == "node" else change(tier) for name, tier in cluster.tiers.items()}
    return cluster.model_copy(update={"tiers": tiers})


def _without_loss(tier: Tier) -> Tier:
    return tier.model_copy(update={"efficiency": None})


def _given(choice: Choice) -> float:
    """Tokens per second as the cluster's file has it."""
    return choice.tokens_per_second


def _ideal(choice: Choice) -> float:
    """Tokens per second without any wait for links: no assumption about them makes more."""
    time = choice.time
    return choice.setup.tokens_per_step / (time.compute_seconds + time.clip_seconds + time.optimizer_seconds)
