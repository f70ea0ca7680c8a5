"""The model on the meta device: built from its config, cut into FSDP units, counted.

On the meta device a parameter has a shape and no memory, so that a model of any size is built in about a second.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fedshard.core.errors import Fault, InputError


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `config`, its parameters stored as `dtype`, on the meta device; `config` itself is left as it is.

    Attention is torch's `scaled_dot_product_attention` where the architecture has it. Code that a model folder
    brings along is never run.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder blocks, in order, each with its name: one FSDP unit each. The root's unit holds all the rest.

    They are found by structure: of the lists of modules of one class, the one that holds the most parameters; a list
    inside a block (of experts, say) holds fewer than the list of blocks. Raises InputError where there is none.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
    ]
    if not lists:
        raise InputError([Fault("model", "no list of decoder blocks found in it", "Take a decoder-only model.")])
    name, blocks = max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))
    return [(f"{name}.{index}", block) for index, block in enumerate(blocks)]


def edge_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What holds parameters outside the blocks, each with its name: embeddings, final norm, head.

    They stay in the root's FSDP unit together, because a head that is tied to the embedding must not be in another.
    """
    blocks = tuple(f"{name}." for name, _ in decoder_blocks(model))
    return [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(blocks) and next(module.parameters(recurse=False), None) is not None
    ]


def some_of(names: Sequence[str], shown: int = 8) -> str:
    """Names for a message: the first few, and how many more there are.

    >>> some_of(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


@dataclass(frozen=True)
class Counts:
    """Parameters of a model by what they cost. Tied ones are counted once."""

    total: int
    """All parameters."""
    active: int
    """Those that one token passes through: all but the experts that it is not routed to."""
    lookup: int
    """Rows of tables that are read and not multiplied: token embeddings and learned positions."""
    head: int
    """The head's matrix, vocabulary × width, which is multiplied whether it is tied or not."""
    tied: bool
    """Whether the head is the token embedding."""

    @property
    def multiplied(self) -> int:
        """Parameters that take part in a multiplication for each token: the P − embedding of the FLOPs formula."""
        return self.active - self.lookup + (self.head if self.tied else 0)


def count_parameters(model: PreTrainedModel) -> Counts:
    """The parameters of `model`, on any device, sharded or not."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding is not None, "a language model has an embedding"
    assert head is not None, "and a head"
    total = sum(parameter.numel() for parameter in model.parameters())
    return Counts(
        total=total,
        active=total - _idle_experts(model),
        lookup=sum(table.weight.numel() for table in model.modules() if isinstance(table, nn.Embedding)),
        head=head.weight.numel(),
        tied=head.weight is embedding.weight,
    )


def flops_per_token(config: PreTrainedConfig, sequence_length: int) -> int:
    """Floating-point operations of one training step per token, forward and backward, without recomputation.

    6·(P − embedding) + 12·L·d·T: two per parameter and token forward and four backward; T keys per query, as if none
    were masked; d is the width of all heads together. A lookup costs nothing, the head always does.
    Source: arXiv:2204.02311, appendix B.

    >>> from transformers import LlamaConfig
    >>> flops_per_token(LlamaConfig(vocab_size=10, hidden_size=4, num_attention_heads=1, num_hidden_layers=1,
    ...                             intermediate_size=8), sequence_length=2)
    1368
    """
    text = config.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 12 * text.num_hidden_layers * text.num_attention_heads * head_width * sequence_length
    return 6 * count_parameters(build_on_meta(config)).multiplied + attention


def _idle_experts(model: PreTrainedModel) -> int:
    """Parameters of the experts that a token is not routed to."""
    idle = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            parameters = list(module.parameters())
            experts = len(module) if isinstance(module, nn.ModuleList) else parameters[0].shape[0]
            idle += sum(parameter.numel() for parameter in parameters) * (experts - _routed(model.config)) // experts
    return idle


def _routed(config: PreTrainedConfig) -> int:
    """How many experts a token is routed to. Raises InputError where the config does not say."""
    text = config.get_text_config()
    for field in ("num_experts_per_tok", "moe_topk", "top_k_experts"):  # as architectures call it
        used = getattr(text, field, None)
        if used is not None:
            return used
    says = f"{text.model_type} does not say how many experts a token is routed to"
    raise InputError([Fault("model", says, "Set model.num_experts_per_tok.")])
