"""Initial values: what the architecture's own initialisation does, done by address and on each rank's rows alone.

Every layout, device and number of ranks starts from the same full tensors bit for bit, no two shards of a tensor are
equal, and no rank makes more than its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from fedshard.core.errors import Fault, InputError
from fedshard.engine.model import build_on_meta, some_of
from fedshard.engine.parameters import local_part, local_rows, named_parameters, plain_name, tied_names
from fedshard.engine.values import Constant, Law, Normal, Piece, Uniform, initial_values

CHUNK = 2**15
"""Elements made at a time: few enough for the cache and for torch not to split them over threads, which ranks that
share their cores would only wait for."""


@dataclass(frozen=True)
class Initials:
    """What the architecture's own initialisation gives each parameter and buffer, by name."""

    model_type: str
    parameters: dict[str, tuple[Piece, ...]]
    """The laws of each one's elements; none where they depend on one another (as in an orthogonal matrix), and so
    have no address."""
    buffers: dict[str, torch.Tensor]
    """Values, on the CPU; most are tables that no checkpoint holds, such as those of rotary embeddings."""

    def check(self) -> None:
        """Raises InputError with the names of the parameters that cannot be initialised by address."""
        unaddressed = [name for name, pieces in self.parameters.items() if not pieces]
        if unaddressed:
            raise InputError([_unaddressed(self.model_type, unaddressed)])


def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Give a model that was built on the meta device its memory on `device`, and its buffers their values.

    Its parameters, sharded or not, hold anything until `fill` or `weights.load`. Tied ones are tied again: each of
    their modules got memory of its own.
    """
    tied = tied_names(model)
    model.to_empty(device=device)
    for name, first in tied.items():
        if name != first:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    values = read_initials(model.config).buffers
    for name, buffer in model.named_buffers():
        buffer.copy_(values[plain_name(name)])


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Give this rank's part of each parameter its initial values: a function of (seed, name, rows) alone."""
    initials = read_initials(model.config)
    initials.check()
    for name, parameter in named_parameters(model).items():
        local = local_part(parameter).view(-1)  # (local numel,)
        rows = local_rows(parameter)
        start = rows.start * parameter.shape[1:].numel()
        for offset in range(0, local.numel(), CHUNK):
            part = local[offset : offset + CHUNK]
            made = initial_values(seed, name, initials.parameters[name], start + offset, part.numel())
            part.copy_(made.to(part.dtype))


def read_initials(config: PreTrainedConfig) -> Initials:
    """What the architecture of `config` does to each parameter and buffer of a new model.

    Found by running its own initialisation on a model on the meta device, with the functions that it writes tensors
    by replaced by ones that take notes. Raises InputError with the names of buffers that it does not write.
    """
    with initialization.no_tie_weights():  # as in a direct construction, where tying follows initialising
        model = build_on_meta(config)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    versions = {name: tensor._version for name, tensor in (parameters | buffers).items()}  # counts writes in place
    notes = _Notes()
    with _replaced(notes.functions()):
        model.initialize_weights()
    unwritten = [name for name, each in buffers.items() if each._version == versions[name]]
    if unwritten:
        raise InputError([_unaddressed(config.model_type, unwritten)])
    for name, each in parameters.items():
        if each._version > versions[name]:  # written without any of these functions
            notes.forget(each)
    model.tie_weights()
    kept = {name: tuple(notes.pieces.get(each, [])) for name, each in model.named_parameters()}
    return Initials(config.model_type, kept, buffers)


class _Notes:
    """What was to be written into each tensor on the meta device; tensors elsewhere (buffers) are written."""

    def __init__(self) -> None:
        self.pieces: dict[torch.Tensor, list[Piece]] = {}

    def functions(self) -> dict[str, Callable[..., torch.Tensor]]:
        """Replacements for the functions of `transformers.initialization`, by name, with the same arguments.

        Those that draw each element by itself leave its law; after the others (an orthogonal matrix) there is none.
        """
        others = dict.fromkeys(initialization.TORCH_INIT_FUNCTIONS, lambda tensor, *_, **__: self.forget(tensor))
        return others | {
            "normal_": lambda tensor, mean=0.0, std=1.0, generator=None: self.write(tensor, Normal(mean, std)),
            "trunc_normal_": lambda tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None: self.write(
                tensor, Normal(mean, std, a, b)
            ),
            "uniform_": lambda tensor, a=0.0, b=1.0, generator=None: self.write(tensor, Uniform(a, b)),
            "constant_": lambda tensor, val: self.write(tensor, Constant(val)),
            "ones_": lambda tensor: self.write(tensor, Constant(1.0)),
            "zeros_": lambda tensor: self.write(tensor, Constant(0.0)),
        }

    def write(self, tensor: torch.Tensor, law: Law) -> torch.Tensor:
        """Note `law` for a parameter or a range of its rows; write a constant into a buffer."""
        if not tensor.is_meta:
            return tensor.fill_(law.value) if isinstance(law, Constant) else tensor
        assert tensor.is_contiguous(), "a part that is initialised apart is a range of rows"
        start = int(tensor.storage_offset())
        piece = Piece(law, start, start + tensor.numel())
        whole = _owner(tensor)
        if tensor.numel() == whole.numel():
            self.pieces[whole] = [piece]
        elif self.pieces.get(whole):
            self.pieces[whole].append(piece)
        return tensor

    def forget(self, tensor: torch.Tensor) -> torch.Tensor:
        """Strike out what was noted for the parameter: it gets values that have no address."""
        self.pieces.pop(_owner(tensor), None)
        return tensor


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that `tensor` is, or is a view of a part of."""
    return tensor if tensor._base is None else tensor._base


@contextmanager
def _replaced(functions: dict[str, Callable[..., torch.Tensor]]) -> Iterator[None]:
    """With these in place of the functions of `transformers.initialization`, which architectures write tensors by."""
    originals = {name: getattr(initialization, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(initialization, name, function)
        yield
    finally:
        for name, original in originals.items():
            setattr(initialization, name, original)


def _unaddressed(model_type: str, names: list[str]) -> Fault:
    says = f"{model_type} initialises {some_of(names)} in a way that cannot be done shard by shard"
    return Fault("model.model_type", says, "Take another architecture, or a folder with weights.")
