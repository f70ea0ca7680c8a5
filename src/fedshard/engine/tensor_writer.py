"""A safetensors file written tensor by tensor, so that no more than one of them is ever in memory.

The library writes a file's tensors all at once. The format is a length (8 bytes, little-endian), that many bytes of
JSON, and the values one behind the other. Source: the safetensors README.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    file: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """A new safetensors file. `shapes` are of all tensors, in the order in which `tensors` gives them."""
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (expected, (shape, dtype)) in zip(tensors, shapes.items(), strict=True):
            assert (name, tuple(tensor.shape), tensor.dtype) == (expected, shape, dtype), f"{name} is not {expected}"
            opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
