import json
import socket

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_config, tiny_model
from transformers import CONFIG_MAPPING

from fedshard.core.errors import InputError
from fedshard.core.recipe import TINY_MODEL, ConfigModel, FolderModel
from fedshard.engine.config import check_positions, read_config
from fedshard.engine.model import build_on_meta


def read(**fields):
    return read_config(ConfigModel(**(TINY_MODEL | fields)))


def faults_of(model):
    with pytest.raises(InputError) as error:
        read_config(model)
    return error.value.faults


def faults(**fields):
    return faults_of(ConfigModel(**(TINY_MODEL | fields)))


@pytest.fixture
def folder(tmp_path):
    """A folder with the config and weights of a tiny Llama."""
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return FolderModel(kind="folder", path=str(folder))


def test_the_built_in_model():
    config = read()
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("llama", 160, 257)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize("field", [name for name in TINY_MODEL if name != "model_type"])
def test_every_misspelt_field_is_refused_with_the_right_one(field):
    wrong = field.replace("_", "-")
    given = {name: value for name, value in TINY_MODEL.items() if name != field} | {wrong: TINY_MODEL[field]}
    fault = {each.key: each for each in faults_of(ConfigModel(**given))}[f"model.{wrong}"]
    assert f"model.{field}?" in fault.mend


def test_all_faults_at_once():
    found = faults(num_layers=2, n_embd=5, hidden_size="wide")
    assert [fault.key for fault in found] == ["model.num_layers", "model.n_embd", "model"]
    assert "hidden_size" in found[2].says


@pytest.mark.parametrize("name", ["temperature", "max_length", "dtype", "torch_dtype", "architectures", "num_labels"])
def test_what_says_nothing_about_the_architecture_is_refused(name):
    """transformers would take each of these and either drop it or let it change nothing that trains."""
    (fault,) = faults(**{name: 1})
    assert fault.key == f"model.{name}"


def test_names_from_older_files_and_other_architectures_are_taken():
    assert read(rope_theta=5e5).rope_parameters["rope_theta"] == 5e5
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_scaling=scaling).rope_parameters["factor"] == 2.0
    gpt2 = read_config(ConfigModel(model_type="gpt2", hidden_size=32, num_hidden_layers=1, n_head=2, vocab_size=61))
    assert (gpt2.n_embd, gpt2.n_layer) == (32, 1)
    pythia = read_config(ConfigModel(model_type="gpt_neox", rotary_pct=0.5, hidden_size=32, num_attention_heads=2,
                                     num_hidden_layers=1, intermediate_size=8, vocab_size=61))  # fmt: skip
    assert pythia.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("model_type", "says", "mend"),
    [
        ("lama", "knows no 'lama'", "Did you mean llama?"),
        ("qwen-2", "knows no 'qwen-2'", "qwen2"),
        ("t5", "'t5' is no causal language model", "never run"),
        ("vit", "'vit' is no causal language model", ""),
    ],
)
def test_unknown_architectures(model_type, says, mend):
    (fault,) = faults_of(ConfigModel(model_type=model_type))
    assert fault.key == "model.model_type"
    assert says in fault.says
    assert mend in fault.mend


def test_encoder_decoder_is_refused():
    (fault,) = faults_of(ConfigModel(model_type="bart"))
    assert "encoder-decoder" in fault.says


def test_encoder_is_refused_unless_made_a_decoder():
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    (fault,) = faults_of(ConfigModel(model_type="bert", **small))
    assert "later tokens" in fault.says
    assert read_config(ConfigModel(model_type="bert", is_decoder=True, **small)).is_decoder


def test_values_that_do_not_fit_one_another():
    (fault,) = faults(hidden_size=130)  # 4 heads
    assert "130" in fault.says
    assert "4" in fault.says


def test_an_architecture_that_cannot_be_initialised_by_address():
    (fault,) = faults_of(ConfigModel(model_type="rwkv", hidden_size=8, num_hidden_layers=2, vocab_size=61))
    assert "rwkv.embeddings.weight" in fault.says


def test_special_tokens_of_a_larger_vocabulary_are_left_out():
    """GPT-2's own 50256 would be outside 61 tokens; one that is given stays."""
    config = read_config(ConfigModel(model_type="gpt2", vocab_size=61, n_embd=8, n_head=2, n_layer=1, bos_token_id=3))
    assert (config.eos_token_id, config.bos_token_id) == (None, 3)
    phi = read_config(ConfigModel(model_type="phi3", vocab_size=61, hidden_size=8, num_attention_heads=2,
                                  num_hidden_layers=1, intermediate_size=8))  # fmt: skip
    assert phi.pad_token_id is None  # 32000, which no embedding of 61 rows takes


