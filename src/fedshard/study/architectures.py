"""From a Hugging Face config to tensors: one function per architecture, and the configs of well-known models."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshard.core.errors import Fault, InputError
from fedshard.study.known_models import MODELS
from fedshard.study.size import Architecture, Tensor

Config = Mapping[str, Any]


def read_architecture(name_or_path: str | Path) -> Architecture:
    """The architecture of a known model's name, of a config.json, or of a folder that holds one.

    Raises InputError where there is none, or where its fields do not describe a model of a kind that is known here.

    >>> read_architecture("llama-3.1-8b").total
    8030261248
    """
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.is_dir():
        return _known(str(name_or_path))
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError([Fault(str(file), f"cannot be read ({error})", "Give a readable config.json.")]) from None
    return architecture_of(config, str(file))


def architecture_of(config: Config, name: str = "model") -> Architecture:
    """The architecture of a config in Hugging Face's form; `name` is what its faults are named after.

    Raises InputError with every field that is missing or no positive number.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, 1)
        mend = f"Did you mean {near[0]}?" if near else f"Kinds: {', '.join(KINDS)}."
        raise InputError([Fault(f"{name}: model_type", f"{kind!r} is no kind of model whose size is known", mend)])
    missing = [
        Fault(f"{name}: {key}", _lack(config, key), f"Give {key} as the model's config.json does.")
        for key in NEEDED[kind]
        if not _is_count(_look(config, key))
    ]
    if missing:
        raise InputError(missing)
    return KINDS[kind](config, name)


def known_models() -> list[str]:
    """The names that `read_architecture` knows, sorted."""
    return sorted(MODELS)


def _known(name: str) -> Architecture:
    if name.lower() in MODELS:
        return architecture_of(MODELS[name.lower()], name.lower())
    near = difflib.get_close_matches(name.lower(), MODELS, 1)
    mend = f"Did you mean {near[0]}? " if near else ""
    mend += f"There are {', '.join(known_models())}; or give the path of a config.json."
    raise InputError([Fault("model", f"no model {name!r} is known", mend)])


ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
ALIASES |= {"max_position_embeddings": "n_positions"}
"""GPT-2's own names for what the others call otherwise; transformers takes both."""


def _look(config: Config, key: str) -> Any:
    return config.get(key, config.get(ALIASES.get(key, key)))


def _lack(config: Config, key: str) -> str:
    value = _look(config, key)
    return "missing" if value is None else f"{value!r} is no positive whole number"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class _Shape:
    """What all kinds share."""

    vocabulary: int
    width: int
    blocks: int
    heads: int
    key_heads: int
    head_width: int
    tied: bool

    @staticmethod
    def of(config: Config, *, tied: bool) -> _Shape:
        """From a config; `tied` is what the kind does where the config says nothing."""
        width, heads = _look(config, "hidden_size"), _look(config, "num_attention_heads")
        return _Shape(
            vocabulary=config["vocab_size"],
            width=width,
            blocks=_look(config, "num_hidden_layers"),
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or width // heads,
            tied=config.get("tie_word_embeddings", tied),
        )

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_width


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (outputs, inputs)), *([Tensor(f"{name}.bias", (outputs,))] if bias else [])]


def _norm(name: str, width: int) -> list[Tensor]:
    """A layer norm with weight and bias."""
    return [Tensor(f"{name}.weight", (width,)), Tensor(f"{name}.bias", (width,))]


def _edges(shape: _Shape, embedding: str, norm: list[Tensor], head: str) -> tuple[Tensor, ...]:
    """The tensors outside the blocks where positions are not learned."""
    edges = [Tensor(embedding, (shape.vocabulary, shape.width), "lookup"), *norm]
    if not shape.tied:
        edges.append(Tensor(head, (shape.vocabulary, shape.width), "head"))
    return tuple(edges)


def _llama(config: Config, name: str) -> Architecture:
    """Llama and its kin: Mistral, Qwen 2 (biases on Q, K, V), Qwen 3 (norms on Q and K), Mixtral (experts)."""
    shape, kind, feed = _Shape.of(config, tied=False), config["model_type"], config["intermediate_size"]
    d, biased = shape.width, bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
    block = [
        *_linear("self_attn.q_proj", shape.attention_width, d, biased or kind == "qwen2"),
        *_linear("self_attn.k_proj", shape.key_width, d, biased or kind == "qwen2"),
        *_linear("self_attn.v_proj", shape.key_width, d, biased or kind == "qwen2"),
        *_linear("self_attn.o_proj", d, shape.attention_width, biased),
    ]
    if kind == "qwen3":
        block += [Tensor(f"self_attn.{each}_norm.weight", (shape.head_width,)) for each in ("q", "k")]
    experts, used = 1, 1
    if kind == "mixtral":
        experts, used = config["num_local_experts"], config["num_experts_per_tok"]
        block += [
            Tensor("mlp.gate.weight", (experts, d)),
            Tensor("mlp.experts.gate_up_proj", (experts, 2 * feed, d), "expert"),
            Tensor("mlp.experts.down_proj", (experts, d, feed), "expert"),
        ]
    else:
        biased = bool(config.get("mlp_bias", False)) and kind == "llama"
        block += [*_linear("mlp.gate_proj", feed, d, biased), *_linear("mlp.up_proj", feed, d, biased)]
        block += _linear("mlp.down_proj", d, feed, biased)
    block += [Tensor(f"{each}_layernorm.weight", (d,)) for each in ("input", "post_attention")]
    root = _edges(shape, "model.embed_tokens.weight", [Tensor("model.norm.weight", (d,))], "lm_head.weight")
    return _architecture(name, shape, config, root, block, "model.layers", feed, gated=True, experts=(experts, used))


