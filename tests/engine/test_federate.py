"""Rounds, from the identities of the design: what must hold whatever the layout."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fedshard.core.errors import InputError, RunError
from fedshard.core.layout import Layout
from fedshard.engine.federate import Federation, RoundReport
from fedshard.engine.outer import Mean, Momentum, Nesterov, OuterOptimizer
from fedshard.engine.shard import shard_mesh, units
from fedshard.testing import RankContext, RankPool, Traffic

WIDTHS = (6, 5, 3)  # 5 and 3 rows over 2 shards: uneven parts; biases of 3 over 2 × 2: an empty owned slice


def make_model(seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]).to(dtype)


def sharded(context: RankContext, model: nn.Module) -> nn.Module:
    mesh = shard_mesh(context.mesh)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def batch(slots: list[int]) -> torch.Tensor:
    return torch.stack([torch.randn(WIDTHS[0], generator=torch.Generator().manual_seed(s)) for s in slots]).double()


def full(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def backward(context: RankContext, model: nn.Module, slots: list[int]) -> int:
    """The group's mean squared output over `slots`, split over its ranks; returns this rank's count."""
    mine = slots[context.rank % context.layout.group_ranks :: context.layout.group_ranks]
    loss = model(batch(mine)).square().sum() / len(slots)
    loss.backward()
    return len(mine)


def train(
    context: RankContext, steps: int, every: int, outer: OuterOptimizer | None, group_sequences: int,
    optimizer: str = "sgd", warmup_steps: int = 0, same_data: bool = False, federated: bool = True,
    order: list[int] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    model = sharded(context, make_model())
    inner = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer == "sgd" else torch.optim.AdamW(model.parameters())
    federation = Federation(model, context.mesh, every=every, outer=outer, warmup_steps=warmup_steps, steps=steps)
    federation.start()
    group = (order or list(range(context.layout.groups)))[context.world.place.group]
    tokens = 0
    for step in range(1, steps + 1):
        start = step * 1000 + (0 if same_data else group * group_sequences)
        tokens += backward(context, model, list(range(start, start + group_sequences)))
        if federated and federation.timetable.synchronous(step):
            federation.average_gradients(group_sequences)
        inner.step()
        inner.zero_grad()
        if federated and federation.due(step):
            (federation.finish if step == steps else federation.round)(tokens)
            tokens = 0
    return full(model)


def close(one: list[torch.Tensor], other: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)])
def test_one_group_under_mean_is_no_federation(ranks: RankPool, shape, every):
    """Identity 1 (and trap A3): bit-equal, for every H."""
    federated = ranks.run(train, Layout(*shape), 7, every, Mean(), 4, "adamw")
    alone = ranks.run(train, Layout(*shape), 7, every, Mean(), 4, "adamw", 0, False, False)
    for one, other in zip(federated, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2), (2, 2, 1), (2, 1, 1)])
def test_rounds_after_every_sgd_step_are_one_big_group(ranks: RankPool, shape):
    """Identity 2: G groups, H = 1, SGD, no clipping = one group with G times the batch."""
    layout = Layout(*shape)
    many = ranks.run(train, layout, 4, 1, Mean(), 4)
    one = ranks.run(train, Layout(1, 1, 2), 4, 1, Mean(), 4 * layout.groups)
    close(many[0], one[0])
    assert all(torch.equal(a, b) for rank in many[1:] for a, b in zip(many[0], rank, strict=True))


@pytest.mark.parametrize("outer", [Mean(), Nesterov(), Momentum()])
def test_layout_inside_groups_does_not_matter(ranks: RankPool, outer):
    """Identity 4: FL+HSDP = FL+FSDP = FL+DDP for the same groups."""
    runs = [ranks.run(train, Layout(*shape), 6, 2, outer, 4, "adamw")[0]
            for shape in [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 1, 4)]]  # fmt: skip
    for other in runs[1:]:
        close(runs[0], other)


def test_nesterov_without_momentum_is_mean(ranks: RankPool):
    """Identity 5."""
    close(
        ranks.run(train, Layout(2, 2, 2), 6, 2, Nesterov(1.0, 0.0), 4)[0],
        ranks.run(train, Layout(2, 2, 2), 6, 2, Mean(), 4)[0],
    )


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2)])
def test_warm_up_over_the_whole_run_is_one_big_group(ranks: RankPool, shape):
    """Identity 11, with AdamW: only the exact gradient of the big group gives its second moment."""
    layout = Layout(*shape)
    many = ranks.run(train, layout, 5, 1, Nesterov(), 4, "adamw", 5)
    one = ranks.run(train, Layout(1, 1, 2), 5, 1, Mean(), 4 * layout.groups, "adamw")
    close(many[0], one[0])


@pytest.mark.parametrize("outer", [Mean(), Nesterov(1.0, 0.0)])
def test_equal_groups_follow_one_group(ranks: RankPool, outer):
    """Identity 12, first half."""
    many = ranks.run(train, Layout(3, 1, 2), 6, 2, outer, 4, "adamw", 0, True)
    one = ranks.run(train, Layout(1, 1, 2), 6, 2, Mean(), 4, "adamw", 0, True)
    close(many[0], one[0])


def test_permuting_groups_changes_nothing(ranks: RankPool):
    """Identity 12, second half."""
    args = (Layout(3, 1, 2), 6, 2, Nesterov(), 4, "adamw", 0, False, True)
    close(ranks.run(train, *args, [0, 1, 2])[0], ranks.run(train, *args, [2, 0, 1])[0])


# One parameter, by hand


def by_hand(
    context: RankContext, values: list[list[float]], outer: OuterOptimizer, anchor: bool, tokens: list[list[float]],
    weights: str = "tokens",
) -> tuple[list[torch.Tensor], list[RoundReport]]:  # fmt: skip
    """Rounds in which the groups' weights are set by hand before each."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=shard_mesh(context.mesh))
    federation = Federation(model, context.mesh, every=1, outer=outer, anchor=anchor, weights=weights)
    federation.start()
    results, reports = [], []
    for of_groups, counts in zip(values, tokens, strict=True):
        if of_groups:
            with torch.no_grad():
                model.weight.to_local().fill_(of_groups[context.world.place.group])
        reports.append(federation.round(counts[context.world.place.group]))
        results.append(model.weight.full_tensor().detach().clone())
    return results, reports


