"""What a device could do at most: dense bfloat16 FLOP/s, for model FLOPs utilisation."""

from __future__ import annotations

PEAKS = {
    "B200": 2250e12,  # NVIDIA DGX B200 datasheet
    "GH200": 989e12,  # NVIDIA GH200 datasheet
    "H200": 989e12,  # NVIDIA H200 datasheet
    "H100 PCIE": 756e12,  # NVIDIA H100 datasheet
    "H100": 989e12,  # NVIDIA H100 datasheet, SXM
    "A100": 312e12,  # NVIDIA A100 datasheet
    "MI300X": 1307e12,  # AMD MI300X datasheet
    "MI250X": 191.5e12,  # AMD MI250X datasheet: 383 for the card, of whose two dies torch sees each as a device
}
"""By a part of the device's name; the first that fits counts."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, None if it is not known.

    >>> peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("cpu")
    (312000000000000.0, None)
    """
    name = device_name.upper()
    return next((peak for part, peak in PEAKS.items() if all(word in name for word in part.split())), None)
