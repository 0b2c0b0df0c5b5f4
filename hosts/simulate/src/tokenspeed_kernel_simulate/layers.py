# SPDX-License-Identifier: Apache-2.0
"""What a layer becomes while it is simulated: an instance of a subclass of its class, made for it.

Only the class of the instance changes, and one attribute is added. Parameters, buffers, hooks and the state dict stay
what they are; a copy or a pickle finds its class again through the original one. A parametrization would rename the
parameters and refuse to be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from tokenspeed_kernel_simulate.formats import ActivationFormat, SlotCall, WeightFormat

__all__ = ["SimulatedLayer", "State", "Swapped", "container_kind", "layer_kind", "swap", "swap_back"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(kw_only=True)
class State:
    """How one layer is simulated, and what calibration found out."""

    name: str
    weights: WeightFormat | None
    activations: ActivationFormat | None
    observing: bool = False
    seen: tuple[torch.Tensor, torch.Tensor] | None = None  # smallest and largest input since calibration began
    fixed: tuple[torch.Tensor, ...] | None = None  # what the slot of a static format is given besides the input

    @property
    def is_static(self) -> bool:
        """Whether the activations have a fixed range."""
        return self.activations is not None and self.activations.fixed is not None

    def fix(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        """Fix the range of a static format."""
        if self.activations is not None and self.activations.fixed is not None:
            self.fixed = self.activations.fixed(lo, hi)


class Swapped(nn.Module):
    """An instance whose class was exchanged for one that :func:`swap` made."""

    original: ClassVar[type[nn.Module]]
    kind: ClassVar[type[Swapped]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _new, (self.original, self.kind), *reduced[2:]


_classes: dict[tuple[type[nn.Module], type[Swapped]], type[Swapped]] = {}


def _swapped_class(original: type[nn.Module], kind: type[Swapped]) -> type[Swapped]:
    """Return the class of a swapped ``original``: always the same one."""
    known = _classes.get((original, kind))
    if known is None:
        members = {"original": original, "kind": kind, "__module__": __name__, "__doc__": kind.__doc__}
        known = _classes.setdefault((original, kind), type(f"Simulated{original.__name__}", (kind, original), members))
    return known


def _new(original: type[nn.Module], kind: type[Swapped]) -> Swapped:
    made = _swapped_class(original, kind)
    return made.__new__(made)


Kind = TypeVar("Kind", bound=Swapped)


class SimulatedLayer(Swapped):
    """A layer whose weight and input are quantized at each forward, through slots."""

    simulation: State
    weight: torch.Tensor
    bias: torch.Tensor | None
    channel_axis = -1  # of the input: the one that is summed over, along which blocks lie

    @property
    def input_channels(self) -> int:
        """The size of the input along the axis that is summed over."""
        return int(getattr(self, "in_features", 0) or self.in_channels)  # type: ignore[arg-type]  # the original's

    def weight_call(self) -> SlotCall | None:
        """Return the slot that quantizes the weight and its arguments, the first of them the weight as a matrix.

        None if the weight is not quantized.
        """
        weights = self.simulation.weights
        return None if weights is None else weights.call(self._rows(), weights)

    def input_call(self, x: torch.Tensor) -> SlotCall | None:
        """Return the slot that quantizes the input ``x`` and its arguments; None if inputs are not quantized.

        Raises:
            RuntimeError: the format has a fixed range, and the layer was not calibrated.
        """
        activations = self.simulation.activations
        if activations is None:
            return None
        if activations.fixed is None:  # blocks lie along the last axis
            return activations.slot, (x.movedim(self.channel_axis, -1),)
        if self.simulation.fixed is None:
            raise RuntimeError(
                f"layer {self.simulation.name!r} is not calibrated, and activations {activations.name!r} have a fixed "
                "range; run data in `with simulation.calibrate():` first"
            )
        return activations.slot, (x, *self.simulation.fixed)

    def _operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and weight to compute with."""
        state = self.simulation
        if state.observing:
            if state.is_static:
                self._observe(x.detach())
            return x, self.weight
        weight, call = self.weight, self.weight_call()
        if call is not None:
            weight = self._from_rows(call[0](*call[1]))
        call = self.input_call(x)
        if call is not None:
            x = call[0](*call[1])
            if not state.is_static:
                x = x.movedim(-1, self.channel_axis)
        return x, weight

    def _observe(self, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        lo, hi = torch.aminmax(x.to(torch.promote_types(x.dtype, torch.float32)))
        if self.simulation.seen is not None:
            lo, hi = torch.minimum(lo, self.simulation.seen[0]), torch.maximum(hi, self.simulation.seen[1])
        self.simulation.seen = lo, hi

    def _rows(self) -> torch.Tensor:
        """Return the weight as a matrix (output channels, all else)."""
        return self.weight.flatten(1)

    def _from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(self.weight.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        if self.simulation.fixed is not None:  # goes to the layer's device, but keeps its dtype: half() would round it
            self.simulation.fixed = tuple(value.to(fn(value).device) for value in self.simulation.fixed)
        return self

    def extra_repr(self) -> str:
        """Return the layer's own line, and the formats."""
        weights, activations = self.simulation.weights, self.simulation.activations
        names = f"weights={weights and weights.name}, activations={activations and activations.name}"
        return f"{super().extra_repr()}, {names}"


class _Linear(SimulatedLayer):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, weight = self._operands(input)
        return functional.linear(x, weight, self.bias)


class _Conv1d(SimulatedLayer):
    channel_axis = -2

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, weight = self._operands(input)
        layer: Any = self  # with the methods of the original
        result: torch.Tensor = layer._conv_forward(x, weight, self.bias)
        return result


class _Conv2d(_Conv1d):
    channel_axis = -3


class _Conv3d(_Conv1d):
    channel_axis = -4


class _ConvTranspose1d(SimulatedLayer):
    """Its weight lies as (in, out / groups, ...): the rows are gathered from it."""

    channel_axis = -2
    convolve = staticmethod(functional.conv_transpose1d)
    groups: int

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        layer: Any = self  # with the attributes of the original
        sizes = layer.stride, layer.padding, layer.kernel_size, -self.channel_axis - 1, layer.dilation
        output_padding = layer._output_padding(input, output_size, *sizes)
        x, weight = self._operands(input)
        geometry = layer.stride, layer.padding, output_padding, self.groups, layer.dilation
        result: torch.Tensor = self.convolve(x, weight, self.bias, *geometry)
        return result

    def _rows(self) -> torch.Tensor:
        by_group: torch.Tensor = self.weight.unflatten(0, (self.groups, -1))
        return by_group.transpose(1, 2).flatten(0, 1).flatten(1)

    def _from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        inputs, outputs, *kernel = self.weight.shape
        by_group = rows.reshape(self.groups, outputs, inputs // self.groups, *kernel)
        return by_group.transpose(1, 2).reshape(self.weight.shape)


class _ConvTranspose2d(_ConvTranspose1d):
    channel_axis = -3
    convolve = staticmethod(functional.conv_transpose2d)


class _ConvTranspose3d(_ConvTranspose1d):
    channel_axis = -4
    convolve = staticmethod(functional.conv_transpose3d)


class _EncoderLayer(Swapped):
    """Never takes the fused path, which reads the weights of its linear layers without calling them."""

    @property
    def activation_relu_or_gelu(self) -> int:
        """Zero, which means neither. Only that path asks; a property comes before what the instance has."""
        return 0


class _Encoder(Swapped):
    """Makes no nested tensors, which only the fused path of its layers takes."""

    @property
    def use_nested_tensor(self) -> bool:
        """False; a property comes before what the instance has."""
        return False


_LAYERS: dict[type[nn.Module], type[SimulatedLayer]] = {
    nn.Linear: _Linear,
    nn.Conv1d: _Conv1d,
    nn.Conv2d: _Conv2d,
    nn.Conv3d: _Conv3d,
    nn.ConvTranspose1d: _ConvTranspose1d,
    nn.ConvTranspose2d: _ConvTranspose2d,
    nn.ConvTranspose3d: _ConvTranspose3d,
}
_CONTAINERS: dict[type[nn.Module], type[Swapped]] = {
    nn.TransformerEncoderLayer: _EncoderLayer,
    nn.TransformerEncoder: _Encoder,
}


def layer_kind(module: nn.Module) -> type[SimulatedLayer] | str | None:
    """Return what ``module`` becomes when it is simulated; why it cannot be, if it is a linear layer or a convolution.

    None for all other modules.
    """
    for original, kind in _LAYERS.items():
        if isinstance(module, original):
            return _reason(module, original) or kind
    return None


def _reason(module: nn.Module, original: type[nn.Module]) -> str | None:
    if "forward" in vars(module) or type(module).forward is not original.forward:
        return f"its forward is not that of torch.nn.{original.__name__}"
    weight: Any = module.weight
    if nn.parameter.is_lazy(weight):
        return "its weight has no shape yet; run a batch through the module first"
    if not isinstance(weight, torch.Tensor) or weight.dtype not in _FLOATS:
        return f"its weight is {getattr(weight, 'dtype', type(weight))}, not one of {', '.join(map(str, _FLOATS))}"
    return None if weight.numel() else "its weight has no elements"


def container_kind(module: nn.Module) -> type[Swapped] | None:
    """Return what ``module`` must become so that it calls the simulated layers in it; None if it does anyway."""
    return next((kind for original, kind in _CONTAINERS.items() if isinstance(module, original)), None)


def swap(module: nn.Module, kind: type[Kind]) -> Kind:
    """Give ``module`` the class that simulates its own, and return it."""
    module.__class__ = _swapped_class(type(module), kind)
    return cast("Kind", module)


def swap_back(module: Swapped) -> None:
    """Make ``module`` what it was."""
    vars(module).pop("simulation", None)
    original: nn.Module = module
    original.__class__ = module.original
