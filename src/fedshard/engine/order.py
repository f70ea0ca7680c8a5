"""The global order of sequences: a permutation per epoch that is computed place by place and never stored.

Skip the arithmetic on first reading: `permute` is a bijection on 0 … size − 1, and that is all that `Order` needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshard.engine.addressed import address_seed

FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class Order:
    """An endless order of `size` sequences: slot k is place k mod size of the permutation of epoch k div size.

    `address` keys the permutations; orders with unlike addresses are unrelated.

    >>> order = Order(3, (0, "order"))
    >>> sorted(order.sequences(np.arange(3)).tolist()), sorted(order.sequences(np.arange(3, 6)).tolist())
    ([0, 1, 2], [0, 1, 2])
    """

    size: int
    address: tuple[str | int, ...]

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """The index of the sequence at each slot, in the shape of `slots`."""
        epochs, places = np.divmod(slots, self.size)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            found[now] = permute(places[now], self.size, address_seed(*self.address, int(epoch)))
        return found


def permute(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a permutation of 0 … size − 1, chosen by `key`, sends each of `places`; memory O(places), not O(size).

    A Feistel network permutes the numbers of 2·h bits, of which there are fewer than 4·size (at least 4); what it
    sends outside is sent on until it falls inside, which leaves a permutation of the numbers inside.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (cycle walking).
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    sent = _feistel(places.astype(np.uint64), half_bits, key)
    outside = sent >= size
    while outside.any():
        sent[outside] = _feistel(sent[outside], half_bits, key)
        outside = sent >= size
    return sent.astype(np.int64)


def _feistel(numbers: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    """A permutation of the numbers of 2·half_bits bits."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = numbers >> shift, numbers & mask
    for number in range(FEISTEL_ROUNDS):
        round_key = np.uint64(address_seed(key, number))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return left << shift | right


def _mix(numbers: np.ndarray) -> np.ndarray:
    """64 bits of which each depends on all bits of the number. Source: SplitMix64's finaliser (Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
