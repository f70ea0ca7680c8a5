"""The loss of one micro-batch, as a sum over its label tokens, and attention that stays inside documents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from fedshard.core.errors import Fault
from fedshard.engine.data import IGNORED, MicroBatch

BY_POSITIONS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe"}
)
"""Architectures whose attention mask transformers cuts where positions start again, sliding windows included."""

BY_MASK = frozenset({"opt"})
"""Architectures that take a mask of ours; their own does not look at positions."""


class Loss(NamedTuple):
    """What one micro-batch adds to the loss; scalars that gradients flow from."""

    nll_sum: torch.Tensor
    """Σ −log p(label) over label tokens, float32: to be divided by the label tokens of the whole step."""
    router_loss: torch.Tensor | None
    """Of a mixture of experts: its load-balancing loss times its coefficient, a mean over this micro-batch's tokens
    (to be weighted by the micro-batch's part of the step); None for other models, or where the coefficient is 0."""


def micro_loss(model: PreTrainedModel, micro: MicroBatch) -> Loss:
    """The loss of `micro`; logits are taken to float32 at least, whatever the model computes in."""
    config: PreTrainedConfig = model.config
    inputs: dict[str, torch.Tensor | bool] = {"input_ids": micro.input_ids, "use_cache": False}
    if micro.position_ids is not None:
        inputs["position_ids"] = micro.position_ids
    if micro.document_ids is not None and config.model_type in BY_MASK:
        inputs["attention_mask"] = document_mask(micro.document_ids, model.dtype)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    if coefficient:
        inputs["output_router_logits"] = True  # without it the model leaves its load-balancing loss out
    output = model(**inputs)
    logits = output.logits.flatten(0, 1)  # (batch · sequence, vocabulary)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll_sum = functional.cross_entropy(logits, micro.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(nll_sum, coefficient * output.aux_loss if coefficient else None)


def document_mask(document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to attention scores so that each token sees its own document's past alone.

    `document_ids`: (batch, sequence); returns (batch, 1, query, key), 0 or −∞. Additive, because eager attention adds
    it; exp(−∞) is exactly 0.
    """
    length = document_ids.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    seen = past & (document_ids[:, :, None] == document_ids[:, None, :])  # (batch, query, key)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))[:, None]


def isolates(config: PreTrainedConfig) -> bool:
    """Whether documents in one sequence can be kept from attending to one another; tested for each architecture."""
    return config.model_type in BY_POSITIONS | BY_MASK


def check_isolation(config: PreTrainedConfig) -> Fault | None:
    """What is wrong with isolating documents in a model of `config`, if anything."""
    if isolates(config):
        return None
    known = ", ".join(sorted(BY_POSITIONS | BY_MASK))
    return Fault(
        "data.isolate_documents",
        f"not known to work for {config.model_type}",
        f"Set data.isolate_documents=false, or take one of {known}.",
    )