SHAPES = [Layout(2, 1, 2), Layout(2, 2, 2), Layout(2, 2, 1)]


@pytest.mark.parametrize("layout", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("outer", "anchor", "expected"),
    [(Mean(), False, [0.7, 0.7]), (Mean(), True, [0.7, 0.7]), (Nesterov(), False, [0.601, 0.4309]),
     (Momentum(1.0, 0.0), False, [0.7, 0.7])],
)  # fmt: skip
def test_check_numbers(ranks: RankPool, layout, outer, anchor, expected):
    """Trap A1: anchor 1.0, groups at 0.8 and 0.6; then a round without local movement."""
    for results, reports in ranks.run(by_hand, layout, [[0.8, 0.6], []], outer, anchor, [[1, 1], [1, 1]]):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, torch.full((4, 4), value), rtol=0, atol=1e-6)
        if reports[0].group_delta_norms is not None:
            assert reports[0].group_delta_norms == pytest.approx([0.8, 1.6], rel=1e-5)
            assert reports[0].delta_norm == pytest.approx(1.2, rel=1e-5)
            assert reports[0].agreement == pytest.approx(2**0.5, rel=1e-5)
        else:
            assert reports[0].spread == pytest.approx([0.4, 0.4], rel=1e-5)


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_weights_by_tokens(ranks: RankPool, layout):
    (results, reports), *_ = ranks.run(by_hand, layout, [[1.0, 5.0]], Mean(), False, [[30, 10]])
    torch.testing.assert_close(results[0], torch.full((4, 4), 2.0))
    assert reports[0].weights == [0.75, 0.25]
    (results, _), *_ = ranks.run(by_hand, layout, [[1.0, 5.0]], Mean(), False, [[30, 10]], "uniform")
    torch.testing.assert_close(results[0], torch.full((4, 4), 3.0))


