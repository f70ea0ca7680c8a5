import math

import pytest
import torch
import torch.distributed as dist
from tiny_models import FAMILIES, rank_of, sharded, tiny_config, tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, initialization
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.engine import initial
from fedshard.engine.initial import fill, materialise, read_initials
from fedshard.engine.model import build_on_meta
from fedshard.engine.parameters import local_part, named_parameters
from fedshard.engine.values import Constant, Normal, Piece

CPU = torch.device("cpu")


def made(config, seed=0):
    """A whole model, filled by address."""
    model = build_on_meta(config).eval()
    materialise(model, CPU)
    fill(model, seed)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_same_laws_as_the_architecture_itself(family):
    """What is constant in a model constructed directly is the same here; what is drawn has the same spread."""
    config = tiny_config(family)
    direct, ours = tiny_model(family), named_parameters(made(config))
    for name, parameter in direct.named_parameters():
        if parameter.std() < 1e-9:
            assert torch.equal(ours[name], parameter), name
        else:
            few = 4.5 / math.sqrt(2 * parameter.numel())  # relative standard error of a spread, 4.5 times
            assert ours[name].std().item() == pytest.approx(parameter.std().item(), rel=2 * few), name
            assert abs(ours[name].mean().item()) < 4.5 * ours[name].std().item() / math.sqrt(parameter.numel()), name
    assert ours.keys() == dict(direct.named_parameters()).keys()


def test_gpt2_scales_its_residual_projections_by_depth():
    """As in the GPT-2 paper: 0.02/√(2·layers), with two layers 0.01."""
    laws = read_initials(tiny_config("gpt2")).parameters
    assert laws["transformer.h.0.attn.c_proj.weight"][0].law == Normal(std=0.01)
    assert laws["transformer.h.0.attn.c_attn.weight"][0].law == Normal(std=0.02)


def test_truncated_normal_is_read_with_its_bounds():
    config = CONFIG_MAPPING["modernbert-decoder"](vocab_size=61, hidden_size=8, num_attention_heads=2,
                                                  num_hidden_layers=2, intermediate_size=8, pad_token_id=0)  # fmt: skip
    laws = {piece.law for pieces in read_initials(config).parameters.values() for piece in pieces}
    assert Normal(std=0.02, low=-0.04, high=0.04) in laws


def test_padding_row_of_a_tied_embedding_is_zero():
    """The head, tied to the embedding, is initialised after it and must not overwrite the row."""
    model = made(tiny_config("opt"))
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    assert torch.equal(embedding[1], torch.zeros(16))
    assert (embedding[[0, 2]] != 0).all()


