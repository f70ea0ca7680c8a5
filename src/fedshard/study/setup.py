"""What a prediction follows from: a model, a layout, the machine, and how a step and a round are done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fedshard.core.layout import Layout
from fedshard.core.recipe import FolderModel, Recipe, TrainSection
from fedshard.core.topology import TIERS, Cluster
from fedshard.study.architectures import architecture_of, read_architecture
from fedshard.study.collectives import Members
from fedshard.study.size import Architecture

Codec = Literal["fp32", "bf16", "int8"]
Axis = Literal["shard", "replica", "group"]

CODEC_BLOCK = 256
"""Elements of an int8 delta that share one float32 scale."""


@dataclass(frozen=True)
class Setup:
    """Everything that time, bytes and memory follow from. Bytes without a unit in their name are per element."""

    architecture: Architecture
    layout: Layout
    cluster: Cluster
    """The part of a cluster that the job runs on (`Cluster.job`): exactly the layout's ranks."""
    sequence_length: int
    micro_batch: int = 1
    """Sequences that one rank takes through the model at once."""
    accumulation: int = 1
    """Micro-batches of one rank in one optimizer step (A)."""
    recompute: bool = False
    """Whether each block's activations are computed again in the backward pass."""
    stored_bytes: float = 4.0
    """Stored parameters, gradients and moments."""
    gather_bytes: float = 2.0
    """Gathered parameters and activations (b_g)."""
    reduce_bytes: float = 4.0
    """Gradients that are reduced (b_r)."""
    round_bytes: float = 4.0
    """Values in a round without a lossy codec (b_w)."""
    moments: int = 2
    """Values that the inner optimizer keeps for each parameter: two for AdamW, none for plain SGD."""
    every: int = 1
    """Steps between rounds (H)."""
    reshard_after_forward: bool = True
    """Whether a block is dropped after its forward pass and gathered again for the backward; the root never is."""
    keep_unsharded_gradients: bool = False
    """Whether gradients stay whole over a step's micro-batches, and are reduced once."""
    sliced: bool = True
    """Whether each replica exchanges the slice that it owns; False: the naive round, where each averages its copy."""
    codec: Codec = "fp32"
    """What a delta looks like on the wire; lossy ones go all-to-all."""
    fragments: int = 1
    """Parts of the model that have rounds of their own, spread over the H steps (F)."""
    delay: int = 0
    """Steps that the groups train on while a round's exchange runs (τ); 0: they wait for it."""
    anchor: bool = False
    """Whether the last global weights are kept."""
    outer_states: int = 0
    """Float32 values that the outer optimizer keeps for each parameter, beside the anchor."""
    bucket_bytes: int = 16 * 2**20
    """Size of the buffers that small tensors move through in a round, in bytes."""
    on_cpu: bool = False
    """Whether ranks are processors that speak over gloo, whose collectives take working space of their own."""

    def __post_init__(self) -> None:
        ranks = self.layout.ranks
        assert self.cluster.ranks == ranks, f"{self.layout} is {ranks} ranks, the job has {self.cluster.ranks}"

    @staticmethod
    def from_recipe(recipe: Recipe, cluster: Cluster) -> Setup:
        """What a recipe asks for, on as much of `cluster` as it needs. `auto` stands for an accelerator.

        Raises InputError where the model's size is not known, or the cluster has too few ranks.
        """
        train, sync, mean = recipe.train, recipe.sync, recipe.sync.outer.kind == "mean"
        return Setup(
            architecture=_architecture(recipe),
            layout=recipe.shape,
            cluster=cluster.job(recipe.shape.ranks),
            sequence_length=recipe.data.sequence_length,
            micro_batch=train.micro_batch,
            accumulation=train.accumulation,
            recompute=train.recompute == "full",
            stored_bytes=2.0 if train.precision == "pure-bfloat16" else 4.0,
            gather_bytes=_compute_bytes(train),
            reduce_bytes=2.0 if train.reduce_dtype == "bfloat16" else 4.0,
            moments=2 if recipe.optimizer.kind == "adamw" else 0,
            every=sync.every,
            anchor=recipe.federates and (sync.anchor or not mean),
            outer_states=0 if mean else 1,
            bucket_bytes=sync.bucket_bytes,
            on_cpu=train.device == "cpu",
        )

    @property
    def rank_tokens(self) -> int:
        """Tokens of one rank in one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.rank_tokens * self.accumulation * self.layout.ranks

    @property
    def lossy(self) -> bool:
        """Whether the codec loses something, so that deltas go all-to-all and are encoded anew by their owner."""
        return self.codec != "fp32"

    @property
    def wire_bytes(self) -> float:
        """Bytes per element that cross groups in a round."""
        return {"fp32": self.round_bytes, "bf16": 2.0, "int8": 1.0 + 4.0 / CODEC_BLOCK}[self.codec]

    @property
    def federates(self) -> bool:
        """Whether there are rounds: several groups, or an outer optimizer that does more than a mean."""
        return self.layout.groups > 1 or self.outer_states > 0

    @property
    def owners(self) -> int:
        """Replicas that a shard is cut over in a round: R, or 1 where each averages its own copy."""
        return self.layout.replicas if self.sliced else 1

    def rings(self, axis: Axis) -> np.ndarray:
        """The ranks of each collective of one axis, in ring order: (rings, members)."""
        layout = self.layout
        ranks = np.arange(layout.ranks).reshape(layout.groups, layout.replicas, layout.shards)
        along = {"group": 0, "replica": 1, "shard": 2}[axis]
        return np.moveaxis(ranks, along, -1).reshape(-1, ranks.shape[along])

    def members(self, axis: Axis) -> Members:
        """The slowest ring of one axis, which the others wait for: the one that crosses the outermost tier."""
        return self._members_of(self.rings(axis))

    @cached_property
    def group_members(self) -> Members:
        """All ranks of the slowest group, which agree on norms."""
        return self._members_of(np.arange(self.layout.ranks).reshape(self.layout.groups, -1))

    @cached_property
    def places(self) -> np.ndarray:
        """Node, cell and site of each rank: (ranks, 3)."""
        cluster = self.cluster
        return np.array(
            [(cluster.node_of(rank), cluster.cell_of(rank), cluster.site_of(rank)) for rank in range(cluster.ranks)]
        )

    def tier_of(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The tier between ranks and ranks, as an index into `TIERS`; arrays of one shape."""
        apart = self.places[one] != self.places[other]  # (…, 3)
        return np.max(apart * np.arange(1, len(TIERS)), axis=-1)

    def _members_of(self, rings: np.ndarray) -> Members:
        tiers = self.tier_of(np.broadcast_to(rings[:, :1], rings.shape), rings).max(axis=-1)  # (rings,)
        return Members.of(self.cluster, rings[int(tiers.argmax())].tolist())


def _architecture(recipe: Recipe) -> Architecture:
    model = recipe.model
    if isinstance(model, FolderModel):
        return read_architecture(model.path)
    return architecture_of({"model_type": model.model_type, **model.fields}, "model")


def _compute_bytes(train: TrainSection) -> float:
    """Bytes of what is computed in; on an accelerator `auto` is bfloat16."""
    single = train.precision == "float32" or (train.precision == "auto" and train.device == "cpu")
    return 4.0 if single else 2.0