@pytest.mark.parametrize("outer", [Mean(), Nesterov(1.0, 0.0)])
@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_a_group_without_tokens_is_left_out_not_multiplied(ranks: RankPool, layout, outer):
    """Trap A5: counts 0 (weights NaN) and 300 (weights 3.0) give 3.0."""
    for results, reports in ranks.run(by_hand, layout, [[float("nan"), 3.0]], outer, False, [[0, 300]]):
        torch.testing.assert_close(results[0], torch.full((4, 4), 3.0))
        assert (reports[0].weights, reports[0].excluded) == ([0.0, 1.0], [0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_group_takes_the_others_weights(ranks: RankPool, bad):
    answers = ranks.run(by_hand, Layout(2, 2, 2), [[bad, 0.5]], Nesterov(1.0, 0.0), False, [[100, 100]])
    for rank, (results, reports) in enumerate(answers):
        torch.testing.assert_close(results[0], torch.full((4, 4), 0.5))
        assert reports[0].reset_moments == (rank < 4)


def test_no_tokens_anywhere_is_refused_with_round_and_groups(ranks: RankPool):
    """Trap A5, second half."""
    with pytest.raises(RunError, match="round 1: none of the 2 groups has a label token"):
        ranks.run(by_hand, Layout(2, 1, 1), [[1.0, 2.0]], Mean(), False, [[0, 0]])


def test_all_groups_bad_rolls_back_to_the_anchor(ranks: RankPool):
    nan = float("nan")
    for layout in (Layout(2, 1, 2), Layout(2, 2, 1)):
        for results, reports in ranks.run(by_hand, layout, [[0.8, 0.6], [nan, nan]], Mean(), True, [[1, 1], [1, 1]]):
            torch.testing.assert_close(results[1], torch.full((4, 4), 0.7))
            assert reports[1].excluded == [0, 1]
            assert reports[1].reset_moments


def test_all_groups_bad_without_an_anchor_names_the_tensor(ranks: RankPool):
    with pytest.raises(RunError, match="non-finite, first weight"):
        ranks.run(by_hand, Layout(2, 1, 1), [[float("nan"), float("nan")]], Mean(), False, [[1, 1]])


# Start, buffers, frozen parameters, traffic, state


def unequal_start(context: RankContext) -> list[torch.Tensor]:
    model = sharded(context, make_model(seed=context.rank))
    Federation(model, context.mesh, every=1).start()
    return full(model)


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(2, 1, 1), Layout(1, 2, 1)], ids=str)
def test_start_makes_all_groups_and_replicas_equal(ranks: RankPool, layout):
    """Traps B1 and B3: nobody agreed on a seed."""
    first, *others = ranks.run(unequal_start, layout)
    assert all(torch.equal(a, b) for rank in others for a, b in zip(first, rank, strict=True))


class WithBuffers(nn.Module):
    def __init__(self, group: int):
        super().__init__()
        self.free, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.tensor([7 + group]))
        self.register_buffer("running", torch.tensor([1.0 + group, 2.0]))
        self.register_buffer("table", torch.tensor([0.1 + group]), persistent=False)


def buffers_and_frozen(context: RankContext):
    torch.manual_seed(0)
    group = context.world.place.group
    model = WithBuffers(0)
    fully_shard(model, mesh=shard_mesh(context.mesh))
    federation = Federation(model, context.mesh, every=1, outer=Nesterov())
    federation.start()
    before = model.frozen.weight.full_tensor().clone()
    with torch.no_grad():
        model.running.copy_(torch.tensor([1.0 + group, 2.0]))
        model.table.fill_(0.1 + group)
        model.seen.fill_(7 + group)
        model.frozen.weight.to_local().add_(group)  # nobody may train it, so nobody looks at it
    for _ in range(5):
        federation.round(1 + 2 * group)
    moved = model.frozen.weight.full_tensor() - before
    finite = all(torch.isfinite(p.full_tensor()).all() for p in model.parameters())
    return model.running.tolist(), model.table.item(), model.seen.item(), moved.mean().item(), finite


