"""Hugging Face folders made from checkpoints: every tensor by name, type and value, and read back by transformers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from saved_runs import LLAMA, recipe_of, whole
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedshard.core.errors import InputError, RunError
from fedshard.core.layout import Layout
from fedshard.core.recipe_file import make_recipe
from fedshard.engine.checkpoint import FOLDER, Checkpoint, open_checkpoint
from fedshard.engine.export import byte_tokenizer, export
from fedshard.engine.job import make_job
from fedshard.engine.log import Log
from fedshard.engine.meter import Meter
from fedshard.engine.parameters import local_part, named_parameters
from fedshard.engine.save import Saver
from fedshard.engine.sinks import Sinks
from fedshard.engine.step import Skips
from fedshard.testing import RankContext, RankPool

TIED = LLAMA | {"hidden_size": 8, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"hidden_size": 8},
    "tied": TIED,
    "gpt2": {
        "kind": "config", "model_type": "gpt2", "vocab_size": 257, "n_embd": 8, "n_layer": 2, "n_head": 2,
        "n_positions": 32,
    },
    "mixtral": {
        "kind": "config", "model_type": "mixtral", "vocab_size": 257, "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
        "max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def save_distinct(context: RankContext, model: dict[str, Any], folder: Path, cache: Path, together: bool):
    """A checkpoint in which every tensor has values of its own; those of later groups are larger. Its weights whole."""
    shape = (context.layout.groups, context.layout.replicas, context.layout.shards)
    recipe = recipe_of(shape, sync={"outer": {"kind": "mean"}})
    raw = recipe.model_dump(mode="json", exclude_none=True) | {"model": model}
    job = make_job(make_recipe(raw), context.world, cache)
    with torch.no_grad():
        for number, parameter in enumerate(named_parameters(job.model).values()):
            local = local_part(parameter)
            local.copy_(torch.arange(local.numel()).view(local.shape) / 64 + number + 2 * context.world.place.group)
    log = Log(job, Sinks([]), Meter(context.world.device, profile_every=0, warmup_steps=0))
    Saver(job, folder).save(1, log, Skips(), 5, together=together)
    return whole(job)


@pytest.fixture(scope="session")
def saved(ranks: RankPool, tmp_path_factory, cache):
    """A checkpoint of each model by two ranks, and its weights."""

    def get(name: str):
        folder = tmp_path_factory.mktemp(name)
        weights = ranks.run(save_distinct, Layout(1, 1, 2), MODELS[name], folder, cache, True)[0]
        return open_checkpoint(folder / FOLDER / "step-000001"), weights

    made = {name: get(name) for name in MODELS}
    return made.__getitem__


def headers(folder: Path) -> dict[str, Any]:
    """The headers of all files, by tensor."""
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}  # K7
        found |= header
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_every_tensor_as_it_was(saved, tmp_path, name):
    """K5, K9, F5: the round trip is the identity, by name and value."""
    checkpoint, weights = saved(name)
    notes = export(checkpoint, tmp_path / "hf", torch.float32)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    read = dict(model.named_parameters())
    assert read.keys() == weights.keys()
    for each in weights:
        assert torch.equal(read[each].detach(), weights[each]), each
    tied = name in ("tied", "gpt2")
    assert any("left out" in note for note in notes) == tied
    assert ("lm_head.weight" in headers(tmp_path / "hf")) != tied


def test_the_files_are_those_that_transformers_writes(saved, tmp_path):
    """Names and shapes, Mixtral's experts one by one included."""
    checkpoint, _ = saved("mixtral")
    export(checkpoint, tmp_path / "ours", torch.float32)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    ours, theirs = headers(tmp_path / "ours"), headers(tmp_path / "theirs")
    assert {name: (each["dtype"], each["shape"]) for name, each in ours.items()} == {
        name: (each["dtype"], each["shape"]) for name, each in theirs.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_is_the_one_asked_for_everywhere(saved, tmp_path, dtype):
    """E5, K1, K3: header, config and size agree."""
    checkpoint, weights = saved("tied")
    notes = export(checkpoint, tmp_path / "hf", dtype)
    assert {each["dtype"] for each in headers(tmp_path / "hf").values()} == {"F32" if dtype.itemsize == 4 else "BF16"}
    numel = sum(each.numel() for each in weights.values())
    assert max(each["data_offsets"][1] for each in headers(tmp_path / "hf").values()) == numel * dtype.itemsize
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == (str(dtype).split(".")[1], ["LlamaForCausalLM"])
    assert any("rounded" in note for note in notes) == (dtype == torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(read.model.norm.weight.detach(), weights["model.norm.weight"].to(dtype))


def test_many_files_and_their_index(saved, tmp_path):
    checkpoint, weights = saved("llama")
    export(checkpoint, tmp_path / "hf", torch.float32, file_bytes=2000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(each.numel() for each in weights.values()) * 4
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), weights[name])
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf").lm_head.weight.detach(), weights["lm_head.weight"]
    )


