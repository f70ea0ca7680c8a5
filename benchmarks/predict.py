"""Predictions of published throughput, each from other rows: the efficiency is calibrated on them, and nothing else.

within    in each family the smallest number of accelerators is calibrated on, and the others are predicted
across    one efficiency for each kind of accelerator, the median of its families'; every row is predicted
order     which of several ways to shard the same model on the same accelerators is faster
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from measured import LeftOut
from published import Published

from fedshard.core.errors import InputError
from fedshard.study.calibrate import at_efficiency, calibrated_efficiency, loaded_work, predicted_step
from fedshard.study.cost import step_seconds


@dataclass(frozen=True)
class Prediction:
    """One row's prediction, and the efficiency that it stands on."""

    row: Published
    efficiency: float
    rank_tokens_per_second: float

    @property
    def error(self) -> float:
        """Predicted over published tokens per second, less one."""
        return self.rank_tokens_per_second / self.row.rank_tokens_per_second - 1


@dataclass(frozen=True)
class Family:
    """Rows that differ in the number of accelerators, and the batch that goes with it."""

    smallest: list[Prediction]
    """On the least accelerators, each calibrated on itself; several where several batches were published."""
    others: list[Published]

    @property
    def accelerator(self) -> str:
        """What it was measured on."""
        return self.smallest[0].row.accelerator

    @property
    def efficiency(self) -> float:
        """The median of those calibrated."""
        return statistics.median(each.efficiency for each in self.smallest)

    def within(self) -> list[Prediction]:
        """The others, each from the calibrated row whose sequences, and then micro-batches, are most like its own."""
        return [predicted(row, min(self.smallest, key=lambda each: _unlike(each.row, row)).efficiency)
                for row in self.others]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two ways to shard the same model on the same accelerators: which is faster, as published and as predicted."""

    faster: Prediction
    slower: Prediction

    @property
    def reproduced(self) -> bool:
        """Whether what is published to be faster is predicted to be."""
        return self.faster.rank_tokens_per_second > self.slower.rank_tokens_per_second


def predicted(row: Published, efficiency: float) -> Prediction:
    """What the formulas say about a row at this efficiency."""
    setup = at_efficiency(row.setup, efficiency)
    if row.near is None:
        seconds = predicted_step(setup, efficiency=efficiency, fused=row.fused).total_seconds
    else:  # one of a block's two gathers is from nearby: each takes the mean of the two
        work, near = (loaded_work(each, fused=row.fused) for each in (setup, replace(setup, layout=row.near)))
        units = [
            replace(far, gather_seconds=(far.gather_seconds + close.gather_seconds) / 2)
            for far, close in zip(work.units, near.units, strict=True)
        ]
        seconds = step_seconds(replace(work, units=tuple(units)), setup).total_seconds
    return Prediction(row, efficiency, setup.rank_tokens * setup.accumulation / seconds)


def families(rows: Iterable[Published]) -> tuple[list[Family], list[LeftOut]]:
    """The families of these rows, and the rows whose seconds no efficiency explains."""
    together: dict[tuple[str, ...], list[Published]] = defaultdict(list)
    for row in rows:
        together[row.family].append(row)
    found, left_out = [], []
    for members in together.values():
        least = min(row.ranks for row in members)
        smallest = []
        for row in (row for row in members if row.ranks == least):
            try:
                efficiency = calibrated_efficiency(row.setup, row.seconds, fused=row.fused)
                smallest.append(Prediction(row, efficiency, row.rank_tokens_per_second))
            except InputError as error:
                left_out.append(LeftOut(f"line {row.line}: {row.model}", error.faults[0].says))
        if smallest:
            found.append(Family(smallest, [row for row in members if row.ranks > least]))
    return found, left_out


def efficiencies(found: Sequence[Family]) -> dict[str, float]:
    """One efficiency for each kind of accelerator that several families were measured on.

    Families that grew are asked first: they were calibrated where they are small, before links matter most.
    """
    constants = {}
    for accelerator in sorted({family.accelerator for family in found}):
        own = [family for family in found if family.accelerator == accelerator]
        grown = [family for family in own if family.others]
        if len(own) > 1:
            constants[accelerator] = statistics.median(family.efficiency for family in grown or own)
    return constants


def across(rows: Iterable[Published], constants: dict[str, float]) -> list[Prediction]:
    """Every row of these kinds of accelerator, from the one efficiency of each."""
    return [predicted(row, constants[row.accelerator]) for row in rows if row.accelerator in constants]


def order(predictions: Iterable[Prediction]) -> list[Pair]:
    """All pairs of rows that differ in how they shard and in nothing else, where one is published to be faster."""
    alike: dict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for each in predictions:
        row, setup = each.row, each.row.setup
        batch = setup.sequence_length, setup.micro_batch, setup.accumulation
        alike[row.source, row.model, row.accelerator, row.ranks, *batch].append(each)
    pairs = []
    for together in alike.values():
        for one, other in combinations(together, 2):
            slower, faster = sorted((one, other), key=lambda each: each.row.rank_tokens_per_second)
            equal = faster.row.rank_tokens_per_second == slower.row.rank_tokens_per_second
            if _sharding(one.row) != _sharding(other.row) and not equal:
                pairs.append(Pair(faster, slower))
    return pairs


def _unlike(one: Published, other: Published) -> tuple[int, int]:
    return (
        abs(one.setup.sequence_length - other.setup.sequence_length),
        abs(one.setup.micro_batch - other.setup.micro_batch),
    )


def _sharding(row: Published) -> tuple[object, ...]:
    return row.setup.layout, row.setup.reshard_after_forward, row.near
