# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_nvfp4_*``: E2M1 elements, an E4M3 scale per block of 16, one scale per tensor, straight-through."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX, PARTIALS, partial_amax
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, is_plain, may_use_hopper, straight_through
from tokenspeed_kernel_triton_fake_quant.early import wait_for_previous
from tokenspeed_kernel_triton_fake_quant.groups import SIZES, group_offsets, grouped
from tokenspeed_kernel_triton_fake_quant.operands import as_one, serves, unfit_scale
from tokenspeed_kernel_triton_fake_quant.rounding import (
    DIVIDES_BY_FMA,
    divisor_parts,
    is_divisor_plain,
    larger,
    largest,
    lower,
    quotient_by_parts,
    round_to_e2m1,
    round_to_e4m3,
    signed_like,
    to_float32,
)
from tokenspeed_kernel_triton_fake_quant.support import unfit

__all__ = ["fake_quant_nvfp4_dynamic", "fake_quant_nvfp4_weight", "quantize", "supports_dynamic", "supports_weight"]

_BLOCK = 16
_TILE = 1024  # elements of a part
_PARTS = {4: 1, 2: 3}  # of a program, by the bytes of an element
_SMALL = 2**17  # elements: so few, each program finds the tensor's maximum for itself, which saves a launch
_GIVEN, _PARTIAL, _OWN = 0, 1, 2  # where the tensor's maximum comes from


@triton.jit
def _tensor_amax(x_ptr, a_ptr, numel, AMAX: tl.constexpr, EARLY: tl.constexpr, FINITE_MAX: tl.constexpr):
    if AMAX == 2:
        so_far = tl.zeros((8192,), x_ptr.dtype.element_ty)
        for start in range(0, tl.cast(numel, tl.int32), 8192):
            within = start + tl.arange(0, 8192)
            so_far = larger(so_far, tl.load(x_ptr + within, mask=within < numel, other=0.0))
        amax = largest(so_far.to(tl.float32), 0, FINITE_MAX)
    elif AMAX == 1:
        if EARLY:
            wait_for_previous()
        amax = tl.max(tl.load(tl.multiple_of(a_ptr + tl.arange(0, PARTIALS), 16)), axis=0)
    else:
        given = tl.maximum(tl.load(a_ptr), 0.0)  # NaN becomes zero
        amax = tl.where(given == float("inf"), FINITE_MAX, given)
    return amax


@triton.jit
def _scales(tensor_amax):
    """Return the tensor's scale, what makes a block's maximum its scale, and whether quotients need no division."""
    tensor_scale = tl.div_rn(tensor_amax, 2688.0)
    block_divisor = tensor_scale * 6.0
    is_plain = False
    if DIVIDES_BY_FMA:
        # All divisors of elements in this tensor are one of eight, times a power of two: what an E4M3 mantissa gives.
        divisors = tensor_scale * (8.0 + tl.arange(0, 8))
        is_plain = tl.min(is_divisor_plain(divisors, 22).to(tl.int32), axis=0) == 1
        is_plain = is_plain & is_divisor_plain(block_divisor, 20) & (tensor_scale > 2.0**-70) & (tensor_scale < 2.0**70)
    return tensor_scale, block_divisor, is_plain


@triton.jit
def _values(loaded, tensor_scale, block_divisor, is_plain, FINITE_MAX: tl.constexpr):
    x = to_float32(loaded)
    block_amax = largest(x, 1, FINITE_MAX)[:, None]
    if is_plain:
        high, rest = divisor_parts(block_divisor)
        block_code = quotient_by_parts(lower(block_amax, 448.0 * block_divisor), high, rest)
        step = round_to_e4m3(block_code) * tensor_scale
        divisor = tl.maximum(step, 2.0**-80)  # under a step of zero any will do: times zero it is a signed zero
        high, rest = divisor_parts(divisor)
        code = quotient_by_parts(lower(tl.abs(x), 6.0 * divisor), high, rest)
    else:
        block_code = round_to_e4m3(lower(tl.div_rn(block_amax, block_divisor), 448.0))
        step = tl.where(tensor_scale > 0.0, block_code * tensor_scale, 0.0)  # else the code is infinite or NaN
        divisor = tl.where(step > 0.0, step, 1.0)
        code = lower(tl.div_rn(tl.abs(x), divisor), 6.0)
    return signed_like(round_to_e2m1(code) * step, loaded)


