import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshard.engine.values import Constant, Normal, Piece, Uniform, initial_values, uniform_draws


def whole(law, numel=1000):
    return [Piece(law, 0, numel)]


@given(st.integers(0, 999), st.integers(0, 1000), st.sampled_from([Normal(std=0.02), Uniform(-1, 1), Constant(2.0)]))
def test_a_range_is_a_range_of_the_whole(start, length, law):
    numel = min(length, 1000 - start)
    values = initial_values(7, "head.weight", whole(law), 0, 1000)
    assert torch.equal(initial_values(7, "head.weight", whole(law), start, numel), values[start : start + numel])


def test_far_ranges_cost_nothing():
    far = 10**12
    values = initial_values(0, "head.weight", [Piece(Normal(), 0, 2 * far)], far, 8)
    assert torch.equal(values[3:], initial_values(0, "head.weight", [Piece(Normal(), 0, 2 * far)], far + 3, 5))


def test_values_stay_what_they_were():
    """A change here changes every run's start: it must be meant, and said in the changelog."""
    values = initial_values(0, "model.embed_tokens.weight", whole(Normal(std=0.02)), 0, 3)
    expected = torch.tensor([-0.0032704752352141343, -0.017573979751460606, 0.0483183989959902], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)


def test_seed_and_name_decide():
    def values(seed, name):
        return initial_values(seed, name, whole(Normal(), 20_000), 0, 20_000)

    base = values(0, "layers.1.weight")
    for other in (values(1, "layers.1.weight"), values(0, "layers.2.weight"), values(0, "layers.1.bias")):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 0.03  # 4 standard errors


def test_draws_are_uniform_inside_the_open_interval():
    draws = uniform_draws(0, "x", 0, 100_000)
    assert 0 < draws.min() < 1e-4
    assert 1 - 1e-4 < draws.max() < 1
    counts = torch.histc(draws, 10, 0, 1)
    assert ((counts - 10_000).abs() < 5 * math.sqrt(10_000)).all()
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1].item()) < 0.015


def test_the_extreme_draws_have_finite_quantiles():
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert Normal().quantile(ends).tolist() == pytest.approx([-8.2095, 8.2095], abs=1e-3)


def test_normal_quantiles():
    quantiles = Normal(mean=1.0, std=2.0).quantile(torch.tensor([0.5, 0.975, 0.1], dtype=torch.float64))
    assert quantiles.tolist() == pytest.approx([1.0, 1 + 2 * 1.959963984540054, 1 - 2 * 1.2815515655446004])


def test_normal_between_bounds():
    """A standard normal between −1 and 2: its median halves the mass between them."""
    law = Normal(low=-1.0, high=2.0)
    below, above = 0.15865525393145707, 0.9772498680518208
    median = law.quantile(torch.tensor([0.5], dtype=torch.float64)).item()
    assert 0.5 * (1 + math.erf(median / math.sqrt(2))) == pytest.approx((below + above) / 2)
    values = initial_values(0, "x", whole(law, 50_000), 0, 50_000)
    assert -1 <= values.min() < -0.999
    assert 1.99 < values.max() <= 2
    phi = [math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) for x in (-1.0, 2.0)]
    assert values.mean().item() == pytest.approx((phi[0] - phi[1]) / (above - below), abs=0.015)


def test_uniform_quantiles():
    assert Uniform(-2.0, 4.0).quantile(torch.tensor([0.5, 0.25])).tolist() == [1.0, -0.5]


def test_later_pieces_count():
    """A padding row of zeros in a table of normals, cut in its middle."""
    pieces = [Piece(Normal(), 0, 40), Piece(Constant(0.0), 8, 16)]
    values = initial_values(0, "table", pieces, 4, 8)
    assert (values[:4] != 0).all()
    assert values[4:].tolist() == [0.0] * 4
    assert torch.equal(values[:4], initial_values(0, "table", pieces[:1], 4, 4))


def test_an_empty_range_is_empty():
    assert initial_values(0, "x", whole(Normal()), 500, 0).shape == (0,)