def test_positions():
    assert check_positions(read(), 512) is None
    fault = check_positions(read(), 513)
    assert fault is not None
    assert fault.key == "data.sequence_length"
    assert "513" in fault.says
    assert "512" in fault.says
    for model_type, positions in [("gpt2", 1024), ("opt", 2048)]:  # OPT's table has two rows more
        config = CONFIG_MAPPING[model_type]()
        assert check_positions(config, positions) is None
        assert check_positions(config, positions + 1) is not None
    assert check_positions(CONFIG_MAPPING["bloom"](), 10**6) is None


def test_a_folder(folder):
    config = read_config(edit(folder))
    assert (config.model_type, config.vocab_size) == ("llama", 61)


def test_nothing_is_fetched(folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    build_on_meta(read_config(edit(folder, _name_or_path="meta-llama/Llama-3.1-8B")))
    (fault,) = faults_of(FolderModel(kind="folder", path="meta-llama/Llama-3.1-8B"))
    assert fault.says == "no folder meta-llama/Llama-3.1-8B"


def test_code_of_a_folder_is_never_run(folder):
    marker = folder / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')")
    model = edit(folder, auto_map={"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Own"})
    build_on_meta(read_config(model))
    (fault,) = faults_of(edit(folder, model_type="own"))
    assert "'own'" in fault.says
    assert "never run" in fault.mend
    assert not marker.exists()


def test_a_folder_without_a_config(tmp_path):
    (fault,) = faults_of(FolderModel(kind="folder", path=str(tmp_path)))
    assert "no config.json" in fault.says
    (tmp_path / "config.json").write_text("{")
    (fault,) = faults_of(FolderModel(kind="folder", path=str(tmp_path)))
    assert "cannot be read" in fault.says


def test_a_slip_in_a_config_file_is_refused_and_old_keys_are_not(folder):
    read_config(edit(folder, n_ctx=32, task_specific_params={}, rotary_dim=4, torch_dtype="bfloat16"))
    raw = json.loads((folder / "config.json").read_text())
    layers = raw.pop("num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(raw))
    (fault,) = faults_of(edit(folder, num_hidden_layer=layers))
    assert fault.mend == "Did you mean num_hidden_layers?"


def test_quantised_weights_are_refused(folder):
    (fault,) = faults_of(edit(folder, quantization_config={"quant_method": "gptq", "bits": 4}))
    assert "quantised" in fault.says


def test_weights_in_another_form_are_no_reason_to_start_anew(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (fault,) = faults_of(edit(folder))
    assert "pytorch_model.bin" in fault.says


def test_a_config_alone_starts_from_scratch(folder):
    (folder / "model.safetensors").unlink()
    assert read_config(edit(folder)).vocab_size == 61


def test_weights_of_another_shape_are_refused(folder):
    (fault,) = faults_of(edit(folder, vocab_size=64, tie_word_embeddings=True))[:1]
    assert "tie_word_embeddings is true" in fault.says
    says = " ".join(fault.says for fault in faults_of(edit(folder, vocab_size=64, tie_word_embeddings=False)))
    assert "model.embed_tokens.weight is (61, 16) in the files and (64, 16) by config.json" in says


def test_tied_by_config_and_a_head_of_its_own_in_the_files(folder):
    (fault,) = faults_of(edit(folder, tie_word_embeddings=True))
    assert fault.key.endswith("config.json")
    assert fault.says == "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ"


def test_untied_by_config_and_no_head_in_the_files(tmp_path):
    tiny_model("llama-tied").save_pretrained(tmp_path)
    (fault,) = faults_of(edit(tmp_path, tie_word_embeddings=False))
    assert fault.says == "tie_word_embeddings is false, but the files hold no lm_head.weight"


def test_tied_by_config_and_the_same_head_twice_is_fine(tmp_path):
    model = tiny_model("llama-tied")
    model.save_pretrained(tmp_path)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_config(edit(tmp_path)).tie_word_embeddings


def test_the_config_is_not_changed_by_the_checks():
    config = tiny_config("llama")
    before = config.to_dict()
    build_on_meta(config, torch.bfloat16)
    assert config.to_dict() == before


def test_key_value_heads_that_cannot_be_shared_are_refused():
    """What would else fail in the first step, with a traceback."""
    config = ConfigModel(model_type="llama", vocab_size=64, hidden_size=8, num_attention_heads=2, num_key_value_heads=4)
    with pytest.raises(InputError, match=r"num_key_value_heads: 2 query heads cannot share 4"):
        read_config(config)