LAYOUTS = [Layout(1, 1, 2), Layout(1, 1, 3), Layout(1, 1, 4), Layout(1, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
def test_every_layout_starts_from_the_same_tensors(family, layout):
    """Bit for bit, with 61 rows over 2, 3, 4 and 4 experts over 3 (2, 2, 0)."""
    config = tiny_config(family)
    whole = named_parameters(made(config, seed=5))
    parts = {name: [] for name in whole}
    for rank in range(layout.ranks):
        with rank_of(layout, rank) as mesh:
            model = sharded(config, mesh)
            materialise(model, CPU)
            fill(model, seed=5)
            for name, parameter in named_parameters(model).items():
                parts[name].append(local_part(parameter).clone())
    for name, parameter in whole.items():
        for replica in range(layout.replicas):
            shards = parts[name][replica * layout.shards : (replica + 1) * layout.shards]
            assert torch.equal(torch.cat(shards), parameter), name
            drawn = [shard for shard in shards if shard.numel() and shard.ndim > 1]
            assert not any(torch.equal(one, other) for one in drawn for other in drawn if one is not other), name


def test_nothing_larger_than_a_chunk_is_made_at_once(monkeypatch):
    config, sizes = tiny_config("llama"), []
    whole = named_parameters(made(config))
    make = initial.initial_values

    def watched(seed, name, pieces, start, numel):
        sizes.append(numel)
        return make(seed, name, pieces, start, numel)

    monkeypatch.setattr(initial, "CHUNK", 7)
    monkeypatch.setattr(initial, "initial_values", watched)
    chunked = named_parameters(made(config))
    assert max(sizes) == 7
    assert all(torch.equal(chunked[name], whole[name]) for name in whole)


def test_seeds_give_other_weights_and_recomputation_does_not():
    config = tiny_config("llama")
    wrapped = build_on_meta(config)
    wrapped.set_submodule("model.layers.1", checkpoint_wrapper(wrapped.get_submodule("model.layers.1")))
    materialise(wrapped, CPU)
    fill(wrapped, 0)
    plain, other = named_parameters(made(config)), named_parameters(made(config, seed=1))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(named_parameters(wrapped)[name], plain[name])
    assert not torch.equal(other[name], plain[name])


def test_stored_in_bfloat16_is_the_same_rounded():
    config = tiny_config("llama")
    model = build_on_meta(config, torch.bfloat16)
    materialise(model, CPU)
    fill(model, 0)
    whole = named_parameters(made(config))
    assert all(torch.equal(each, whole[name].bfloat16()) for name, each in named_parameters(model).items())


ROPES = {
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16},
    "default": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip


def assert_same_forward(model, config):
    """`model` computes the same bits as one constructed directly with the same parameters."""
    direct = AutoModelForCausalLM.from_config(config).eval()
    whole = named_parameters(made(config))
    with torch.no_grad():
        for name, parameter in named_parameters(direct).items():
            parameter.copy_(whole[name])
        ids = torch.arange(24).view(2, 12)
        assert torch.equal(model.eval()(input_ids=ids).logits, direct(input_ids=ids).logits)


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_tables_are_rebuilt(rope):
    config = tiny_config("llama")
    config.rope_parameters = ROPES[rope]
    assert_same_forward(made(config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_materialised_computes_as_constructed(family):
    assert_same_forward(made(tiny_config(family)), tiny_config(family))


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_materialised_computes_as_constructed_under_fsdp(family):
    config = tiny_config(family)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sharded(config, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
        materialise(model, CPU)
        fill(model, 0)
        if family == "llama-tied":
            assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_same_forward(model, config)
    finally:
        dist.destroy_process_group()


def test_persistent_buffers_get_their_values():
    """DeepSeek's bias of the router, a buffer that checkpoints hold."""
    config = CONFIG_MAPPING["deepseek_v3"](
        vocab_size=61, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2,
        first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        intermediate_size=8, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    buffers = dict(made(config).named_buffers())
    direct = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in direct
    assert buffers.keys() == direct.keys()
    assert all(torch.equal(buffers[name], direct[name]) for name in direct)


def test_what_has_no_address_is_refused_by_name():
    config = CONFIG_MAPPING["rwkv"](vocab_size=61, hidden_size=8, num_hidden_layers=2, context_length=8)
    initials = read_initials(config)
    assert initials.parameters["rwkv.blocks.0.attention.key.weight"] == ()  # orthogonal, over a normal
    with pytest.raises(InputError, match=r"rwkv initialises rwkv\.embeddings\.weight"):
        initials.check()


def test_what_is_written_past_the_known_functions_is_refused(monkeypatch):
    """A parameter scaled in place after it was drawn would otherwise lose its scale without a word."""
    own = LlamaPreTrainedModel._init_weights

    def scaling(self, module):
        own(self, module)
        if type(module).__name__ == "LlamaMLP":
            module.down_proj.weight.mul_(0.5)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", scaling)
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.down_proj\.weight, model\.layers\.1\.mlp\.down_proj"):
        read_initials(tiny_config("llama")).check()


def test_an_unwritten_buffer_is_refused_by_name():
    config = CONFIG_MAPPING["apertus"](vocab_size=61, hidden_size=8, num_attention_heads=2, num_hidden_layers=1,
                                       intermediate_size=8, num_key_value_heads=2)  # fmt: skip
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.act_fn\.beta"):
        read_initials(config)


def test_transformers_is_left_as_it_was(monkeypatch):
    before = vars(initialization).copy()
    read_initials(tiny_config("llama"))
    assert vars(initialization) == before

    def fail(self):
        raise RuntimeError("stop")

    monkeypatch.setattr("transformers.PreTrainedModel.initialize_weights", fail)
    with pytest.raises(RuntimeError, match="stop"):
        read_initials(tiny_config("llama"))
    assert vars(initialization) == before


def test_part_of_a_parameter_alone_has_no_law():
    """A part written before the whole leaves the rest without a law: refused, not filled with anything."""
    notes = initial._Notes()
    parameter = torch.nn.Parameter(torch.empty(4, 2, device="meta"))
    notes.functions()["zeros_"](parameter[1])
    assert parameter not in notes.pieces
    notes.functions()["ones_"](parameter)
    notes.functions()["zeros_"](parameter[1])
    assert notes.pieces[parameter] == [Piece(Constant(1.0), 0, 8), Piece(Constant(0.0), 2, 4)]
