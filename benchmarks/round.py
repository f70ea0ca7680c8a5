"""Seconds of a round against the bare collectives that move the same bytes, side by side in one run.

    python benchmarks/round.py

With one replica the limit is one `all_reduce` of a flat tensor; with two, an `all_reduce` of half of it and an
`all_gather`. Both on loopback, and on a link of 200 Mbit/s (traffic control on the loopback of a network namespace
of its own; skipped, and said so, where the kernel has none). The model is a few blocks of TinyLlama-1.1B.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fedshard import Federation, Mean, Nesterov
from fedshard.core.units import MIB
from fedshard.engine.collectives import all_gather
from fedshard.engine.shard import shard_mesh

HIDDEN, FEED, KEYS = 2048, 5632, 256  # TinyLlama-1.1B
SLOW_MBIT = 200
CASES = [("mean", 1), ("mean", 2), ("nesterov", 1), ("nesterov", 2)]  # outer optimizer, replicas


class Blocks(torch.nn.Module):
    """The parameters of decoder blocks, in their real shapes."""

    def __init__(self, blocks: int, hidden: int, feed: int, keys: int):
        super().__init__()
        shapes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
        shapes += [(feed, hidden), (feed, hidden), (hidden, feed), (hidden,), (hidden,)]
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(s)) for _ in range(blocks) for s in shapes])


def measure(rank: int, replicas: int, outer: str, small: bool, repeats: int, port: int, queue: mp.SimpleQueue) -> None:
    """On each of 2 · replicas ranks: a round and the bare collectives in turn, `repeats` times."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2 * replicas)
    sizes = {"group": 2, "replica": replicas, "shard": 1} if replicas > 1 else {"group": 2, "shard": 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Blocks(1, 1024, 2816, 256) if small else Blocks(2, HIDDEN, FEED, KEYS)
    numel = sum(parameter.numel() for parameter in model.parameters())
    fully_shard(model, mesh=shard_mesh(mesh))
    federation = Federation(model, mesh, every=1, outer=Mean() if outer == "mean" else Nesterov())
    federation.start()
    flat = torch.randn(-(-numel // replicas))
    whole = torch.empty(flat.numel() * replicas)

    def bare() -> None:
        dist.all_reduce(flat, group=mesh.get_group("group"))
        if replicas > 1:
            all_gather(whole, flat, mesh.get_group("replica"))

    seconds: dict[str, list[float]] = {"bare": [], "round": []}
    extra = 0
    for repeat in range(repeats + 1):
        for name, call in (("bare", bare), ("round", lambda: federation.round(1))):
            before = reset_peak()
            dist.barrier()
            began = time.perf_counter()
            call()
            dist.barrier()
            if repeat > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
            elif name == "round":
                extra = peak_rss() - before
    if rank == 0:
        queue.put((numel * 4, extra, seconds))
    dist.destroy_process_group()


def reset_peak() -> int:
    """Start measuring the peak of resident memory anew; returns what is resident now, in bytes.

    Free memory goes back to the system first, so that what a call takes from it is seen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status_bytes("VmRSS")


def peak_rss() -> int:
    """The peak of resident memory since `reset_peak`, in bytes."""
    return status_bytes("VmHWM")


def status_bytes(key: str) -> int:
    """A size from /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def run_case(outer: str, replicas: int, slow: bool, repeats: int) -> dict:
    """One case's figures: medians, their ratio, and the memory that the round needed beside the model."""
    queue = mp.get_context("spawn").SimpleQueue()
    port = 29400 + os.getpid() % 500
    mp.spawn(measure, (replicas, outer, slow, repeats, port, queue), nprocs=2 * replicas)
    size, extra, seconds = queue.get()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {
        "outer": outer,
        "replicas": replicas,
        "link": f"{SLOW_MBIT} Mbit/s" if slow else "loopback",
        "bytes_per_rank": size,
        "bare_seconds": round(medians["bare"], 4),
        "round_seconds": round(medians["round"], 4),
        "ratio": round(medians["round"] / medians["bare"], 3),
        "ratio_of_minima": round(min(seconds["round"]) / min(seconds["bare"]), 3),
        "extra_mib": round(extra / MIB, 1),
    }
    print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    return figures


def in_slow_namespace(repeats: int) -> list[dict] | None:
    """The cases again in a network namespace whose loopback has a rate; None where that cannot be."""
    setup = f"ip link set lo up && tc qdisc add dev lo root tbf rate {SLOW_MBIT}mbit burst 128kb latency 400ms"
    inner = f'{setup} && exec "{sys.executable}" "{__file__}" --inside --repeats {repeats}'
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", inner]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"slow link skipped: {done.stderr.strip().splitlines()[-1:]}")
        return None
    print(done.stdout, end="")
    return [parse(line) for line in done.stdout.splitlines() if line.startswith("outer ")]


def parse(line: str) -> dict:
    """A printed case's figures."""
    pairs = [pair.split(" ", 1) for pair in line.split("  ")]
    numbers = {key: value if key in ("outer", "link") else float(value) for key, value in pairs}
    return {key: int(value) if key in ("replicas", "bytes_per_rank") else value for key, value in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        for outer, replicas in CASES[:2]:
            run_case(outer, replicas, True, given.repeats)
        return
    fast = [run_case(outer, replicas, False, given.repeats) for outer, replicas in CASES]
    slow = in_slow_namespace(max(given.repeats // 5, 2))
    save("round", {"targets": {"one replica": 1.2, "two replicas": 1.3, "slow link": 1.05, "extra MiB": 64},
                   "loopback": fast, "slow_link": slow})  # fmt: skip


if __name__ == "__main__":
    main()
