"""Evaluation of the global model: each held-out sequence once, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fedshard.core.recipe import Recipe
from fedshard.engine.agree import agree
from fedshard.engine.corpus import Corpus
from fedshard.engine.data import eval_batches
from fedshard.engine.loss import micro_loss
from fedshard.engine.shard import reshard
from fedshard.engine.world import World


@dataclass(frozen=True)
class Evaluation:
    """Σ nll / Σ label tokens over all ranks, and e to that; `sequences` that were used."""

    loss: float
    perplexity: float
    sequences: int


@torch.no_grad()
def evaluate(model: PreTrainedModel, corpus: Corpus, recipe: Recipe, world: World) -> Evaluation:
    """The loss on the held-out sequences, spread over all ranks of all groups; the same number on every rank.

    All groups must hold the same weights: call it after a round.
    """
    model.eval()
    nll, tokens = torch.zeros((), dtype=torch.float64, device=world.device), 0
    batches = eval_batches(
        corpus,
        sequences=recipe.evaluate.sequences,
        ranks=world.layout.ranks,
        rank=world.rank,
        micro_batch=recipe.train.micro_batch,
        isolate_documents=recipe.data.isolate_documents,
    )
    for micro in batches:
        nll += micro_loss(model, micro.to(world.device)).nll_sum.double()
        tokens += micro.label_tokens
    model.train()
    reshard(model)  # without a backward pass the root stays gathered
    total_nll, total_tokens = agree(torch.stack([nll.cpu(), torch.tensor(float(tokens))]), world.mesh).tolist()
    loss = total_nll / total_tokens
    sequences = min(recipe.evaluate.sequences, len(corpus.eval))
    return Evaluation(loss, math.exp(min(loss, 700.0)), sequences)  # e⁷⁰⁰ is near the largest number there is
