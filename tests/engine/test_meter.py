"""Times on a clock that the test turns; memory and communication in cases whose answer is known."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from fedshard.core.layout import Layout
from fedshard.core.timetable import Timetable
from fedshard.engine.meter import Meter
from fedshard.engine.ring import RingReduceScatter
from fedshard.engine.sample import communication_seconds, highest_growth, live_tensor_bytes, sample
from fedshard.testing import RankContext, RankPool

CPU = torch.device("cpu")
TOKENS = 100  # per step


class Clock:
    """Stands still but for `pass_seconds`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def pass_seconds(self, seconds: float) -> None:
        self.seconds += seconds


def measured(
    timetable: Timetable, steps: range, slow: range, rounds: bool = True, evaluate_seconds: float = 0.0
) -> tuple[Meter, Clock]:
    """A run whose steps take 1 s (`slow` ones 10 s) and whose rounds take 2 s."""
    clock = Clock()
    meter = Meter(CPU, profile_every=0, warmup_steps=timetable.warmup_steps, clock=clock)
    for step in steps:
        with meter.step(step):
            clock.pass_seconds(10.0 if step in slow else 1.0)
        if rounds and timetable.due(step):
            with meter.round():
                clock.pass_seconds(2.0)
        clock.pass_seconds(evaluate_seconds)
    return meter, clock


def test_training_time_is_steps_and_rounds():
    meter, _ = measured(Timetable(4, 0, 8), range(1, 9), slow=range(1, 2), evaluate_seconds=50.0)
    assert meter.training_seconds == 10 + 7 + 2 * 2
    assert meter.step_seconds == 1.0


def test_steady_speed_is_of_whole_rounds_after_the_warm_up():
    """Rounds after 6, 10, 14 and, early, 16: the whole ones are 7 to 10 and 11 to 14."""
    meter, _ = measured(Timetable(4, 6, 16), range(1, 17), slow=range(1, 7))
    assert meter.steady_tokens_per_second(TOKENS) == 8 * TOKENS / (8 * 1 + 2 * 2)


def test_steady_speed_without_warm_up_leaves_out_the_first_round():
    meter, _ = measured(Timetable(4, 0, 12), range(1, 13), slow=range(1, 5))
    assert meter.steady_tokens_per_second(TOKENS) == 8 * TOKENS / (8 * 1 + 2 * 2)


def test_the_last_round_counts_if_it_is_whole():
    meter, _ = measured(Timetable(5, 3, 8), range(1, 9), slow=range(1, 4))
    assert meter.steady_tokens_per_second(TOKENS) == 5 * TOKENS / (5 + 2)


def test_steady_speed_without_rounds_leaves_out_a_tenth():
    meter, _ = measured(Timetable(4, 0, 20), range(1, 21), slow=range(1, 3), rounds=False)
    assert meter.steady_tokens_per_second(TOKENS) == 18 * TOKENS / 18


def test_steady_speed_where_no_whole_round_fits():
    """Rounds after 10 and, early, 14: 2 of 14 steps are left out, and both rounds count."""
    meter, _ = measured(Timetable(10, 0, 14), range(1, 15), slow=range(1, 3))
    assert meter.steady_tokens_per_second(TOKENS) == 12 * TOKENS / (12 + 2 * 2)


def test_steady_speed_of_one_step():
    meter, _ = measured(Timetable(4, 0, 1), range(1, 2), slow=range(0), rounds=False)
    assert meter.steady_tokens_per_second(TOKENS) == TOKENS


def test_steady_speed_of_a_run_that_went_on_in_mid_round():
    """From step 8 on: rounds after 10, 14, 18; the first one is not whole."""
    meter, _ = measured(Timetable(4, 2, 18), range(8, 19), slow=range(8, 11))
    assert meter.steady_tokens_per_second(TOKENS) == 8 * TOKENS / (8 + 2 * 2)


