"""What a setup says of its ranks: who is in which ring, and which ring the others wait for."""

from dataclasses import replace

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.core.recipe_file import make_recipe
from fedshard.core.topology import TIERS
from fedshard.study.architectures import read_architecture
from fedshard.study.collectives import Members
from fedshard.study.setup import Axis, Setup

LLAMA = {
    "kind": "config", "model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def setup_of(shape: tuple[int, int, int], cluster: str = "leonardo-nominal") -> Setup:
    layout = Layout(*shape)
    return Setup(read_architecture("llama-3.1-8b"), layout, read_cluster(cluster).job(layout.ranks), 2048)


@pytest.mark.parametrize(
    ("axis", "rings"),
    [
        ("shard", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("group", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_rings_are_those_of_the_layout(axis: Axis, rings):
    assert setup_of((2, 2, 2)).rings(axis).tolist() == rings


def test_groups_meet_in_the_rings_that_the_layout_tells():
    setup = setup_of((2, 4, 4))
    assert setup.rings("group").tolist() == list(setup.layout.all_peers())


def test_tiers_between_ranks_are_the_clusters_own():
    setup = setup_of((1, 1, 64), "leonardo-observed")  # 16 nodes in 3 cells
    ranks = setup.rings("shard")[0]
    expected = [setup.cluster.tier_between([0, rank]) for rank in range(64)]
    assert [TIERS[each] for each in setup.tier_of(ranks * 0, ranks)] == expected
    assert set(expected) == {"node", "cell", "global"}


def test_the_slowest_ring_is_the_one_that_crosses_most():
    """16 nodes in cells of 6: of the groups of four nodes, the second one lies in two cells."""
    setup = setup_of((4, 1, 16), "leonardo-observed")
    assert setup.cluster.nodes_per_cell == 6
    assert setup.members("shard") == Members.of(setup.cluster, range(16, 32))
    assert setup.members("shard").tier == setup.cluster.tiers["global"]
    assert setup.group_members == setup.members("shard")


def test_a_recipe_says_it_all():
    raw = {
        "layout": {"groups": 2, "replicas": 1, "shards": 4},
        "model": LLAMA,
        "data": {"sequence_length": 32},
        "train": {"micro_batch": 3, "accumulation": 2, "recompute": "full", "reduce_dtype": "bfloat16"},
        "sync": {"every": 5, "warmup_fraction": 0.0, "outer": {"kind": "nesterov"}, "bucket_bytes": 2**20},
        "budget": {"steps": 7},
    }
    setup = Setup.from_recipe(make_recipe(raw), read_cluster("leonardo-nominal"))
    assert (setup.layout, setup.cluster.ranks, setup.architecture.blocks) == (Layout(2, 1, 4), 8, 2)
    assert (setup.rank_tokens, setup.tokens_per_step, setup.every) == (96, 96 * 2 * 8, 5)
    assert (setup.stored_bytes, setup.gather_bytes, setup.reduce_bytes, setup.round_bytes) == (4, 2, 2, 4)
    assert (setup.moments, setup.recompute, setup.anchor, setup.outer_states, setup.federates) == (
        2,
        True,
        True,
        1,
        True,
    )
    assert setup.bucket_bytes == 2**20


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, (4, 2, 4)),
        ({"device": "cpu"}, (4, 4, 4)),
        ({"precision": "float32"}, (4, 4, 4)),
        ({"precision": "pure-bfloat16"}, (2, 2, 4)),
        ({"precision": "bfloat16", "reduce_dtype": "bfloat16"}, (4, 2, 2)),
    ],
)
def test_precisions(train, expected):
    setup = Setup.from_recipe(make_recipe({"train": train}), read_cluster("workstation-8"))
    assert (setup.stored_bytes, setup.gather_bytes, setup.reduce_bytes) == expected


def test_a_mean_keeps_no_anchor_unless_asked():
    def setup_with(**sync) -> Setup:
        return Setup.from_recipe(make_recipe({"sync": sync}), read_cluster("workstation-8"))

    assert not setup_with().anchor
    assert setup_with(anchor=True).anchor


def test_one_group_under_a_mean_has_no_rounds():
    assert not setup_of((1, 2, 4)).federates


def test_a_cluster_that_is_too_small_is_refused():
    recipe = make_recipe({"layout": {"groups": 4, "shards": 4}, "train": {"device": "cpu"}})
    with pytest.raises(InputError, match="16 ranks, and workstation-8 has 8"):
        Setup.from_recipe(recipe, read_cluster("workstation-8"))


def test_wire_bytes_of_the_codecs():
    setup = setup_of((2, 1, 4))
    assert [replace(setup, codec=codec).wire_bytes for codec in ("fp32", "bf16", "int8")] == [4, 2, 1 + 4 / 256]
