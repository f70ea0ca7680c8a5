"""What a run needs before its first step: checked before any process group exists, then built on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from fedshard.core.course import Course, Done
from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import FolderModel, Recipe
from fedshard.engine import weights
from fedshard.engine.agree import agree
from fedshard.engine.config import check_positions, read_config
from fedshard.engine.corpus import Corpus, prepare
from fedshard.engine.data import Feed
from fedshard.engine.federate import Federation
from fedshard.engine.initial import fill, materialise
from fedshard.engine.inner import Inner
from fedshard.engine.loss import check_isolation
from fedshard.engine.model import build_on_meta, decoder_blocks
from fedshard.engine.outer import make_outer
from fedshard.engine.parameters import local_part
from fedshard.engine.shard import shard_model, stored_dtype
from fedshard.engine.stop import Stop
from fedshard.engine.world import World


@dataclass
class Job:
    """The parts of a run on one rank."""

    recipe: Recipe
    course: Course
    world: World
    config: PreTrainedConfig
    corpus: Corpus
    model: PreTrainedModel
    federation: Federation
    inner: Inner
    feed: Feed
    stop: Stop = field(default_factory=Stop)


def check(recipe: Recipe, cache: Path) -> None:
    """All that can be wrong with model and data, found before any rank starts; prepares the data on the way.

    Raises InputError with every fault.
    """
    faults: list[Fault] = []
    config = None
    try:
        config = read_config(recipe.model)
        found = [check_positions(config, recipe.data.sequence_length)]
        if recipe.data.isolate_documents:
            found.append(check_isolation(config))
        faults += [fault for fault in found if fault is not None]
    except InputError as error:
        faults += error.faults
    for source in recipe.data.sources or (None,):
        try:
            open_corpus(recipe, config, cache, source)
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(dict.fromkeys(faults))  # what ails the tokenizer ails every source


def open_corpus(
    recipe: Recipe, config: PreTrainedConfig | None, cache: Path, source: str | None, quiet: bool = False
) -> Corpus:
    """The corpus of a recipe; without a config the vocabulary is not checked."""
    vocabulary = config.get_text_config().vocab_size if config else 2**31
    return prepare(recipe.data, vocab_size=vocabulary, seed=recipe.seed, cache=cache, source=source, quiet=quiet)


def make_job(recipe: Recipe, world: World, cache: Path, done: Done | None = None) -> Job:
    """Build the parts of a run, and make sure that all ranks start from the same weights and data.

    With something `done` the weights are zeros, and the state of a checkpoint must follow.
    """
    place, course = world.place, Course.of(recipe, done)
    config = read_config(recipe.model)
    source = recipe.data.sources[place.group] if recipe.data.assignment == "by-source" else None
    corpus = open_corpus(recipe, config, cache, source, quiet=True)
    if source is None:
        _check_same_data(corpus, world)
    model = make_model(recipe, config, world, empty=done is not None)
    federation = Federation(
        model,
        world.mesh,
        every=recipe.sync.every,
        outer=make_outer(recipe.sync.outer),
        warmup_steps=course.timetable.warmup_steps,
        steps=course.steps,
        weights=recipe.sync.weights,
        anchor=recipe.sync.anchor,
        bucket_bytes=recipe.sync.bucket_bytes,
    )
    federation.start()
    inner = Inner(model, recipe.optimizer, recipe.schedule, recipe.train.clip_norm)
    feed = Feed(
        corpus,
        layout=world.layout,
        place=place,
        micro_batch=recipe.train.micro_batch,
        accumulation=recipe.train.accumulation,
        assignment=recipe.data.assignment,
        seed=recipe.seed,
        isolate_documents=recipe.data.isolate_documents,
    )
    return Job(recipe, course, world, config, corpus, model, federation, inner, feed)


def make_model(recipe: Recipe, config: PreTrainedConfig, world: World, *, empty: bool = False) -> PreTrainedModel:
    """The model, cut over the group's ranks and filled shard by shard: no rank ever holds it whole.

    An `empty` one holds zeros, for values that come from elsewhere.
    """
    model = build_on_meta(config, stored_dtype(recipe.train))
    shard_model(model, [name for name, _ in decoder_blocks(model)], world.mesh, recipe.train)
    materialise(model, world.device)
    if empty:
        for parameter in model.parameters():
            local_part(parameter).zero_()
    elif isinstance(recipe.model, FolderModel) and weights.has_weights(Path(recipe.model.path)):
        weights.load(model, Path(recipe.model.path))
    else:
        fill(model, recipe.seed)
    return model.train()


def _check_same_data(corpus: Corpus, world: World) -> None:
    """Raises InputError if ranks read different data: a file that differs between nodes, or another Python's stdlib."""
    mine = torch.tensor([float(int(corpus.fingerprint[:12], 16))], dtype=torch.float64)  # 48 bits: exact in a float64
    lowest, highest = agree(mine, world.mesh, dist.ReduceOp.MIN), agree(mine, world.mesh, dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise InputError([Fault("data", "ranks read different data", "Give all nodes the same files.")])
