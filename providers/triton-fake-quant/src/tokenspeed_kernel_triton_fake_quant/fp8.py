# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_fp8``: values on the E4M3 grid of a scale that broadcasts, and the straight-through gradient."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain, straight_through
from tokenspeed_kernel_triton_fake_quant.operands import as_operand, broadcasts, serves, tiled, unfit_scale, warps
from tokenspeed_kernel_triton_fake_quant.rounding import (
    DIVIDES_BY_FMA,
    divide,
    divisor_parts,
    is_divisor_plain,
    lower,
    quotient_by_parts,
    round_to_e4m3,
    with_sign_of,
)
from tokenspeed_kernel_triton_fake_quant.support import unfit
from tokenspeed_kernel_triton_fake_quant.tiles import SIZES, has_rest, rest, row_of_tiles, tile

__all__ = ["fake_quant_fp8", "quantize", "supports"]


@triton.jit
def _write(x_ptr, y_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, IS_ONE: tl.constexpr):
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    scale = tl.load(s_ptr + s_offsets, mask=s_mask, other=1.0)
    tl.store(y_ptr + y_offsets, _quantized(x, scale, IS_ONE).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantized(x, scale, IS_ONE: tl.constexpr):
    # Maxima drop a NaN unless told otherwise.
    step = tl.maximum(scale, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    x = x.to(tl.float32)
    is_plain = False
    if IS_ONE and DIVIDES_BY_FMA:
        is_plain = is_divisor_plain(step, 20)
    if is_plain:
        high, rest = divisor_parts(step)
        code = quotient_by_parts(lower(tl.abs(x), 448.0 * step), high, rest)
    else:
        code = tl.abs(divide(x, step, -448.0, 448.0))
    return with_sign_of(round_to_e4m3(code), x) * step


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["s_ptr"])
def _fake_quant_fp8_kernel(
    x_ptr, y_ptr, s_ptr,
    rows: tl.int64, cols: tl.int64, mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, sc: tl.int64,
    LAYOUT: tl.constexpr, VARIES: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row_tile = row_of_tiles()
    col_tile = tl.program_id(0)
    x_offsets, y_offsets, s_offsets, mask, s_mask = tile(
        row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
        LAYOUT, VARIES, ALIGNED, INT64, ROWS, COLS,
    )  # fmt: skip
    _write(x_ptr, y_ptr, s_ptr, x_offsets, y_offsets, s_offsets, mask, s_mask, (ROWS == 1) & (VARIES == 0))
    if has_rest(row_tile, col_tile, cols, LAYOUT):
        last, s_last, last_mask, s_last_mask = rest(cols, sc, VARIES, INT64)
        _write(x_ptr, y_ptr, s_ptr, last, last, s_last, last_mask, s_last_mask, VARIES == 0)


_kernel = Kernel(_fake_quant_fp8_kernel)


def quantize(x: torch.Tensor, scale: torch.Tensor, start: Start) -> torch.Tensor:
    """Return ``x`` on the grid of ``scale``, a float32 tensor, by kernels started as asked."""
    y = torch.empty_like(x)
    if x.numel():
        tiling = tiled(x, y, scale)
        if tiling is None:
            return y.copy_(quantize(x.contiguous(), scale.expand(x.shape).contiguous(), start))
        start(_kernel, tiling.grid, (x, y, scale), tiling.sizes, tiling.constants, warps(x))
    return y


_eager = partial(quantize, start=Kernel.launch)


def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return ``x`` on the FP8 E4M3 grid of ``scale``, bit for bit as the reference does.

    Args:
        x: float32, float16 or bfloat16 on a GPU, any shape and strides. Not written.
        scale: step of the grid, in units of ``x``: a number, or a tensor on the same device that broadcasts to the
            shape of ``x``.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the strides of ``x``. Its gradient for ``x`` is the
        identity (straight-through estimator), ``scale`` has none.

    Raises:
        ValueError: ``scale`` does not broadcast to the shape of ``x``.

    Formula: OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3, with saturation.
    """
    scale = as_operand("fake_quant_fp8", "scale", scale, x)
    if not is_plain(x, scale):
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_fp8(x, scale)
        return quantized
    return straight_through(_eager, x, scale)


def supports(x: torch.Tensor, scale: Any) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if serves(x, scale) and (scale.numel() == 1 or broadcasts(scale.shape, x.shape)):
        return True
    return unfit("x", x) or unfit_scale("scale", scale, x, True) or True
