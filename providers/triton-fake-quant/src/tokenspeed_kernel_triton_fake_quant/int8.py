# SPDX-License-Identifier: Apache-2.0
"""The int8 kernel of both int8 slots: values on a grid of 256 steps, and the gradient that stops outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, apply_of, is_plain
from tokenspeed_kernel_triton_fake_quant.masks import empty_mask, masked_gradient, store_mask
from tokenspeed_kernel_triton_fake_quant.operands import tiled, warps
from tokenspeed_kernel_triton_fake_quant.rounding import clamp, round_to_integer, unsigned_zero
from tokenspeed_kernel_triton_fake_quant.tiles import SIZES, Tiling, has_rest, rest, row_of_tiles, tile

__all__ = [
    "AMAX",
    "NUMBERS",
    "RANGE",
    "SCALE",
    "Grid",
    "Masked",
    "in_tensors",
    "masked",
    "on_grid",
    "quantize",
]

_VALUES, _GRADIENT, _VALUES_AND_MASK = 0, 1, 2
SCALE, AMAX, RANGE, NUMBERS = 0, 1, 2, 3
"""What the grid is made of: steps; largest magnitudes; the ends of a range, as tensors; the same, as numbers."""

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _write(
    x_ptr, y_ptr, g_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, lo, hi,
    KIND: tl.constexpr, WHAT: tl.constexpr,
):  # fmt: skip
    """Store a tile's values or gradients, and return where the gradient passes."""
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    first = tl.load(s_ptr + s_offsets, mask=s_mask, other=1.0) if KIND <= 1 else 0.0
    code, step, lowest, highest = _codes(x, first, lo, hi, KIND)
    rounded = round_to_integer(clamp(code, lowest - 1.0, highest + 1.0))
    within = clamp(rounded, lowest, highest)
    inside = rounded == within  # False at NaN
    if WHAT == 1:
        gradient = tl.load(g_ptr + y_offsets, mask=mask, other=0.0)
        value = tl.where(inside, gradient, 0.0)
    else:
        value = unsigned_zero(within * step, y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_offsets, value, mask=mask)
    return inside


