"""Peaks by the names that torch gives to devices."""

import pytest

from fedshard.engine.peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_known_devices(name: str, flops: float):
    assert peak_flops(name) == flops


@pytest.mark.parametrize("name", ["cpu", "NVIDIA A10", "NVIDIA A10G", "NVIDIA RTX A1000", "AMD EPYC 7763", ""])
def test_what_is_not_known_has_no_peak(name: str):
    assert peak_flops(name) is None
