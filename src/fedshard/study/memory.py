"""What one rank's memory holds, part by part, at each phase of a step; the largest phase decides what fits.

Bytes of the rank that holds most. Parts are what FSDP2 and autograd keep alive at the same time, in the order in which
a step goes through it; derivations in docs/formal/memory.md.

    loss        all activations, log-probabilities and the two gradients behind them
    backward    of block k from the end: the activations before it, gathered parameters, its gradients, the reduction
                of the block that came last
    reduction   of that block's gradients
    root        the embedding's gradient and its reduction, when all else is done
    round       what moves slices between groups
    evaluation  under overlap, the local weights beside the anchor
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedshard.study.cost import fragment_fractions
from fedshard.study.setup import Setup
from fedshard.study.work import bucketed_numel

Parts = dict[str, float]

CONTEXT_BYTES = 1.0e9
"""What an accelerator's driver and libraries take. Source: 1 to 3 GB with the communicators, measured by others."""

COMMUNICATOR_BYTES = 0.25e9
"""What one communicator takes: about 24 channels of two 4 MiB buffers."""

OUTSIDE = ("context", "communicators")
"""Parts that no allocator of tensors sees."""

SAMPLE_NUMEL = 2**18
"""Owned elements that a mean without an anchor measures its spread on, as in engine/update.py."""


@dataclass(frozen=True)
class Kept:
    """What autograd keeps of a block without a gate, for each token."""

    widths: int
    """Values as wide as the model."""
    feeds: int
    """Values as wide as the feed-forward layer."""
    feed_gradients: int
    """Values as wide as the feed-forward layer that its backward pass holds beside them."""


UNGATED = {"transformer.h": Kept(8, 5, 2), "model.decoder.layers": Kept(8, 1, 2), "gpt_neox.layers": Kept(10, 2, 1)}
"""GPT-2 (its GELU is five steps), OPT (a ReLU), GPT-NeoX: by what the blocks are called."""


