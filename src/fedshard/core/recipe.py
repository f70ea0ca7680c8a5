"""The recipe: everything that decides a run, as one frozen tree. TOML in, and the same TOML out.

An empty recipe is `tiny`: a small Llama-type model on the Python standard library's source, in two groups of two
ranks. Each field's docstring gives its meaning and unit; the recipe reference in the docs is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedshard.core.layout import Layout
from fedshard.core.timetable import Timetable


class Section(BaseModel):
    """A frozen part of the recipe; a key that is no field is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )


class LayoutSection(Section):
    """How the ranks are laid out: groups × replicas × shards. Their product is the number of ranks."""

    groups: int = Field(default=2, ge=1)
    """Groups that train on their own and meet in rounds (G)."""
    replicas: int = Field(default=1, ge=1)
    """Full copies of the model inside a group (R)."""
    shards: int = Field(default=2, ge=1)
    """Ranks that one replica's parameters are cut over (S)."""


class ConfigModel(Section):
    """A model from scratch: a Hugging Face `model_type` and that architecture's own fields beside it."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["config"] = "config"
    """`config`: the architecture's own fields stand in this section; weights are initialised from the seed."""
    model_type: str = "llama"
    """The architecture's name in `transformers` (`llama`, `qwen2`, `gpt2`, `mixtral`, …)."""

    @property
    def fields(self) -> dict[str, Any]:
        """The architecture's own fields."""
        return dict(self.__pydantic_extra__ or {})


class FolderModel(Section):
    """A model from a Hugging Face folder: its config alone, or its weights too."""

    kind: Literal["folder"]
    """`folder`: a Hugging Face model folder."""
    path: str
    """The folder. With safetensors in it, training continues from them; with a config alone, it starts from scratch."""


TINY_MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class DataSection(Section):
    """What is trained on."""

    kind: Literal["stdlib", "text", "jsonl", "parquet", "dataset", "tokens"] = "stdlib"
    """`stdlib`: the Python standard library's source on this machine. `text`: a folder of text files, one document
    each. `jsonl`, `parquet`: files with a text column. `dataset`: a Hugging Face dataset on disk. `tokens`: arrays of
    token ids (`.npy`)."""
    path: str | None = None
    """File or folder of the data; not used by `stdlib`, nor where `sources` are given."""
    sources: tuple[str, ...] = ()
    """One path per group, for `assignment = "by-source"`."""
    text_field: str = "text"
    """The column that holds the text, in `jsonl`, `parquet` and `dataset`."""
    tokenizer: str = "bytes"
    """`bytes` (ids 0–255 and the separator 256), or a folder that holds a `tokenizer.json`."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in one packed sequence."""
    assignment: Literal["disjoint", "replicated", "by-source"] = "disjoint"
    """`disjoint`: groups share one global order and no sequence twice. `replicated`: every group sees all, in an order
    of its own. `by-source`: each group has its own of the `sources`."""
    isolate_documents: bool = False
    """Whether attention is masked across documents packed into one sequence."""
    eval_fraction: float = Field(default=0.02, gt=0, lt=1)
    """Fraction of the documents held out for evaluation."""


class TrainSection(Section):
    """How one step computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where every local rank has a device of its own, else the CPU, and says which."""
    micro_batch: int = Field(default=2, ge=1)
    """Sequences that one rank takes through the model at once."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches of one rank in one optimizer step."""
    precision: Literal["auto", "float32", "bfloat16", "pure-bfloat16"] = "auto"
    """What the model computes in; weights and moments are stored in float32, except with `pure-bfloat16`, which stores
    all in bfloat16. `auto`: bfloat16 on CUDA, float32 on the CPU."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients are reduced in inside a group."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest norm of a group's gradient; longer ones are scaled down. 0: no clipping."""
    recompute: Literal["none", "full"] = "none"
    """`full`: each decoder block's activations are computed again in the backward pass, to save memory."""
    compile: bool = False
    """Whether each decoder block goes through `torch.compile`."""
    deterministic: bool = False
    """Whether only deterministic kernels are used, so that CUDA runs repeat bit for bit."""


