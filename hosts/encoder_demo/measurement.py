# SPDX-License-Identifier: Apache-2.0
"""Run the encoder in one format, and say how well it agrees with float32 and who served its calls."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agreement import cosines, neighbours
from encoder import embed
from tokenspeed_kernel import active, slot
from tokenspeed_kernel_simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from formats import Format
    from tokenspeed_kernel import Slot

__all__ = ["Measurement", "Operand", "measure", "timed"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the table. The bits include the scales; calls are those of the warm-up and the timed run."""

    name: str
    weights: str
    activations: str | None
    group_size: int | None
    weight_bits: float
    activation_bits: float
    cosine_mean: float
    cosine_worst: float
    top1_agreement_percent: float
    seconds: float
    calls: dict[str, int]  # that the host made, by slot
    served: dict[str, dict[str, int]]  # by slot and kernel


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What the first layer hands to a slot."""

    role: str
    slot: Slot
    arguments: tuple[Any, ...]


def measure(
    model: Any,
    wanted: Format,
    batches: Sequence[dict[str, torch.Tensor]],
    calibration: Sequence[dict[str, torch.Tensor]],
    expected: torch.Tensor,
) -> tuple[Measurement, list[Operand]]:
    """Return the figures of ``model`` with its encoder in the format, against the embeddings ``expected``.

    The model is what it was afterwards. Weights are rounded at each forward, as in quantization-aware training, where
    they change at each step.
    """
    with simulate(model.encoder, wanted.weights, wanted.activations, group_size=wanted.group_size) as simulation:
        if wanted.activations in {"fp8", "int8"}:  # the others find their scales at each call
            with simulation.calibrate():
                embed(model, calibration, f"{wanted.name}, calibration")
        layer = next(iter(simulation.layers.values()))
        before = {name: _served(slot(name)) for name in active()}
        inputs: list[torch.Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, received: inputs.append(received[0]))
        actual, seconds, forwards = timed(model, batches, wanted.name)
        hook.remove()
        calls = (("activation", layer.input_call(inputs[0])), ("weight", layer.weight_call()))
        operands = [Operand(role=role, slot=call[0], arguments=call[1]) for role, call in calls if call is not None]

        slots = {operand.slot.name for operand in operands}
        similarity = cosines(actual, expected)
        agreed = (neighbours(actual) == neighbours(expected)).double().mean()
        found = Measurement(
            name=wanted.name,
            weights=wanted.weights,
            activations=wanted.activations,
            group_size=wanted.group_size,
            weight_bits=simulation.weight_bits,
            activation_bits=simulation.activation_bits,
            cosine_mean=float(similarity.mean()),
            cosine_worst=float(similarity.min()),
            top1_agreement_percent=100.0 * float(agreed),
            seconds=seconds,
            calls={
                name: len(simulation.layers) * forwards * sum(operand.slot.name == name for operand in operands)
                for name in sorted(slots)
            },
            served={name: dict(_served(slot(name)) - before[name]) for name in sorted(slots)},
        )
    return found, operands


def timed(model: Any, batches: Sequence[dict[str, torch.Tensor]], label: str) -> tuple[torch.Tensor, float, int]:
    """Return the embeddings, the seconds of the second of two runs, and the batches of both.

    On a GPU the first run meets every shape, for kernels are compiled for them; elsewhere one batch will do.
    """
    on_gpu = batches[0]["input_ids"].is_cuda
    warm_up = batches if on_gpu else batches[:1]
    embed(model, warm_up, f"{label}, warm-up")
    _synchronize(on_gpu)
    start = time.perf_counter()
    vectors = embed(model, batches, label)
    _synchronize(on_gpu)
    return vectors, time.perf_counter() - start, len(warm_up) + len(batches)


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _served(handle: Slot) -> Counter[str]:
    return Counter({kernel: counts["served"] for kernel, counts in handle.stats().items()})