def test_buffers_and_frozen_parameters(ranks: RankPool):
    """Traps A7 and A9: float buffers by weight, integer ones and tables stay, frozen parameters are not exchanged."""
    for rank, (running, table, seen, moved, finite) in enumerate(ranks.run(buffers_and_frozen, Layout(2, 1, 2))):
        assert running == pytest.approx([1.75, 2.0])
        assert table == pytest.approx(0.1 + rank // 2)
        assert seen == 7 + rank // 2
        assert moved == pytest.approx(rank // 2)
        assert finite


def traffic_of(context: RankContext, outer: OuterOptimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024, bias=False))
    fully_shard(model, mesh=shard_mesh(context.mesh))
    federation = Federation(model, context.mesh, every=3, outer=outer)
    federation.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Traffic() as between:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
    with Traffic() as during:
        report = federation.round(1)
    peers = context.layout.peers(context.rank)
    neighbours = frozenset({context.rank, peers[(context.world.place.group + 1) % len(peers)]})
    sent = during.sent_bytes("send", neighbours) + during.sent_bytes("all_reduce", frozenset(peers))
    return between.across(context.layout), sent, report.sent_bytes


@pytest.mark.parametrize("outer", [Mean(), Nesterov()])
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(2, 2, 2), Layout(4, 1, 2), Layout(2, 4, 1)], ids=str)
def test_groups_are_silent_between_rounds_and_a_round_sends_what_the_formula_says(ranks: RankPool, layout, outer):
    """Identity 9: 2·(G−1)/G·P·b/(S·R), each byte of the model once, not R times; and small change to agree on."""
    parameters = 64 * 64 + 64 + 1024 * 64
    expected = 2 * (layout.groups - 1) / layout.groups * parameters * 4 / layout.group_ranks
    for between, sent, reported in ranks.run(traffic_of, layout, outer):
        assert between == {}
        assert reported == expected
        assert expected <= sent <= expected + 200


@pytest.mark.parametrize("axis", ["group", "shard"])
def test_a_mesh_without_an_axis_is_refused(axis):
    from unittest.mock import Mock

    names = tuple({"group", "shard"} - {axis})
    with pytest.raises(InputError, match=f"no axis '{axis}'"):
        Federation(nn.Linear(2, 2), Mock(mesh_dim_names=names), every=1)


def state_round_trip(context: RankContext):
    def fresh():
        model = sharded(context, make_model())
        federation = Federation(model, context.mesh, every=1, outer=Nesterov())
        federation.start()
        return model, federation

    def move(model, amount):
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.to_local().add_(amount * (index + 1) + context.world.place.group)

    model, federation = fresh()
    move(model, 1.0)
    federation.round(1)
    weights = [parameter.to_local().clone() for parameter in model.parameters()]
    state = federation.state_dict()
    move(model, 2.0)
    federation.round(1)
    straight = full(model)

    model, federation = fresh()
    federation.load_state_dict(state)
    with torch.no_grad():
        for parameter, saved in zip(model.parameters(), weights, strict=True):
            parameter.to_local().copy_(saved)
    move(model, 2.0)
    federation.round(1)
    assert federation.rounds == 2
    return straight, full(model), state["parts"], [tuple(p.shape) for p in model.parameters()]


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(2, 2, 2)], ids=str)
def test_state_round_trip_and_parts_cover_each_parameter_once(ranks: RankPool, layout):
    answers = ranks.run(state_round_trip, layout)
    for straight, resumed, _, _ in answers:
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    shapes = answers[0][3]
    for index, name in enumerate(answers[0][2]):
        covered = [part for rank in range(layout.group_ranks) for part in [answers[rank][2][name]]]
        elements = sorted(element for offset, length in covered for element in range(offset, offset + length))
        assert elements == list(range(torch.Size(shapes[index]).numel()))