def test_time_left_is_wall_time_at_the_pace_since_the_first_step():
    meter, clock = measured(Timetable(4, 0, 4), range(1, 2), slow=range(1, 2), rounds=False)
    assert meter.eta_seconds(3) == 30.0
    clock.pass_seconds(5.0)  # an evaluation
    with meter.step(2):
        clock.pass_seconds(1.0)
    assert meter.eta_seconds(2) == 12.0


@pytest.mark.parametrize(
    ("profile_every", "warmup_steps", "expected"),
    [(3, 0, [3, 6, 9]), (3, 4, [6, 9]), (0, 0, [])],
    ids=["every third", "not synchronous ones", "off"],
)
def test_which_steps_tell_their_communication(profile_every: int, warmup_steps: int, expected: list[int]):
    meter = Meter(CPU, profile_every=profile_every, warmup_steps=warmup_steps)
    told = []
    for step in range(1, 11):
        with meter.step(step):
            torch.ones(1)
        if meter.inner_seconds is not None:
            told.append(step)
    assert told == expected


@pytest.mark.parametrize("first", [1, 101], ids=["from the start", "of a run that goes on"])
def test_the_second_step_is_weighed_where_sampling_is_off(first: int):
    meter = Meter(CPU, profile_every=0, warmup_steps=0)
    others = live_tensor_bytes()
    for step, numel in enumerate((3_000_000, 2_000_000, 4_000_000), start=first):
        with meter.step(step):
            torch.zeros(numel)
    assert meter.peak_memory_bytes - others == pytest.approx(8e6, rel=0.01)


def test_a_failing_step_leaves_no_profiler_behind():
    meter = Meter(CPU, profile_every=1, warmup_steps=0)
    with pytest.raises(ZeroDivisionError), meter.step(2):
        raise ZeroDivisionError
    with meter.step(3):
        pass
    assert meter.inner_seconds == 0.0


def test_live_tensors_count_each_storage_once():
    before = live_tensor_bytes()
    whole = torch.zeros(1_000_000)
    views = [whole[10:], whole.view(1000, 1000), torch.nn.Parameter(whole)]
    assert live_tensor_bytes() - before == 4_000_000
    freed = torch.zeros(1_000_000)
    freed.untyped_storage().resize_(0)  # what FSDP2 does with a unit's gathered parameters
    assert live_tensor_bytes() - before == 4_000_000
    assert len(views) == 3


def sharded_bytes(context: RankContext) -> tuple[int, int]:
    """By how much a sharded model adds to the live bytes, and its local shards' bytes."""
    from torch.distributed.fsdp import fully_shard

    before = live_tensor_bytes()
    model = torch.nn.Linear(1024, 1024, bias=False)
    fully_shard(model, mesh=context.mesh["shard"])
    return live_tensor_bytes() - before, 1024 * 1024 * 4 // 2


def test_live_tensors_of_a_sharded_model_are_its_shards(ranks: RankPool):
    for counted, shards in ranks.run(sharded_bytes, Layout(1, 1, 2)):
        assert counted == pytest.approx(shards, rel=0.01)


def test_peak_memory_of_a_step_with_a_known_answer():
    """10 MB before; in the step 3 × 8 MB at once, two of them given back before 4 MB more come."""
    meter = Meter(CPU, profile_every=1, warmup_steps=0)
    others = live_tensor_bytes()
    kept = torch.zeros(2_500_000)
    with meter.step(2):
        three = [torch.zeros(2_000_000) for _ in range(3)]
        del three[1:]
        small = torch.zeros(1_000_000)
    del three, small, kept
    assert meter.peak_memory_bytes - others == pytest.approx(10e6 + 24e6, rel=0.01)
    with meter.step(3):
        pass  # a smaller step does not lower the peak
    assert meter.peak_memory_bytes - others == pytest.approx(10e6 + 24e6, rel=0.01)


