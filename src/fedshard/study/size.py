"""How large a model is, tensor by tensor: what sharding, memory and FLOPs are counted from. No weights, no torch.

Names and shapes are those of the model in memory (`named_parameters()` of transformers 5), because FSDP2 cuts dim 0 of
each tensor into ⌈rows/n⌉, and what that wastes depends on the shapes. All decoder blocks are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["lookup", "head", "expert", "dense"]
"""`lookup`: rows are read, not multiplied (token embedding, learned positions). `expert`: of a mixture of experts."""


@dataclass(frozen=True)
class Tensor:
    """One parameter. In a block, `name` begins after the block's own name."""

    name: str
    shape: tuple[int, ...]
    role: Role = "dense"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row of dim 0, which is the dim that is cut."""
        return math.prod(self.shape[1:])

    def shard_numel(self, shards: int) -> int:
        """Elements of the largest of so many shards, which is also what FSDP2 pads the others to: ⌈rows/n⌉·columns.

        >>> Tensor("w", (257, 160)).shard_numel(4)
        10400
        """
        return -(-self.shape[0] // shards) * self.row_numel


@dataclass(frozen=True)
class Architecture:
    """A decoder-only model: the tensors outside the blocks, those of one block, and how often it stands there.

    `attention_width` is that of all query heads together, `key_width` that of all key (or value) heads; `feed_width`
    is that of one feed-forward layer (of one expert).
    """

    name: str
    root: tuple[Tensor, ...]
    """Outside the blocks: embeddings, final norm, and the head where it is not tied."""
    block: tuple[Tensor, ...]
    """Of one decoder block."""
    blocks: int
    block_prefix: str
    """What blocks are called: `model.layers` for `model.layers.0`, ….."""
    width: int
    attention_width: int
    key_width: int
    feed_width: int
    gated: bool
    """Whether the feed-forward layer has a gate: three matrices and not two."""
    vocabulary: int
    positions: int | None
    """Longest sequence, if there is one."""
    tied: bool
    """Whether the head is the token embedding."""
    experts: int = 1
    experts_used: int = 1
    """Experts of a block, and how many of them a token passes."""

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter under its full name."""
        yield from self.root
        for index in range(self.blocks):
            for tensor in self.block:
                yield Tensor(f"{self.block_prefix}.{index}.{tensor.name}", tensor.shape, tensor.role)

    @property
    def tensor_count(self) -> int:
        """How many parameters there are."""
        return len(self.root) + self.blocks * len(self.block)

    @property
    def root_numel(self) -> int:
        """Elements outside the blocks."""
        return _numel(self.root)

    @property
    def block_numel(self) -> int:
        """Elements of one block."""
        return _numel(self.block)

    @property
    def total(self) -> int:
        """All parameters; a tied head is counted once."""
        return self.root_numel + self.blocks * self.block_numel

    @property
    def embedding(self) -> int:
        """Elements of the token embedding."""
        return self.vocabulary * next(tensor.row_numel for tensor in self.root if tensor.role == "lookup")

    @property
    def head(self) -> int:
        """Elements of the head, whether it is tied or not."""
        return next((tensor.numel for tensor in self.root if tensor.role == "head"), self.embedding)

    @property
    def body(self) -> int:
        """All parameters but the token embedding and the head."""
        return self.total - self.embedding - (0 if self.tied else self.head)

    @property
    def lookup(self) -> int:
        """Rows of tables that are read and not multiplied."""
        return _numel(tensor for tensor in self.root if tensor.role == "lookup")

    @property
    def active(self) -> int:
        """Parameters that one token passes: all but those of experts that it is not routed to."""
        experts = self.blocks * _numel(tensor for tensor in self.block if tensor.role == "expert")
        return self.total - experts * (self.experts - self.experts_used) // self.experts

    @property
    def multiplied(self) -> int:
        """Parameters that take part in a multiplication for each token: the head always, a lookup never."""
        return self.active - self.lookup + (self.head if self.tied else 0)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of a training step per token, forward and backward, without recomputation.

        6·(P − embedding) + 12·L·d·T, all T keys counted for each query. Equation (size-flops) of docs/formal/size.md;
        source: arXiv:2204.02311, appendix B.
        """
        return 6 * self.multiplied + self.attention_flops_per_token(sequence_length)

    def attention_flops_per_token(self, sequence_length: int) -> int:
        """The part of `flops_per_token` that grows with the sequence: 12·L·d·T."""
        return 12 * self.blocks * self.attention_width * sequence_length

    def padded_numel(self, shards: int) -> int:
        """P_n: elements of all tensors once FSDP2 has padded dim 0 to n equal shards. Equation (size-padded)."""
        return shards * self.shard_numel(shards)

    def shard_numel(self, shards: int) -> int:
        """Elements that the rank with the most of them holds: Σ ⌈rows/n⌉·columns."""
        return self.root_shard_numel(shards) + self.blocks * self.block_shard_numel(shards)

    def root_shard_numel(self, shards: int) -> int:
        """The part of `shard_numel` that lies outside the blocks."""
        return sum(tensor.shard_numel(shards) for tensor in self.root)

    def block_shard_numel(self, shards: int) -> int:
        """The part of `shard_numel` of one block."""
        return sum(tensor.shard_numel(shards) for tensor in self.block)

    def owned_numel(self, shards: int, replicas: int) -> int:
        """Elements that the rank with the most of them owns in a round: Σ ⌈⌈rows/S⌉·columns/R⌉."""
        root, block = (
            sum(-(-tensor.shard_numel(shards) // replicas) for tensor in tensors) for tensors in (self.root, self.block)
        )
        return root + self.blocks * block


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel for tensor in tensors)