class OptimizerSection(Section):
    """The inner optimizer, which each group steps on its own."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """`adamw`, or `sgd` without momentum."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate; the schedule multiplies it."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of AdamW's first and second moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""


class ScheduleSection(Section):
    """The learning rate as a function of tokens consumed / budget, the same for every layout."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """The shape after the warm-up."""
    warmup_fraction: float = Field(default=0.05, ge=0, le=1)
    """Fraction of the budget over which the learning rate rises linearly to its peak."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """What the learning rate ends at, as a fraction of its peak."""


class MeanOuter(Section):
    """Federated averaging: the new global weights are the weighted mean of the groups'."""

    kind: Literal["mean"] = "mean"
    """`mean`: FedAvg."""


class MomentumOuter(Section):
    """Heavy-ball momentum over the mean delta (FedAvgM)."""

    kind: Literal["momentum"]
    """`momentum`: FedAvgM."""
    learning_rate: float = Field(default=1.0, gt=0)
    """Outer learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the outer momentum."""


class NesterovOuter(Section):
    """Nesterov momentum over the mean delta (DiLoCo; FedMom is the same iteration)."""

    kind: Literal["nesterov"]
    """`nesterov`: DiLoCo."""
    learning_rate: float = Field(default=0.7, gt=0)
    """Outer learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the outer momentum."""


Outer = Annotated[MeanOuter | MomentumOuter | NesterovOuter, Field(discriminator="kind")]
Model = Annotated[ConfigModel | FolderModel, Field(discriminator="kind")]


class SyncSection(Section):
    """What happens between groups."""

    every: int = Field(default=10, ge=1)
    """Steps between two rounds (H)."""
    warmup_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the steps in which the groups still train as one: their gradients are averaged at every step. The
    strongest single knob for quality."""
    weights: Literal["tokens", "uniform"] = "tokens"
    """What a group's part in a round is: by the label tokens it trained since the last one, or equal for all."""
    anchor: bool = False
    """Whether `mean` keeps the last global weights too: buys delta norms, agreement and roll-back, for 4 bytes per
    owned parameter. Other outer optimizers keep them anyway."""
    bucket_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """Size of the buffers that a round moves its slices through, in bytes."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a rank waits for the others before it gives up."""
    outer: Outer = MeanOuter()
    """The outer optimizer: what becomes of the groups' mean."""