def test_peak_memory_of_a_backward_pass():
    """Six arrays of n² at once, in the backward pass of the second product: products 1 and 3, the gradients of
    products 1 and 2, and two parts of w's. Product 2 is gone by then, and product 3's gradient is one number."""
    n = 500
    x, w = torch.ones(n, n), torch.ones(n, n, requires_grad=True)
    others = live_tensor_bytes()
    with sample(CPU) as seen:
        product = x
        for _ in range(3):
            product = product * w
        product.sum().backward()
    assert seen.peak_memory_bytes - others == pytest.approx(6 * 4 * n * n, rel=0.01)


def test_without_a_sample_the_peak_is_what_lives():
    meter = Meter(CPU, profile_every=0, warmup_steps=0)
    others = meter.peak_memory_bytes
    kept = torch.zeros(1_000_000)
    assert meter.peak_memory_bytes - others == kept.nbytes


def test_resident_memory_is_in_bytes():
    assert 100e6 < Meter(CPU, profile_every=0, warmup_steps=0).rss_bytes < 100e9  # torch alone takes over 100 MB


@dataclass
class FakeEvent:
    called: str
    start: int = 0
    duration: int = 0
    bytes_: int = 0
    where: DeviceType = DeviceType.CPU

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def nbytes(self) -> int:
        return self.bytes_

    def device_type(self) -> DeviceType:
        return self.where


def test_communication_is_the_union_of_its_intervals():
    events = [
        FakeEvent("gloo:all_reduce", 4_000, 3_000),  # 4 to 7 µs, overlaps the next
        FakeEvent("gloo:all_gather", 1_000, 4_000),  # 1 to 5 µs
        FakeEvent("gloo:send", 2_000, 1_000),  # inside it
        FakeEvent("gloo:recv", 9_000, 500),
        FakeEvent("aten::mm", 20_000, 9_000),
        FakeEvent("nccl:all_reduce", 30_000, 9_000),  # only its launch
        FakeEvent("ncclDevKernel_AllGather_RING_LL", 40_000, 2_000, where=DeviceType.CUDA),
    ]
    assert communication_seconds(events, DeviceType.CPU) == pytest.approx(6.5e-6)
    assert communication_seconds(events, DeviceType.CUDA) == pytest.approx(2e-6)
    assert communication_seconds([], DeviceType.CPU) == 0.0


def test_growth_follows_the_order_of_time():
    events = [FakeEvent("[memory]", 3, bytes_=50), FakeEvent("[memory]", 1, bytes_=30), FakeEvent("aten::mm", 2)]
    events += [FakeEvent("[memory]", 2, bytes_=-30), FakeEvent("[memory]", 0, bytes_=999, where=DeviceType.CUDA)]
    assert highest_growth(events) == 50
    assert highest_growth([FakeEvent("[memory]", 1, bytes_=-5)]) == 0


def wait_for_the_last(context: RankContext) -> tuple[float | None, float]:
    """Both meet, since profilers start at their own pace; rank 1 comes 0.4 s late to the next collective."""
    meter = Meter(CPU, profile_every=1, warmup_steps=0)
    with meter.step(2):
        dist.barrier(context.world.group)
        if context.rank == 1:
            time.sleep(0.4)
        numbers = torch.ones(4)
        dist.all_reduce(numbers, group=context.world.group)
        RingReduceScatter()(torch.empty(2), numbers, context.world.group, dist.ReduceOp.SUM)
    return meter.inner_seconds, meter.step_seconds


def messages_alone(context: RankContext) -> float | None:
    meter = Meter(CPU, profile_every=1, warmup_steps=0)
    with meter.step(2):
        RingReduceScatter()(torch.empty(2), torch.ones(4), context.world.group, dist.ReduceOp.SUM)
    return meter.inner_seconds


def test_inner_seconds_hold_the_wait_for_a_late_rank(ranks: RankPool):
    (early, early_step), (late, late_step) = ranks.run(wait_for_the_last, Layout(1, 1, 2))
    assert early is not None
    assert late is not None
    assert 0.2 < early <= early_step
    assert 0 < late <= late_step - 0.4


def test_inner_seconds_hold_messages_too(ranks: RankPool):
    assert all(seconds is not None and seconds > 0 for seconds in ranks.run(messages_alone, Layout(1, 1, 2)))
