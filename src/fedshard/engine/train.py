"""The training loop. What crosses groups is in plain sight: the gradient average of the warm-up, and the round.

for each step
    1. take_step       forward, backward, optimizer: inside the group          step.py
       (warm-up)       gradients averaged over the groups                      federate.py
    2. round           if due: shards averaged over the groups                 federate.py
    3. evaluate        if due, on the global model                             evaluate.py
"""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import write_recipe
from fedshard.engine.evaluate import evaluate
from fedshard.engine.job import Job, make_job
from fedshard.engine.live import print_summary
from fedshard.engine.log import Log, fsdp_bytes
from fedshard.engine.meter import Meter
from fedshard.engine.rows import Summary
from fedshard.engine.run_folder import RunFolder, describe_environment
from fedshard.engine.sinks import Sinks, open_sinks
from fedshard.engine.step import Skips, take_step
from fedshard.engine.world import World, find_launch, open_world


def train_on_rank(recipe: Recipe, into: Path, cache: Path, as_json: bool) -> None:
    """One rank's whole run, from its place in the world to the summary on stdout (rank 0's)."""
    with open_world(recipe, find_launch()) as world:
        sinks = Sinks([])
        job = make_job(recipe, world, cache)
        hosts = all_hosts(world)
        if world.rank == 0:
            environment = describe_environment(world.layout.ranks, world.device, hosts)
            sinks = open_sinks(recipe, RunFolder.create(into, write_recipe(recipe), environment))
        try:
            summary = train(job, sinks)
        finally:
            sinks.close()
        if world.rank == 0:
            print_summary(summary, federated=job.federation.federates, fsdp_bytes=fsdp_bytes(job), as_json=as_json)


def train(job: Job, sinks: Sinks) -> Summary:
    """Train to the end of the budget; the summary is the same on every rank but for memory, which is the rank's own."""
    recipe, federation = job.recipe, job.federation
    last = recipe.steps
    meter = Meter(job.world.device, profile_every=recipe.log.profile_every, warmup_steps=recipe.timetable.warmup_steps)
    log = Log(job, sinks, meter)
    skips = Skips()
    tokens = 0  # label tokens of this rank since the last round

    for step in range(1, last + 1):
        # 1. the group trains; in the warm-up, all groups as one
        with meter.step(step):
            done = take_step(job, step, synchronous=federation.federates and recipe.timetable.synchronous(step))
            skips.note(job, step, done.grad_norm)
            job.inner.zero_grad()
        tokens += done.rank_label_tokens
        log.step(step, done)

        # 2. the round: groups meet
        report = None
        if federation.due(step):
            with meter.round():
                report = federation.finish(tokens) if step == last else federation.round(tokens)
            tokens = 0
            if report is not None and report.reset_moments:
                job.inner.reset_moments()

        # 3. rows and evaluation follow the round; without rounds, every step
        if report is not None or not federation.federates:
            log.exchange(step, report)
            if evaluation_due(recipe, log.last_evaluated, step):
                log.evaluation(step, evaluate(job.model, job.corpus, recipe, job.world))

    return log.summary()


def evaluation_due(recipe: Recipe, last_evaluated: int, step: int) -> bool:
    """Whether the model is evaluated after this step, which ends a round where there are rounds.

    `evaluate.every` counts steps; what is due in mid-round waits for the round. The end is always evaluated.
    """
    every = recipe.evaluate.every
    return step == recipe.steps or (every > 0 and step // every > last_evaluated // every)


def all_hosts(world: World) -> list[str]:
    """The names of the machines, in the order of their ranks, each once."""
    names: list[str] = [""] * world.layout.ranks
    dist.all_gather_object(names, socket.gethostname(), group=world.control)
    return list(dict.fromkeys(names))