class BudgetSection(Section):
    """When training ends: at so many tokens, or at so many steps; exactly one of them."""

    tokens: int | None = Field(default=None, ge=1)
    """Sequences × sequence length over all groups. The last step may pass it."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of a group."""

    @model_validator(mode="after")
    def _exactly_one(self) -> BudgetSection:
        given = [name for name in ("tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of tokens and steps is needed, {' and '.join(given) or 'none'} given")
        return self


class EvaluateSection(Section):
    """Evaluation of the global model on held-out data."""

    every: int = Field(default=200, ge=0)
    """Optimizer steps between evaluations; with rounds it moves to the next round's end. The end is always evaluated.
    0: only the end."""
    sequences: int = Field(default=256, ge=1)
    """How many held-out sequences are used at most, always the same ones."""


class CheckpointSection(Section):
    """State on disk, from which `--resume` goes on."""

    every: int = Field(default=100, ge=0)
    """Optimizer steps between checkpoints; between two rounds a checkpoint waits for the next round's end. The end is
    always saved. 0: only the end, and what signals ask for."""
    keep: int = Field(default=2, ge=-1)
    """How many of the newest are kept. −1: all."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept beside the newest ones. 0: none."""
    async_: bool = Field(default=False, alias="async")
    """Whether training goes on while a checkpoint is written: it stops only to copy its state, which takes as much
    memory again on the CPU."""
    mid_round: bool = False
    """Whether a checkpoint is saved between two rounds where `every` says so: larger, because each group's weights are
    written, and the groups wait for each other."""
    moments: Literal["average", "first", "reset"] = "average"
    """What becomes of the groups' optimizer moments when a checkpoint is loaded into another number of groups: their
    mean, the first group's, or none."""
    grace_seconds: float = Field(default=120.0, gt=0)
    """How long the ranks may take to stop and save after SIGTERM or SIGUSR1, before the launcher kills them."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """How long a rank waits for the others to have written their parts."""

    @field_validator("keep")
    @classmethod
    def _keeps_one(cls, keep: int) -> int:
        if keep == 0:
            raise ValueError("at least one checkpoint must be kept; -1 keeps all")
        return keep


class LogSection(Section):
    """What is written beside the JSONL files."""

    every: int = Field(default=1, ge=1)
    """Steps between two lines on the terminal where it is no terminal (the live line updates by itself)."""
    profile_every: int = Field(default=50, ge=0)
    """Steps between two that are timed phase by phase (compute, communication inside the group). 0: never."""
    tensorboard: bool = False
    """Whether TensorBoard events are written to the run folder; needs `fedshard[tensorboard]`."""
    wandb: str | None = None
    """Weights & Biases project to log to; needs `fedshard[wandb]`."""


class Recipe(Section):
    """Everything that decides a run.

    >>> recipe = Recipe()
    >>> recipe.shape.strategy, recipe.tokens_per_step, recipe.steps
    ('FL+FSDP', 2048, 391)
    """

    seed: int = Field(default=0, ge=0)
    """Seed of everything random: initial weights, data order, dropout."""
    layout: LayoutSection = LayoutSection()
    """How the ranks are laid out."""
    model: Model = ConfigModel(**TINY_MODEL)
    """The model."""
    data: DataSection = DataSection()
    """The data."""
    train: TrainSection = TrainSection()
    """One step."""
    optimizer: OptimizerSection = OptimizerSection()
    """The inner optimizer."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate's course."""
    sync: SyncSection = SyncSection()
    """What happens between groups."""
    budget: BudgetSection = BudgetSection(tokens=800_000)
    """When training ends."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """State on disk."""
    log: LogSection = LogSection()
    """Logging."""

    @property
    def shape(self) -> Layout:
        """The layout, as pure arithmetic."""
        return Layout(self.layout.groups, self.layout.replicas, self.layout.shards)

    @property
    def group_sequences(self) -> int:
        """Sequences in one optimizer step of one group (B_g)."""
        return self.shape.group_ranks * self.train.micro_batch * self.train.accumulation

    @property
    def group_tokens(self) -> int:
        """Tokens in one optimizer step of one group."""
        return self.group_sequences * self.data.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step over all groups."""
        return self.group_tokens * self.layout.groups

    @property
    def steps(self) -> int:
        """Optimizer steps of each group."""
        if self.budget.steps is not None:
            return self.budget.steps
        return -(-self.budget_tokens // self.tokens_per_step)

    @property
    def budget_tokens(self) -> int:
        """Tokens over all groups after which training ends."""
        if self.budget.tokens is not None:
            return self.budget.tokens
        assert self.budget.steps is not None
        return self.budget.steps * self.tokens_per_step

    @property
    def federates(self) -> bool:
        """Whether there are rounds at all: more than one group, or an outer optimizer that does more than a mean."""
        return self.layout.groups > 1 or self.sync.outer.kind != "mean"

    @property
    def timetable(self) -> Timetable:
        """When rounds happen."""
        warmup = round(self.sync.warmup_fraction * self.steps) if self.layout.groups > 1 else 0
        return Timetable(self.sync.every, warmup, self.steps)

    @property
    def strategy(self) -> str:
        """The layout's strategy; a single group with an outer optimizer is named so."""
        alone = self.layout.groups == 1 and self.federates
        return f"{self.shape.strategy} + outer" if alone else self.shape.strategy
