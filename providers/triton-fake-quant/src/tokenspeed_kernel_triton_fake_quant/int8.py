# SPDX-License-Identifier: Apache-2.0
"""The int8 kernel of both int8 slots: values on a grid of 256 steps, and the gradient that stops outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain
from tokenspeed_kernel_triton_fake_quant.operands import tiled
from tokenspeed_kernel_triton_fake_quant.rounding import clamp, round_to_integer, unsigned_zero
from tokenspeed_kernel_triton_fake_quant.tiles import SIZES, has_rest, rest, row_of_tiles, tile

__all__ = [
    "AMAX",
    "NUMBERS",
    "RANGE",
    "SCALE",
    "Grid",
    "gradient_op",
    "in_tensors",
    "masked",
    "quantize",
    "quantize_op",
]

SCALE, AMAX, RANGE, NUMBERS = 0, 1, 2, 3
"""What the grid is made of: steps; largest magnitudes; the ends of a range, as tensors; the same, as numbers."""

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _write(
    x_ptr, y_ptr, g_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, lo, hi,
    KIND: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    grad = tl.load(g_ptr + y_offsets, mask=mask, other=0.0) if BACKWARD else x
    first = tl.load(s_ptr + s_offsets, mask=s_mask, other=1.0) if KIND <= 1 else 0.0
    value = _values(x, grad, first, lo, hi, KIND, BACKWARD, y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_offsets, value, mask=mask)


@triton.jit
def _values(x, grad, first, lo, hi, KIND: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr):
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
    code = x.to(tl.float32) * tl.div_rn(1.0, step)
    if BACKWARD:
        code = round_to_integer(clamp(code, -1000.0, 1000.0))
        return tl.where((code >= lowest) & (code <= highest), grad, 0.0).to(DTYPE)
    else:  # noqa: RET505 -- what follows a return is compiled too
        return unsigned_zero(round_to_integer(clamp(code, lowest, highest)) * step, DTYPE)


@triton.jit(do_not_specialize=[*SIZES, "lo", "hi"], do_not_specialize_on_alignment=["s_ptr", "h_ptr"])
def _int8_kernel(
    x_ptr, y_ptr, g_ptr, s_ptr, h_ptr,
    rows: tl.int64, cols: tl.int64, mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, sc: tl.int64,
    lo: tl.float32, hi: tl.float32,
    LAYOUT: tl.constexpr, S_ALONG: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, KIND: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row_tile = row_of_tiles()
    col_tile = tl.program_id(0)
    x_offsets, y_offsets, s_offsets, mask, s_mask = tile(
        row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
        LAYOUT, S_ALONG, ALIGNED, INT64, ROWS, COLS,
    )  # fmt: skip
    if KIND == 2:
        lo = tl.load(s_ptr)
        hi = tl.load(h_ptr)
    _write(x_ptr, y_ptr, g_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, lo, hi, KIND, BACKWARD)
    if has_rest(row_tile, col_tile, cols, LAYOUT):
        last, s_last, last_mask, s_last_mask = rest(cols, sc, S_ALONG, INT64)
        _write(x_ptr, y_ptr, g_ptr, s_ptr, last, last, s_last, last_mask, s_last_mask, lo, hi, KIND, BACKWARD)


_kernel = Kernel(_int8_kernel)


class Grid(NamedTuple):
    """What values are rounded to. ``first`` and ``second`` are what ``kind`` says they are; a lone one has no second.

    Steps and magnitudes broadcast to the values, the ends of a range have one element.
    """

    kind: int
    first: Any
    second: Any = None


def quantize(x: torch.Tensor, grid: Grid, start: Start, grad: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` on the grid, or its gradient where ``grad`` is that of the result.

    Either has the shape, dtype and, for a dense ``x``, the strides of ``x``.
    """
    y = torch.empty_like(x)
    if not x.numel():
        return y
    if grad is not None and (grad.stride() != y.stride() or grad.is_neg()):
        grad = torch.empty_like(y).copy_(grad)
    kind, first, second = grid
    tiling = tiled(x, y, first if kind <= AMAX else None)
    if tiling is None:
        if kind <= AMAX:
            grid = Grid(kind, first.expand(x.shape).contiguous())
        return y.copy_(quantize(x.contiguous(), grid, start, None if grad is None else grad.contiguous()))
    numbers = (first, second) if kind == NUMBERS else (0.0, 0.0)
    tensor = y if kind == NUMBERS else first
    tensors = (x, y, x if grad is None else grad, tensor, second if kind == RANGE else tensor)
    constants = (*tiling.constants, kind, grad is not None)
    start(_kernel, tiling.grid, tensors, (*tiling.sizes, *numbers), constants, tiling.warps)
    return y


def masked(function: Callable[..., tuple[torch.Tensor, Grid]], x: torch.Tensor, *rest: object) -> torch.Tensor:
    """Return the first of ``function(x, *rest)``, whose gradient for ``x`` stops outside of the second, the grid."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return function(x, *rest)[0]
    quantized: torch.Tensor = _Masked.apply(function, x, *rest)
    return quantized


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[torch.Tensor, Grid]], x: torch.Tensor, *rest: object) -> Any:
        y, grid = function(x, *rest)
        ctx.rest = len(rest)
        ctx.grid = grid if grid.kind == NUMBERS else Grid(grid.kind, None)
        ctx.save_for_backward(x, *(() if grid.kind == NUMBERS else grid[1:]))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        grid = Grid(ctx.grid.kind, *tensors) if tensors else ctx.grid
        if is_plain(x, grad) and not torch.is_grad_enabled():
            return None, quantize(x, grid, Kernel.launch, grad), *(None,) * ctx.rest
        return None, gradient_op(x, grad, *in_tensors(grid, x)), *(None,) * ctx.rest


def in_tensors(grid: Grid, x: torch.Tensor) -> Grid:
    """Return the grid with tensors in place of numbers, which an operator of ``torch.library`` takes."""
    if grid.kind != NUMBERS:
        return grid
    ends = (torch.full((), end, dtype=torch.float32, device=x.device) for end in grid[1:])
    return Grid(RANGE, *ends)


@triton_op("tokenspeed_triton::fake_quant_int8", mutates_args=())
def quantize_op(x: torch.Tensor, kind: int, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` on a grid."""
    return quantize(x, Grid(kind, first, second), Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_int8_gradient", mutates_args=())
def gradient_op(
    x: torch.Tensor, grad: torch.Tensor, kind: int, first: torch.Tensor, second: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient for ``x`` from that of the result."""
    return quantize(x, Grid(kind, first, second), Kernel.record, grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.kind, first, second = inputs
    ctx.save_for_backward(x, first, second)


def _keep_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, ctx.kind, first, second = inputs
    ctx.save_for_backward(x, first, second)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    x, first, second = ctx.saved_tensors
    result: torch.Tensor = gradient_op(x, grad, ctx.kind, first, second)
    return result


quantize_op.register_autograd(lambda ctx, grad: (_gradient(ctx, grad), None, None, None), setup_context=_keep)
gradient_op.register_autograd(
    lambda ctx, grad: (None, _gradient(ctx, grad), None, None, None), setup_context=_keep_of_gradient
)
