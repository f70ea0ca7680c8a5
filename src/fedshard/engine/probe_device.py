"""What one rank computes when it does not communicate: the recipe's decoder block, forward and backward; its memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from fedshard.core.recipe import Recipe
from fedshard.engine.addressed import address_seed
from fedshard.engine.initial import materialise
from fedshard.engine.model import build_on_meta, count_parameters, decoder_blocks, flops_per_token
from fedshard.engine.peaks import peak_flops
from fedshard.engine.probe_times import time_calls
from fedshard.engine.run_folder import device_name
from fedshard.engine.shard import compute_dtype
from fedshard.engine.world import World

BLOCK_TIMES = 10
"""The block is measured for so many times as long as all else: how it scatters matters, too."""

PRODUCT_WIDTH = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices whose product stands for the peak where no data sheet is known."""

COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Of a copy within memory: more than caches hold."""


@dataclass(frozen=True)
class DeviceTimes:
    """What was found out about the ranks' devices, all ranks at work at the same time."""

    name: str
    block_flops_per_second: float
    """Of one rank in forward and backward of the block, by the mean time over ranks and calls. Where ranks take turns
    on a processor, most calls run undisturbed, and a few bear all the waiting."""
    deviation_fraction: float
    """Standard deviation of a rank's time from call to call, over its mean: the mean over ranks."""
    slowest_factor: float
    """The slowest rank's mean time over that of all ranks."""
    product_flops_per_second: float
    """The fastest product of two matrices of `product_width`, in the type that the model computes in."""
    product_width: int
    sheet_flops_per_second: float | None
    """The peak by the maker's data sheet, where it is known."""
    memory_bytes: int
    """Of one rank."""
    memory_source: str
    """Where that is known from."""
    copied_bytes_per_second: float
    """Read and written bytes of a copy, by the mean time over ranks and calls."""


def measure_device(
    recipe: Recipe, config: PreTrainedConfig, world: World, local_ranks: int, seconds: float, say: Callable[[str], None]
) -> DeviceTimes:
    """Time the block, and for about `seconds` each a product and a copy, on all ranks at once; the same result on all
    of them."""
    kind, dtype = world.device.type, compute_dtype(recipe.train, world.device.type)
    tokens = recipe.train.micro_batch * recipe.data.sequence_length
    say(f"one decoder block, forward and backward, {tokens} tokens in {str(dtype).removeprefix('torch.')}")
    step = block_step(recipe, config, world.device, world.rank)
    block = time_calls(step, world, BLOCK_TIMES * seconds)  # (ranks, calls)
    mean = float(block.mean())
    say("a product of matrices, a copy in memory")
    width = PRODUCT_WIDTH[kind]
    matrix = torch.full((width, width), 0.5, dtype=dtype, device=world.device)
    product = time_calls(lambda: matrix @ matrix, world, seconds)
    source = torch.empty(COPIED_BYTES[kind], dtype=torch.uint8, device=world.device).zero_()
    target = torch.empty_like(source).zero_()
    copy = time_calls(lambda: target.copy_(source), world, seconds)
    name, (memory, memory_source) = device_name(world.device), own_memory(world.device, local_ranks)
    return DeviceTimes(
        name=name,
        block_flops_per_second=block_flops(config, recipe.data.sequence_length) * tokens / mean,
        deviation_fraction=float((block.std(dim=1) / block.mean(dim=1)).mean()),
        slowest_factor=float(block.mean(dim=1).max()) / mean,
        product_flops_per_second=2 * width**3 / float(product.min()),
        product_width=width,
        sheet_flops_per_second=peak_flops(name) if kind == "cuda" else None,
        memory_bytes=memory,
        memory_source=memory_source,
        copied_bytes_per_second=2 * COPIED_BYTES[kind] / float(copy.mean()),
    )


def block_step(recipe: Recipe, config: PreTrainedConfig, device: torch.device, rank: int) -> Callable[[], None]:
    """Forward and backward of the model's first decoder block by itself, on one micro-batch of random tokens.

    The other blocks are taken out before the model gets memory. What it hands to its block (positions, masks) is
    caught in one pass.
    """
    torch.manual_seed(address_seed(recipe.seed, "probe", rank))
    model = build_on_meta(config, compute_dtype(recipe.train, device.type))
    name, block = decoder_blocks(model)[0]
    siblings = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(siblings, torch.nn.ModuleList), "blocks stand in a list"
    del siblings[1:]
    materialise(model, device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    shape = (recipe.train.micro_batch, recipe.data.sequence_length)
    ids = torch.randint(config.get_text_config().vocab_size, shape, device=device)
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(lambda _, *given: caught.append(given), with_kwargs=True)
    with torch.no_grad():
        model.train().base_model(input_ids=ids, use_cache=False)
    hook.remove()
    (hidden, *others), named = caught[0]  # hidden: (batch, sequence, width)
    gradient = torch.full_like(hidden, 1 / hidden.numel())
    if recipe.train.compile:
        block.compile()

    def step() -> None:
        entering = hidden.detach().requires_grad_()
        leaving = block(entering, *others, **named)
        leaving = leaving[0] if isinstance(leaving, tuple) else leaving  # some return their attention beside it
        leaving.backward(gradient)
        block.zero_grad(set_to_none=True)

    return step


def block_flops(config: PreTrainedConfig, sequence_length: int) -> float:
    """Floating-point operations of one block per token, forward and backward: its part of `flops_per_token`.

    Equation (step-compute) of docs/formal/step.md.
    """
    model = build_on_meta(config)
    blocks = [block for _, block in decoder_blocks(model)]
    counts = count_parameters(model)
    attention = flops_per_token(config, sequence_length) - 6 * counts.multiplied
    in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    idle = counts.total - counts.active
    return (6 * (in_blocks - idle) + attention) / len(blocks)


def own_memory(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes of memory that one rank has, and how that is known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1], "as the device tells"
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return whole // local_ranks, f"the machine's, split by its {local_ranks} ranks"
