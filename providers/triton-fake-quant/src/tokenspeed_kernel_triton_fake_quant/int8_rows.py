# SPDX-License-Identifier: Apache-2.0
"""The int8 kernel of long channels: a program holds a row of 1025 to 16384 elements in pieces of powers of two.

One piece would have to be as wide as the next power of two, and what of that is empty would keep registers from other
rows: how many rows a multiprocessor holds decides how well it uses the bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.ahead import prefetch, programs_ahead
from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start
from tokenspeed_kernel_triton_fake_quant.groups import LONGEST
from tokenspeed_kernel_triton_fake_quant.masks import store_mask
from tokenspeed_kernel_triton_fake_quant.rounding import (
    DIVIDES_BY_FMA,
    clamp,
    kept_narrow,
    largest,
    round_to_integer,
    unsigned_zero,
)

__all__ = ["long_rows"]

_AHEAD = 104 * 1024  # bytes read ahead for each multiprocessor: what was best on an H200


@triton.jit
def _load(x_ptr, base, first, length, SIZE: tl.constexpr):
    offsets = first + tl.arange(0, SIZE)
    return tl.load(x_ptr + base + offsets, mask=offsets < length, other=0.0)


@triton.jit
def _folded(x, SIZE: tl.constexpr):
    """Return maxima of elements that a thread holds, so that those of all pieces meet once."""
    return tl.max(tl.reshape(tl.abs(x.to(tl.float32)), (x.shape[0] // SIZE, SIZE)), axis=0)


@triton.jit
def _store(y_ptr, m_ptr, x, step, row, base, first, length, SIZE: tl.constexpr, MASK: tl.constexpr):
    if DIVIDES_BY_FMA and x.dtype != tl.float32:
        x = kept_narrow(x)
    code = x.to(tl.float32) * tl.div_rn(1.0, step)
    if MASK:
        rounded = round_to_integer(clamp(code, -129.0, 128.0))
        code = clamp(rounded, -128.0, 127.0)
        store_mask(m_ptr, rounded == code, row, first, length, True, length, 1, SIZE)
    else:
        code = round_to_integer(clamp(code, -128.0, 127.0))
    offsets = first + tl.arange(0, SIZE)
    tl.store(y_ptr + base + offsets, unsigned_zero(code * step, y_ptr.dtype.element_ty), mask=offsets < length)


@triton.jit(do_not_specialize=["size", "ahead"], do_not_specialize_on_alignment=["s_ptr", "m_ptr"])
def _long_rows_kernel(
    x_ptr, y_ptr, s_ptr, m_ptr, size: tl.int64, ahead: tl.int64,
    ALIGNED: tl.constexpr, PLACE: tl.constexpr, THIRD: tl.constexpr, PREFETCH: tl.constexpr,
    STORED: tl.constexpr, MASK: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    length = tl.cast(size, tl.int32)
    if ALIGNED:  # true already; written so that the compiler sees it, and uses wide loads
        length = length // 16 * 16
    row = tl.cast(tl.program_id(0), tl.int64)
    base = row * length
    first = _load(x_ptr, base, 0, length, PLACE // 2)
    second = _load(x_ptr, base, PLACE // 2, length, PLACE // 4)
    third = _load(x_ptr, base, PLACE // 4 * 3, length, THIRD)
    folded = tl.maximum(_folded(first, PLACE // 8), _folded(second, PLACE // 8))
    amax = largest(tl.maximum(folded, _folded(third, PLACE // 8)), 0, FINITE_MAX)
    if PREFETCH:
        prefetch(x_ptr, row + ahead, length)
    if STORED:
        tl.store(s_ptr + row, amax)
    step = tl.maximum(tl.div_rn(amax, 127.0), 1e-12)
    _store(y_ptr, m_ptr, first, step, row, base, 0, length, PLACE // 2, MASK)
    _store(y_ptr, m_ptr, second, step, row, base, PLACE // 2, length, PLACE // 4, MASK)
    _store(y_ptr, m_ptr, third, step, row, base, PLACE // 4 * 3, length, THIRD, MASK)


_kernel = Kernel(_long_rows_kernel)


def long_rows(
    x: torch.Tensor,
    y: torch.Tensor,
    amax: torch.Tensor | None,
    mask: torch.Tensor | None,
    rows: int,
    place: int,
    start: Start,
) -> None:
    """Write the values of a contiguous ``x`` of equally long rows, and what is wanted beside them.

    Args:
        x: ``rows`` rows of 1025 to 16384 elements.
        y: the same, for the values.
        amax: one for each row, for the largest magnitudes, or None.
        mask: for where the gradient passes, or None; rows are of a multiple of 16 elements, then.
        rows: how many there are.
        place: the next power of two of a row's elements.
        start: what starts the kernel.
    """
    size = x.numel() // rows
    aligned = bool(size % 16 == 0)  # a constant, even where a size is a symbol
    third = place // 8 if size <= place // 8 * 7 else place // 4
    ahead = programs_ahead(start, x, place, _AHEAD) if mask is None else 0  # with a mask, it was slower
    constants = (aligned, place, third, ahead > 0, amax is not None, mask is not None, FINITE_MAX[x.dtype])
    tensors = (x, y, x if amax is None else amax, x if mask is None else mask)
    start(_kernel, (rows, 1, 1), tensors, (size, ahead), constants, _warps(x, place, mask is not None))


def _warps(x: torch.Tensor, place: int, with_mask: bool) -> int:
    """Return how many warps hold a row, with 16 bytes a thread of what is folded; fewer where that was faster."""
    if place == LONGEST and (with_mask or x.element_size() == 4):
        return 4
    return place * x.element_size() // 4096