@triton.jit(do_not_specialize=[*SIZES, "numel"], do_not_specialize_on_alignment=["a_ptr"])
def _nvfp4_kernel(
    x_ptr, y_ptr, a_ptr,
    groups: tl.int64, rows: tl.int64, row_groups: tl.int64, cols: tl.int64, size: tl.int64,
    mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    numel: tl.int64,
    LAYOUT: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, ROWS_FIRST: tl.constexpr, LOOP: tl.constexpr,
    INT64: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    AMAX: tl.constexpr, EARLY: tl.constexpr, FINITE_MAX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if AMAX == 1:  # what was read last for the maximum is still in the cache
        program = tl.num_programs(0) - 1 - program
    first = tl.cast(program, tl.int64 if INT64 else tl.int32) * (PARTS * GROUPS)
    x, y_offsets, mask = first, first, first  # nothing is read yet
    for part in tl.static_range(PARTS + 1):  # each part is read before the one before it is made into values
        if part < PARTS:
            next_x_offsets, next_y_offsets, next_mask = group_offsets(
                first + part * GROUPS + tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :],
                groups, rows, row_groups, cols, size, mid, low, x0, x1, x2, xc, y0, y1, y2, yc,
                LAYOUT, EXACT, ALIGNED, ROWS_FIRST, INT64, SIZE,
            )  # fmt: skip
            next_x = tl.load(x_ptr + next_x_offsets, mask=next_mask, other=0.0)
        if part == 1:  # reading need not wait for the maximum
            tensor_amax = _tensor_amax(x_ptr, a_ptr, numel, AMAX, EARLY, FINITE_MAX)
            tensor_scale, block_divisor, is_plain = _scales(tensor_amax)
        if part > 0:
            value = _values(x, tensor_scale, block_divisor, is_plain, FINITE_MAX)
            tl.store(y_ptr + y_offsets, value, mask=mask)
        x, y_offsets, mask = next_x, next_y_offsets, next_mask


_kernel = Kernel(_nvfp4_kernel)


def quantize(x: torch.Tensor, amax: torch.Tensor | None, start: Start) -> torch.Tensor:
    """Return ``x`` in NVFP4 under ``amax``, a float32 tensor, or its own, by kernels started as asked."""
    y = torch.empty_like(x)
    if x.numel():
        grouping = grouped(x, y, _BLOCK, _TILE)
        if grouping is None:
            return y.copy_(quantize(x.contiguous(), amax, start))
        source, early = _GIVEN, False
        if amax is None and x.numel() <= _SMALL and x.is_contiguous():
            amax, source = x, _OWN
        elif amax is None:
            early = may_use_hopper(start, x)
            amax, source = partial_amax(x, start, early), _PARTIAL
        parts = _PARTS[x.element_size()]
        constants = (*grouping.constants, source, early, FINITE_MAX[x.dtype], parts)
        grid = (-(-grouping.grid[0] // parts), 1, 1)
        start(_kernel, grid, (x, y, amax), (*grouping.sizes, x.numel()), constants, 2, early)
    return y


_eager = partial(quantize, start=Kernel.launch)


def fake_quant_nvfp4_weight(weight: torch.Tensor, tensor_amax: torch.Tensor | float) -> torch.Tensor:
    """Return ``weight`` in NVFP4, bit for bit as the reference: E2M1 elements, an E4M3 scale per block of 16.

    Args:
        weight: float32, float16 or bfloat16 on a GPU, one axis or more, any strides; blocks lie along the last axis,
            and the last of a row may be short. Not written.
        tensor_amax: largest magnitude of the tensor: a number, or a tensor of one element on the same device; NaN or a
            negative counts as zero, an infinity as the largest finite value of the dtype of ``weight``.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the strides of ``weight``. Its gradient for
        ``weight`` is the identity (straight-through estimator), ``tensor_amax`` has none.

    Raises:
        ValueError: ``tensor_amax`` has not one element.

    Formula: the NVFP4 format as NVIDIA documents it.
    """
    amax = as_one("fake_quant_nvfp4_weight", "tensor_amax", tensor_amax, weight)
    if not is_plain(weight, amax):
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_nvfp4(weight, amax)
        return quantized
    return straight_through(_eager, weight, amax)


def fake_quant_nvfp4_dynamic(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in NVFP4 under its own largest magnitude, found on the device.

    Args:
        x: float32, float16 or bfloat16 on a GPU, one axis or more, any strides. Not written.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the strides of ``x``. Its gradient is the identity
        (straight-through estimator); none passes through the maxima.

    Formula: the NVFP4 format as NVIDIA documents it.
    """
    if not is_plain(x):
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_nvfp4(x, None)
        return quantized
    return straight_through(_eager, x, None)


def supports_weight(weight: torch.Tensor, tensor_amax: Any) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if serves(weight, tensor_amax) and tensor_amax.numel() == 1 and weight.ndim:
        return True
    fault = unfit("weight", weight) or unfit_scale("tensor_amax", tensor_amax, weight, False)
    return fault or (True if weight.ndim else "weight has no axis")


def supports_dynamic(x: torch.Tensor) -> Literal[True] | str:
    """Return True if the kernel serves this tensor, else the reason why not."""
    return unfit("x", x) or (True if x.ndim else "x has no axis")
