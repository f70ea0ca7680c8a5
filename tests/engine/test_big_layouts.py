"""Llama-3.1-8B as it is, on 512 ranks that do not exist: built, sharded, and taken through one round, byte by byte.

The process group is torch's fake one, on which an exchange takes the way it takes on NCCL, and tensors have shapes
but no memory. Each case runs in a process of its own,
because a process has one default group.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

from fedshard import Federation
from fedshard.core.layout import Layout
from fedshard.core.recipe import TrainSection
from fedshard.engine.model import build_on_meta, decoder_blocks
from fedshard.engine.parameters import named_parameters
from fedshard.engine.shard import shard_model
from fedshard.testing import Traffic

groups, replicas, shards = map(int, sys.argv[1:])
layout = Layout(groups, replicas, shards)
dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
sizes = {"group": groups, "replica": replicas, "shard": shards}
if replicas == 1:
    del sizes["replica"]
mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                     num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072)
model = build_on_meta(config)
shard_model(model, [name for name, _ in decoder_blocks(model)], mesh, TrainSection())
local = sum(parameter.to_local().numel() for parameter in named_parameters(model).values())
with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
    model.to_empty(device="cpu")
    federation = Federation(model, mesh, every=8)
    update = federation._update(plain=True)
    weights = [1 / groups] * groups
    with Traffic() as traffic:  # a fake tensor has no values, so there are no flags to agree on
        federation._exchange.run(federation._locals(), weights, update.before, update.after)
print(json.dumps({
    "local": local, "told": federation.sent_bytes,
    "sent_to_groups": traffic.sent_bytes("all_reduce", frozenset(layout.peers(0))),
    "gathered": traffic.sent_bytes("all_gather"), "calls": sum(traffic.across(layout).values()),
}))
"""

PARAMETERS = 8_030_261_248


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("groups", "replicas", "shards"), [(128, 1, 4), (16, 8, 4)])
def test_a_round_of_llama_8b_on_512_ranks_sends_what_the_formula_says(groups, replicas, shards):
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(groups), str(replicas), str(shards)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["local"] == PARAMETERS / shards  # each of its matrices divides by four
    between = 2 * (groups - 1) / groups * PARAMETERS * 4 / (shards * replicas)
    assert seen["told"] == between
    assert seen["sent_to_groups"] == pytest.approx(between, rel=1e-12)
    assert seen["gathered"] == (replicas - 1) / replicas * PARAMETERS * 4 / shards
    assert seen["calls"] < 291  # one message per tensor, and the norms of a few kB each in one bucket
