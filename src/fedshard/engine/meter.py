"""Times of a run, taken in plain sight of the loop: no hooks.

meter = Meter(device, profile_every=50, warmup_steps=20)
for step in range(1, steps + 1):
    with meter.step(step):
        ...                                # forward, backward, optimizer
    if due:
        with meter.round():
            ...                            # groups meet
    ...                                    # evaluation, saving, rows: not training time
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch

from fedshard.engine.sample import live_tensor_bytes, sample


class Meter:
    """Adds up the training time of one rank, which is its steps and its rounds.

    Steps whose number is a multiple of `profile_every` (0: none) are sampled: looked at closely, which takes time.
    On the CPU the second step always is, for its memory: by then all state exists. The first `warmup_steps` are
    synchronous. `seconds_before`: training time before a checkpoint that the run goes on from. `clock` gives seconds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        profile_every: int,
        warmup_steps: int,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.step_seconds = 0.0
        """Of the last step, without its round."""
        self.inner_seconds: float | None = None
        """Of the last step: time in which it communicated inside the group, waits for other ranks included. None if
        it was not sampled, or synchronous: then groups speak with each other too, and the two cannot be told apart."""
        self.training_seconds = seconds_before
        """Of all steps and rounds."""
        self._device, self._clock, self._seconds_before = device, clock, seconds_before
        self._profile_every, self._warmup_steps = profile_every, warmup_steps
        self._ends: dict[int, float] = {}  # training seconds at the end of each step, its round included
        self._rounds: list[int] = []  # the steps that a round followed
        self._first_end = 0.0  # the clock at the end of the first step
        self._sampled_peak_bytes = 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Time the step of that number (from 1); what profiling costs before and after it does not count."""
        timed = self._profile_every > 0 and step % self._profile_every == 0
        weighed = self._device.type == "cpu" and len(self._ends) == 1
        with sample(self._device) if timed or weighed else nullcontext() as seen:
            began = self._now()
            yield
            self.step_seconds = self._now() - began
        if not self._ends:
            self._first_end = self._clock()
        self._add(step, self.step_seconds)
        self.inner_seconds = seen.communication_seconds if seen and timed and step > self._warmup_steps else None
        self._sampled_peak_bytes = max(self._sampled_peak_bytes, seen.peak_memory_bytes if seen else 0)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time the round that follows the last step."""
        began = self._now()
        yield
        last = next(reversed(self._ends))
        self._rounds.append(last)
        self._add(last, self._now() - began)

    def eta_seconds(self, steps_left: int) -> float:
        """Wall time until so many more steps are done, at the pace since the first one, which is slower."""
        paced = len(self._ends) - 1
        pace = (self._clock() - self._first_end) / paced if paced else self.step_seconds
        return pace * steps_left

    def steady_tokens_per_second(self, tokens_per_step: int) -> float:
        """Over whole rounds: from the end of the run's first one (the warm-up's, if it has one) to the end of the last
        whole one, so that each H steps bear the cost of exactly one round.

        Where no whole round fits, and without rounds: over all steps but the first tenth.
        """
        first, last = self._whole_rounds() or self._all_but_a_tenth()
        seconds = self._ends[last] - self._ends.get(first, self._seconds_before)
        return (last - first) * tokens_per_step / seconds

    @property
    def peak_memory_bytes(self) -> int:
        """Highest sum of live tensors: CUDA's allocator's; on the CPU of sampled steps, and at least what lives now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(self._sampled_peak_bytes, live_tensor_bytes())

    @property
    def rss_bytes(self) -> int:
        """Highest resident memory of this process so far. Linux counts it in KiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _now(self) -> float:
        """The clock when all that was asked of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def _add(self, step: int, seconds: float) -> None:
        self.training_seconds += seconds
        self._ends[step] = self.training_seconds

    def _whole_rounds(self) -> tuple[int, int] | None:
        """The steps that the first and the last whole round follow; None if there is none between.

        There are none before the end of the warm-up. The last round of a run may come early; it is whole if as many
        steps lie before it as before any other.
        """
        if len(self._rounds) < 2:
            return None
        start = max(next(iter(self._ends)) - 1, self._warmup_steps)
        apart = [after - before for before, after in pairwise([start, *self._rounds])]
        first, last = self._rounds[0], self._rounds[-1 if apart[-1] == max(apart) else -2]
        return (first, last) if last > first else None

    def _all_but_a_tenth(self) -> tuple[int, int]:
        """The last step of the first tenth (the one before the first where there is but one), and the last."""
        first, last = next(iter(self._ends)), next(reversed(self._ends))
        skipped = min(-(-len(self._ends) // 10), len(self._ends) - 1)
        return first - 1 + skipped, last
