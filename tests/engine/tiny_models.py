"""Tiny models of each family, and ranks that hold shards without a second process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fedshard.core.layout import Layout
from fedshard.engine.model import build_on_meta, decoder_blocks

COMMON = {
    "vocab_size": 61,  # uneven over 2, 3 and 4 shards
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
ROTARY = COMMON | {"intermediate_size": 24, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
LEARNED = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", ROTARY),
    "llama-tied": ("llama", ROTARY | {"tie_word_embeddings": True}),
    "mistral": ("mistral", ROTARY | {"sliding_window": None}),
    "mistral-window": ("mistral", ROTARY | {"sliding_window": 5}),
    "qwen2": ("qwen2", ROTARY),
    "qwen2-window": ("qwen2", ROTARY | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", ROTARY | {"head_dim": 8}),
    "gpt2": ("gpt2", LEARNED | {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32}),
    "gpt_neox": ("gpt_neox", COMMON | {"intermediate_size": 24}),
    "opt": ("opt", COMMON | {"ffn_dim": 24, "pad_token_id": 1}),
    "mixtral": ("mixtral", ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", ROTARY | EXPERTS | {"shared_expert_intermediate_size": 8}),
    "qwen3_moe": ("qwen3_moe", ROTARY | EXPERTS),
}


def tiny_config(family: str) -> PreTrainedConfig:
    """The config of a tiny model of one of `FAMILIES`."""
    model_type, fields = FAMILIES[family]
    return CONFIG_MAPPING[model_type](**fields)


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model constructed directly, on the CPU, by its own initialisation; not training (no dropout)."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family)).eval()


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[DeviceMesh]:
    """This process as one rank of a group of `layout`; its collectives do nothing, so nothing may need their result."""
    # The rank stands in an axis's name because DTensor keeps the first of equal meshes, which knows another rank.
    shape, names = (layout.replicas, layout.shards), ("replica", f"shard of rank {rank}")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        replicated = layout.replicas > 1
        yield init_device_mesh(
            "cpu", shape if replicated else shape[1:], mesh_dim_names=names if replicated else names[1:]
        )
    finally:
        dist.destroy_process_group()


def sharded(config: PreTrainedConfig, mesh: DeviceMesh) -> PreTrainedModel:
    """A model on the meta device, cut into FSDP2 units."""
    model = build_on_meta(config)
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
