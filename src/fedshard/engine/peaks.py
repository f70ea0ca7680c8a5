"""What a device could do at most: dense bfloat16 FLOP/s, for model FLOPs utilisation."""

from __future__ import annotations

import re

# From the makers' data sheets; where one gives the figure with 2:4 sparsity, half of it.
PEAKS: tuple[tuple[str, float], ...] = (
    ("A100", 312e12),  # NVIDIA A100; some centres have a faster chip of their own under this name
    ("A800", 312e12),  # an A100 with slower NVLink
    ("H100 PCIe", 756e12),  # NVIDIA H100: 1,513 with sparsity
    ("H100 NVL", 835e12),  # NVIDIA H100 NVL: 1,671 with sparsity
    ("H100", 989e12),  # NVIDIA H100, SXM: 1,979 with sparsity
    ("H800", 989e12),  # an H100 SXM with slower NVLink
    ("H200 NVL", 835e12),  # NVIDIA H200: 1,671 with sparsity
    ("H200", 989e12),  # NVIDIA H200, SXM: 1,979 with sparsity
    ("GH200", 989e12),  # NVIDIA GH200: 1,979 with sparsity
    ("B200", 2250e12),  # NVIDIA HGX B200: 36,000 with sparsity for 8
    ("MI250X", 191.5e12),  # AMD MI250X: 383 for the card, of whose two dies torch sees each as a device
    ("MI300X", 1307e12),  # AMD MI300X
    ("MI325X", 1307e12),  # AMD MI325X
)
"""The first whose words are all among the words of a device's name counts."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name that torch gives it, None if it is not known.

    >>> peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("NVIDIA A10"), peak_flops("cpu")
    (312000000000000.0, None, None)
    """
    words = _words(device_name)
    return next((peak for name, peak in PEAKS if _words(name) <= words), None)


def _words(name: str) -> set[str]:
    """Whole words, because an A10 is no A100 and an H200 no GH200."""
    return set(re.split(r"[\s-]+", name.upper()))
