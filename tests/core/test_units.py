"""Sizes as a person reads them."""

import pytest

from fedshard.core.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds


def test_binary_sizes():
    assert (KIB, MIB, GIB) == (1024, 1_048_576, 1_073_741_824)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (128_480_000_000, "128 GB"),
        (16_060_522_496, "16.1 GB"),
        (3e18, "3000 PB"),
        (-2_000_000, "-2.00 MB"),
    ],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (812, "812"), (1_234, "1.23 k"), (8_030_261_248, "8.03 B"), (70_553_706_496, "70.6 B")],
)
def test_counts(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000042, "0.0042 ms"),
        (0.0042, "4.20 ms"),
        (0.123, "123 ms"),
        (1, "1.00 s"),
        (59.4, "59.4 s"),
        (60, "1:00"),
        (3599.6, "1:00:00"),  # rounded before it is split, so never 59:60
        (7380, "2:03:00"),
        (90_061, "25:01:01"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
