"""Steps of real (tiny) language models: the same numbers whatever the layout, and what becomes of bad ones."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from fedshard.core.errors import RunError
from fedshard.core.layout import Layout
from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import make_recipe
from fedshard.engine.evaluate import evaluate
from fedshard.engine.job import Job, make_job
from fedshard.engine.parameters import named_parameters
from fedshard.engine.step import Skips, take_step
from fedshard.testing import RankContext, RankPool, Traffic

LLAMA = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2,
                   "router_aux_loss_coef": 0.1, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def recipe_of(
    layout: Layout, sequences: int = 8, accumulation: int = 1, model: dict | None = None, **sections
) -> Recipe:
    """A small recipe whose groups take `sequences` per step, in `accumulation` micro-batches of each rank."""
    raw = {
        "layout": {"groups": layout.groups, "replicas": layout.replicas, "shards": layout.shards},
        "model": {"kind": "config", **(model or LLAMA)},
        "data": {"sequence_length": 32},
        "train": {"micro_batch": sequences // layout.group_ranks // accumulation, "accumulation": accumulation},
        "budget": {"steps": 20},
        "sync": {"every": 2, "warmup_fraction": 0.0},
        "evaluate": {"sequences": 7},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return make_recipe(raw)


def job_of(context: RankContext, recipe: Recipe, cache: Path, dtype: torch.dtype) -> Job:
    with mock.patch("fedshard.engine.job.stored_dtype", return_value=dtype):
        return make_job(recipe, context.world, cache)


def run(context: RankContext, recipe: Recipe, cache: Path, steps: int = 5, dtype: torch.dtype = torch.float64):
    """Weights, (loss, norm, router loss) of each step, and the evaluation afterwards."""
    job = job_of(context, recipe, cache, dtype)
    told = []
    for step in range(1, steps + 1):
        done = take_step(job, step, synchronous=False)
        job.inner.zero_grad()
        told.append((done.nll_sum / done.label_tokens, done.grad_norm, done.router_loss))
    weights = {name: full(each) for name, each in named_parameters(job.model).items()}
    return weights, told, evaluate(job.model, job.corpus, recipe, job.world)


def full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    "model", [LLAMA, GPT2 | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}], ids=["llama", "gpt2"]
)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 1)])
def test_every_layout_of_a_group_is_one_process(ranks: RankPool, cache, model, shape):
    """Identity 3, and traps D1, D3 and F1: float64, five AdamW steps; losses and norms as one process has them."""
    layout = Layout(*shape)
    weights, told, evaluation = ranks.run(run, layout, recipe_of(layout, model=model), cache)[0]
    alone, told_alone, evaluation_alone = ranks.run(
        run, Layout(1, 1, 1), recipe_of(Layout(1, 1, 1), model=model), cache
    )[0]
    same(weights, alone, 1e-12)
    for one, other in zip(told, told_alone, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert evaluation.loss == pytest.approx(evaluation_alone.loss, abs=1e-9)


@pytest.mark.parametrize(("shape", "accumulation"), [((1, 1, 1), 8), ((1, 1, 2), 4), ((1, 2, 2), 2)])
@pytest.mark.parametrize("isolate", [False, True])
def test_accumulation_is_one_big_batch(ranks: RankPool, cache, shape, accumulation, isolate):
    """Traps C1 and D5; with isolated documents label tokens differ between micro-batches."""
    layout, data = Layout(*shape), {"isolate_documents": isolate}
    split = ranks.run(run, layout, recipe_of(layout, accumulation=accumulation, data=data), cache, 3)[0]
    whole = ranks.run(run, Layout(1, 1, 1), recipe_of(Layout(1, 1, 1), data=data), cache, 3)[0]
    same(split[0], whole[0], 1e-12)
    assert split[1][-1] == pytest.approx(whole[1][-1], abs=1e-9)


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 2)])
def test_router_loss_is_added_and_told(ranks: RankPool, cache, shape):
    """Experts of three rows over four shards; the balancing loss is a mean over micro-batches, so these are kept."""
    layout, sgd = Layout(*shape), {"kind": "sgd", "learning_rate": 0.1}
    recipe, whole = (
        recipe_of(layout, model=MIXTRAL, optimizer=sgd),
        recipe_of(Layout(1, 1, 1), 8, 4, MIXTRAL, optimizer=sgd),
    )
    spread = ranks.run(run, layout, recipe, cache, 3, torch.float32)[0]  # torch's grouped product knows no float64
    alone = ranks.run(run, Layout(1, 1, 1), whole, cache, 3, torch.float32)[0]
    same(spread[0], alone[0], 1e-6)
    assert spread[1][0][2] == pytest.approx(alone[1][0][2], abs=1e-6)
    assert 0.1 < spread[1][0][2] < 1


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 4), (2, 1, 2), (2, 2, 2), (5, 1, 1)])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_evaluation_does_not_depend_on_the_layout(ranks: RankPool, cache, shape, micro_batch):
    """Identity 8 and traps C5 and I1: seven sequences, each once, over any number of ranks."""
    layout = Layout(*shape)
    recipe = recipe_of(layout, micro_batch * layout.group_ranks)
    answers = ranks.run(evaluation_of, layout, recipe, cache)
    reference = ranks.run(evaluation_of, Layout(1, 1, 1), recipe_of(Layout(1, 1, 1)), cache)[0]
    for answer in answers:
        assert answer.loss == pytest.approx(reference.loss, abs=1e-5)
        assert answer.perplexity == pytest.approx(math.exp(answer.loss))
        assert answer.sequences == 7


def evaluation_of(context: RankContext, recipe: Recipe, cache: Path):
    return evaluate((job := make_job(recipe, context.world, cache)).model, job.corpus, recipe, job.world)


def silent_steps(context: RankContext, recipe: Recipe, cache: Path):
    job = make_job(recipe, context.world, cache)
    with Traffic() as traffic:
        for step in (1, 2):
            take_step(job, step, synchronous=False)
            job.inner.zero_grad()
    return traffic.across(context.layout), traffic.sent_bytes()


def test_nothing_crosses_groups_between_rounds(ranks: RankPool, cache):
    layout = Layout(2, 1, 2)
    for across, sent in ranks.run(silent_steps, layout, recipe_of(layout), cache):
        assert across == {}
        assert sent > 0


def stored_types(context: RankContext, recipe: Recipe, cache: Path):
    job = make_job(recipe, context.world, cache)
    seen = []
    job.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    take_step(job, 1, synchronous=False)
    state = job.inner.optimizer.state
    moments = {value.dtype for each in state.values() for name, value in each.items() if name.startswith("exp_avg")}
    return seen, {each.dtype for each in job.model.parameters()}, moments


def test_bfloat16_computes_and_float32_stores(ranks: RankPool, cache):
    """Trap E1."""
    recipe = recipe_of(Layout(1, 1, 2), train={"precision": "bfloat16", "micro_batch": 4})
    for seen, stored, moments in ranks.run(stored_types, Layout(1, 1, 2), recipe, cache):
        assert (seen, stored, moments) == ([torch.bfloat16], {torch.float32}, {torch.float32})
    pure = recipe_of(Layout(1, 1, 2), train={"precision": "pure-bfloat16", "micro_batch": 4})
    for _, stored, moments in ranks.run(stored_types, Layout(1, 1, 2), pure, cache):
        assert (stored, moments) == ({torch.bfloat16}, {torch.bfloat16})


def dropout_masks(context: RankContext, recipe: Recipe, cache: Path):
    job = make_job(recipe, context.world, cache)
    masks = []
    hook = lambda module, inputs, output: masks.append((output == 0).flatten()[:200].tolist())  # noqa: E731
    job.model.transformer.drop.register_forward_hook(hook)
    for step in (1, 2):
        take_step(job, step, synchronous=False)
        job.inner.zero_grad()
    return masks


def test_dropout_differs_between_ranks_and_steps_and_repeats(ranks: RankPool, cache):
    """Trap B5: group, replica and shard all count."""
    layout = Layout(2, 2, 1)
    recipe = recipe_of(layout, 4, model=GPT2 | {"embd_pdrop": 0.5})
    first = ranks.run(dropout_masks, layout, recipe, cache)
    assert len({str(mask) for masks in first for mask in masks}) == 8
    assert first == ranks.run(dropout_masks, layout, recipe, cache)


@pytest.mark.parametrize("train", [{"recompute": "full"}, {"reduce_dtype": "float32"}])
def test_recomputation_changes_nothing(ranks: RankPool, cache, train):
    layout = Layout(1, 1, 2)
    plain = ranks.run(run, layout, recipe_of(layout), cache, 2)[0]
    other = ranks.run(run, layout, recipe_of(layout, train={"micro_batch": 4} | train), cache, 2)[0]
    same(plain[0], other[0], 1e-12)


def poisoned(context: RankContext, recipe: Recipe, cache: Path, bad_steps: list[int]):
    job = make_job(recipe, context.world, cache)
    skips, rates = Skips(), []
    for step in range(1, 6):
        before = [each.to_local().clone() for each in job.model.parameters()]
        name = "model.layers.1.mlp.down_proj.weight"
        handle = named_parameters(job.model)[name].register_post_accumulate_grad_hook(
            lambda parameter, step=step: parameter.grad.mul_(float("nan") if step in bad_steps else 1.0)
        )
        done = take_step(job, step, synchronous=False)
        handle.remove()
        skipped = skips.note(job, step, done.grad_norm)
        unchanged = all(torch.equal(a, b.to_local()) for a, b in zip(before, job.model.parameters(), strict=True))
        rates.append((skipped, unchanged, done.learning_rate > 0))
        job.inner.zero_grad()
    return rates


def test_a_step_with_a_non_finite_gradient_is_not_applied(ranks: RankPool, cache):
    for rates in ranks.run(poisoned, Layout(1, 1, 2), recipe_of(Layout(1, 1, 2)), cache, [2, 3, 5]):
        assert rates == [(False, False, True), (True, True, False), (True, True, False), (False, False, True),
                         (True, True, False)]  # fmt: skip


def test_three_in_a_row_stop_with_the_tensors_name(ranks: RankPool, cache):
    with pytest.raises(RunError, match=r"step 4.*3rd step in a row, first in model\.layers\.1\.mlp\.down_proj\.weight"):
        ranks.run(poisoned, Layout(1, 1, 2), recipe_of(Layout(1, 1, 2)), cache, [2, 3, 4])


def warm_up(context: RankContext, recipe: Recipe, cache: Path, synchronous: bool):
    job = job_of(context, recipe, cache, torch.float64)
    for step in range(1, 5):
        take_step(job, step, synchronous=synchronous)
        job.inner.zero_grad()
    return {name: full(each) for name, each in named_parameters(job.model).items()}


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("isolate", [False, True])
def test_synchronous_warm_up_is_one_big_group(ranks: RankPool, cache, shape, isolate):
    """Identity 11 on a language model: groups have different label tokens, and clipping bites."""
    layout, data = Layout(*shape), {"isolate_documents": isolate}
    many = recipe_of(layout, 8, data=data, train={"clip_norm": 0.3, "micro_batch": 8 // layout.group_ranks})
    one = recipe_of(Layout(1, 1, 1), 16, data=data, train={"clip_norm": 0.3, "micro_batch": 16})
    grouped = ranks.run(warm_up, layout, many, cache, True)
    alone = ranks.run(warm_up, Layout(1, 1, 1), one, cache, False)[0]
    same(grouped[0], alone, 1e-12)
    same(grouped[0], grouped[-1], 0.0)
