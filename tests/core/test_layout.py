"""Where ranks stand, and which rows and elements each of them holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.layout import Layout, Place, owned_of, rows_of

layouts = st.builds(Layout, st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))


def test_shards_run_fastest_then_replicas_then_groups():
    layout = Layout(2, 2, 2)
    assert [layout.place(rank) for rank in range(8)] == [
        Place(group, replica, shard) for group in range(2) for replica in range(2) for shard in range(2)
    ]


@given(layouts)
def test_rank_and_place_are_inverse(layout):
    assert [layout.rank(layout.place(rank)) for rank in range(layout.ranks)] == list(range(layout.ranks))


@given(layouts)
def test_peers_hold_the_same_slice_in_every_group(layout):
    met = []
    for peers in layout.all_peers():
        places = [layout.place(rank) for rank in peers]
        assert [place.group for place in places] == list(range(layout.groups))
        assert len({(place.replica, place.shard) for place in places}) == 1
        assert all(layout.peers(rank) == peers for rank in peers)
        met += peers
    assert sorted(met) == list(range(layout.ranks)), "each rank takes part in one exchange"


@given(layouts)
def test_groups_divide_the_ranks(layout):
    groups = [list(layout.group_of(group * layout.group_ranks)) for group in range(layout.groups)]
    assert [rank for group in groups for rank in group] == list(range(layout.ranks))
    assert all(layout.group_of(rank) == layout.group_of(group[0]) for group in groups for rank in group)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ((1, 1, 1), "single process"),
        ((1, 1, 8), "FSDP"),
        ((1, 4, 2), "HSDP"),
        ((1, 8, 1), "DDP"),
        ((4, 1, 2), "FL+FSDP"),
        ((2, 2, 2), "FL+HSDP"),
        ((2, 4, 1), "FL+DDP"),
        ((8, 1, 1), "FL+DDP"),
    ],
)
def test_strategy_is_derived(layout, strategy):
    assert Layout(*layout).strategy == strategy


def test_a_layout_prints_as_the_papers_write_it():
    assert str(Layout(16, 8, 4)) == "16×8×4"


@pytest.mark.parametrize(
    ("rows", "shards", "lengths"),
    [
        (8, 4, [2, 2, 2, 2]),
        (6, 4, [2, 2, 2, 0]),
        (257, 4, [65, 65, 65, 62]),
        (8, 16, [1] * 8 + [0] * 8),
        (1, 4, [1, 0, 0, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_rows_are_cut_as_fsdp_cuts_them(rows, shards, lengths):
    """Trap X5: the last shards may hold fewer rows, or none. Lengths by hand, from torch's chunks."""
    assert [len(rows_of(shard, shards, rows)) for shard in range(shards)] == lengths


@given(st.integers(1, 9), st.integers(0, 60))
def test_parts_are_contiguous_disjoint_and_complete(parts, numel):
    for cut in (rows_of, owned_of):
        assert [each for part in range(parts) for each in cut(part, parts, numel)] == list(range(numel))
