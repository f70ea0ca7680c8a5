"""The inner optimizer: its learning rate at the edges, what decays, and where it clips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedshard.core.recipe import OptimizerSection, ScheduleSection
from fedshard.engine.inner import Inner, make_optimizer, schedule_factor


def factors(warmup: int, decay: int, total: int, kind: str = "linear", final: float = 0.0) -> list[float]:
    """Each step's factor, for a schedule given in steps."""
    schedule = ScheduleSection(kind=kind, warmup_fraction=min(warmup / total, 1.0), final_fraction=final)
    return [schedule_factor(schedule, step / total, (step + 1) / total) for step in range(total)]


def test_warm_up_two_of_ten():
    """Trap G7: the first value is above 0, the peak is exactly 1."""
    assert factors(2, 8, 10) == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])


@pytest.mark.parametrize(
    ("warmup", "decay", "total"), [(0, 10, 10), (10, 0, 10), (4, 4, 10), (6, 6, 10), (0, 0, 1), (20, 0, 10)]
)
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_no_edge_divides_by_zero_or_goes_negative(warmup, decay, total, kind):
    """Trap G7."""
    made = factors(warmup, decay, total, kind)
    assert all(0 < factor <= 1 for factor in made)
    assert max(made) == 1


def test_cosine_at_45_of_100():
    """Trap G3: T = 100, peak 1e-3: after 45 steps 5.782e-4, then 5.627e-4."""
    made = factors(0, 100, 100, "cosine")
    assert 1e-3 * made[45] == pytest.approx(5.782e-4, abs=5e-8)
    assert 1e-3 * made[46] == pytest.approx(5.627e-4, abs=5e-8)


def test_the_end_is_the_final_fraction():
    schedule = ScheduleSection(kind="cosine", warmup_fraction=0.0, final_fraction=0.1)
    assert schedule_factor(schedule, 1.0, 1.0) == pytest.approx(0.1)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    model[1].bias.requires_grad_(False)
    groups = make_optimizer(model, OptimizerSection(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], [tuple(each.shape) for each in group["params"]]) for group in groups] == [
        (0.1, [(4, 3), (3, 3)]),
        (0.0, [(3,), (3,)]),
    ]


@pytest.mark.parametrize(("clip", "expected"), [(1.0, 0.2), (0.0, 1.0), (10.0, 1.0)])
def test_clipping_by_the_norm_that_is_given(clip, expected):
    """A gradient of norm 5 under a clip of 1 is scaled by 0.2; 0 never clips."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    section = OptimizerSection(kind="sgd", learning_rate=1.0)
    inner = Inner(model, section, ScheduleSection(kind="constant", warmup_fraction=0.0), clip)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = math.sqrt(inner.square_norm().item())
    assert norm == pytest.approx(5.0)
    assert inner.step(norm, 0.0, 0.1) == 1.0
    torch.testing.assert_close(model.weight.detach(), -expected * torch.tensor([[3.0, 4.0]]))


def test_moments_are_forgotten():
    model = nn.Linear(2, 1)
    inner = Inner(model, OptimizerSection(), ScheduleSection(), 0.0)
    model(torch.ones(1, 2)).sum().backward()
    inner.step(1.0, 0.0, 0.1)
    assert inner.optimizer.state
    inner.reset_moments()
    assert not inner.optimizer.state
