"""Speed-ups as bands, why choices lost, and what is not chosen unasked."""

from dataclasses import replace

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.study.architectures import read_architecture
from fedshard.study.bands import LINKS_LEFT, Band, assumptions, rates, slowed, speedup
from fedshard.study.choice import Wanted
from fedshard.study.cost import step_seconds
from fedshard.study.plan import Plan, make_plan
from fedshard.study.reasons import cause, losers, reasons
from fedshard.study.stragglers import waiting, with_jitter
from fedshard.study.what_if import what_ifs
from fedshard.study.work import step_work


def plan_of(cluster: str, **more: object) -> Plan:
    job = read_cluster(cluster).job(64)
    return make_plan(Wanted(read_architecture("llama-3.1-8b"), job, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("leonardo-nominal", max_batch_tokens=2**19)


@pytest.fixture(scope="module")
def observed() -> Plan:
    return plan_of("leonardo-observed", max_batch_tokens=2**19)


def told_of(made: Plan) -> list[str]:
    return list(reasons(made, losers(made)))


def test_slowed_links_are_those_that_leave_a_node():
    job = read_cluster("leonardo-nominal").job(64)
    slower = slowed(job, 0.25)
    assert slower.tiers["node"] == job.tiers["node"]
    assert slower.tiers["cell"].link_bytes_per_second.value == job.tiers["cell"].link_bytes_per_second.value / 4
    assert slower.tiers["cell"].rank_bytes_per_second.value == job.tiers["cell"].rank_bytes_per_second.value / 4
    assert slower.tiers["cell"].latency_seconds == job.tiers["cell"].latency_seconds


def test_assumptions_are_named_after_what_the_file_knows(plan, observed):
    assert [each.name for each in assumptions(plan.wanted.cluster)] == [
        "nominal links", f"links at {LINKS_LEFT:g} of their rate", "with noise",
    ]  # fmt: skip
    nominal, as_it_is, _ = assumptions(observed.wanted.cluster)
    assert (nominal.name, as_it_is.name) == ("nominal links", "observed links")
    assert nominal.cluster.tiers["cell"].efficiency is None
    assert nominal.cluster.tiers["node"] == as_it_is.cluster.tiers["node"]
    assert as_it_is.cluster == observed.wanted.cluster


@pytest.mark.parametrize("name", ["plan", "observed"])
def test_the_best_of_a_strategy_is_sought_anew_under_each_assumption(name, request):
    """As if every choice of it had been worked out by the closed form."""
    made = request.getfixturevalue(name)
    for strategy in ("FSDP", "HSDP"):
        found = rates(made.of(strategy))
        for each in assumptions(made.wanted.cluster):
            speeds = []
            for choice in made.of(strategy):
                setup = replace(choice.setup, cluster=each.cluster)
                work = step_work(setup)
                seconds = step_seconds(with_jitter(work, setup) if each.noise else work, setup).total_seconds
                wait = waiting(setup, choice.time.compute_seconds).total_seconds if each.noise else 0.0
                speeds.append(setup.tokens_per_step / (seconds + wait))
            assert found[each.name] == pytest.approx(max(speeds), rel=1e-9)


def test_a_band_reaches_from_the_least_to_the_most():
    band = speedup({"a": 30.0, "b": 20.0}, {"a": 10.0, "b": 10.0})
    assert band == Band({"a": 3.0, "b": 2.0})
    assert (band.low, band.high) == (2.0, 3.0)
    assert str(band) == "2.00–3.00× (3.00 a, 2.00 b)"


def test_worse_links_favour_federation(plan):
    best = plan.best("FL+FSDP")
    for strategy in ("FSDP", "HSDP"):
        band = speedup(rates([best]), rates(plan.of(strategy)))
        assert band.by_assumption["links at 0.5 of their rate"] > band.by_assumption["nominal links"]


def test_each_loser_gets_a_reason(plan):
    told = told_of(plan)
    winner = plan.rows[0].strategy
    assert {row.strategy for row, _ in losers(plan)} == {"FSDP", "HSDP", "FL+FSDP", "FL+HSDP"} - {winner}
    for row, band in losers(plan):
        line = next(
            line for line in told if line.startswith(f"{winner} over {row.strategy} {row.setup.layout}: {band}")
        )
        assert "of its step goes to" in line or "no one cause stands out" in line
    assert any("of a replica: a rank needs" in line and "may fill 60.8 GB" in line for line in told)


def test_the_cause_is_what_takes_longer_than_with_the_winner(plan):
    """Not what takes longest: that may be the same for both."""
    row = plan.best("FL+FSDP")
    assert "no one cause stands out" in cause(row, row)
    second = row.time.total_seconds
    slow = replace(row, time=replace(row.time, round_exposed_seconds=second))  # half of the step, or nearly
    more = {"gather_exposed_seconds": "gathers over ", "reduction_exposed_seconds": "reductions over "}
    for name, said in more.items():
        slower = replace(slow, time=replace(slow.time, **{name: getattr(slow.time, name) + second / 10}))
        assert f" of its step goes to {said}{row.setup.layout.shards} ranks" in cause(slower, slow)
    assert f"rounds over {row.setup.layout.groups} ranks" in cause(slow, row)


def test_what_limits_leave_out_is_told():
    told = told_of(plan_of("leonardo-nominal", max_batch_tokens=65_536, tokens=300_000_000))
    assert "groups of 32 ranks or more: 131 k tokens a step at least, and at most 65.5 k are allowed" in told
    few = plan_of("leonardo-nominal", tokens=10_000_000)  # 39 steps of one sequence a rank
    assert any(line.endswith(" layouts: the budget has 36 rounds at most, and 50 are wanted") for line in told_of(few))


def test_what_ends_sooner_is_told():
    """The fastest is not always the first to end: in the warm-up of many small groups all gradients cross them."""
    made = plan_of("leonardo-nominal")
    soonest = min(made.rows, key=lambda row: row.run_seconds)
    lines = [line for line in told_of(made) if "ends sooner" in line]
    if soonest.run_seconds < 0.99 * made.rows[0].run_seconds:
        assert lines[0].startswith(f"{soonest.strategy} {soonest.setup.layout} ends sooner, in {soonest.days:.3g} days")
    else:
        assert lines == []


def test_precision_codecs_and_overlap_are_shown_and_not_searched(plan):
    tried = {each.name: each for each in what_ifs(plan)}
    assert set(tried) == {"reductions in bfloat16", "pure bfloat16", "codec bf16", "codec int8", "overlap of one step"}
    assert all(choice.setup.codec == "fp32" and choice.setup.delay == 0 for choice in plan.choices)
    assert tried["codec int8"].needs == tried["overlap of one step"].needs == "not in this version"
    assert tried["pure bfloat16"].needs == "--precision pure-bfloat16"
    for each in tried.values():
        assert each.choice.memory_bytes <= plan.wanted.capacity_bytes
        assert each.choice.setup.layout == each.row.setup.layout
    assert tried["codec int8"].choice.setup.anchor
    assert tried["overlap of one step"].choice.setup.every > 1


def test_what_is_asked_for_is_what_was_shown(plan):
    """The best choice in the winner's layout with lower precision is the one that a plan in that precision has."""
    shown = next(each for each in what_ifs(plan) if each.name == "reductions in bfloat16").choice
    asked = plan_of("leonardo-nominal", max_batch_tokens=2**19, precision="bfloat16-reductions")
    assert shown.setup == next(row for row in asked.rows if row.setup.layout == shown.setup.layout).setup
    assert not [each for each in what_ifs(asked) if each.needs.startswith("--precision")]
