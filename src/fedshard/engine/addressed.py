"""Randomness with an address: every random thing is keyed by what it is for, never by what was drawn before it."""

from __future__ import annotations

import hashlib
import json


def address_seed(*parts: str | int) -> int:
    """A seed in [0, 2⁶³) for one address, such as (seed, purpose, group, rank, step).

    The same in every process and on every machine; addresses that differ in any part, in its type or in their
    number of parts get unrelated seeds.

    >>> address_seed(0, "dropout", 1, 3, 20) == address_seed(0, "dropout", 1, 3, 20)
    True
    >>> address_seed(0, "dropout", 13, 20) == address_seed(0, "dropout", 1, 320)
    False
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits, so that signed and unsigned takers both accept it
