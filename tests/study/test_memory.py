"""Memory by part: published sums, what real runs weigh, and what each choice adds or takes."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshard.core.cluster_file import read_cluster
from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.study.architectures import read_architecture
from fedshard.study.cost import round_sent_bytes
from fedshard.study.memory import kept_bytes_per_token, memory, state_bytes
from fedshard.study.setup import Setup
from fedshard.testing import RankContext, RankPool

LLAMA_8B = read_architecture("llama-3.1-8b")


def setup_of(shape: tuple[int, int, int], model: str = "llama-3.1-8b", **changes: Any) -> Setup:
    layout = Layout(*shape)
    cluster = read_cluster("leonardo-nominal").job(layout.ranks)
    return replace(Setup(read_architecture(model), layout, cluster, 2048), **changes)


def test_sixteen_bytes_a_parameter_cut_over_the_shards():
    """Trap O5: 128.48 GB of state in all, 16.06 GB of it on each of eight ranks; replicas do not divide it."""
    alone, sharded, replicated = (
        sum(state_bytes(setup_of(shape)).values()) for shape in ((1, 1, 1), (1, 1, 8), (1, 4, 8))
    )
    assert alone == 8_030_261_248 * 16
    assert f"{alone / 1e9:.2f} {sharded / 1e9:.2f}" == "128.48 16.06"
    assert replicated == sharded


def test_the_outer_state_is_cut_over_the_replicas_too():
    """Anchor and momentum: four bytes each, over S·R."""
    parts = memory(setup_of((2, 4, 8), anchor=True, outer_states=1)).parts
    assert parts["anchor"] == parts["outer state"] == 4 * 8_030_261_248 / 32
    naive = memory(setup_of((2, 4, 8), anchor=True, outer_states=1, sliced=False)).parts
    assert naive["anchor"] == 4 * parts["anchor"]


# what real runs weigh


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A few short texts, and room for a cache: what is learned from them does not matter here."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / f"texts/{number}.txt").write_text(f"{number} is a number. " * 2_000)
    return folder


def recipe_of(layout: Layout, folder: Path, train: dict[str, Any], sync: dict[str, Any]) -> Recipe:
    """`tiny` for two steps, each with a round: the second is weighed."""
    return make_recipe(
        {
            "layout": {"groups": layout.groups, "replicas": layout.replicas, "shards": layout.shards},
            "data": {"kind": "text", "path": str(folder / "texts"), "sequence_length": 128, "eval_fraction": 0.2},
            "train": {"device": "cpu", "micro_batch": 8} | train,
            "sync": {"every": 1, "warmup_fraction": 0.0} | sync,
            "budget": {"steps": 2},
            "evaluate": {"sequences": 1},
            "log": {"profile_every": 0},
        }
    )


class Rounds:
    """A sink that keeps the rows of rounds."""

    def __init__(self) -> None:
        self.sent_bytes: list[int] = []

    def round(self, row: Any) -> None:
        self.sent_bytes.append(row.sent_bytes)

    def progress(self, progress: Any) -> None:
        """Not kept."""

    step = evaluation = summary = progress

    def close(self) -> None:
        """Nothing is open."""


def weigh(context: RankContext, recipe: Recipe, folder: Path) -> tuple[int, int, list[int]]:
    """Peak of live tensors, bytes of a round as the summary has them, and as the rounds' rows have them."""
    from fedshard.engine.job import make_job
    from fedshard.engine.sinks import Sinks
    from fedshard.engine.train import train

    gc.collect()  # what an earlier test left must not weigh
    rounds = Rounds()
    summary = train(make_job(recipe, context.world, folder / "cache"), Sinks([rounds]))
    assert summary is not None
    return summary.peak_memory_bytes, summary.round_sent_bytes, rounds.sent_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "train", "sync"),
    [
        ((2, 1, 2), {}, {"outer": {"kind": "nesterov"}}),
        ((2, 2, 1), {"accumulation": 2}, {}),
        ((1, 1, 2), {"precision": "bfloat16", "recompute": "full"}, {}),
    ],
)
def test_memory_and_bytes_are_those_of_a_run(ranks: RankPool, folder, shape, train, sync):
    """Within 3 % of the live tensors that the meter counts on the CPU; bytes of a round to the byte."""
    layout = Layout(*shape)
    recipe = recipe_of(layout, folder, train, sync)
    peak, told, rows = ranks.run(weigh, layout, recipe, folder)[0]
    setup = Setup.from_recipe(recipe, read_cluster("workstation-8"))
    assert memory(setup).total_bytes == pytest.approx(peak, rel=0.03)
    assert round_sent_bytes(setup) == told
    assert set(rows) <= {told}
    assert len(rows) == (2 if layout.groups > 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("each", [4, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2", "opt", "gpt_neox"])
def test_kept_activations_are_what_autograd_keeps(kind, each):
    """Of one block, by what its forward pass saves: within 3 % for the widths of real models."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from fedshard.study.architectures import architecture_of

    config = {"vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        config |= {"n_embd": 256, "n_layer": 1, "n_head": 4, "n_positions": 64}
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        config |= {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 640}
    if kind in ("llama", "qwen3", "mixtral"):
        config |= {"num_key_value_heads": 2, "head_dim": 64}
    if kind == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    if kind == "opt":
        config |= {"ffn_dim": 640, "word_embed_proj_dim": 256, "dropout": 0.0, "pad_token_id": None}
    dtype = torch.float32 if each == 4 else torch.bfloat16
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config), dtype=dtype).train()
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}
    inside = []
    blocks[0].register_forward_pre_hook(lambda module, inputs: inside.append(True))
    blocks[0].register_forward_hook(lambda module, inputs, output: inside.clear())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randint(0, 64, (1, 64)), use_cache=False)
    setup = replace(setup_of((1, 1, 1)), architecture=architecture_of({"model_type": kind} | config))
    setup = replace(setup, gather_bytes=float(each), stored_bytes=float(each))
    assert kept_bytes_per_token(setup) == pytest.approx(sum(saved.values()) / 64, rel=0.03)


# what each choice does


def test_activations_of_llama_8b():
    """196 KiB per token and block in bfloat16: 2·8 d of norms (float32 inside), 2·(2 d + 2 k) of attention, 2·4 f."""
    d, k, f = 4096, 1024, 14336
    assert kept_bytes_per_token(setup_of((1, 1, 8))) == 16 * d + 4 * (d + k) + 8 * f == 200_704
    assert (
        memory(setup_of((1, 1, 8), micro_batch=2)).phases["loss"]["activations"] == 32 * 200_704 * 4096 + 8 * d * 4096
    )


def test_logits_are_three_float32_tables():
    assert memory(setup_of((1, 1, 8))).phases["loss"]["logits"] == 12 * 128_256 * 2048


def test_recomputation_keeps_what_goes_into_each_block():
    setup = setup_of((1, 1, 8), micro_batch=2, recompute=True)
    assert memory(setup).phases["loss"]["activations"] == (32 * 2 + 8) * 4096 * 4096
    assert memory(setup).total_bytes < memory(replace(setup, recompute=False)).total_bytes / 1.5


def test_one_node_groups_of_the_reference_experiment_fit_only_in_pure_bfloat16():
    """64 GB, two sequences of 2,048: 16 bytes a parameter do not leave enough, eight bytes do."""
    limit = read_cluster("leonardo-nominal").device.memory_bytes.value
    mixed = setup_of((128, 1, 4), micro_batch=2, reduce_bytes=4.0, outer_states=1, anchor=True)
    pure = replace(mixed, stored_bytes=2.0, reduce_bytes=2.0, outer_states=0, anchor=False)
    assert memory(pure).total_bytes < limit < memory(mixed).total_bytes
    assert memory(replace(mixed, recompute=True)).total_bytes < limit


def test_keeping_gradients_whole_takes_the_whole_model():
    once, kept = (
        memory(setup_of((1, 1, 8), accumulation=2, keep_unsharded_gradients=kept)).phases["loss"]
        for kept in (False, True)
    )
    assert once["gradients"] == 4 * LLAMA_8B.total / 8
    assert "gradients" not in kept
    backward = memory(setup_of((1, 1, 8), accumulation=2, keep_unsharded_gradients=True)).phases["backward"]
    assert backward["whole gradients"] > 4 * LLAMA_8B.total


def test_without_resharding_all_blocks_stay_gathered():
    phases = memory(setup_of((1, 1, 8), reshard_after_forward=False)).phases
    assert phases["loss"]["gathered units"] == 2 * LLAMA_8B.total
    assert memory(setup_of((1, 1, 8))).phases["loss"]["gathered units"] == 2 * LLAMA_8B.root_numel


def test_overlap_keeps_deltas_and_puts_weights_aside():
    setup = setup_of((4, 2, 4), anchor=True, outer_states=1, delay=2, every=8)
    phases, owned = memory(setup).phases, LLAMA_8B.total / 8
    assert phases["loss"]["deltas under way"] == 4 * owned
    assert phases["evaluation"]["set-aside weights"] == 4 * LLAMA_8B.total / 4
    split = memory(replace(setup, fragments=5)).phases["loss"]["deltas under way"]
    assert split == pytest.approx(4 * owned * 8 * LLAMA_8B.block_numel / LLAMA_8B.total)
    assert "evaluation" not in memory(replace(setup, delay=0)).phases


def test_lossy_codecs_keep_what_they_lost():
    """The sender's slice, and the chunk of it that this rank sums."""
    setup = setup_of((4, 2, 4), codec="int8", anchor=True)
    assert memory(setup).parts["residuals"] == 4 * LLAMA_8B.total / 8 * (1 + 1 / 4)
    assert "residuals" not in memory(replace(setup, codec="fp32")).parts


def test_a_round_moves_norms_through_two_buckets():
    phases = memory(setup_of((4, 2, 4), bucket_bytes=2**16)).phases
    assert phases["round"]["buckets"] == 2 * 2 * 2**16 / 2  # of both replicas; 32 KiB of each


def test_ranks_on_a_cpu_have_no_context_and_gather_twice():
    setup = setup_of((1, 1, 4), "smollm2-135m", sequence_length=16)
    assert memory(setup).total_bytes - memory(setup).tensor_bytes == 1.0e9 + 2 * 0.25e9
    on_cpu = memory(replace(setup, on_cpu=True))
    assert on_cpu.total_bytes == on_cpu.tensor_bytes
    ours, others = on_cpu.phases["backward"], memory(setup).phases["backward"]
    assert ours["gathered units"] > others["gathered units"]


def test_memory_grows_with_what_is_computed_at_once():
    def total(**changes: Any) -> float:
        return memory(setup_of((2, 2, 4), **changes)).total_bytes

    assert total() < total(micro_batch=2) < total(micro_batch=2, anchor=True) < total(micro_batch=4, anchor=True)
    assert memory(setup_of((2, 2, 8))).total_bytes < memory(setup_of((2, 2, 4))).total_bytes
