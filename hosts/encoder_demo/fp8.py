# SPDX-License-Identifier: Apache-2.0
"""FP8 (E4M3) simulation of linear layers through the slot ``fake_quant_fp8``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from encoder import embed
from tokenspeed_kernel import slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FAKE_QUANT", "SLOT_CALLS", "Fp8Linear", "calibrate", "simulate_fp8"]

FAKE_QUANT = slot("fake_quant_fp8")
SLOT_CALLS = 2  # of one Fp8Linear in one forward
_E4M3_MAX = 448.0


class Fp8Linear(nn.Module):
    """``linear`` with its input rounded to E4M3 by one scale, and its weight by one scale an output channel.

    Both roundings run at each forward, as in quantization-aware training, where the weight changes at each step.
    """

    def __init__(self, linear: nn.Linear, input_peak: torch.Tensor) -> None:
        """Keep ``linear``'s own parameters; ``input_peak`` is the largest magnitude of its input, 0-d."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        # A tensor divides: CUDA would turn division by a Python number into a product with its reciprocal, and the
        # scales of a CPU and a GPU would differ in the last bit.
        largest = input_peak.new_tensor(_E4M3_MAX)
        self.input_scale = input_peak / largest  # ()
        self.weight_scale = linear.weight.detach().abs().amax(1, keepdim=True) / largest  # (out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (..., out) for ``x`` (..., in), in ``x``'s dtype."""
        weight = FAKE_QUANT(self.weight, self.weight_scale)
        return nn.functional.linear(FAKE_QUANT(x, self.input_scale), weight, self.bias)


def _linears(model: Any) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in model.encoder.named_modules() if isinstance(layer, nn.Linear)]


def calibrate(model: Any, batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the largest magnitude (0-d) of the input of each linear layer of the encoder over ``batches``."""
    peaks: dict[str, torch.Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            peak = inputs[0].abs().amax()  # stays on the device: no synchronization in the loop
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

        return record

    hooks = [layer.register_forward_pre_hook(recorder(name)) for name, layer in _linears(model)]
    try:
        embed(model, batches, "calibration")
    finally:
        for hook in hooks:
            hook.remove()
    return {name: peak.clone() for name, peak in peaks.items()}  # out of inference mode


def simulate_fp8(model: Any, peaks: dict[str, torch.Tensor]) -> list[Fp8Linear]:
    """Replace each linear layer of ``model.encoder`` in place, and return the new layers in the model's order."""
    layers = []
    for name, linear in _linears(model):
        layer = Fp8Linear(linear, peaks[name])
        parent, _, leaf = name.rpartition(".")
        setattr(model.encoder.get_submodule(parent), leaf, layer)
        layers.append(layer)
    return layers
