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

    Groups that have each a corpus of their own hold out sequences of their own: each then takes an equal part of
    `evaluate.sequences` from it. All groups must hold the same weights: call it after a round.
    """
    model.eval()
    layout, group = world.layout, world.place.group
    ranks, rank, most = layout.ranks, world.rank, recipe.evaluate.sequences
    if recipe.data.assignment == "by-source":
        ranks, rank, most = layout.group_ranks, world.rank % layout.group_ranks, len(range(group, most, layout.groups))
    nll, tokens = torch.zeros((), dtype=torch.float64, device=world.device), 0
    batches = eval_batches(
        corpus,
        sequences=most,
        ranks=ranks,
        rank=rank,
        micro_batch=recipe.train.micro_batch,
        isolate_documents=recipe.data.isolate_documents,
    )
    for micro in batches:
        nll += micro_loss(model, micro.to(world.device)).nll_sum.double()
        tokens += micro.label_tokens
    model.train()
    reshard(model)  # without a backward pass the root stays gathered
    sequences = min(most, len(corpus.eval)) if rank == 0 else 0  # one rank speaks for all that share a corpus
    known = torch.tensor([nll.item(), tokens, sequences], dtype=torch.float64)
    total_nll, total_tokens, total_sequences = agree(known, world.mesh).tolist()
    loss = total_nll / total_tokens
    perplexity = math.exp(min(loss, 700.0))  # e⁷⁰⁰ is near the largest number there is
    return Evaluation(loss, perplexity, int(total_sequences))
