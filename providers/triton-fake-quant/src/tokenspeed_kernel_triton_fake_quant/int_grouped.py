# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_int_grouped``: small integers with a scale per group of a row, and the straight-through gradient."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.ahead import prefetch, programs_ahead
from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain, straight_through
from tokenspeed_kernel_triton_fake_quant.groups import (
    SIZES,
    Grouping,
    group_offsets,
    group_scale_offsets,
    grouped,
)
from tokenspeed_kernel_triton_fake_quant.masks import store_mask
from tokenspeed_kernel_triton_fake_quant.operands import serves, unfit_operand
from tokenspeed_kernel_triton_fake_quant.rounding import (
    DIVIDES_BY_FMA,
    clamp,
    divide,
    kept_narrow,
    largest,
    round_to_integer,
    to_float32,
    unsigned_zero,
)
from tokenspeed_kernel_triton_fake_quant.support import unfit

__all__ = ["GIVEN", "OWN", "STORED", "fake_quant_int_grouped", "quantize", "supports", "write_groups"]

_TILE = 1024  # elements of a program
_AHEAD = 48 * 1024  # bytes read ahead for each multiprocessor: what was best on an H200
OWN, STORED, GIVEN = 0, 1, 2
"""Where a scale comes from: the group's own maximum, the same and that maximum is kept, or the caller."""


@triton.jit
def _values(x, step, lowest, highest, RECIPROCAL: tl.constexpr, DTYPE: tl.constexpr):
    if RECIPROCAL:
        code = clamp(x * tl.div_rn(1.0, step), lowest, highest)
    else:
        code = divide(x, step, lowest, highest)
    return unsigned_zero(round_to_integer(code) * step, DTYPE)