def _gpt2(config: Config, name: str) -> Architecture:
    """GPT-2: learned positions, biases everywhere, linear layers stored transposed (inputs, outputs)."""
    shape = _Shape.of(config, tied=True)
    d, feed = shape.width, config.get("n_inner") or 4 * shape.width

    def linear(name: str, inputs: int, outputs: int) -> list[Tensor]:
        return [Tensor(f"{name}.weight", (inputs, outputs)), Tensor(f"{name}.bias", (outputs,))]

    block = [*_norm("ln_1", d), *linear("attn.c_attn", d, 3 * d), *linear("attn.c_proj", d, d)]
    block += [*_norm("ln_2", d), *linear("mlp.c_fc", d, feed), *linear("mlp.c_proj", feed, d)]
    positions = Tensor("transformer.wpe.weight", (_look(config, "max_position_embeddings"), d), "lookup")
    norm = [positions, *_norm("transformer.ln_f", d)]
    root = _edges(shape, "transformer.wte.weight", norm, "lm_head.weight")
    return _architecture(name, shape, config, root, block, "transformer.h", feed)


def _opt(config: Config, name: str) -> Architecture:
    """OPT: learned positions, two of which are never used; some sizes embed in another width than they compute in."""
    shape, feed = _Shape.of(config, tied=True), config["ffn_dim"]
    d, narrow, decoder = shape.width, config.get("word_embed_proj_dim") or shape.width, "model.decoder"
    block = [part for each in ("k", "v", "q", "out") for part in _linear(f"self_attn.{each}_proj", d, d, True)]
    block += [*_norm("self_attn_layer_norm", d), *_linear("fc1", feed, d, True), *_linear("fc2", d, feed, True)]
    block += _norm("final_layer_norm", d)
    positions = config["max_position_embeddings"] + 2
    root = [
        Tensor(f"{decoder}.embed_tokens.weight", (shape.vocabulary, narrow), "lookup"),
        Tensor(f"{decoder}.embed_positions.weight", (positions, d), "lookup"),
    ]
    if narrow != d:
        root += [
            Tensor(f"{decoder}.project_out.weight", (narrow, d)),
            Tensor(f"{decoder}.project_in.weight", (d, narrow)),
        ]
    if config.get("do_layer_norm_before", True):
        root += _norm(f"{decoder}.final_layer_norm", d)
    if not shape.tied:
        root.append(Tensor("lm_head.weight", (shape.vocabulary, narrow), "head"))
    return _architecture(name, shape, config, tuple(root), block, f"{decoder}.layers", feed)


def _gpt_neox(config: Config, name: str) -> Architecture:
    """GPT-NeoX, as Pythia: Q, K and V in one matrix, biases everywhere."""
    shape, feed = _Shape.of(config, tied=False), config["intermediate_size"]
    d, biased = shape.width, bool(config.get("attention_bias", True))
    block = [*_norm("input_layernorm", d), *_norm("post_attention_layernorm", d)]
    block += [*_linear("attention.query_key_value", 3 * d, d, biased), *_linear("attention.dense", d, d, biased)]
    block += [*_linear("mlp.dense_h_to_4h", feed, d, True), *_linear("mlp.dense_4h_to_h", d, feed, True)]
    root = _edges(shape, "gpt_neox.embed_in.weight", _norm("gpt_neox.final_layer_norm", d), "lm_head.weight")
    return _architecture(name, shape, config, root, block, "gpt_neox.layers", feed)


def _architecture(
    name: str,
    shape: _Shape,
    config: Config,
    root: tuple[Tensor, ...],
    block: list[Tensor],
    block_prefix: str,
    feed_width: int,
    gated: bool = False,
    experts: tuple[int, int] = (1, 1),
) -> Architecture:
    return Architecture(
        name=name,
        root=root,
        block=tuple(block),
        blocks=shape.blocks,
        block_prefix=block_prefix,
        width=shape.width,
        attention_width=shape.attention_width,
        key_width=shape.key_width,
        feed_width=feed_width,
        gated=gated,
        vocabulary=shape.vocabulary,
        positions=_look(config, "max_position_embeddings"),
        tied=shape.tied,
        experts=experts[0],
        experts_used=experts[1],
    )


COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
NEEDED: dict[str, tuple[str, ...]] = {
    "llama": (*COMMON, "intermediate_size"),
    "mistral": (*COMMON, "intermediate_size", "num_key_value_heads"),
    "qwen2": (*COMMON, "intermediate_size", "num_key_value_heads"),
    "qwen3": (*COMMON, "intermediate_size", "num_key_value_heads", "head_dim"),
    "mixtral": (*COMMON, "intermediate_size", "num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
    "gpt2": (*COMMON, "max_position_embeddings"),
    "opt": (*COMMON, "ffn_dim", "max_position_embeddings"),
    "gpt_neox": (*COMMON, "intermediate_size"),
}
"""The fields that each kind's tensors are made from and that do not follow from the others."""

KINDS: dict[str, Callable[[Config, str], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _llama),
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
}
