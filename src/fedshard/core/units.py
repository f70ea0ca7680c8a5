"""Sizes and how they are printed. GB is 10⁹ bytes, GiB is 2³⁰."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(count: float) -> str:
    """Decimal bytes with three figures.

    >>> format_bytes(16_060_522_496), format_bytes(999), format_bytes(2_000_000)
    ('16.1 GB', '999 B', '2.00 MB')
    """
    return _scaled(count, 1000, ["B", "kB", "MB", "GB", "TB", "PB"])


def format_count(count: float) -> str:
    """A count with three figures.

    >>> format_count(8_030_261_248), format_count(812)
    ('8.03 B', '812')
    """
    return _scaled(count, 1000, ["", "k", "M", "B", "T"]).strip()


def format_seconds(seconds: float) -> str:
    """A duration a person reads at a glance.

    >>> format_seconds(0.0042), format_seconds(75), format_seconds(7380)
    ('4.20 ms', '1:15', '2:03:00')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.001 else f"{_three(seconds * 1000)} ms"
    if seconds < 60:
        return f"{_three(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _scaled(value: float, base: int, names: list[str]) -> str:
    scaled, index = float(value), 0
    while abs(scaled) >= base and index < len(names) - 1:
        scaled, index = scaled / base, index + 1
    text = f"{scaled:.0f}" if index == 0 and scaled == int(scaled) else _three(scaled)
    return f"{text} {names[index]}"


def _three(value: float) -> str:
    """Three figures, without an exponent."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"
