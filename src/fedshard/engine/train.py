"""The training loop. What crosses groups is in plain sight: the gradient average of the warm-up, and the round.

for each step
    1. take_step       forward, backward, optimizer: inside the group          step.py
       (warm-up)       gradients averaged over the groups                      federate.py
    2. round           if due: shards averaged over the groups                 federate.py
    3. evaluate        if due, on the global model                             evaluate.py
    4. save            if due: every rank writes its part                      save.py
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fedshard.core.recipe import Recipe
from fedshard.core.recipe_file import write_recipe
from fedshard.engine.checkpoint import Cursor, Start
from fedshard.engine.evaluate import evaluate
from fedshard.engine.failure import Stopped
from fedshard.engine.job import Job, make_job
from fedshard.engine.live import print_summary
from fedshard.engine.log import Log, fsdp_bytes
from fedshard.engine.meter import Meter
from fedshard.engine.resume import take_up
from fedshard.engine.rows import Summary
from fedshard.engine.run_folder import RunFolder, describe_environment
from fedshard.engine.save import Saver, set_aside
from fedshard.engine.sinks import Sinks, open_sinks
from fedshard.engine.step import Skips, take_step
from fedshard.engine.stop import Stop, heeding_signals, open_stop
from fedshard.engine.world import World, find_launch, open_world


def train_on_rank(recipe: Recipe, begin: Start, cache: Path, as_json: bool) -> None:
    """One rank's whole run, from its place in the world to the summary on stdout (rank 0's)."""
    launch = find_launch()
    with open_world(recipe, launch) as world:
        begin = start_of_rank_0(world, begin)
        stop = open_stop(world, begin.stop_after)
        sinks = Sinks([])
        with heeding_signals(stop):
            checkpoint = begin.checkpoint
            job = make_job(recipe, world, cache, checkpoint.cursor().done if checkpoint else None)
            job.stop = stop
            cursor = take_up(job, checkpoint) if checkpoint else None
            hosts = all_hosts(world)
            if world.rank == 0:
                environment = describe_environment(world.layout.ranks, world.device, hosts)
                sinks = open_sinks(recipe, open_folder(recipe, begin, environment, cursor.step if cursor else 0))
            try:
                saver = Saver(job, begin.into, cursor.step if cursor and begin.resume else 0)
                summary = train(job, sinks, saver, cursor)
            finally:
                sinks.close()
                stop.close()
        if world.rank == 0 and summary is not None:
            print_summary(summary, federated=job.federation.federates, fsdp_bytes=fsdp_bytes(job), as_json=as_json)
        elif world.rank == 0:
            again = f"fedshard train {begin.into / 'recipe.toml'} --resume"
            print(f"stopped after step {saver.last_step} of {job.course.steps}; go on: {again}", file=sys.stderr)
        by_signal = all_asked(world, stop)
    if by_signal:
        raise Stopped(0)  # whoever sent the signal waits for the ranks to be gone


def train(job: Job, sinks: Sinks, saver: Saver | None = None, cursor: Cursor | None = None) -> Summary | None:
    """Train to the end of the budget, from the start or from `cursor`; None if the run was stopped before.

    The summary is the same on every rank but for memory, which is the rank's own.
    """
    recipe, course, federation, group = job.recipe, job.course, job.federation, job.world.place.group
    before, warmup = cursor.training_seconds if cursor else 0.0, course.timetable.warmup_steps
    meter = Meter(job.world.device, profile_every=recipe.log.profile_every, warmup_steps=warmup, seconds_before=before)
    log = Log(job, sinks, meter, last_evaluated=cursor.last_evaluated if cursor else 0)
    skips = Skips(cursor.skipped[group] if cursor else 0)
    leads = job.world.rank % job.world.layout.group_ranks == 0
    tokens = cursor.label_tokens[group] if cursor and leads else 0  # label tokens of this rank since the last round
    step, together = course.done.step, cursor.together if cursor else True

    def save() -> None:
        """The state as it is after this step, with its rows on the disk."""
        if saver is not None and saver.last_step != step:
            log.exchange(step, None)
            saver.save(step, log, skips, tokens, together=together)

    while step < course.steps and not job.stop.before(step + 1):
        step += 1

        # 1. the group trains; in the warm-up, all groups as one
        synchronous = federation.federates and course.timetable.synchronous(step)
        with meter.step(step):
            done = take_step(job, step, synchronous=synchronous)
            skips.note(job, step, done.grad_norm)
            job.inner.zero_grad()
        tokens += done.rank_label_tokens
        together = synchronous or not federation.federates
        log.step(step, done)

        # 2. the round: groups meet
        report = None
        if federation.due(step):
            with meter.round():
                report = federation.finish(tokens) if step == course.steps else federation.round(tokens)
            tokens, together = 0, True
            if report is not None and report.reset_moments:
                job.inner.reset_moments()

        # 3. rows and evaluation follow the round; without rounds, every step
        if report is not None or not federation.federates:
            log.exchange(step, report)
            if evaluation_due(recipe, course.steps, log.last_evaluated, step):
                log.evaluation(step, evaluate(job.model, job.corpus, recipe, job.world))

        # 4. the state goes to disk; the last one follows the summary, which it makes good
        if step < course.steps and saver is not None and saver.due(step, together=together):
            save()

    summary = log.summary() if step == course.steps else None
    save()
    if saver is not None:
        saver.wait()
    return summary


def evaluation_due(recipe: Recipe, steps: int, last_evaluated: int, step: int) -> bool:
    """Whether the model is evaluated after this step, which ends a round where there are rounds.

    `evaluate.every` counts steps; what is due in mid-round waits for the round. The end is always evaluated.
    """
    every = recipe.evaluate.every
    return step == steps or (every > 0 and step // every > last_evaluated // every)


def open_folder(recipe: Recipe, begin: Start, environment: dict[str, object], step: int) -> RunFolder:
    """The run folder, new, or as it was after `step`."""
    if not (begin.resume and begin.into.exists()):
        return RunFolder.create(begin.into, write_recipe(recipe), environment)
    for aside in set_aside(begin.into, step):
        print(f"{aside}: kept, of the run that went on from here before", file=sys.stderr)
    return RunFolder.reopen(begin.into, write_recipe(recipe), environment, step)


def start_of_rank_0(world: World, begin: Start) -> Start:
    """Where rank 0 begins: each rank found a start of its own, and a new folder's name has the time in it."""
    found = [begin]
    dist.broadcast_object_list(found, src=0, group=world.control)
    return found[0]


def all_asked(world: World, stop: Stop) -> bool:
    """Whether a signal asked every rank to stop; waits for all."""
    asked = torch.tensor(int(stop.asked))
    dist.all_reduce(asked, dist.ReduceOp.MIN, group=world.control)
    return bool(asked)


def all_hosts(world: World) -> list[str]:
    """The names of the machines, in the order of their ranks, each once."""
    names: list[str] = [""] * world.layout.ranks
    dist.all_gather_object(names, socket.gethostname(), group=world.control)
    return list(dict.fromkeys(names))
