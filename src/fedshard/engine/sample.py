"""A close look at one step: how long it communicates, and what memory it takes at most.

torch's profiler is on for as long as the block runs, so this is for a few steps of many. On CUDA memory needs no look:
the allocator keeps its own peak.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MEMORY = "[memory]"
"""What the profiler calls an event that takes memory or gives it back."""


class Event(Protocol):
    """What is asked of an event of the profiler."""

    def name(self) -> str: ...
    def device_type(self) -> DeviceType: ...
    def start_ns(self) -> int: ...
    def duration_ns(self) -> int: ...
    def nbytes(self) -> int: ...


@dataclass
class Sample:
    """What was seen of a block of code, once it is done."""

    communication_seconds: float = 0.0
    """Time in which at least one collective or message of this rank was under way."""
    peak_memory_bytes: int = 0
    """Highest sum of live tensors; CPU only, 0 on CUDA."""


@contextmanager
def sample(device: torch.device) -> Iterator[Sample]:
    """Look at what this rank does in the block; the result is filled in when it ends.

    On CUDA, kernels must be done (a synchronisation) before the block ends. On the CPU a block of memory that was
    taken before and is given back inside still counts, so the peak may be too high by it, never too low.
    """
    seen = Sample()
    on_cpu = device.type == "cpu"
    before = live_tensor_bytes() if on_cpu else 0
    profiler = profile(use_device=None if on_cpu else device.type, profile_memory=on_cpu)
    with profiler:
        yield seen
    assert profiler.kineto_results is not None, "the profiler has ended"
    events: list[Any] = profiler.kineto_results.events()  # torch's stub of an event lacks `nbytes`
    seen.communication_seconds = communication_seconds(events, DeviceType.CPU if on_cpu else DeviceType.CUDA)
    seen.peak_memory_bytes = before + highest_growth(events) if on_cpu else 0


def live_tensor_bytes() -> int:
    """Bytes of all CPU tensors that Python can reach, each storage once, whatever views it."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # A wrapper, such as a DTensor, has no storage of its own; the tensors in it are found by themselves.
        if issubclass(type(thing), torch.Tensor) and not is_traceable_wrapper_subclass(thing):
            storage = thing.untyped_storage()
            if storage.device.type == "cpu":
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def communication_seconds(events: Iterable[Event], where: DeviceType) -> float:
    """The union of the intervals in which gloo (on the CPU) or NCCL (on CUDA) works, or waits for other ranks."""
    backend = "gloo:" if where == DeviceType.CPU else "nccl"
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith(backend) and event.device_type() == where
    )
    covered_ns, until = 0, 0
    for start, end in spans:
        covered_ns += max(0, end - max(start, until))
        until = max(until, end)
    return covered_ns / 1e9


def highest_growth(events: Iterable[Event]) -> int:
    """By how many bytes the CPU's live memory grew at most, from the start of the events."""
    changes = [event for event in events if event.name() == MEMORY and event.device_type() == DeviceType.CPU]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))
