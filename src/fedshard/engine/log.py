"""What a group knows of its steps, kept until groups meet, and the rows that come of it.

Between rounds nothing crosses groups, so the rows of H steps are written together, after the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fedshard.engine.agree import agree
from fedshard.engine.evaluate import Evaluation
from fedshard.engine.federate import RoundReport
from fedshard.engine.job import Job
from fedshard.engine.meter import Meter
from fedshard.engine.model import decoder_blocks, flops_per_token
from fedshard.engine.parameters import named_parameters
from fedshard.engine.peaks import peak_flops
from fedshard.engine.rows import EvalRow, Progress, RoundRow, StepRow, Summary
from fedshard.engine.shard import compute_dtype
from fedshard.engine.sinks import Sinks
from fedshard.engine.step import GroupStep


@dataclass
class Log:
    """Keeps a group's steps until groups meet, and hands finished rows to the sinks of rank 0."""

    job: Job
    sinks: Sinks
    meter: Meter
    last_evaluated: int = 0
    _kept: list[GroupStep] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _inner_seconds: list[float | None] = field(default_factory=list)
    _train_loss: float = 0.0
    _router_loss: float | None = None
    _evaluated: Evaluation | None = None
    _flops: int | None = None

    def __post_init__(self) -> None:
        device = self.job.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name)
        if self._peak is not None:
            self._flops = flops_per_token(self.job.config, self.job.recipe.data.sequence_length)

    def step(self, step: int, done: GroupStep) -> None:
        """Keep a step's row, and show how far the run is."""
        course = self.job.course
        self._kept.append(done)
        self._seconds.append(self.meter.step_seconds)
        self._inner_seconds.append(self.meter.inner_seconds)
        next_round = course.timetable.next_round(step) if self.job.federation.federates else None
        self.sinks.progress(
            Progress(
                step=step,
                steps=course.steps,
                loss=done.nll_sum / max(done.label_tokens, 1),
                tokens_per_second=course.tokens_per_step / self.meter.step_seconds,
                next_round=next_round,
                eta_seconds=self.meter.eta_seconds(course.steps - step),
            )
        )

    def exchange(self, step: int, report: RoundReport | None) -> None:
        """Rows of the steps since the last time, from all groups; then the round's. Nothing where there are none."""
        if not self._kept:
            return
        course, groups = self.job.course, self.job.world.layout.groups
        first = step - len(self._kept) + 1
        table = self._all_groups()  # (steps, groups, 5)
        for offset, (of_groups, seconds, inner) in enumerate(
            zip(table.tolist(), table[:, :, 4].amax(1).tolist(), self._inner_seconds, strict=True)
        ):
            nll, labels, router, norms, _ = zip(*of_groups, strict=True)
            self._train_loss = sum(nll) / max(sum(labels), 1)
            self._router_loss = sum(router) / groups if any(router) else None
            now = first + offset
            speed = course.tokens_per_step / seconds
            self.sinks.step(
                StepRow(
                    step=now,
                    tokens=course.tokens(now),
                    loss=self._train_loss,
                    group_losses=[each / max(count, 1) for each, count in zip(nll, labels, strict=True)],
                    learning_rate=self._kept[offset].learning_rate,
                    grad_norms=list(norms),
                    tokens_per_second=speed,
                    seconds=seconds,
                    inner_seconds=inner,
                    router_loss=self._router_loss,
                    mfu=self._mfu(speed),
                )
            )
        self._kept, self._seconds, self._inner_seconds = [], [], []
        if report is not None:
            self.sinks.round(round_row(report, step, course.tokens(step)))

    def evaluation(self, step: int, result: Evaluation) -> None:
        """An evaluation's row."""
        self.last_evaluated, self._evaluated = step, result
        self.sinks.evaluation(
            EvalRow(step, self.job.course.tokens(step), result.loss, result.perplexity, result.sequences)
        )

    def summary(self) -> Summary:
        """What is left of the run."""
        recipe, course, meter = self.job.recipe, self.job.course, self.meter
        assert self._evaluated is not None, "the end is always evaluated"
        peaks = torch.tensor([meter.peak_memory_bytes, meter.rss_bytes], dtype=torch.float64)
        peak_memory, rss = agree(peaks, self.job.world.mesh, dist.ReduceOp.MAX).tolist()
        speed = course.tokens(course.steps) / meter.training_seconds
        summary = Summary(
            strategy=recipe.strategy,
            layout=str(recipe.shape),
            tokens=course.tokens(course.steps),
            steps=course.steps,
            rounds=self.job.federation.rounds,
            seconds=meter.training_seconds,
            tokens_per_second=speed,
            steady_tokens_per_second=meter.steady_tokens_per_second(course.tokens_per_step),
            train_loss=self._train_loss,
            eval_loss=self._evaluated.loss,
            eval_perplexity=self._evaluated.perplexity,
            round_sent_bytes=self.job.federation.sent_bytes,
            peak_memory_bytes=int(peak_memory),
            rss_bytes=int(rss),
            mfu=self._mfu(speed),
            router_loss=self._router_loss,
        )
        self.sinks.summary(summary)
        return summary

    def _all_groups(self) -> torch.Tensor:
        """What each group knows of the kept steps: (steps, groups, 5). One message per rank crosses groups."""
        world, federates = self.job.world, self.job.federation.federates
        table = torch.zeros(len(self._kept), world.layout.groups, 5, dtype=torch.float64)
        if world.rank % world.layout.group_ranks == 0 or not federates:  # one rank speaks for its group
            for row, done, seconds in zip(table, self._kept, self._seconds, strict=True):
                known = [done.nll_sum, done.label_tokens, done.router_loss, done.grad_norm, seconds]
                row[world.place.group] = torch.tensor(known, dtype=torch.float64)
        return agree(table, world.mesh) if federates else table

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation: what the ranks achieve of their devices' peak."""
        if self._peak is None or self._flops is None:
            return None
        return self._flops * tokens_per_second / self.job.world.layout.ranks / self._peak


def round_row(report: RoundReport, step: int, tokens: int) -> RoundRow:
    """A round as the run folder has it. It blocks, so all of its seconds are exposed."""
    return RoundRow(
        round=report.round,
        step=step,
        tokens=tokens,
        sent_bytes=report.sent_bytes,
        seconds=report.seconds,
        exposed_seconds=report.seconds,
        delta_norm=report.delta_norm,
        group_delta_norms=report.group_delta_norms,
        agreement=report.agreement,
        spread=report.spread,
        weights=report.weights,
        excluded=report.excluded,
    )


def fsdp_bytes(job: Job) -> int:
    """What FSDP over all ranks would send between groups from one round to the next, for each rank of a group.

    Its ring leaves each group once, and each crossing carries (N−1)/N of the padded parameters per gather and per
    reduction. For each micro-batch blocks are gathered twice, in the type of computation, the root once, because FSDP2
    keeps it from the forward pass to the backward pass; and all are reduced once (DESIGN section 7).
    """
    recipe, world = job.recipe, job.world
    ranks, train = world.layout.ranks, recipe.train
    gathered = compute_dtype(train, world.device.type).itemsize
    reduced = getattr(torch, train.reduce_dtype).itemsize
    blocks = tuple(f"{name}." for name, _ in decoder_blocks(job.model))
    per_step = 0
    for name, parameter in named_parameters(job.model).items():
        padded = -(-parameter.shape[0] // ranks) * parameter.shape[1:].numel()
        gathers = 2 if name.startswith(blocks) else 1
        per_step += (ranks - 1) * padded * (gathers * gathered + reduced) * train.accumulation
    return recipe.sync.every * per_step // world.layout.group_ranks
