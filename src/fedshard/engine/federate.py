"""Federation: what groups do with each other. A few lines in any training loop over `fully_shard`.

    federation = Federation(model, mesh, every=10, outer=Nesterov())    # mesh: "group", ["replica",] "shard"
    federation.start()                                                  # equal weights everywhere, checked
    for step in range(1, steps + 1):
        ...                                                             # forward, backward
        if step <= warmup_steps:
            federation.average_gradients(tokens)                        # synchronous warm-up: one big group
        optimizer.step()
        if federation.due(step):
            federation.round(tokens_since_last_round)
    federation.finish(tokens_since_last_round)

A round in four parts, each on shards only (numbered alike in the code):
    1. flags and weights of the groups are agreed: two small collectives
    2. owned slices are averaged over the group axis, in float32
    3. the outer optimizer steps the owned slices of the anchor
    4. slices are gathered over the replica axis into the local shards
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from fedshard.core.errors import Fault, InputError, RunError
from fedshard.core.timetable import Timetable
from fedshard.engine.agree import agree, average_buffers, first_difference, make_equal, persistent_buffers
from fedshard.engine.exchange import Exchange, Piece
from fedshard.engine.outer import Mean, OuterOptimizer
from fedshard.engine.owned import by_name, owned_parts, put_by_name
from fedshard.engine.parameters import named_parameters
from fedshard.engine.shard import flat, reshard
from fedshard.engine.update import AnchoredMean, OuterStep, PlainMean, Update


@dataclass(frozen=True)
class RoundReport:
    """What a round did; the same on every rank. Lists are over groups."""

    round: int
    weights: list[float]
    """What each group counted for; 0 for one that was left out."""
    excluded: list[int]
    """Groups that were left out: non-finite, or without tokens."""
    group_delta_norms: list[float] | None
    """‖anchor − local‖ of each group; None where no anchor is kept, and for a group that is not finite NaN."""
    delta_norm: float | None
    """‖anchor − mean‖; None where no anchor is kept."""
    spread: list[float] | None
    """‖local − mean‖ of each group, where no anchor is kept. Of more than 2¹⁸ owned elements on a rank it is estimated
    from so many, a run in the middle of every tensor."""
    sent_bytes: int
    """What one rank sent to other groups; the largest over ranks."""
    seconds: float
    reset_moments: bool
    """Whether this rank's group was non-finite: its weights are new, its inner optimizer must forget its moments."""

    @property
    def agreement(self) -> float | None:
        """√G·‖mean delta‖ / mean ‖delta‖ over the groups that took part: 1 = independent, √G = all alike."""
        if self.group_delta_norms is None or self.delta_norm is None:
            return None
        norms = [norm for group, norm in enumerate(self.group_delta_norms) if group not in self.excluded]
        total = sum(norms)
        return len(norms) ** 0.5 * self.delta_norm / (total / len(norms)) if total > 0 else None


