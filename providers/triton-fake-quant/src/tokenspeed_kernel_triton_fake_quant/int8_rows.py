# SPDX-License-Identifier: Apache-2.0
"""The int8 kernel of long channels: a program holds a row of 8193 to 16384 elements in pieces of powers of two.

One piece would have to be 16384 wide, and what of that is empty would keep registers from other rows: how many rows a
multiprocessor holds decides how well it uses the bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.amax import FINITE_MAX
from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, may_use_hopper, properties
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

_FIRST, _SECOND = 8192, 4096  # elements of pieces
_FOLDED = tl.constexpr(2048)  # elements: each thread folds pieces to so many, and then they meet, once for all pieces


@triton.jit
def _load(x_ptr, base, first, length, SIZE: tl.constexpr):
    offsets = first + tl.arange(0, SIZE)
    return tl.load(x_ptr + base + offsets, mask=offsets < length, other=0.0)


@triton.jit
def _prefetch(x_ptr, row, length):
    """Have a row read into the L2 cache, for the program that is going to load it, if there is one."""
    if row < tl.num_programs(0):
        size = length * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            """{
                .reg .pred is_first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 is_first, thread, 0;
                @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r", [(x_ptr + row * length).to(tl.int64) & -16, size & -16], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _folded(x):
    return tl.max(tl.reshape(tl.abs(x.to(tl.float32)), (x.shape[0] // _FOLDED, _FOLDED)), axis=0)


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
    ALIGNED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, PREFETCH: tl.constexpr,
    STORED: tl.constexpr, MASK: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    length = tl.cast(size, tl.int32)
    if ALIGNED:  # true already; written so that the compiler sees it, and uses wide loads
        length = length // 16 * 16
    row = tl.cast(tl.program_id(0), tl.int64)
    base = row * length
    first = _load(x_ptr, base, 0, length, FIRST)
    second = _load(x_ptr, base, FIRST, length, SECOND)
    third = _load(x_ptr, base, FIRST + SECOND, length, THIRD)
    folded = tl.maximum(tl.maximum(_folded(first), _folded(second)), _folded(third))
    amax = largest(folded, 0, FINITE_MAX)
    if PREFETCH:
        _prefetch(x_ptr, row + ahead, length)
    if STORED:
        tl.store(s_ptr + row, amax)
    step = tl.maximum(tl.div_rn(amax, 127.0), 1e-12)
    _store(y_ptr, m_ptr, first, step, row, base, 0, length, FIRST, MASK)
    _store(y_ptr, m_ptr, second, step, row, base, FIRST, length, SECOND, MASK)
    _store(y_ptr, m_ptr, third, step, row, base, FIRST + SECOND, length, THIRD, MASK)


_kernel = Kernel(_long_rows_kernel)


def long_rows(
    x: torch.Tensor, y: torch.Tensor, amax: torch.Tensor | None, mask: torch.Tensor | None, rows: int, start: Start
) -> None:
    """Write the values of a contiguous ``x`` of equally long rows, and what is wanted beside them.

    Args:
        x: ``rows`` rows of 8193 to 16384 elements.
        y: the same, for the values.
        amax: one for each row, for the largest magnitudes, or None.
        mask: for where the gradient passes, or None; rows are of a multiple of 16 elements, then.
        rows: how many there are.
        start: what starts the kernel.
    """
    size = x.numel() // rows
    aligned = bool(size % 16 == 0)  # a constant, even where a size is a symbol
    third = 2048 if size <= _FIRST + _SECOND + 2048 else 4096
    # Measured on an H200, as are the warps: what is loaded next is there when this is stored. Further ahead it would
    # be gone from the cache again.
    prefetch = third == 2048 and mask is None and may_use_hopper(start, x)
    ahead = properties(x.get_device()).multi_processor_count * 8 // x.element_size() if prefetch else 0
    given = (amax is not None, mask is not None, FINITE_MAX[x.dtype])
    constants = (aligned, _FIRST, _SECOND, third, prefetch, *given)
    tensors = (x, y, x if amax is None else amax, x if mask is None else mask)
    warps = 8 if x.dtype == torch.bfloat16 and mask is None else 4
    start(_kernel, (rows, 1, 1), tensors, (size, ahead), constants, warps)
