import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, rank_of, sharded, tiny_config, tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fedshard.core.errors import InputError
from fedshard.core.layout import Layout
from fedshard.engine.initial import materialise
from fedshard.engine.model import build_on_meta
from fedshard.engine.parameters import local_part, named_parameters
from fedshard.engine.tensor_files import TensorFiles, has_weights
from fedshard.engine.weights import load, plan_weights

CPU = torch.device("cpu")


def numbered(model):
    """Each element of each tensor gets its own number, so that nothing can be swapped unseen."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
            start += parameter.numel()
    assert start < 2**24, "float32 holds each of them exactly"
    return model


def loaded(config, folder):
    model = build_on_meta(config)
    materialise(model, CPU)
    load(model, folder)
    return named_parameters(model)


def assert_same(found, expected):
    expected = named_parameters(expected)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def rewrite(folder, change):
    """Save the folder's tensors again, as `change` makes them."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_by_name_and_value(family, tmp_path):
    """Through the files that transformers writes: experts one by one, Pythia's head as embed_out, no tied head."""
    model = numbered(tiny_model(family))
    model.save_pretrained(tmp_path)
    assert_same(loaded(model.config, tmp_path), model)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_several_files_with_an_index(family, tmp_path):
    model = numbered(tiny_model(family))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert has_weights(tmp_path)
    assert_same(loaded(model.config, tmp_path), model)


@pytest.mark.parametrize("layout", [Layout(1, 1, 3), Layout(1, 1, 4), Layout(1, 2, 2)], ids=str)
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
def test_each_rank_reads_its_rows_alone(family, layout, tmp_path, monkeypatch):
    model = numbered(tiny_model(family))
    model.save_pretrained(tmp_path)
    whole, read = named_parameters(model), TensorFiles.read
    parts, numel = {name: [] for name in whole}, []

    def counted(files, key, rows=None):
        tensor = read(files, key, rows)
        numel.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counted)
    for rank in range(layout.ranks):
        with rank_of(layout, rank) as mesh:
            ours = sharded(model.config, mesh)
            materialise(ours, CPU)
            numel.clear()
            load(ours, tmp_path)
            local = {name: local_part(parameter) for name, parameter in named_parameters(ours).items()}
            assert sum(numel) == sum(part.numel() for part in local.values())
            for name, part in local.items():
                parts[name].append(part.clone())
    for name, parameter in whole.items():
        for replica in range(layout.replicas):
            shards = parts[name][replica * layout.shards : (replica + 1) * layout.shards]
            assert torch.equal(torch.cat(shards), parameter), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_read_too(family, tmp_path):
    """By the names and shapes that the model has in memory."""
    model = numbered(tiny_model(family))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda _: {name: each.detach() for name, each in model.state_dict().items()})
    assert_same(loaded(model.config, tmp_path), model)


def test_ten_experts_and_more_keep_their_order(tmp_path):
    config = tiny_config("mixtral")
    config.num_local_experts = 12
    model = numbered(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path)
    assert_same(loaded(config, tmp_path), model)


def test_gpt2_as_published(tmp_path):
    """Without the `transformer.` prefix and with the causal masks that old files hold."""
    model = numbered(tiny_model("gpt2"))
    model.save_pretrained(tmp_path)

    def old(tensors):
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        return tensors | masks

    rewrite(tmp_path, old)
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")
    assert_same(loaded(model.config, tmp_path), model)


def test_rotary_tables_of_old_files_are_not_read(tmp_path):
    model = numbered(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert_same(loaded(model.config, tmp_path), model)


def test_a_tied_tensor_by_the_head_s_name(tmp_path):
    model = numbered(tiny_model("llama-tied"))
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {name.replace("model.embed_tokens", "lm_head"): each for name, each in tensors.items()},
    )
    assert_same(loaded(model.config, tmp_path), model)


def test_recomputed_blocks_are_loaded(tmp_path):
    model = numbered(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    ours = build_on_meta(model.config)
    ours.set_submodule("model.layers.0", checkpoint_wrapper(ours.get_submodule("model.layers.0")))
    materialise(ours, CPU)
    load(ours, tmp_path)
    assert_same(named_parameters(ours), model)


def test_converted_to_the_stored_type(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = loaded(model.config, tmp_path)
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], each.float()) for name, each in model.named_parameters())


def test_persistent_buffers_are_read(tmp_path):
    """DeepSeek's bias of the router is no parameter, and learned all the same."""
    config = CONFIG_MAPPING["deepseek_v3"](
        vocab_size=61, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2,
        first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        intermediate_size=8, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    model = numbered(AutoModelForCausalLM.from_config(config))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)
    ours = build_on_meta(config)
    materialise(ours, CPU)
    load(ours, tmp_path)
    assert ours.get_buffer(name).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert_same(named_parameters(ours), model)


def faults(config, folder):
    with pytest.raises(InputError) as error:
        plan_weights(config, folder)
    return [fault.says for fault in error.value.faults]


def test_missing_and_unused_tensors_are_named(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)

    def change(tensors):
        tensors["model.layers.0.mlp.side.weight"] = tensors.pop("model.norm.weight")
        return tensors

    rewrite(tmp_path, change)
    unused, missing = faults(model.config, tmp_path)
    assert unused == "its model has no use for model.layers.0.mlp.side.weight"
    assert missing == "its files lack model.norm.weight"


def test_one_missing_expert_is_no_smaller_layer(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    rewrite(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if name != gone})
    (says,) = faults(model.config, tmp_path)
    assert says == "model.layers.1.mlp.experts.down_proj is (3, 16, 24) in the files and (4, 16, 24) by config.json"
    gone = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    rewrite(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if name != gone})
    assert any(
        "its files lack model.layers.1.mlp.experts.gate_up_proj" in says for says in faults(model.config, tmp_path)
    )


def test_layouts_of_experts_that_are_not_known_here_are_refused(tmp_path):
    """Two spellings of one tensor: which of them counts is not ours to guess."""
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"wpe.weight": tensors["transformer.wpe.weight"] + 1})
    assert any("transformer.wpe.weight" in says and "no use for" in says for says in faults(model.config, tmp_path))


def test_shapes_that_differ_are_both_named(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    config = tiny_config("llama")
    config.intermediate_size = 28
    says = faults(config, tmp_path)
    assert len(says) == 6  # three in each layer
    assert "model.layers.0.mlp.down_proj.weight is (16, 24) in the files and (16, 28) by config.json" in says


def test_files_that_are_missing_or_cut_off(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-8])
    with pytest.raises(InputError, match=first.name):
        plan_weights(model.config, tmp_path)
    first.unlink()
    with pytest.raises(InputError, match=first.name):
        plan_weights(model.config, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(InputError, match=r"index\.json"):
        plan_weights(model.config, tmp_path)


def test_a_folder_without_weights(tmp_path):
    assert not has_weights(tmp_path)
    Path(tmp_path / "consolidated.00.pth").touch()
    with pytest.raises(InputError, match=r"consolidated\.00\.pth"):
        has_weights(tmp_path)
