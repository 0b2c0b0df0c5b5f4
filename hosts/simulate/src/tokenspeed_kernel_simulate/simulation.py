# SPDX-License-Identifier: Apache-2.0
"""Simulate a module, calibrate it, and take it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tokenspeed_kernel_simulate.choice import Skip, choose
from tokenspeed_kernel_simulate.formats import ActivationFormat, WeightFormat, activation_format, weight_format
from tokenspeed_kernel_simulate.layers import SimulatedLayer, State, Swapped, swap, swap_back

__all__ = ["Simulation", "restore", "simulate"]


class Simulation:
    """A simulated module. As a context manager it restores the module at the end, whatever happens inside."""

    def __init__(self, layers: dict[str, SimulatedLayer], containers: list[Swapped], skipped: dict[str, str]) -> None:
        self.layers = layers
        """The simulated layers, by qualified name."""
        self.skipped = skipped
        """Why each other linear layer, convolution and attention is not simulated, by qualified name."""
        self._containers = containers

    @contextmanager
    def calibrate(self) -> Iterator[None]:
        """Observe the inputs of the layers while the block runs the module on data, and then fix their ranges.

        Inside, the layers compute as they did before they were simulated. Formats that find their scales at each call
        need no calibration; it does no harm. Calibrating again replaces the ranges. If the block raises, they stay as
        they were.

        Raises:
            ValueError: a layer saw no data, or saw NaN or infinity. No range is changed then.
        """
        states = [layer.simulation for layer in self.layers.values()]
        static = [state for state in states if state.is_static]
        for state in states:
            state.observing = True
        try:
            yield
            ranges = _ranges(static)
        finally:
            for state in states:
                state.observing, state.seen = False, None
        for state, (lo, hi) in zip(static, ranges, strict=True):
            state.fix(lo, hi)

    def restore(self) -> None:
        """Make the module what it was before. A second call does nothing."""
        for layer in self.layers.values():
            if isinstance(layer, Swapped):
                swap_back(layer)
        for container in self._containers:
            still_needed = any(
                isinstance(part, SimulatedLayer) for part in container.modules()
            )  # by another simulation
            if isinstance(container, Swapped) and not still_needed:
                swap_back(container)

    @property
    def weight_bits(self) -> float:
        """Bits of a weight of the simulated layers on average, their scales included."""
        bits = numbers = 0
        for layer in self.layers.values():
            rows, columns = layer._rows().shape
            numbers += rows * columns
            bits += _bits(layer.simulation.weights, layer.weight, rows, columns)
        return bits / numbers

    @property
    def activation_bits(self) -> float:
        """Bits of an input of the simulated layers on average, with the scales of its blocks."""
        bits = channels = 0
        for layer in self.layers.values():
            width = layer.input_channels
            channels += width
            bits += _bits(layer.simulation.activations, layer.weight, 1, width)
        return bits / channels

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        lines = [f"simulated: {len(self.layers)} layers"]
        lines += [f"  skipped {name!r}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def simulate(
    module: nn.Module,
    weights: str | None = "fp8",
    activations: str | None = None,
    *,
    group_size: int | None = None,
    skip: Skip | Iterable[Skip] = (),
) -> Simulation:
    """Quantize the linear layers and convolutions of ``module`` in place, for simulation, and return the handle.

    From then on each of them rounds its weight and its input through a slot at each forward; gradients reach weights
    and inputs as the slots define. Biases, parameters, buffers and the keys of the state dict stay as they are.

    A weight is taken as a matrix with a row per output channel, ``(out, in / groups * kernel)``: ``fp8`` and ``int8``
    have a scale per row; ``int2`` to ``int7`` one per ``group_size`` elements of a row, 128 by default, and so has
    ``int8`` with a ``group_size``; ``nvfp4`` and ``mxfp4`` blocks of 16 and 32 lie along the rows. Activations in
    ``fp8`` (one scale) and ``int8`` (one range, with a zero point) need :meth:`Simulation.calibrate`; blocks of
    ``nvfp4`` and ``mxfp4`` lie along the input channels, and their scales are found at each call.

    Args:
        module: any module; a layer that it uses in several places is simulated once.
        weights: ``"fp8"``, ``"int8"``, ``"int2"`` to ``"int7"``, ``"nvfp4"``, ``"mxfp4"``, or None.
        activations: ``"fp8"``, ``"int8"``, ``"nvfp4"``, ``"mxfp4"``, or None.
        group_size: weights that share a scale, for the integer formats.
        skip: what stays as it is, with all that is in it: qualified names, patterns of names, classes of modules.

    Raises:
        ValueError: a format is unknown, both are None, ``group_size`` or a name in ``skip`` fits nothing, no layer is
            left, or a layer is simulated already. The module is unchanged then.
        TypeError: ``module`` is no module, or an entry of ``skip`` is neither a name nor a class of modules.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"simulate takes a torch.nn.Module, got {module!r}")
    known = weight_format(weights, group_size), activation_format(activations)
    if known == (None, None):
        raise ValueError("weights and activations are both None; name the format of one of them")
    choice = choose(module, skip)
    layers: dict[str, SimulatedLayer] = {}
    for name, (layer, kind) in choice.layers.items():
        layer.simulation = State(name=name, weights=known[0], activations=known[1])  # type: ignore[assignment]  # plain
        layers[name] = swap(layer, kind)
    containers = [
        container if isinstance(container, Swapped) else swap(container, kind) for container, kind in choice.containers
    ]
    return Simulation(layers, containers, choice.skipped)


def restore(module: nn.Module) -> None:
    """Make every simulated layer in ``module`` what it was: for a copy or a loaded pickle, which have no handle."""
    for part in module.modules():
        if isinstance(part, Swapped):
            swap_back(part)


@torch.inference_mode(False)
def _ranges(states: list[State]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each layer saw, as tensors that training can use even if inference mode made them."""
    seen = [(state.name, *state.seen) for state in states if state.seen is not None]
    if len(seen) < len(states):
        unseen = [repr(state.name) for state in states if state.seen is None]
        raise ValueError(
            f"{len(unseen)} layers saw no data in calibration: {', '.join(unseen)}; run data that reaches them, "
            "or name them in skip if nothing ever calls them"
        )
    broken = [repr(name) for name, lo, hi in seen if not bool(lo.isfinite() & hi.isfinite())]
    if broken:
        raise ValueError(
            f"{len(broken)} layers saw NaN or infinity in calibration: {', '.join(broken)}; "
            "mend the data, or what comes before the first of them"
        )
    return [(lo.clone(), hi.clone()) for _, lo, hi in seen]


def _bits(wanted: WeightFormat | ActivationFormat | None, weight: torch.Tensor, rows: int, columns: int) -> int:
    return rows * columns * weight.element_size() * 8 if wanted is None else wanted.bits(rows, columns)
