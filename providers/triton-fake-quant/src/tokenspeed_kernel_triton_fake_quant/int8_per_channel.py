# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_int8_per_channel``: values on the int8 grid of each channel, whose gradient stops outside of it."""

from __future__ import annotations

from typing import Literal

import torch

from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX, channel_amax
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain
from tokenspeed_kernel_triton_fake_quant.groups import LONGEST, rows_grouped
from tokenspeed_kernel_triton_fake_quant.int8 import AMAX, SCALE, Grid, Masked, masked, on_grid
from tokenspeed_kernel_triton_fake_quant.int_grouped import STORED
from tokenspeed_kernel_triton_fake_quant.int_grouped import kernel as grouped_kernel
from tokenspeed_kernel_triton_fake_quant.masks import empty_mask
from tokenspeed_kernel_triton_fake_quant.operands import as_operand, unfit_scale
from tokenspeed_kernel_triton_fake_quant.support import unfit

__all__ = ["dynamic", "fake_quant_int8_per_channel", "supports"]

_TILE = 2048  # elements of a program


def dynamic(weight: torch.Tensor, axis: int, start: Start, with_mask: bool = False) -> Masked:
    """Return the values, the grid that they are on, which is the largest magnitude of each channel, and the mask."""
    if not _has_rows(weight, axis):
        amax = channel_amax(weight, axis, start) if weight.numel() else weight.new_empty((), dtype=torch.float32)
        return on_grid(weight, Grid(AMAX, amax), start, with_mask)
    # A channel is a row, and one program holds it: it is read once.
    channels = weight.shape[axis]
    y = torch.empty_like(weight)
    amax = weight.new_empty([n if i == axis else 1 for i, n in enumerate(weight.shape)], dtype=torch.float32)
    grouping = rows_grouped(weight, channels, _TILE)
    # The widest rows of float32 leave no registers for more.
    warps = 8 if weight.dtype == torch.float32 and grouping.constants[-1] == LONGEST else grouping.warps
    mask = empty_mask(y) if with_mask and grouping.is_aligned else None
    constants = (*grouping.constants, STORED, True, mask is not None, FINITE_MAX[weight.dtype])
    tensors = (weight, y, amax, y if mask is None else mask)
    start(grouped_kernel, grouping.grid, tensors, (*grouping.sizes, 127.0), constants, warps)
    return y, Grid(AMAX, amax), mask


def _has_rows(weight: torch.Tensor, axis: int) -> bool:
    """Return whether each channel is one stretch of memory that a program can hold."""
    channels = weight.shape[axis]
    if not (weight.numel() and weight.is_contiguous() and weight.numel() <= channels * LONGEST):
        return False
    return weight.stride(axis) * channels == weight.numel() or channels == 1


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
            return masked(dynamic, weight, axis, Kernel.launch)
        from tokenspeed_kernel_triton_fake_quant import operators

        by_itself: torch.Tensor = operators.fake_quant_int8_dynamic(weight, axis)[0]
        return by_itself
    steps = as_operand("fake_quant_int8_per_channel", "scale", _along(scale, axis, weight), weight)
    if is_plain(weight, steps):
        return masked(on_grid, weight, Grid(SCALE, steps), Kernel.launch)
    from tokenspeed_kernel_triton_fake_quant import operators

    quantized: torch.Tensor = operators.fake_quant_int8(weight, SCALE, steps, None)
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
