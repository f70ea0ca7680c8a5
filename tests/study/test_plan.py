"""The planner: every choice fits, the ranking holds, limits are kept, and what does not fit is told with the lack."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshard.core.cluster_file import read_cluster
from fedshard.study.architectures import read_architecture
from fedshard.study.bands import slowed, speedup
from fedshard.study.cost import step_seconds
from fedshard.study.memory import memory
from fedshard.study.plan import SYNC_SHARE, Plan, Wanted, layouts, make_plan, nearest, variants
from fedshard.study.reasons import reasons, shortage
from fedshard.study.work import step_work


def plan_of(model: str = "llama-3.1-8b", cluster: str = "leonardo-nominal", ranks: int = 64, **more: object) -> Plan:
    job = read_cluster(cluster).job(ranks)
    return make_plan(Wanted(read_architecture(model), job, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


@given(st.integers(1, 600))
@settings(max_examples=30, deadline=None)
def test_layouts_are_all_of_so_many_ranks(ranks):
    found = list(layouts(ranks))
    assert all(layout.ranks == ranks for layout in found)
    assert len(set(found)) == len(found)
    assert len(found) == sum(1 for a in range(1, ranks + 1) if ranks % a == 0 for b in range(1, ranks // a + 1)
                             if ranks // a % b == 0)  # fmt: skip


def test_every_choice_fits_and_is_what_the_closed_form_says(plan):
    for choice in plan.best_by_layout:
        assert choice.memory_bytes == memory(choice.setup).total_bytes <= plan.capacity_bytes
        time = step_seconds(step_work(choice.setup), choice.setup)
        assert choice.time.total_seconds == pytest.approx(time.total_seconds, rel=1e-9)


def test_the_fastest_comes_first_and_baselines_are_at_their_best(plan):
    speeds = [choice.tokens_per_second for choice in plan.choices]
    assert speeds == sorted(speeds, reverse=True)
    for strategy in ("FSDP", "HSDP", "FL+FSDP", "FL+HSDP"):
        of_it = [choice.tokens_per_second for choice in plan.choices if choice.strategy == strategy]
        assert plan.best(strategy).tokens_per_second == max(of_it)
    assert 0 < plan.choices[0].mfu < 1


def test_rounds_are_as_frequent_as_they_are_cheap(plan):
    for choice in plan.choices:
        if choice.setup.layout.groups > 1 and choice.setup.every > 1:
            assert choice.sync_share <= SYNC_SHARE
    few = plan_of(cluster="leonardo-observed", tokens=4_000_000_000, min_rounds=100)
    for choice in few.choices:
        rounds = few.wanted.budget / choice.setup.tokens_per_step / choice.setup.every
        assert choice.setup.layout.groups == 1 or choice.setup.every == 1 or rounds >= 100


def test_the_batch_limit_is_kept():
    limited = plan_of(max_batch_tokens=65_536)
    assert max(choice.group_tokens for choice in limited.choices) <= 65_536
    assert {choice.strategy for choice in limited.choices} <= {"FL+FSDP", "FL+HSDP"}
    assert any("--max-batch-tokens" in line for line in reasons(limited))


def test_worse_links_favour_federation(plan):
    """Where links are worse than the file says, what is gained over FSDP and HSDP is more."""
    fast = plan_of(max_batch_tokens=2**19)
    best = next(choice for choice in fast.choices if choice.strategy == "FL+FSDP")
    for strategy in ("FSDP", "HSDP"):
        band = speedup(best, fast.best(strategy))
        assert band.low <= band.by_assumption["links as given"] <= band.high
        assert band.by_assumption["at 0.5 of their rate"] > band.by_assumption["links as given"]
        assert str(band).startswith(f"{band.low:.2f}–{band.high:.2f}×")


def test_slowed_links_are_those_that_leave_a_node():
    job = read_cluster("leonardo-nominal").job(64)
    slower = slowed(job, 0.25)
    assert slower.tiers["node"] == job.tiers["node"]
    given = job.tiers["cell"].link_bytes_per_second.value
    assert slower.tiers["cell"].link_bytes_per_second.value == given / 4


def test_each_loser_gets_a_reason(plan):
    told = list(reasons(plan))
    for strategy in {"FSDP", "HSDP", "FL+FSDP", "FL+HSDP"} - {plan.choices[0].strategy}:
        assert any(line.startswith(f"{strategy} ") and "% of the tokens per second" in line for line in told)
    assert any("of a replica: a rank needs" in line for line in told)


def test_codecs_and_overlap_are_shown_and_not_searched(plan):
    best = next(choice for choice in plan.choices if choice.setup.layout.groups > 1)
    told = variants(best)
    assert set(told) == {"bf16 codec", "int8 codec", "overlap of one step"}
    assert all(choice.setup.codec == "fp32" and choice.setup.delay == 0 for choice in plan.choices)


def test_three_ranks_have_their_layouts():
    assert {str(choice.setup.layout) for choice in plan_of(ranks=3).choices} == {"1×1×3"}
    small = plan_of("gpt2", ranks=3, sequence_length=512)
    assert {str(choice.setup.layout) for choice in small.choices} == {"1×1×3", "1×3×1", "3×1×1"}


def test_where_nothing_fits_the_lack_is_told():
    big = plan_of("llama-3.1-405b", ranks=8)
    assert big.choices == []
    assert shortage(big).startswith("memory is short by ")
    ranks, length = nearest(big.wanted, read_cluster("leonardo-nominal"))
    assert (ranks, length) == (1024, 2048)
    assert nearest(big.wanted, read_cluster("leonardo-nominal").job(8)) is None