class Federation:
    """Rounds over the group axis of `mesh` for a model that `fully_shard` has cut over its other axes.

    `every` = H steps between rounds after `warmup_steps` synchronous ones; `steps`, where known, makes the last step's
    round due. `weights`: "tokens" or "uniform". `anchor` keeps the last global weights with a plain mean too (other
    outer optimizers keep them anyway): 4 bytes per owned parameter, for delta norms, agreement and roll-back.

    Raises InputError if the mesh lacks an axis or the model has nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        every: int,
        outer: OuterOptimizer | None = None,
        warmup_steps: int = 0,
        steps: int | None = None,
        weights: Literal["tokens", "uniform"] = "tokens",
        anchor: bool = False,
        bucket_bytes: int = 16 * 2**20,
    ):
        _check_arguments(mesh, every)
        self.timetable = Timetable(every, warmup_steps, steps)
        self.rounds = 0
        self._model, self._mesh = model, mesh
        self._outer = outer or Mean()
        self._keeps_anchor = anchor or not isinstance(self._outer, Mean)
        self._by_tokens = weights == "tokens"
        self._groups, self._group = mesh.get_group("group").size(), mesh.get_local_rank("group")
        parameters = {name: each for name, each in named_parameters(model).items() if each.requires_grad}
        if not parameters:
            raise InputError([Fault("model", "no parameter to train", "Leave requires_grad on for some.")])
        self._names, self._parameters = list(parameters), list(parameters.values())
        replica_axis = mesh.get_group("replica") if "replica" in (mesh.mesh_dim_names or ()) else None
        self._exchange = Exchange(self._locals(), mesh.get_group("group"), replica_axis, bucket_bytes)
        self.sent_bytes = _largest_sent_bytes(self._parameters, mesh, self._exchange)
        self._anchors: list[torch.Tensor] = []  # one per piece, (piece.numel,)
        self._states: list[dict[str, torch.Tensor]] = []
        self.synchronous = False
        """Whether gradients have been averaged since the last round, which then is a plain mean."""

    @property
    def federates(self) -> bool:
        """Whether there are rounds at all: not for one group under a plain mean, which would change nothing."""
        return self._groups > 1 or not isinstance(self._outer, Mean)

    def start(self) -> None:
        """Before step 1: all groups and replicas hold bit-equal weights, by broadcast where they do not.

        Raises RunError, naming the tensor, if they still differ.
        """
        reshard(self._model)
        tensors = {**named_parameters(self._model), **persistent_buffers(self._model)}
        if first_difference(tensors, self._mesh) is not None:
            make_equal(list(tensors.values()), self._mesh)
            if (name := first_difference(tensors, self._mesh)) is not None:
                raise RunError(f"groups start from different values of {name}, even after a broadcast")
        if self._keeps_anchor:
            locals_ = self._locals()
            self._anchors = [self._exchange.read(piece, locals_) for piece in self._exchange.pieces]
            self._states = [
                {name: torch.zeros_like(anchor) for name in self._outer.state_names} for anchor in self._anchors
            ]

    def due(self, step: int) -> bool:
        """Whether a round follows this step (counted from 1)."""
        return self.federates and self.timetable.due(step)

    @torch.no_grad()
    def average_gradients(self, tokens: float) -> None:
        """Synchronous warm-up: gradients become the mean over groups, weighted by their tokens, before clipping.

        `tokens`: the label tokens of this rank's part of the step; those of a group's ranks are summed. A group's
        gradient is the mean over its own tokens. All groups call it in the same step.
        Raises RunError if no group has a token.
        """
        if self._groups == 1:
            return
        self.synchronous = True
        present = torch.tensor([each.grad is not None for each in self._parameters], dtype=torch.float64)
        agreed = agree(torch.cat([self._of_group(tokens), present]), self._mesh).tolist()
        group_tokens, holders = agreed[: self._groups], agreed[self._groups :]
        if sum(group_tokens) == 0:
            raise RunError("no group has a label token in this step")
        gradients = []
        for parameter, ranks in zip(self._parameters, holders, strict=True):
            if parameter.grad is None and ranks > 0:
                parameter.grad = torch.zeros_like(parameter)  # another group has one
            gradients.append(flat(parameter.grad) if parameter.grad is not None else torch.zeros_like(flat(parameter)))
        self._exchange.run(gradients, _shares(group_tokens), _as_it_is, _as_it_is)

    @torch.no_grad()
    def round(self, tokens: float) -> RoundReport:
        """One aggregation. `tokens`: this rank's label tokens since the last round.

        The round after synchronous steps is a plain mean, which only sets the anchor. Raises RunError where no group
        has a token, or all are non-finite and there is no anchor to roll back to.
        """
        return self._round(tokens, plain=self.synchronous)

    @torch.no_grad()
    def finish(self, tokens: float) -> RoundReport | None:
        """The last round: a plain mean that covers everything. None where there are no rounds at all."""
        return self._round(tokens, plain=True) if self.federates else None

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on: its part of the anchor and of the outer state, by parameter name.

        Every rank's is another: save it under the rank. `parts` tells which elements of each flattened full parameter
        the tensors are: (offset, length).
        """
        exchange, names = self._exchange, self._names
        states = {key: [each[key] for each in self._states] for key in self._outer.state_names}
        return {
            "rounds": self.rounds,
            "synchronous": self.synchronous,
            "parts": dict(zip(names, owned_parts(exchange, self._parameters), strict=True)),
            "anchor": by_name(exchange, names, self._anchors),
            "outer": {key: by_name(exchange, names, pieces) for key, pieces in states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, after `start`. Raises InputError if it is of another layout, model or outer optimizer."""
        mine = self.state_dict()
        for key in ("parts", "anchor", "outer"):
            if _shapes(mine[key]) != _shapes(state[key]):
                raise InputError([Fault(key, "saved by another layout, model or outer optimizer", "Use the same.")])
        self.rounds, self.synchronous = state["rounds"], state["synchronous"]
        put_by_name(self._exchange, self._names, self._anchors, state["anchor"])
        for key, tensors in state["outer"].items():
            put_by_name(self._exchange, self._names, [each[key] for each in self._states], tensors)

    def _round(self, tokens: float, *, plain: bool) -> RoundReport:
        began = time.perf_counter()
        reshard(self._model)
        self.rounds, self.synchronous = self.rounds + 1, False
        shards = self._locals()
        # 1. flags and weights are agreed
        group_tokens, broken = self._agree(tokens, shards)
        weights = self._weigh(group_tokens, broken)
        update = self._update(plain)
        if any(weights):
            # 2. to 4. every piece is averaged over the groups, stepped, and gathered over the replicas
            self._exchange.run(shards, weights, update.before, update.after)
            average_buffers(self._model, weights, self._mesh)
        else:
            self._roll_back(shards)
        squares = torch.cat([self._of_group(update.own_square.item()), update.mean_square.cpu().view(1)])
        if self._group > 0:
            squares[-1] = 0  # the mean is the same in all groups: the first one's ranks add it up
        *group_norms, mean_norm = agree(squares, self._mesh).sqrt().tolist()
        return RoundReport(
            round=self.rounds,
            weights=weights,
            excluded=[group for group, weight in enumerate(weights) if weight == 0],
            group_delta_norms=group_norms if self._keeps_anchor else None,
            delta_norm=mean_norm if self._keeps_anchor else None,
            spread=None if self._keeps_anchor else group_norms,
            sent_bytes=self.sent_bytes,
            seconds=time.perf_counter() - began,
            reset_moments=broken[self._group],
        )

    def _agree(self, tokens: float, shards: Sequence[torch.Tensor]) -> tuple[list[float], list[bool]]:
        """Each group's tokens since the last round, and whether any of its weights is non-finite."""
        finite = math.isfinite(get_total_norm(self._exchange.owned(shards)).item())
        agreed = agree(torch.cat([self._of_group(tokens), self._of_group(not finite)]), self._mesh).tolist()
        return agreed[: self._groups], [ranks > 0 for ranks in agreed[self._groups :]]

    def _weigh(self, group_tokens: list[float], broken: list[bool]) -> list[float]:
        """What each group counts for. Raises RunError if no group has a token."""
        if not any(group_tokens):
            raise RunError(f"round {self.rounds}: none of the {self._groups} groups has a label token since the last")
        counted = [0.0 if bad else each for each, bad in zip(group_tokens, broken, strict=True)]
        if not self._by_tokens:
            counted = [float(each > 0) for each in counted]
        return _shares(counted) if any(counted) else counted

    def _update(self, plain: bool) -> Update:
        if not self._keeps_anchor:
            return PlainMean(self._exchange)
        if plain or isinstance(self._outer, Mean):
            return AnchoredMean(self._exchange, self._anchors)
        return OuterStep(self._exchange, self._anchors, self._outer, self._states)

    def _roll_back(self, shards: list[torch.Tensor]) -> None:
        """Every group is non-finite: back to the anchor. Raises RunError with the tensor's name where there is none."""
        if not self._keeps_anchor:
            finite = [torch.isfinite(each).all() for each in shards]
            lost = agree((~torch.stack(finite)).double(), self._mesh).tolist()
            name = next(name for name, ranks in zip(self._names, lost, strict=True) if ranks > 0)
            raise RunError(
                f"round {self.rounds}: the weights of all groups are non-finite, first {name}; "
                "lower optimizer.learning_rate, or set sync.anchor=true to roll back to the last round"
            )
        alone = [1.0] + [0.0] * (self._groups - 1)  # all anchors are equal; the exchange gathers them over replicas

        def take_anchor(piece: Piece, wire: torch.Tensor) -> None:
            wire.copy_(self._anchors[piece.index])

        self._exchange.run(shards, alone, take_anchor, _as_it_is)

    def _locals(self) -> list[torch.Tensor]:
        """The trained parameters' local shards, flat: (local numel,) each, sharing their memory."""
        return [flat(parameter) for parameter in self._parameters]

    def _of_group(self, value: float) -> torch.Tensor:
        """A value in this group's place among the groups: (groups,) float64. Sums over ranks are the groups' own."""
        values = torch.zeros(self._groups, dtype=torch.float64)
        values[self._group] = value
        return values


def _as_it_is(piece: Piece, wire: torch.Tensor) -> None:
    """Nothing is done to the values."""


def _shares(amounts: Sequence[float]) -> list[float]:
    total = sum(amounts)
    return [amount / total for amount in amounts]


def _shapes(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _shapes(value) for key, value in tree.items()}
    return tuple(tree.shape) if isinstance(tree, torch.Tensor) else tuple(tree)


def _check_arguments(mesh: DeviceMesh, every: int) -> None:
    names = mesh.mesh_dim_names or ()
    faults = [
        Fault("mesh", f"has no axis {axis!r} among {list(names)}", "Name its axes group, shard and, if R > 1, replica.")
        for axis in ("group", "shard")
        if axis not in names
    ]
    if every < 1:
        faults.append(Fault("every", f"{every} steps between rounds", "Give at least 1."))
    if faults:
        raise InputError(faults)


def _largest_sent_bytes(parameters: Sequence[nn.Parameter], mesh: DeviceMesh, exchange: Exchange) -> int:
    """What the first rank of a group, which owns most, sends to other groups in a round (ring): DESIGN's
    2·(G−1)/G·P_S·b_w/(S·R), equation (round-sliced) of docs/formal."""
    shards, groups = mesh.get_group("shard").size(), mesh.get_group("group").size()
    owned = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.ndim else 1
        local = -(-rows // shards) * parameter.shape[1:].numel()
        owned += -(-local // exchange.replicas)
    return 2 * (groups - 1) * owned * exchange.wire_dtype.itemsize // groups
