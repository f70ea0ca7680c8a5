"""Where nothing fits: what is short, by how much, and that what is said to do does."""

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.study.architectures import read_architecture
from fedshard.study.choice import Wanted
from fedshard.study.plan import Plan, make_plan
from fedshard.study.shortage import shortage, smallest_group


def plan_of(model: str, cluster: str, ranks: int, **more: object) -> Plan:
    return make_plan(Wanted(read_architecture(model), read_cluster(cluster).job(ranks), **more))  # type: ignore[arg-type]


def asked_anew(model: str, cluster: str, ranks: int, words: str, **more: object) -> Plan:
    """The plan with the words that would do in place of what was asked for."""
    names = iter(words.split())
    changes = {name.removeprefix("--").replace("-", "_"): next(names) for name in names}
    ranks = int(changes.pop("gpus", ranks))
    asked = {name: text if name == "precision" else int(text) for name, text in changes.items()}
    return plan_of(model, cluster, ranks, **{**more, **asked})


CASES = [
    ("llama-3.1-70b", "leonardo-nominal", 8, {}, "memory"),
    ("llama-3.1-8b", "leonardo-nominal", 1, {}, "memory"),
    ("llama-3.1-8b", "leonardo-nominal", 2, {}, "memory"),
    ("llama-3.1-8b", "leonardo-nominal", 2, {"max_batch_tokens": 10_000}, "memory"),
    ("llama-3.1-70b", "leonardo-nominal", 128, {"max_batch_tokens": 100_000}, "batch"),
    ("gpt2", "workstation-8", 8, {"sequence_length": 1024, "tokens": 100_000, "max_batch_tokens": 4096}, "rounds"),
]


@pytest.mark.parametrize(("model", "cluster", "ranks", "more", "of"), CASES)
def test_what_would_do_does(model, cluster, ranks, more, of):
    short = shortage(plan_of(model, cluster, ranks, **more), read_cluster(cluster))
    assert short.of == of
    assert short.missing > 0
    assert short.would_do
    for words in short.would_do:
        assert asked_anew(model, cluster, ranks, words, **more).choices, words


def test_how_much_memory_is_short():
    made = plan_of("llama-3.1-405b", "leonardo-nominal", 8)
    short = shortage(made, read_cluster("leonardo-nominal"))
    assert short.missing == pytest.approx(made.least_bytes[8] - 0.95 * 64e9)
    assert short.says.startswith("memory is short by 792 GB a rank: ")
    assert "8 shards, a rank needs 853 GB, and may fill 60.8 GB" in short.says


def test_fewer_ranks_than_are_said_to_do_do_not():
    """One node fewer, and a replica does not fit."""
    cluster, model = read_cluster("leonardo-nominal"), read_architecture("llama-3.1-70b")
    short = shortage(plan_of("llama-3.1-70b", "leonardo-nominal", 8), cluster)
    ranks = next(int(words.split()[1]) for words in short.would_do if words.startswith("--gpus"))
    assert smallest_group(Wanted(model, cluster.job(ranks))) == ranks
    assert smallest_group(Wanted(model, cluster.job(ranks - 4))) is None


def test_sequences_are_shorter_where_no_number_of_ranks_does():
    cluster, model = read_cluster("leonardo-nominal"), read_architecture("llama-3.1-405b")
    short = shortage(plan_of("llama-3.1-405b", "leonardo-nominal", 8), cluster)
    assert short.would_do[-1].endswith(" --sequence-length 2048")
    assert smallest_group(Wanted(model, cluster.job(1024), 4096)) is None
    assert smallest_group(Wanted(model, cluster.job(1024), 2048)) is not None


def test_nothing_would_do_where_the_machine_is_too_small():
    whole = read_cluster("workstation-8")
    short = shortage(plan_of("llama-3.1-405b", "workstation-8", 8), whole)
    assert (short.of, short.would_do) == ("memory", ())


def test_the_limits_of_batch_and_rounds_are_told_with_both_numbers():
    case = CASES[4]
    short = shortage(plan_of(*case[:3], **case[3]), read_cluster(case[1]))
    assert short.says == "the smallest group that fits takes 131072 tokens a step, 31072 more than are allowed"
    assert short.would_do == ("--max-batch-tokens 131072", "--sequence-length 3125")
    case = CASES[5]
    short = shortage(plan_of(*case[:3], **case[3]), read_cluster(case[1]))
    assert short.says == "the budget of 100000 tokens has 13 rounds at most, 37 fewer than are wanted"
