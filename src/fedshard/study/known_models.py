"""Configs of well-known models, by name: only the fields that sizes follow from, as their config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _of_llamas_kin(kind: str, sizes: str, *, positions: int, tied: bool = False, **more: Any) -> Config:
    """A config from `vocabulary width blocks heads key_heads feed_width`."""
    vocabulary, width, blocks, heads, key_heads, feed = (int(size) for size in sizes.split())
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": feed,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **more,
    }


MODELS: Mapping[str, Config] = {
    "llama-2-7b": _of_llamas_kin("llama", "32000 4096 32 32 32 11008", positions=4096),
    "llama-2-13b": _of_llamas_kin("llama", "32000 5120 40 40 40 13824", positions=4096),
    "llama-2-70b": _of_llamas_kin("llama", "32000 8192 80 64 8 28672", positions=4096),
    "llama-3.1-8b": _of_llamas_kin("llama", "128256 4096 32 32 8 14336", positions=131072),
    "llama-3.1-70b": _of_llamas_kin("llama", "128256 8192 80 64 8 28672", positions=131072),
    "llama-3.1-405b": _of_llamas_kin("llama", "128256 16384 126 128 8 53248", positions=131072),
    "tinyllama-1.1b": _of_llamas_kin("llama", "32000 2048 22 32 4 5632", positions=2048),
    "smollm2-135m": _of_llamas_kin("llama", "49152 576 30 9 3 1536", positions=8192, tied=True),
    "stories15m": _of_llamas_kin("llama", "32000 288 6 6 6 768", positions=256, tied=True),
    "qwen2.5-0.5b": _of_llamas_kin("qwen2", "151936 896 24 14 2 4864", positions=32768, tied=True),
    "mixtral-8x7b": _of_llamas_kin(
        "mixtral", "32000 4096 32 32 8 14336", positions=32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    },
    "opt-125m": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
    },
    "opt-175b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 12288,
        "word_embed_proj_dim": 12288,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "ffn_dim": 49152,
        "max_position_embeddings": 2048,
    },
    "pythia-70m": {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}
