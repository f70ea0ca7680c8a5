import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import CONFIG_MAPPING

from fedshard.core.errors import InputError
from fedshard.engine.model import build_on_meta, count_parameters, decoder_blocks, edge_modules, flops_per_token
from fedshard.engine.parameters import local_part, local_rows, named_parameters, tied_names

# The published configs, as far as they decide sizes.
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_70B |= {"intermediate_size": 28672}
TINY_LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32}
TINY_LLAMA |= {"num_key_value_heads": 4, "intermediate_size": 5632}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True}
MIXTRAL = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
MIXTRAL |= {"num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
OPT = {"vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072}
QWEN = {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
QWEN |= {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
PYTHIA = {"vocab_size": 50304, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
PYTHIA |= {"intermediate_size": 2048}
STORIES = {"vocab_size": 32000, "hidden_size": 288, "num_hidden_layers": 6, "num_attention_heads": 6}
STORIES |= {"intermediate_size": 768, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "fields", "total", "without", "active", "tensors"),
    [
        pytest.param("llama", LLAMA_8B, 8_030_261_248, 6_979_588_096, 8_030_261_248, 291, id="Llama-3.1-8B"),
        pytest.param("llama", LLAMA_70B, 70_553_706_496, 68_452_360_192, 70_553_706_496, 723, id="Llama-3.1-70B"),
        pytest.param("llama", TINY_LLAMA, 1_100_048_384, 968_976_384, 1_100_048_384, 201, id="TinyLlama-1.1B"),
        pytest.param("llama", SMOLLM2, 134_515_008, 106_203_456, 134_515_008, 272, id="SmolLM2-135M"),
        pytest.param("mixtral", MIXTRAL, 46_702_792_704, 46_440_648_704, 12_879_925_248, 291, id="Mixtral-8x7B"),
        pytest.param("opt", OPT, 125_239_296, 86_630_400, 125_239_296, 196, id="OPT-125m"),
        pytest.param("qwen2", QWEN, 494_032_768, 357_898_112, 494_032_768, 290, id="Qwen2.5-0.5B"),
        pytest.param("gpt2", {}, 124_439_808, 85_842_432, 124_439_808, 148, id="GPT-2"),
        pytest.param("gpt_neox", PYTHIA, 70_426_624, 18_915_328, 70_426_624, 76, id="Pythia-70m"),
        pytest.param("llama", STORIES, 15_191_712, 5_975_712, 15_191_712, 56, id="stories15M"),
    ],
)
def test_parameters_of_known_models(kind, fields, total, without, active, tensors):
    """By their published configs: all, without embedding and head, those that one token uses, tensors."""
    model = build_on_meta(CONFIG_MAPPING[kind](**fields))
    counts = count_parameters(model)
    assert counts.total == total
    assert counts.active == active
    embedding = model.get_input_embeddings().weight.numel()
    assert counts.total - embedding - (0 if counts.tied else counts.head) == without
    assert len(named_parameters(model)) == tensors
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_stored_in_float32_whatever_the_config_says():
    config = tiny_config("llama")
    config.dtype = torch.bfloat16
    model = build_on_meta(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in build_on_meta(config, torch.bfloat16).parameters()} == {torch.bfloat16}
    assert config.dtype == torch.bfloat16, "the caller's config was changed"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.layers"), ("gpt2", "transformer.h"), ("gpt_neox", "gpt_neox.layers"),
     ("opt", "model.decoder.layers"), ("mixtral", "model.layers")],
)  # fmt: skip
def test_blocks_by_structure(family, name):
    model = build_on_meta(tiny_config(family))
    assert [found for found, _ in decoder_blocks(model)] == [f"{name}.0", f"{name}.1"]
    assert all(model.get_submodule(found) is block for found, block in decoder_blocks(model))


def test_a_list_of_experts_is_no_list_of_blocks():
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert decoder_blocks(model) == [("layers.0", block)]


def test_no_blocks_is_refused():
    with pytest.raises(InputError, match="no list of decoder blocks"):
        decoder_blocks(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_edges_hold_every_parameter(family):
    model = build_on_meta(tiny_config(family))
    parts = [*decoder_blocks(model), *edge_modules(model)]
    held = [name for name, module in parts for name in {f"{name}.{inner}" for inner, _ in module.named_parameters()}]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_tied_head_is_at_the_edges_beside_its_embedding():
    model = build_on_meta(tiny_config("llama-tied"))
    edges = dict(edge_modules(model))
    assert list(edges) == ["model.embed_tokens", "model.norm", "lm_head"]
    assert edges["lm_head"].weight is edges["model.embed_tokens"].weight
    assert tied_names(model)["lm_head.weight"] == "model.embed_tokens.weight"


def test_names_do_not_tell_that_blocks_are_recomputed():
    model = build_on_meta(tiny_config("llama"))
    names = list(named_parameters(model))
    model.set_submodule("model.layers.0", checkpoint_wrapper(model.get_submodule("model.layers.0")))
    assert list(named_parameters(model)) == names


def test_a_plain_tensor_is_all_local():
    whole = torch.arange(6.0).view(3, 2)
    assert local_rows(whole) == range(3)
    assert local_rows(torch.tensor(1.0)) == range(1)
    assert local_part(whole).data_ptr() == whole.data_ptr()


def test_flops_by_hand():
    """One layer of width 4 with one head, MLP of 8, vocabulary 10, no biases; 3 tokens."""
    config = CONFIG_MAPPING["llama"](
        vocab_size=10, hidden_size=4, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8
    )
    matrices = 4 * (4 * 4) + 3 * (4 * 8) + 10 * 4  # Q K V O; gate, up, down; head
    norms = 3 * 4
    assert flops_per_token(config, 3) == 6 * (matrices + norms) + 12 * 1 * 4 * 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "mixtral"])
def test_flops_do_not_depend_on_tying(family):
    """The embedding is a lookup and costs nothing; the head is 2·V·h forward, tied or not: 80 for V = 10, h = 4."""
    costs = set()
    for tied in (True, False):
        config = tiny_config(family)
        config.tie_word_embeddings = tied
        costs.add(flops_per_token(config, 8))
    assert len(costs) == 1
    config.vocab_size += 10
    width = config.hidden_size
    assert flops_per_token(config, 8) - costs.pop() == 3 * (80 * width // 4)


def test_flops_count_the_experts_that_a_token_uses():
    """Experts that a token is not routed to cost nothing but their row of the router."""
    config = tiny_config("mixtral")
    before = flops_per_token(config, 8)
    config.num_local_experts *= 2
    assert flops_per_token(config, 8) - before == 6 * 2 * 4 * config.hidden_size  # two layers, four more rows each
