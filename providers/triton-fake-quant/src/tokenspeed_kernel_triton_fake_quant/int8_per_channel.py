# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_int8_per_channel``: values on the int8 grid of each channel, whose gradient stops outside of it."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

import torch
from torch.autograd import forward_ad

from tokenspeed_kernel_triton_fake_quant.amax import channel_amax
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain
from tokenspeed_kernel_triton_fake_quant.groups import channels_grouped
from tokenspeed_kernel_triton_fake_quant.int8 import AMAX, SCALE, Grid, Masked, in_tensors, masked, on_grid
from tokenspeed_kernel_triton_fake_quant.int8_rows import long_rows
from tokenspeed_kernel_triton_fake_quant.int_grouped import OWN, STORED, write_groups
from tokenspeed_kernel_triton_fake_quant.masks import empty_mask
from tokenspeed_kernel_triton_fake_quant.operands import (
    FLOATS,
    as_float32,
    as_operand,
    broadcasts,
    unfit_operand,
    unfit_scale,
)
from tokenspeed_kernel_triton_fake_quant.support import DTYPES, PLAIN, STRIDED, is_functorch_active, unfit

__all__ = ["dynamic", "fake_quant_int8_per_channel", "supports"]

_TILE = 2048  # elements of a program


def dynamic(weight: torch.Tensor, axis: int, start: Start, with_mask: bool = False, with_amax: bool = True) -> Masked:
    """Return the values, their grid, which is the largest magnitude of each channel, and the mask if one is wanted.

    Where there is a mask, or no magnitudes are wanted, those of rows are not kept: the grid has none.
    """
    grouping = channels_grouped(weight, axis, _TILE)
    if grouping is None:
        found = channel_amax(weight, axis, start) if weight.numel() else weight.new_empty((), dtype=torch.float32)
        return on_grid(weight, Grid(AMAX, found), start, with_mask)
    # One program holds a channel: it is read once.
    y = torch.empty_like(weight)
    mask = empty_mask(y) if with_mask and grouping.is_aligned else None
    amax = None
    if with_amax and mask is None:
        amax = weight.new_empty([n if i == axis else 1 for i, n in enumerate(weight.shape)], dtype=torch.float32)
    place = grouping.constants[-1]
    if place > _TILE // 2:  # a program holds one row
        long_rows(weight, y, amax, mask, weight.shape[axis], place, start)
        return y, Grid(AMAX, amax), mask
    source = OWN if amax is None else STORED
    write_groups(weight, y, grouping, 127.0, start, source=source, scale=amax, by_reciprocal=True, mask=mask)
    return y, Grid(AMAX, amax), mask


def _eager_dynamic(weight: torch.Tensor, axis: int, with_gradient: bool) -> Masked:
    return dynamic(weight, axis, Kernel.launch, with_mask=with_gradient, with_amax=with_gradient)


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
    axis = ch_axis if ch_axis >= 0 else ch_axis + weight.ndim
    if not 0 <= axis < weight.ndim:
        raise IndexError(f"fake_quant_int8_per_channel: ch_axis {ch_axis} is no axis of {tuple(weight.shape)}")
    if scale is None:
        if is_plain(weight):
            return masked(_eager_dynamic, weight, axis)
        from tokenspeed_kernel_triton_fake_quant import operators

        by_itself: torch.Tensor = operators.fake_quant_int8_dynamic(weight, axis)[0]
        return by_itself
    if _is_per_channel(scale, axis, weight):
        grid = Grid(SCALE, as_float32(scale, weight), None, axis)
    else:
        grid = Grid(SCALE, as_operand("fake_quant_int8_per_channel", "scale", scale, weight))
    if is_plain(weight, grid.first):
        return masked(on_grid, weight, grid, Kernel.launch)
    from tokenspeed_kernel_triton_fake_quant import operators

    quantized: torch.Tensor = operators.fake_quant_int8(weight, *in_tensors(grid, weight)[:3])
    return quantized


def _is_per_channel(scale: torch.Tensor | float, axis: int, weight: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(scale, torch.Tensor) and scale.ndim == 1 and scale.numel() == weight.shape[axis]


def supports(weight: torch.Tensor, ch_axis: int = 0, scale: Any = None) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    try:
        if (  # the usual ones, soon: each of the calls below takes its time
            type(weight) in PLAIN
            and type(scale) in PLAIN
            and weight.is_cuda
            and weight.dtype in DTYPES
            and weight.layout is STRIDED
            and not is_functorch_active()
            and forward_ad._current_level < 0
            and scale.get_device() == weight.get_device()
            and scale.dtype in FLOATS
            and (
                ((count := scale.numel()) == weight.shape[ch_axis] and scale.ndim == 1)
                or count == 1
                or broadcasts(scale.shape, weight.shape)
            )
        ):
            return True
        if fault := unfit("weight", weight):
            return fault
        channels = weight.shape[ch_axis]
    except IndexError:
        return f"ch_axis {ch_axis} is no axis of a tensor of {weight.ndim} axes"
    if scale is None:
        return True
    if type(scale) in PLAIN and scale.ndim == 1 and scale.numel() == channels:
        return unfit_operand("scale", scale, weight) or True
    return unfit_scale("scale", scale, weight, True) or True