@dataclass(frozen=True)
class Memory:
    """What one rank's memory holds: a table of phases and parts."""

    phases: dict[str, Parts]
    """Bytes of each part in each phase; parts that take nothing are left out."""

    @property
    def phase(self) -> str:
        """The phase in which it holds most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def parts(self) -> Parts:
        """What it holds then."""
        return self.phases[self.phase]

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def tensor_bytes(self) -> float:
        """What the allocator of tensors sees: all but the driver and the communicators."""
        return sum(size for name, size in self.parts.items() if name not in OUTSIDE)


def memory(setup: Setup) -> Memory:
    """The memory of `setup`, by phase and part. Equation (memory-peak).

    >>> from fedshard.core.cluster_file import read_cluster
    >>> from fedshard.core.layout import Layout
    >>> from fedshard.study.architectures import read_architecture
    >>> setup = Setup(read_architecture("llama-3.1-8b"), Layout(1, 1, 8), read_cluster("p4d").job(8), 2048)
    >>> parts = memory(setup).parts
    >>> round((parts["stored"] + parts["moments"]) / 1e9, 2)
    12.05
    """
    last = setup.architecture.blocks - 1
    blocks = sorted({0, min(1, last), max(0, last - 1), last})  # between these bytes rise or fall evenly
    phases = {
        "loss": _loss(setup),
        "backward": max((parts for done in blocks for parts in _backward(setup, done)), key=_total),
        "reduction": max((_reduction(setup, done) for done in blocks), key=_total),
        "root": max(_root(setup), key=_total),
    }
    if setup.federates:
        phases["round"] = _round(setup)
    if setup.delay > 0:
        phases["evaluation"] = _evaluation(setup)
    always, outside = _always(setup), _outside(setup)
    return Memory(
        {
            phase: {name: size for name, size in (always | parts | outside).items() if size > 0}
            for phase, parts in phases.items()
        }
    )


def state_bytes(setup: Setup) -> Parts:
    """What training keeps for each parameter, before any activation: 16 bytes for AdamW on float32, cut over S.

    Replicas do not divide it. Equation (memory-state).
    """
    stored = setup.stored_bytes * setup.architecture.shard_numel(setup.layout.shards)
    return {"stored": stored, "gradients": stored, "moments": setup.moments * stored}


def kept_bytes_per_token(setup: Setup) -> float:
    """Activations of one block that autograd keeps for the backward pass, per token. Equation (memory-kept).

    For blocks with a gate: each norm its input in float32, what it normalised and what it gives; query, key, value
    and the attention's result; gate, its activation, the other branch and their product (of each expert that is used,
    which also copies what goes in and comes out).
    """
    model, each = setup.architecture, setup.gather_bytes
    if not model.gated:
        ungated = UNGATED[model.block_prefix]
        return each * (ungated.widths * model.width + ungated.feeds * model.feed_width)
    heads = model.attention_width + model.key_width
    kept = 2 * (4 + 2 * each) * model.width + 2 * each * heads
    if any(tensor.name == "self_attn.q_norm.weight" for tensor in model.block):
        kept += (4 + each) * heads
    if model.experts > 1:
        kept += 2 * model.experts_used * each * model.width
    return kept + 4 * model.experts_used * each * model.feed_width


def _always(setup: Setup) -> Parts:
    """What stays from step to step."""
    state, owned = state_bytes(setup), setup.architecture.owned_numel(setup.layout.shards, setup.owners)
    return {
        "stored": state["stored"],
        "moments": state["moments"],
        "anchor": 4.0 * owned * setup.anchor,
        "outer state": 4.0 * owned * setup.outer_states,
        "residuals": 4.0 * owned * (1 + 1 / setup.layout.groups) if setup.lossy else 0.0,
        "deltas under way": 4.0 * owned * max(fragment_fractions(setup)) if setup.delay > 0 else 0.0,
    }


def _outside(setup: Setup) -> Parts:
    """What no allocator of tensors sees: one communicator for each axis, and one for the group."""
    if setup.on_cpu:
        return {}
    layout = setup.layout
    axes = (layout.groups, layout.replicas, layout.shards, layout.group_ranks)
    return {"context": CONTEXT_BYTES, "communicators": COMMUNICATOR_BYTES * sum(members > 1 for members in axes)}


def _loss(setup: Setup) -> Parts:
    """After the forward pass: log-probabilities, and the gradients of the loss and of the logits, in float32."""
    return {
        "gradients": _accumulated(setup),
        "gathered units": _gathered(setup, 0 if setup.reshard_after_forward else setup.architecture.blocks),
        "activations": _activations(setup, setup.architecture.blocks) + (4 + 2 * setup.gather_bytes) * _hidden(setup),
        "logits": 12.0 * setup.architecture.vocabulary * setup.rank_tokens,
    }


def _backward(setup: Setup, done: int) -> Iterator[Parts]:
    """The backward pass of the next block, once `done` blocks are through: at its begin (on gloo, whose gathers need
    their size again), in its feed-forward layer, where activations have most beside them, and at its end."""
    model, each = setup.architecture, setup.gather_bytes
    block, left = model.block_shard_numel(setup.layout.shards), model.blocks - done
    ahead = _gather_buffer(setup) if setup.reshard_after_forward and left > 1 else 0.0
    held = {
        "gradients": _gradients(setup, done),
        "gathered units": _gathered(setup, 1 if setup.reshard_after_forward else left) + ahead,
        "activations": _activations(setup, left) + _recomputed(setup) + _hidden(setup) * each,
        "whole gradients": each * model.head + _kept_whole(setup),
        "reductions": _reduced(setup, block) if done else _left_over(setup),
    }
    if setup.on_cpu:
        converted = each * block if ahead and each != setup.stored_bytes else 0.0  # the rank's own part of it
        yield held | {"gathered units": held["gathered units"] + ahead + converted}
    feeds = 2 if model.gated else UNGATED[model.block_prefix].feed_gradients
    yield held | {
        "activation gradients": feeds * each * model.feed_width * model.experts_used * setup.rank_tokens,
        "whole gradients": held["whole gradients"] + each * model.feed_width * model.width * model.experts,
    }
    yield held | {
        "activations": _activations(setup, left - 1) + (4 + 3 * each) * _hidden(setup),
        "whole gradients": held["whole gradients"] + each * model.block_numel,
    }


def _reduction(setup: Setup, done: int) -> Parts:
    """When a block's gradients are copied to be reduced, and the next block is gathered."""
    model, left = setup.architecture, setup.architecture.blocks - done - 1
    gathered = _gathered(setup, 0 if setup.reshard_after_forward else left)
    return {
        "gradients": _gradients(setup, done),
        "gathered units": gathered + (_gather_buffer(setup) if setup.reshard_after_forward and left else 0.0),
        "activations": _activations(setup, left) + _hidden(setup) * setup.gather_bytes,
        "whole gradients": setup.gather_bytes * (model.head + model.block_numel) + _kept_whole(setup),
        "reductions": _reduced(setup, model.block_shard_numel(setup.layout.shards)),
    }


