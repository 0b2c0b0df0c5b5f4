# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_int8_per_channel``: values on the int8 grid of each channel, whose gradient stops outside of it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.library import triton_op

from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX, channel_amax
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain
from tokenspeed_kernel_triton_fake_quant.groups import LONGEST, rows_grouped
from tokenspeed_kernel_triton_fake_quant.int8 import AMAX, SCALE, Grid, gradient_op, masked, quantize, quantize_op
from tokenspeed_kernel_triton_fake_quant.int_grouped import STORED
from tokenspeed_kernel_triton_fake_quant.int_grouped import kernel as grouped_kernel
from tokenspeed_kernel_triton_fake_quant.operands import as_operand, unfit_scale
from tokenspeed_kernel_triton_fake_quant.support import unfit

__all__ = ["fake_quant_int8_per_channel", "supports"]

_TILE = 2048  # elements of a program


def _dynamic(weight: torch.Tensor, axis: int, start: Start) -> tuple[torch.Tensor, Grid]:
    """Return the values, and the grid that they are on: the largest magnitude of each channel."""
    if not _has_rows(weight, axis):
        amax = channel_amax(weight, axis, start) if weight.numel() else weight.new_empty((), dtype=torch.float32)
        grid = Grid(AMAX, amax)
        return quantize(weight, grid, start), grid
    # A channel is a row, and one program holds it: it is read once.
    channels = weight.shape[axis]
    y = torch.empty_like(weight)
    amax = weight.new_empty([n if i == axis else 1 for i, n in enumerate(weight.shape)], dtype=torch.float32)
    grouping = rows_grouped(weight, channels, _TILE)
    constants = (*grouping.constants, STORED, True, FINITE_MAX[weight.dtype])
    start(grouped_kernel, grouping.grid, (weight, y, amax), (*grouping.sizes, 127.0), constants, grouping.warps)
    return y, Grid(AMAX, amax)


def _has_rows(weight: torch.Tensor, axis: int) -> bool:
    """Return whether each channel is one stretch of memory that a program can hold."""
    channels = weight.shape[axis]
    if not (weight.numel() and weight.is_contiguous() and weight.numel() <= channels * LONGEST):
        return False
    return weight.stride(axis) * channels == weight.numel() or channels == 1


@triton_op("tokenspeed_triton::fake_quant_int8_dynamic", mutates_args=())
def _dynamic_op(weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    y, grid = _dynamic(weight, axis, Kernel.record)
    return y, grid.first


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
    weight, amax = ctx.saved_tensors
    return gradient_op(weight, grad, AMAX, amax, None), None


_dynamic_op.register_autograd(_gradient, setup_context=_keep)
_eager_dynamic = partial(_dynamic, start=Kernel.launch)


def _eager_scaled(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Grid]:
    grid = Grid(SCALE, scale)
    return quantize(weight, grid, Kernel.launch), grid


def fake_quant_int8_per_channel(
    weight: torch.Tensor, ch_axis: int = 0, scale: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Return ``weight`` on the symmetric int8 grid of each channel, bit for bit as the reference does.

    Args:
        weight: float32, float16 or bfloat16 on a GPU, one axis or more, any strides. Not written.
        ch_axis: axis of the channels; a negative one counts from the end.
        scale: step of the grid, in units of ``weight``: a number, or a tensor on the same device, one per channel of
            shape (C,) or any that broadcasts to ``weight``; by default the channel's largest magnitude divided by 127.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the strides of ``weight``. Its gradient for
        ``weight`` is the identity where the code before the clamp is within its range, and zero elsewhere; the scale
        has none.

    Raises:
        IndexError: ``weight`` has no axis ``ch_axis``.
        ValueError: ``scale`` does not broadcast to the shape of ``weight``.

    Formula: PyTorch's documentation of torch.fake_quantize_per_channel_affine.
    """
    axis = ch_axis if ch_axis >= 0 else ch_axis + weight.dim()
    if not 0 <= axis < weight.dim():
        raise IndexError(f"fake_quant_int8_per_channel: ch_axis {ch_axis} is no axis of {tuple(weight.shape)}")
    if scale is None:
        if is_plain(weight):
            return masked(_eager_dynamic, weight, axis)
        dynamic: torch.Tensor = _dynamic_op(weight, axis)[0]
        return dynamic
    steps = as_operand("fake_quant_int8_per_channel", "scale", _along(scale, axis, weight), weight)
    if is_plain(weight, steps):
        return masked(_eager_scaled, weight, steps)
    quantized: torch.Tensor = quantize_op(weight, SCALE, steps, None)
    return quantized


def _along(scale: torch.Tensor | float, axis: int, weight: torch.Tensor) -> torch.Tensor | float:
    """Return a scale of shape (C,) as one that broadcasts along ``axis``, and any other as it is."""
    if isinstance(scale, torch.Tensor) and scale.dim() == 1 and scale.shape[0] == weight.shape[axis]:
        return scale.reshape([-1 if i == axis else 1 for i in range(weight.dim())])
    return scale


def supports(weight: torch.Tensor, ch_axis: int = 0, scale: torch.Tensor | float | None = None) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if fault := unfit("weight", weight):
        return fault
    axes = weight.dim()
    if not -axes <= ch_axis < axes:
        return f"ch_axis {ch_axis} is no axis of a tensor of {axes} axes"
    if scale is None:
        return True
    return unfit_scale("scale", _along(scale, ch_axis % axes, weight), weight) or True
