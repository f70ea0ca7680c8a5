"""What keeps a real step from the ideal one, and how fast a device computes, found from one step that was measured.

The pieces of `study/work.py` are ideal: products at the device's rate, and collectives that disturb nobody. Real steps
are slower in three ways that do not depend on the device's rate. Derivations: docs/formal/validation.md.

    weights       each gather and each gradient is written and read several times, however few tokens there are
    activations   what lies between the products is written and read: it grows with the width, products with its square
    contention    collectives take memory and processors from the computation that they hide behind

With these set apart, one number is left to find: the efficiency, the part of its peak that a device has in products.
"""

from __future__ import annotations

from dataclasses import replace

from fedshard.core.errors import Fault, InputError
from fedshard.core.topology import Constant
from fedshard.study.cost import StepTime, step_seconds
from fedshard.study.memory import kept_bytes_per_token
from fedshard.study.setup import Setup
from fedshard.study.work import StepWork, UnitWork, step_work

CONTENTION = 0.5
"""Seconds by which a second of collectives slows down what computes beside it. Equation (calibrate-contention); fitted
to published throughputs, the same for all of them."""

FUSED_FRACTION = 0.5
"""Of the activations' traffic, what is left where a compiler joins operations that follow each other. Assumed."""

LEAST_EFFICIENCY, MOST_EFFICIENCY = 1e-4, 1e2
"""Bounds of what is searched. More than 1 is possible where the device's peak is not the one that was used."""


def predicted_step(setup: Setup, *, efficiency: float, fused: bool = False) -> StepTime:
    """Where a real step's seconds go, on devices that reach `efficiency` of their peak in products."""
    at = at_efficiency(setup, efficiency)
    return step_seconds(loaded_work(at, fused=fused), at)


def calibrated_efficiency(setup: Setup, seconds: float, *, fused: bool = False) -> float:
    """The efficiency at which a step of `setup` takes so many seconds. Equation (calibrate-efficiency).

    Raises InputError where none does: communication and memory alone take longer, or the time is absurdly long.

    >>> from fedshard.core.cluster_file import read_cluster
    >>> from fedshard.core.layout import Layout
    >>> from fedshard.study.architectures import read_architecture
    >>> setup = Setup(read_architecture("llama-3.1-8b"), Layout(1, 1, 8), read_cluster("dgx-h100").job(8), 8192, 2)
    >>> efficiency = calibrated_efficiency(setup, 2.5)
    >>> round(predicted_step(setup, efficiency=efficiency).total_seconds, 6)
    2.5
    """
    ideal = step_work(at_efficiency(setup, 1.0))
    loaded = _load(ideal, setup, fused, CONTENTION)

    def seconds_at(efficiency: float) -> float:
        work = _slowed(loaded, ideal, 1 / efficiency - 1)
        return step_seconds(work, setup).total_seconds

    slow, fast = LEAST_EFFICIENCY, MOST_EFFICIENCY
    if not seconds_at(fast) < seconds < seconds_at(slow):
        says = f"{seconds:.3g} s a step, where communication and memory alone take {seconds_at(fast):.3g} s"
        raise InputError([Fault("seconds", says, "Check what was measured, and the links' rates.")])
    while fast / slow > 1 + 1e-8:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if seconds_at(middle) > seconds else (slow, middle)
    return fast


def at_efficiency(setup: Setup, efficiency: float) -> Setup:
    """The same on devices that reach this part of their peak."""
    reached = Constant(value=efficiency, source="calibrated on a measured step", confidence="measured")
    device = setup.cluster.device.model_copy(update={"achievable_fraction": reached})
    return replace(setup, cluster=setup.cluster.model_copy(update={"device": device}))


def loaded_work(setup: Setup, *, fused: bool = False, contention: float = CONTENTION) -> StepWork:
    """`step_work` with what an ideal step lacks: weights' and activations' traffic, and contention.

    `fused`: a compiler joins operations that follow each other. Where nothing runs beside a collective there is no
    `contention`: 0.
    """
    return _load(step_work(setup), setup, fused, contention)


def _slowed(work: StepWork, ideal: StepWork, times: float) -> StepWork:
    """Work whose products take so many times those of `ideal` more."""
    return replace(
        work,
        units=tuple(
            replace(
                unit,
                forward_seconds=unit.forward_seconds + times * products.forward_seconds,
                backward_seconds=unit.backward_seconds + times * products.backward_seconds,
            )
            for unit, products in zip(work.units, ideal.units, strict=True)
        ),
    )


def _load(work: StepWork, setup: Setup, fused: bool, contention: float) -> StepWork:
    """`work` with traffic and contention added to each unit. Equation (calibrate-contention)."""
    model, rate = setup.architecture, setup.cluster.device.memory_bytes_per_second.value

    def load(unit: UnitWork, numel: int, activations: tuple[float, float], *, block: bool) -> UnitWork:
        regathered = block and setup.reshard_after_forward
        weights = _weight_bytes(setup, numel, regathered=regathered, recomputed=block and setup.recompute)
        beside = unit.scatter_seconds + unit.replica_seconds / setup.accumulation + regathered * unit.gather_seconds
        forward = (weights[0] + activations[0]) / rate + contention * unit.gather_seconds
        backward = (weights[1] + activations[1]) / rate + contention * beside
        return replace(
            unit,
            forward_seconds=unit.forward_seconds + forward,
            backward_seconds=unit.backward_seconds + backward,
        )

    root, *blocks = work.units
    kept = _kept_bytes(setup, fused)
    loaded_root = load(root, model.root_numel, _logits_bytes(setup), block=False)
    return replace(work, units=(loaded_root, *(load(each, model.block_numel, kept, block=True) for each in blocks)))


def _weight_bytes(setup: Setup, numel: int, *, regathered: bool, recomputed: bool) -> tuple[float, float]:
    """Bytes that pass a device's memory for a unit's weights, forward and backward. Equation (calibrate-weights).

    A gather writes them, they are copied out of its buffer (read, written), products read them: four times. Gradients
    are written, read and copied into the reduction's buffer (written), which the reduction reads.
    """
    gather, reduction = setup.gather_bytes, setup.reduce_bytes
    weights = (4 if regathered else 1) + recomputed
    return 4 * gather * numel, (weights * gather + 2 * gather + 2 * reduction) * numel


def _kept_bytes(setup: Setup, fused: bool) -> tuple[float, float]:
    """Bytes of a block's activations, forward and backward. Equation (calibrate-activations).

    What is kept is written and read once; backward it is read, and its gradient written and read: twice as much in
    all with what is not kept. Recomputation writes and reads once more.
    """
    once = 2 * kept_bytes_per_token(setup) * setup.rank_tokens * (FUSED_FRACTION if fused else 1.0)
    return once, (3 if setup.recompute else 2) * once


def _logits_bytes(setup: Setup) -> tuple[float, float]:
    """The same of the root: logits and log-probabilities; gradients of both in float32, and the logits' once more."""
    values = setup.architecture.vocabulary * setup.rank_tokens
    return 2 * (setup.gather_bytes + 4) * values, 2 * (setup.gather_bytes + 8) * values
