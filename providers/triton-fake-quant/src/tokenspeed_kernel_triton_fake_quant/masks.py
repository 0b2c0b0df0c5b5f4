# SPDX-License-Identifier: Apache-2.0
"""Where a gradient passes, a bit an element in the order of memory: written by a forward, read by its backward.

A backward would else read all values again, which is 32 times the bits for float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, is_plain

__all__ = ["empty_mask", "masked_gradient", "store_mask"]

_BLOCK = 1024  # elements of a program


@triton.jit
def store_mask(m_ptr, inside, rows, columns, row_length, is_row, end, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store the bits of a tile (ROWS, COLS) of rows that lie one after the other.

    ``rows`` are numbers, ``columns`` the first one of the tile's, ``row_length`` and ``end`` (of what is stored) in
    columns: all are multiples of eight, so that eight neighbours are a byte.
    """
    byte = columns // 8 + tl.arange(0, COLS // 8)[None, :]
    bits = tl.reshape(inside.to(tl.int32), (ROWS, COLS // 8, 8)) << tl.arange(0, 8)[None, None, :]
    places = rows * (row_length // 8) + byte
    tl.store(m_ptr + places, tl.sum(bits, axis=2).to(tl.uint8), mask=is_row & (byte < end // 8))


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["m_ptr"])
def _masked_gradient_kernel(g_ptr, y_ptr, m_ptr, numel: tl.int64, INT64: tl.constexpr, BLOCK: tl.constexpr):
    byte = tl.cast(tl.program_id(0), tl.int64 if INT64 else tl.int32) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[:, None]
    bit = tl.arange(0, 8)[None, :]
    offsets = byte * 8 + bit
    if tl.cast(tl.program_id(0), tl.int64) * BLOCK + BLOCK <= numel:  # a mask would keep the compiler from wide loads
        bits = tl.load(m_ptr + byte).to(tl.int32)
        gradient = tl.load(g_ptr + offsets)
        tl.store(y_ptr + offsets, tl.where((bits >> bit) & 1 != 0, gradient, 0.0))
    else:
        mask = offsets < numel
        bits = tl.load(m_ptr + byte, mask=byte * 8 < numel, other=0).to(tl.int32)
        gradient = tl.load(g_ptr + offsets, mask=mask, other=0.0)
        tl.store(y_ptr + offsets, tl.where((bits >> bit) & 1 != 0, gradient, 0.0), mask=mask)


_kernel = Kernel(_masked_gradient_kernel)


def empty_mask(y: torch.Tensor) -> torch.Tensor:
    """Return memory for the bits of a dense tensor."""
    return y.new_empty(-(-y.numel() // 16) * 2, dtype=torch.uint8)


def masked_gradient(grad: torch.Tensor, mask: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``grad`` where the bit is set, and zero elsewhere, for a result of these strides, which was dense."""
    if torch.is_grad_enabled() or not is_plain(grad, mask):  # to be differentiated again, or watched
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
        return torch.where(bits.reshape(-1).as_strided(grad.shape, strides) != 0, grad, 0.0)
    y = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
    if grad.stride() != strides:
        grad = torch.empty_like(y).copy_(grad)
    numel = grad.numel()
    programs = -(-numel // _BLOCK)
    _kernel.launch((programs, 1, 1), (grad, y, mask), (numel,), (numel >= 2**31 - _BLOCK, _BLOCK), grad.element_size())
    return y