@triton.jit
def _codes(x, first, lo, hi, KIND: tl.constexpr):
    """Return the codes before they are rounded, less the zero point, with their step and bounds."""
    if KIND == 0:
        scale = first
    elif KIND == 1:
        scale = tl.div_rn(first, 127.0)
    else:
        # Minima and maxima drop a NaN unless told otherwise.
        lo = tl.minimum(lo, 0.0, propagate_nan=tl.PropagateNan.ALL)
        hi = tl.maximum(hi, 0.0, propagate_nan=tl.PropagateNan.ALL)
        lo = tl.maximum(lo, -_FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
        hi = tl.minimum(hi, _FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
        span = tl.minimum(hi - lo, _FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(span, 255.0)
    step = tl.maximum(scale, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    lowest = -128.0
    highest = 127.0
    if KIND >= 2:
        # The zero point moves the bounds instead of each code: it is an integer, as they are.
        zero_point = round_to_integer(clamp(-128.0 - tl.div_rn(lo, step), -128.0, 127.0))
        lowest = lowest - zero_point
        highest = highest - zero_point
    return x.to(tl.float32) * tl.div_rn(1.0, step), step, lowest, highest


@triton.jit(do_not_specialize=[*SIZES, "lo", "hi"], do_not_specialize_on_alignment=["s_ptr", "h_ptr"])
def _int8_kernel(
    x_ptr, y_ptr, g_ptr, s_ptr, h_ptr,
    rows: tl.int64, cols: tl.int64, mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, sc: tl.int64,
    lo: tl.float32, hi: tl.float32,
    LAYOUT: tl.constexpr, VARIES: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr, WHAT: tl.constexpr,
):  # fmt: skip
    row_tile = row_of_tiles()
    col_tile = tl.program_id(0)
    x_offsets, y_offsets, s_offsets, mask, s_mask = tile(
        row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
        LAYOUT, VARIES, ALIGNED, INT64, ROWS, COLS,
    )  # fmt: skip
    if KIND == 2:
        lo = tl.load(s_ptr)
        hi = tl.load(h_ptr)
    inside = _write(
        x_ptr, y_ptr, g_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, lo, hi, KIND, WHAT
    )  # fmt: skip
    if WHAT == 2:
        row = tl.cast(row_tile, tl.int64 if INT64 else tl.int32) * ROWS + tl.arange(0, ROWS)[:, None]
        col = tl.cast(col_tile, tl.int64 if INT64 else tl.int32) * COLS
        store_mask(g_ptr, inside, row, col, cols, row < rows, cols // 16 * 16, ROWS, COLS)
    if has_rest(row_tile, col_tile, cols, LAYOUT):
        last, s_last, last_mask, s_last_mask = rest(cols, sc, VARIES, INT64)
        last_inside = _write(
            x_ptr, y_ptr, g_ptr, s_ptr, last, last, s_last, last_mask, s_last_mask, lo, hi, KIND, WHAT
        )  # fmt: skip
        if WHAT == 2:
            store_mask(g_ptr, last_inside, 0, cols // 16 * 16, 0, True, cols + 7, 1, 16)


_kernel = Kernel(_int8_kernel)


class Grid(NamedTuple):
    """What values are rounded to. ``first`` and ``second`` are what ``kind`` says they are; a lone one has no second.

    Steps and magnitudes broadcast to the values, or there is one for each along ``axis``; the ends of a range have one
    element.
    """

    kind: int
    first: Any
    second: Any = None
    axis: int | None = None

    @property
    def operand(self) -> Any:
        """The tensor that broadcasts, or None."""
        return self.first if self.kind <= AMAX else None


def quantize(x: torch.Tensor, grid: Grid, start: Start, grad: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` on the grid, or its gradient where ``grad`` is that of the result.

    Either has the shape, dtype and, for a dense ``x``, the strides of ``x``.
    """
    y = torch.empty_like(x)
    if not x.numel():
        return y
    if grad is not None and (grad.stride() != y.stride() or grad.is_neg()):
        grad = torch.empty_like(y).copy_(grad)
    tiling = tiled(x, y, grid.operand, axis=grid.axis)
    if tiling is None:
        if grid.operand is not None:
            grid = Grid(grid.kind, in_tensors(grid, x).first.expand(x.shape).contiguous())
        return y.copy_(quantize(x.contiguous(), grid, start, None if grad is None else grad.contiguous()))
    if grad is None:
        _start(start, tiling, x, y, x, grid, _VALUES)
    else:
        _start(start, tiling, x, y, grad, grid, _GRADIENT)
    return y


def on_grid(x: torch.Tensor, grid: Grid, start: Start, with_mask: bool) -> Masked:
    """Return ``x`` on the grid, the grid, and the mask if one is wanted and its bits have a place of their own."""
    if not with_mask:
        return quantize(x, grid, start), grid, None
    y = torch.empty_like(x)
    tiling = tiled(x, y, grid.operand, axis=grid.axis) if x.numel() else None
    if tiling is None or not tiling.has_bytes:
        return quantize(x, grid, start), grid, None
    mask = empty_mask(y)
    _start(start, tiling, x, y, mask, grid, _VALUES_AND_MASK)
    return y, grid, mask


def _start(
    start: Start, tiling: Tiling, x: torch.Tensor, y: torch.Tensor, third: torch.Tensor, grid: Grid, what: int
) -> None:
    kind, first, second, _ = grid
    numbers = (first, second) if kind == NUMBERS else (0.0, 0.0)
    tensors = (x, y, third, x if kind == NUMBERS else first, second if kind == RANGE else x)
    start(_kernel, tiling.grid, tensors, (*tiling.sizes, *numbers), (*tiling.constants, kind, what), warps(x))


def masked(function: Callable[..., Masked], x: torch.Tensor, *rest: object) -> torch.Tensor:
    """Return the values of ``function(x, *rest, False)``, whose gradient for ``x`` stops outside of the grid.

    The last argument is whether a gradient is wanted. See :func:`straight_through` on when the values are found.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return function(x, *rest, False)[0]
    quantized: torch.Tensor = _apply_masked(x, function(x, *rest, True))
    return quantized


Masked = tuple[torch.Tensor, Grid, "torch.Tensor | None"]
"""Values, the grid that they are on, and where the gradient passes, or None to find out from the grid."""


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: Masked) -> torch.Tensor:
        y, grid, mask = quantized
        if mask is not None:
            ctx.strides = y.stride()
            ctx.save_for_backward(mask)
        else:
            ctx.strides = None
            ctx.kind, first, second, _ = in_tensors(grid, x)
            ctx.save_for_backward(x, first, second)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.strides is not None:
            (mask,) = ctx.saved_tensors
            return masked_gradient(grad, mask, ctx.strides), None
        x, first, second = ctx.saved_tensors
        grid = Grid(ctx.kind, first, second)
        if is_plain(x, grad) and not torch.is_grad_enabled():
            return quantize(x, grid, Kernel.launch, grad), None
        from tokenspeed_kernel_triton_fake_quant import operators

        return operators.fake_quant_int8_gradient(x, grad, ctx.kind, first, second), None


_apply_masked = apply_of(_Masked)


def in_tensors(grid: Grid, x: torch.Tensor) -> Grid:
    """Return the grid in tensors that broadcast, without an axis, as an operator of ``torch.library`` takes them."""
    if grid.kind == NUMBERS:
        lo, hi = (torch.full((), end, dtype=torch.float32, device=x.device) for end in (grid.first, grid.second))
        return Grid(RANGE, lo, hi)
    if grid.axis is not None:
        shape = [1] * x.ndim
        shape[grid.axis] = -1
        return Grid(grid.kind, grid.first.view(shape))
    return grid
