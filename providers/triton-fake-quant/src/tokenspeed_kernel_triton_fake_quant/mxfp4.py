# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_mxfp4_*``: E2M1 elements, a power of two per block of 32, and the straight-through gradient."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain, straight_through
from tokenspeed_kernel_triton_fake_quant.groups import SIZES, group_offsets, grouped
from tokenspeed_kernel_triton_fake_quant.operands import warps
from tokenspeed_kernel_triton_fake_quant.rounding import largest, lower, round_to_e2m1, with_sign_of
from tokenspeed_kernel_triton_fake_quant.support import unfit

__all__ = ["fake_quant_mxfp4_dynamic", "fake_quant_mxfp4_weight", "quantize", "supports_dynamic", "supports_weight"]

_BLOCK = 32
_TILE = 1024  # elements of a program


@triton.jit(do_not_specialize=SIZES)
def _mxfp4_kernel(
    x_ptr, y_ptr,
    groups: tl.int64, rows: tl.int64, row_groups: tl.int64, cols: tl.int64, size: tl.int64,
    mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    LAYOUT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, ROWS_FIRST: tl.constexpr, LOOP: tl.constexpr,
    INT64: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
):  # fmt: skip
    group = tl.cast(tl.program_id(0), tl.int64 if INT64 else tl.int32) * GROUPS + tl.arange(0, GROUPS)[:, None]
    x_offsets, y_offsets, mask = group_offsets(
        group, tl.arange(0, SIZE)[None, :], groups, rows, row_groups, cols, size, mid, low,
        x0, x1, x2, xc, y0, y1, y2, yc, LAYOUT, EXACT, ALIGNED, ROWS_FIRST, INT64, SIZE,
    )  # fmt: skip
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    # From the exponent bits of the maximum, which no logarithm can round: e = their value - 127 - 2, at least -127.
    bits = largest(x, 1, FINITE_MAX)[:, None].to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits >> 23, 2)
    reciprocal = ((256 - exponent) << 23).to(tl.float32, bitcast=True)
    step = tl.maximum((exponent - 2) << 23, 0x00400000).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    code = round_to_e2m1(lower(tl.abs(x) * reciprocal, 6.0))  # by a power of two, a product is the quotient
    value = with_sign_of(code, x) * step
    tl.store(y_ptr + y_offsets, value.to(y_ptr.dtype.element_ty), mask=mask)


_kernel = Kernel(_mxfp4_kernel)


def quantize(x: torch.Tensor, start: Start) -> torch.Tensor:
    """Return ``x`` in MXFP4, by a kernel started as asked."""
    y = torch.empty_like(x)
    if x.numel():
        grouping = grouped(x, y, _BLOCK, _TILE)
        if grouping is None:
            return y.copy_(quantize(x.contiguous(), start))
        constants = (*grouping.constants, FINITE_MAX[x.dtype])
        start(_kernel, grouping.grid, (x, y), grouping.sizes, constants, warps(x))
    return y


_eager = partial(quantize, start=Kernel.launch)


def fake_quant_mxfp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` in MXFP4, bit for bit as the reference: E2M1 elements, a power of two per block of 32.

    Args:
        weight: float32, float16 or bfloat16 on a GPU, one axis or more, any strides; blocks lie along the last axis,
            and the last of a row may be short. Not written.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the strides of ``weight``. Its gradient is the
        identity (straight-through estimator).

    Formula: OCP Microscaling Formats (MX) Specification 1.0, MXFP4, section 6.3 for the scale.
    """
    if not is_plain(weight):
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_mxfp4(weight)
        return quantized
    return straight_through(_eager, weight)


def fake_quant_mxfp4_dynamic(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in MXFP4, as :func:`fake_quant_mxfp4_weight` does for a weight.

    Args:
        x: float32, float16 or bfloat16 on a GPU, one axis or more, any strides. Not written.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the strides of ``x``. Its gradient is the identity
        (straight-through estimator).

    Formula: OCP Microscaling Formats (MX) Specification 1.0, MXFP4, section 6.3 for the scale.
    """
    return fake_quant_mxfp4_weight(x)


def supports_weight(weight: torch.Tensor) -> Literal[True] | str:
    """Return True if the kernel serves this tensor, else the reason why not."""
    return unfit("weight", weight) or (True if weight.ndim else "weight has no axis")


def supports_dynamic(x: torch.Tensor) -> Literal[True] | str:
    """Return True if the kernel serves this tensor, else the reason why not."""
    return unfit("x", x) or (True if x.ndim else "x has no axis")
