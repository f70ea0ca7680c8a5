"""The order is a bijection on every size, computed place by place, and keyed by nothing but its address."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.engine.addressed import address_seed
from fedshard.engine.order import Order, permute


def test_an_address_has_one_seed_for_ever():
    assert address_seed(0, "order", 3) == 6254814875441857239  # b2sum -l 64 of the address as JSON, halved
    assert address_seed(0, "dropout", 1, 2, 3) < 2**63


@pytest.mark.parametrize("other", [(0, "order", 4), (0, "order"), (0, "order", "3"), (1, "order", 3), (0, "order3")])
def test_every_part_of_an_address_counts(other):
    assert address_seed(*other) != address_seed(0, "order", 3)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 46288])
def test_permute_is_a_bijection_on_every_size(size):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key=7)), np.arange(size))


@given(size=st.integers(1, 5000), key=st.integers(0, 2**63 - 1))
def test_permute_is_a_bijection_for_every_key(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_a_place_does_not_depend_on_which_others_are_asked_for():
    whole = permute(np.arange(1000), 1000, key=5)
    assert [int(permute(np.array([place]), 1000, key=5)[0]) for place in (0, 17, 999)] == whole[[0, 17, 999]].tolist()


def test_sizes_far_beyond_memory_are_no_trouble():
    places = np.arange(10**15, 10**15 + 1000)
    sent = permute(places, 10**16, key=1)
    assert len(set(sent.tolist())) == 1000
    assert sent.min() >= 0
    assert sent.max() < 10**16


def test_all_permutations_of_three_occur_about_equally_often():
    seen = [tuple(permute(np.arange(3), 3, address_seed(key)).tolist()) for key in range(600)]
    counts = [seen.count(each) for each in itertools.permutations(range(3))]
    assert min(counts) > 60  # 100 each, give or take 9
    assert max(counts) < 140


def test_places_are_spread_evenly_and_neighbours_part():
    sent = permute(np.arange(10_000), 10_000, key=3)
    tenths = np.bincount(sent[:1000] // 1000, minlength=10)
    assert tenths.min() > 60  # 100 each, give or take 9
    assert tenths.max() < 140
    assert abs(np.corrcoef(sent[:-1], sent[1:])[0, 1]) < 0.04  # 0, give or take 0.01


@given(size=st.integers(1, 200), epoch=st.integers(0, 50))
def test_every_epoch_has_every_sequence_once(size, epoch):
    slots = np.arange(epoch * size, (epoch + 1) * size)
    assert sorted(Order(size, (0, "order")).sequences(slots)) == list(range(size))


def test_epochs_and_addresses_have_orders_of_their_own():
    order = Order(100, (0, "order"))
    first, second = order.sequences(np.arange(100)), order.sequences(np.arange(100, 200))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, Order(100, (1, "order")).sequences(np.arange(100)))
    assert not np.array_equal(first, Order(100, (0, "order", 0)).sequences(np.arange(100)))


def test_slots_keep_their_shape_across_an_epochs_end():
    order = Order(5, (0, "order"))
    flat = order.sequences(np.arange(12))
    assert np.array_equal(order.sequences(np.arange(12).reshape(3, 4)), flat.reshape(3, 4))