def test_between_two_rounds_it_is_the_groups_mean(ranks: RankPool, tmp_path, cache):
    model = MODELS["llama"]
    groups = ranks.run(save_distinct, Layout(2, 1, 1), model, tmp_path / "run", cache, False)
    notes = export(open_checkpoint(tmp_path / "run" / FOLDER / "step-000001"), tmp_path / "hf", torch.float32)
    assert any("between two rounds" in note for note in notes)
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    for name, first in groups[0].items():
        torch.testing.assert_close(read[name].detach(), (first + groups[1][name]) / 2)


def test_training_starts_from_the_folder(ranks: RankPool, saved, tmp_path, cache):
    checkpoint, weights = saved("mixtral")
    export(checkpoint, tmp_path / "hf", torch.float32)
    for told in ranks.run(load_folder, Layout(1, 1, 2), tmp_path / "hf", cache):
        assert all(torch.equal(told[name], weights[name]) for name in weights)


def load_folder(context: RankContext, folder: Path, cache: Path):
    recipe = recipe_of((1, 1, 2)).model_dump(mode="json", exclude_none=True)
    job = make_job(make_recipe(recipe | {"model": {"kind": "folder", "path": str(folder)}}), context.world, cache)
    return whole(job)


def test_a_folder_that_exists_is_refused(saved, tmp_path):
    with pytest.raises(InputError, match="exists already"):
        export(saved("llama")[0], tmp_path, torch.float32)


def test_a_folder_that_cannot_be_written_is_one_error_and_leaves_nothing(saved, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"hf cannot be written: .*Not a directory"):
        export(saved("llama")[0], tmp_path / "file" / "hf", torch.float32)

    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedshard.engine.export.write_tensors", fill_the_disk)
    with pytest.raises(RunError, match=r"hf cannot be written: .*No space left"):
        export(saved("llama")[0], tmp_path / "hf", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_tokenizer_that_is_gone_is_told_of(saved, tmp_path):
    source = saved("llama")[0].path
    path = shutil.copytree(source, tmp_path / "step-000001")
    recipe = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(recipe.replace('tokenizer = "bytes"', 'tokenizer = "gone"'))
    notes = export(Checkpoint(path), tmp_path / "hf", torch.float32)
    assert "no tokenizer: gone is not there any more" in notes


@pytest.mark.parametrize("text", ["", "hé\n\tx  y", "".join(map(chr, range(256))), "日本 🙂"])
def test_bytes_as_a_tokenizer_of_transformers(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([AutoTokenizer.from_pretrained(sys.argv[1]).encode("def f(x):")])
torch.save(model(ids).logits, sys.argv[2])
"""


@pytest.mark.slow
def test_a_fresh_process_computes_the_same_logits(saved, tmp_path):
    checkpoint, _ = saved("llama")
    export(checkpoint, tmp_path / "hf", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "hf").encode("def f(x):")])
    command = [sys.executable, "-c", FRESH, str(tmp_path / "hf"), str(tmp_path / "logits")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert torch.equal(torch.load(tmp_path / "logits"), model(ids).logits)