def _root(setup: Setup) -> Iterator[Parts]:
    """When all blocks are through: the embedding's gradient beside the head's, and then the reduction of both."""
    model, each = setup.architecture, setup.gather_bytes
    gradients = _gradients(setup, model.blocks)
    yield {
        "gradients": gradients,
        "gathered units": _gathered(setup, 0),
        "activations": _hidden(setup) * each,
        "whole gradients": each * (model.head + model.embedding) + _kept_whole(setup),
        "reductions": _reduced(setup, model.block_shard_numel(setup.layout.shards)),
    }
    yield {
        "gradients": gradients,
        "whole gradients": each * model.root_numel + _kept_whole(setup),
        "reductions": _reduced(setup, model.root_shard_numel(setup.layout.shards)),
    }


def _round(setup: Setup) -> Parts:
    """Two buckets for what is small, and the sample that a mean without an anchor compares. No gradients are left."""
    model, layout = setup.architecture, setup.layout
    bucket = min(bucketed_numel(setup, setup.owners), setup.bucket_bytes // 8)
    return {
        "buckets": 2 * 4.0 * setup.owners * bucket,
        "sample": 0.0 if setup.anchor else 4.0 * min(SAMPLE_NUMEL, model.owned_numel(layout.shards, setup.owners)),
    }


def _evaluation(setup: Setup) -> Parts:
    """Of the anchor, under overlap: the local weights are put aside for it. Two blocks are gathered ahead of one."""
    return {
        "set-aside weights": setup.stored_bytes * setup.architecture.shard_numel(setup.layout.shards),
        "gathered units": _gathered(setup, 3),
        "logits": (8 + setup.gather_bytes) * setup.architecture.vocabulary * setup.rank_tokens,
    }


def _activations(setup: Setup, blocks: int) -> float:
    """What autograd has kept of so many blocks: all that they need, or what goes into them."""
    kept = setup.gather_bytes * setup.architecture.width if setup.recompute else kept_bytes_per_token(setup)
    return blocks * kept * setup.rank_tokens


def _recomputed(setup: Setup) -> float:
    """What one block has kept when it was computed again; in float32 its first norm keeps what went in, as it is."""
    if not setup.recompute:
        return 0.0
    shared = 4 * setup.architecture.width if setup.gather_bytes == 4 else 0
    return (kept_bytes_per_token(setup) - shared) * setup.rank_tokens


def _hidden(setup: Setup) -> float:
    """Values of one hidden state of a micro-batch."""
    return setup.architecture.width * setup.rank_tokens


def _gathered(setup: Setup, blocks: int) -> float:
    """Gathered parameters of the root and of so many blocks."""
    model, shards = setup.architecture, setup.layout.shards
    numel = model.root_shard_numel(shards) + blocks * model.block_shard_numel(shards)
    return setup.gather_bytes * shards * numel


def _gather_buffer(setup: Setup) -> float:
    """What the next block arrives in; one rank gathers nothing."""
    shards = setup.layout.shards
    return setup.gather_bytes * shards * setup.architecture.block_shard_numel(shards) if shards > 1 else 0.0


def _reduced(setup: Setup, shard_numel: int) -> float:
    """The copy of a unit's gradients that is reduced."""
    return setup.reduce_bytes * setup.layout.shards * shard_numel


def _gradients(setup: Setup, done: int) -> float:
    """Reduced gradients once `done` blocks are through; all of them after the first of several micro-batches."""
    blocks = setup.stored_bytes * done * setup.architecture.block_shard_numel(setup.layout.shards)
    return max(blocks, _accumulated(setup))


def _accumulated(setup: Setup) -> float:
    """Reduced gradients of the micro-batches before."""
    several = setup.accumulation > 1 and not setup.keep_unsharded_gradients
    return state_bytes(setup)["gradients"] if several else 0.0


def _kept_whole(setup: Setup) -> float:
    """Gradients of the micro-batches before, where they are kept whole."""
    several = setup.accumulation > 1 and setup.keep_unsharded_gradients
    return setup.reduce_bytes * setup.architecture.total if several else 0.0


def _left_over(setup: Setup) -> float:
    """The root's copy of the micro-batch before, which the next reduction lets go."""
    several = setup.accumulation > 1 and not setup.keep_unsharded_gradients
    return _reduced(setup, setup.architecture.root_shard_numel(setup.layout.shards)) if several else 0.0


def _total(parts: Parts) -> float:
    return sum(parts.values())