@triton.jit(do_not_specialize=[*SIZES, "highest", "ahead"], do_not_specialize_on_alignment=["s_ptr", "m_ptr"])
def _int_grouped_kernel(
    x_ptr, y_ptr, s_ptr, m_ptr,
    groups: tl.int64, rows: tl.int64, row_groups: tl.int64, cols: tl.int64, size: tl.int64,
    mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    highest: tl.float32, ahead: tl.int64,
    LAYOUT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, ROWS_FIRST: tl.constexpr, LOOP: tl.constexpr,
    INT64: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    SCALE: tl.constexpr, RECIPROCAL: tl.constexpr, MASK: tl.constexpr, PREFETCH: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    highest = tl.cast(highest, tl.float32)  # torch.compile takes a number for float64
    group = tl.cast(tl.program_id(0), tl.int64 if INT64 else tl.int32) * GROUPS + tl.arange(0, GROUPS)[:, None]
    s_offsets = group_scale_offsets(group, rows, row_groups, ROWS_FIRST, INT64)
    is_group = group < groups
    if LOOP:  # a group that no program can hold is read twice
        x = tl.zeros((GROUPS, SIZE), tl.float32)
        for start in range(0, tl.cast(size, tl.int32), SIZE):
            x_offsets, y_offsets, mask = group_offsets(
                group, start + tl.arange(0, SIZE)[None, :], groups, rows, row_groups, cols, size, mid, low,
                x0, x1, x2, xc, y0, y1, y2, yc, LAYOUT, EXACT, ALIGNED, ROWS_FIRST, INT64, SIZE,
            )  # fmt: skip
            some = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
            x = tl.maximum(x, tl.abs(some))  # drops NaN
    else:
        x_offsets, y_offsets, mask = group_offsets(
            group, tl.arange(0, SIZE)[None, :], groups, rows, row_groups, cols, size, mid, low,
            x0, x1, x2, xc, y0, y1, y2, yc, LAYOUT, EXACT, ALIGNED, ROWS_FIRST, INT64, SIZE,
        )  # fmt: skip
        loaded = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
        x = to_float32(loaded)
        if PREFETCH:
            prefetch(x_ptr, tl.program_id(0) + ahead, GROUPS * size)
    if SCALE == 2:
        scale = tl.load(s_ptr + s_offsets, mask=is_group, other=1.0)
    else:
        amax = largest(x, 1, FINITE_MAX)[:, None]
        if SCALE == 1:
            tl.store(s_ptr + s_offsets, amax, mask=is_group)
        scale = tl.div_rn(amax, highest)
    step = tl.maximum(scale, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    if LOOP:
        for start in range(0, tl.cast(size, tl.int32), SIZE):
            x_offsets, y_offsets, mask = group_offsets(
                group, start + tl.arange(0, SIZE)[None, :], groups, rows, row_groups, cols, size, mid, low,
                x0, x1, x2, xc, y0, y1, y2, yc, LAYOUT, EXACT, ALIGNED, ROWS_FIRST, INT64, SIZE,
            )  # fmt: skip
            some = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
            value = _values(some, step, -highest - 1.0, highest, RECIPROCAL, y_ptr.dtype.element_ty)
            tl.store(y_ptr + y_offsets, value, mask=mask)
    else:
        if DIVIDES_BY_FMA and SIZE >= 4096 and loaded.dtype != tl.float32:
            x = to_float32(kept_narrow(loaded))
        value = _values(x, step, -highest - 1.0, highest, RECIPROCAL, y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_offsets, value, mask=mask)
        if MASK:
            rounded = round_to_integer(clamp(x * tl.div_rn(1.0, step), -highest - 2.0, highest + 1.0))
            inside = (rounded >= -highest - 1.0) & (rounded <= highest)
            store_mask(m_ptr, inside, group, 0, size, is_group, size, GROUPS, SIZE)


_kernel = Kernel(_int_grouped_kernel)


def write_groups(
    x: torch.Tensor,
    y: torch.Tensor,
    grouping: Grouping,
    highest: float,
    start: Start,
    *,
    source: int,
    scale: torch.Tensor | None,
    by_reciprocal: bool = False,
    mask: torch.Tensor | None = None,
) -> None:
    """Write the values of groups, and what is wanted beside them.

    Args:
        x: what is quantized.
        y: the same, for the values.
        grouping: of both.
        highest: the largest code.
        start: what starts the kernel.
        source: of the scale: ``OWN``, ``STORED`` or ``GIVEN``.
        scale: float32 and contiguous, of each group: the given ones, or a place for the largest magnitudes.
        by_reciprocal: whether to multiply by a scale's reciprocal instead of dividing by the scale.
        mask: for where the gradient passes; groups are aligned, then.
    """
    ahead = programs_ahead(start, x, grouping.tile, _AHEAD) if grouping.is_packed and mask is None else 0
    how = (source, by_reciprocal, mask is not None, ahead > 0, FINITE_MAX[x.dtype])
    tensors = (x, y, x if scale is None else scale, x if mask is None else mask)
    numbers = (*grouping.sizes, highest, ahead)
    start(_kernel, grouping.grid, tensors, numbers, (*grouping.constants, *how), grouping.warps)


def quantize(weight: torch.Tensor, bits: int, size: int, scale: torch.Tensor | None, start: Start) -> torch.Tensor:
    """Return ``weight`` in groups of ``size``, by a kernel started as asked; ``scale`` is float32 and contiguous."""
    y = torch.empty_like(weight)
    if weight.numel():
        grouping = cast("Grouping", grouped(weight, y, size, _TILE))  # of a matrix there always is one
        source = OWN if scale is None else GIVEN
        write_groups(weight, y, grouping, 2.0 ** (bits - 1) - 1, start, source=source, scale=scale)
    return y


_eager = partial(quantize, start=Kernel.launch)


def fake_quant_int_grouped(
    weight: torch.Tensor, bits: int, group_size: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``weight`` as integers of ``bits`` bits with one scale per group of a row, bit for bit as the reference.

    Args:
        weight: (out, in), float32, float16 or bfloat16 on a GPU, any strides. Not written.
        bits: 2 to 8.
        group_size: elements in a group along the last axis, 1 or more; the last group may be short.
        scale: (out, groups): step of each group, in units of ``weight``; by default the group's largest magnitude
            divided by the largest code.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the strides of ``weight``. Its gradient for
        ``weight`` is the identity (straight-through estimator), ``scale`` has none.

    Raises:
        ValueError: :func:`supports` would have declined the arguments.
    """
    if fault := _misfit(weight, bits, group_size, scale):
        raise ValueError(f"fake_quant_int_grouped: {fault}")
    size = min(group_size, max(weight.shape[1], 1))
    if scale is not None:
        scale = scale.float().contiguous()
    if not is_plain(weight) or (scale is not None and not is_plain(scale)):
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_int_grouped(weight, bits, size, scale)
        return quantized
    return straight_through(_eager, weight, bits, size, scale)


def supports(
    weight: torch.Tensor, bits: int, group_size: int, scale: torch.Tensor | None = None
) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if scale is not None and serves(weight, scale):
        return _misfit(weight, bits, group_size, scale) or True
    fault = unfit("weight", weight) or _misfit(weight, bits, group_size, scale)
    if fault is None and scale is not None:
        fault = unfit_operand("scale", scale, weight)
    return fault or True


def _misfit(weight: torch.Tensor, bits: object, group_size: object, scale: object) -> str | None:
    if weight.ndim != 2:
        return f"weight has {weight.ndim} axes, not 2"
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        return f"bits is {bits!r}, not an integer from 2 to 8"
    if not isinstance(group_size, int) or group_size < 1:
        return f"group_size is {group_size!r}, not an integer from 1 on"
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        return f"scale is {scale!r}, not a tensor"
    rows, cols = weight.shape
    wanted = (rows, -(-cols // group_size))
    if scale.shape != wanted:
        return f"scale is of shape {tuple(scale.shape)}, not {wanted}"
    return None
