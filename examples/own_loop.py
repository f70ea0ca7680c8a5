"""Rounds in a loop of your own, over plain `fully_shard`: torchrun --nproc-per-node 4 examples/own_loop.py

Two groups of two ranks learn to guess the next byte of this file; then the state is saved, and loaded again.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fedshard import Federation, Nesterov

STEPS, WARMUP_STEPS, EVERY, BATCH, CONTEXT = 36, 4, 8, 64, 16
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # (bytes,)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "shard"))
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other data on each rank; other weights too, until `start` makes them equal
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 256), nn.GELU(), nn.Linear(256, 256)
    )
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    federation = Federation(model, mesh, every=EVERY, outer=Nesterov(), warmup_steps=WARMUP_STEPS, steps=STEPS)
    federation.start()

    targets = 0  # of this rank since the last round
    for step in range(1, STEPS + 1):
        rows = TEXT[torch.randint(len(TEXT) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]  # (batch, context + 1)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        loss.backward()  # the mean over the group: its ranks have equally many targets
        if step <= WARMUP_STEPS:
            federation.average_gradients(BATCH)  # crosses groups
        optimizer.step()
        optimizer.zero_grad()
        targets += BATCH
        if federation.due(step):
            report = federation.finish(targets) if step == STEPS else federation.round(targets)  # crosses groups
            targets = 0
            if rank == 0 and report is not None:
                print(f"step {step}: round {report.round}, loss {loss.item():.2f}, {report.sent_bytes} bytes sent")

    with tempfile.TemporaryDirectory() as folder:  # every rank saves its own: no other has the same
        path = Path(folder) / f"rank-{rank}.pt"
        torch.save([model.state_dict(), optimizer.state_dict(), federation.state_dict()], path)
        for part, state in zip([model, optimizer, federation], torch.load(path), strict=True):
            part.load_state_dict(state)
    dist.destroy_process_group()


main()
