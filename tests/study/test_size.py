"""Sizes of models: exact against published counts, and tensor by tensor against transformers on the meta device."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshard.core.errors import InputError
from fedshard.core.layout import owned_of, rows_of
from fedshard.study.architectures import KINDS, architecture_of, known_models, read_architecture
from fedshard.study.known_models import MODELS
from fedshard.study.size import Tensor

# name: total, without embedding and head, tensors; counted on the meta device by others
COUNTS = {
    "llama-3.1-8b": (8_030_261_248, 6_979_588_096, 291),
    "llama-3.1-70b": (70_553_706_496, 68_452_360_192, 723),
    "tinyllama-1.1b": (1_100_048_384, 968_976_384, 201),
    "smollm2-135m": (134_515_008, 106_203_456, 272),
    "mixtral-8x7b": (46_702_792_704, 46_440_648_704, 291),
    "opt-125m": (125_239_296, 86_630_400, 196),
    "qwen2.5-0.5b": (494_032_768, 357_898_112, 290),
    "gpt2": (124_439_808, 85_842_432, 148),
    "pythia-70m": (70_426_624, 18_915_328, 76),
    "stories15m": (15_191_712, 5_975_712, 56),
}

SMALL = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"vocab_size": 11, "n_embd": 6, "n_layer": 2, "n_head": 2, "n_positions": 5}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **SMALL, "intermediate_size": 6, "num_key_value_heads": 1},
    {"model_type": "llama", **SMALL, "intermediate_size": 6, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    {"model_type": "llama", **SMALL, "intermediate_size": 6, "tie_word_embeddings": True},
    {"model_type": "mistral", **SMALL, "intermediate_size": 6, "num_key_value_heads": 1},
    {"model_type": "qwen2", **SMALL, "intermediate_size": 6, "num_key_value_heads": 1},
    {"model_type": "qwen3", **SMALL, "intermediate_size": 6, "num_key_value_heads": 1, "head_dim": 6},
    {"model_type": "mixtral", **SMALL, "intermediate_size": 6, "num_key_value_heads": 2}
    | {"num_local_experts": 3, "num_experts_per_tok": 2},
    {"model_type": "gpt2", **GPT2},
    {"model_type": "gpt2", **GPT2, "n_inner": 7, "tie_word_embeddings": False},
    {"model_type": "opt", **SMALL, "word_embed_proj_dim": 4, "ffn_dim": 9, "max_position_embeddings": 7},
    {"model_type": "opt", **SMALL, "word_embed_proj_dim": 2, "ffn_dim": 9, "max_position_embeddings": 7},
    {"model_type": "opt", **SMALL, "ffn_dim": 9, "max_position_embeddings": 7, "do_layer_norm_before": False}
    | {"word_embed_proj_dim": 4},
    {"model_type": "gpt_neox", **SMALL, "intermediate_size": 9},
    {"model_type": "gpt_neox", **SMALL, "intermediate_size": 9, "attention_bias": False, "tie_word_embeddings": True},
]


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts_are_met_exactly(name):
    model = read_architecture(name)
    assert (model.total, model.body, model.tensor_count) == COUNTS[name]
    assert sum(tensor.numel for tensor in model.tensors()) == model.total


def test_a_token_passes_two_of_mixtrals_eight_experts():
    assert read_architecture("mixtral-8x7b").active == 12_879_925_248


def test_a_dense_model_is_all_active():
    assert all(model.active == model.total for model in map(read_architecture, ["gpt2", "llama-2-7b", "opt-175b"]))


@pytest.mark.parametrize(("name", "total"), [("llama-3.1-405b", 405.8534e9), ("opt-175b", 174.60e9)])
def test_the_largest_models_to_the_published_digits(name, total):
    assert read_architecture(name).total == pytest.approx(total, rel=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{len(config)}")
def test_names_shapes_and_flops_are_those_of_transformers(config):
    from transformers import CONFIG_MAPPING

    from fedshard.engine.model import build_on_meta, count_parameters, decoder_blocks, flops_per_token

    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields = {key: value for key, value in config.items() if key != "model_type"}
    built = CONFIG_MAPPING[config["model_type"]](**special, **fields)
    model, ours = build_on_meta(built), architecture_of(config)
    assert {tensor.name: tensor.shape for tensor in ours.tensors()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert [name for name, _ in decoder_blocks(model)] == [f"{ours.block_prefix}.{i}" for i in range(ours.blocks)]
    counts = count_parameters(model)
    assert (ours.total, ours.active, ours.lookup, ours.head, ours.tied) == (
        counts.total,
        counts.active,
        counts.lookup,
        counts.head,
        counts.tied,
    )
    assert ours.flops_per_token(32) == flops_per_token(built, 32)


def test_the_head_costs_the_same_tied_or_not():
    """Traps O3 and O7: a lookup is no product, the head always is one: 2·V·d forward, 80 for V = 10 and d = 4."""
    config = {"model_type": "llama", **SMALL, "intermediate_size": 6}
    tied, untied = (architecture_of(config | {"tie_word_embeddings": tie}) for tie in (True, False))
    assert tied.flops_per_token(8) == untied.flops_per_token(8)
    assert untied.total - tied.total == 10 * 4
    without_blocks = tied.multiplied - tied.body
    assert 2 * without_blocks == 80
    assert untied.multiplied - untied.body == without_blocks


def test_flops_of_llama_by_hand():
    """6 · (8.030 − 0.525) + 12 · 32 · 4096 · T: 45.0 and 12.88 GFLOP a token at 8,192 tokens."""
    model = read_architecture("llama-3.1-8b")
    assert model.flops_per_token(8192) == 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    assert model.attention_flops_per_token(8192) == pytest.approx(12.88e9, rel=1e-3)


@given(st.integers(1, 300), st.integers(1, 7), st.integers(1, 40), st.integers(1, 5))
def test_the_largest_shard_is_that_of_the_layout(rows, columns, shards, replicas):
    tensor = Tensor("w", (rows, columns))
    largest = max(len(rows_of(shard, shards, rows)) for shard in range(shards)) * columns
    assert tensor.shard_numel(shards) == largest
    model = architecture_of({"model_type": "llama", **SMALL, "intermediate_size": 6})
    owned = [
        len(owned_of(0, replicas, each.row_numel * len(rows_of(0, shards, each.shape[0])))) for each in model.tensors()
    ]
    assert model.owned_numel(shards, replicas) == sum(owned)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 600))
def test_padding_only_adds_and_less_than_a_row_per_shard(name, shards):
    model = read_architecture(name)
    waste = model.padded_numel(shards) - model.total
    assert 0 <= waste < shards * sum(tensor.row_numel for tensor in model.tensors())
    assert model.padded_numel(1) == model.total


def test_padding_by_hand():
    """257 rows over 4 ranks are padded to 260; eight fused experts over 16 ranks to 16."""
    assert Tensor("w", (257, 160)).shard_numel(4) * 4 == 260 * 160
    experts = next(each for each in read_architecture("mixtral-8x7b").block if each.role == "expert")
    assert experts.shard_numel(16) * 16 == 2 * experts.numel


def test_a_config_file_and_its_folder_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gpt2"] | {"n_ctx": 1024}))
    assert read_architecture(tmp_path).total == read_architecture(tmp_path / "config.json").total == COUNTS["gpt2"][0]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"model_type": "bert"}, ["model_type"]),
        ({}, ["model_type"]),
        ({"model_type": "llama", **SMALL}, ["intermediate_size"]),
        (
            {"model_type": "llama", **SMALL, "hidden_size": 0, "intermediate_size": "6"},
            ["hidden_size", "intermediate_size"],
        ),
        (
            {"model_type": "gpt2", "vocab_size": 3},
            ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
        ),
    ],
)
def test_every_field_that_is_lacking_is_named(config, keys):
    with pytest.raises(InputError) as caught:
        architecture_of(config, "c")
    assert [fault.key for fault in caught.value.faults] == [f"c: {key}" for key in keys]


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InputError) as caught:
        read_architecture("llama-3.1-8")
    assert caught.value.faults[0].mend.startswith("Did you mean llama-3.1-8b? There are gpt2, ")


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_architecture(tmp_path)


def test_every_known_model_is_of_a_known_kind():
    assert {MODELS[name]["model_type"] for name in known_models()} <= set(KINDS)
