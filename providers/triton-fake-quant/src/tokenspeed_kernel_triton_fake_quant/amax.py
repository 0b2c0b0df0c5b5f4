# SPDX-License-Identifier: Apache-2.0
"""Largest magnitudes, found on the device: of parts of a tensor, or of each channel of one axis.

NaN is ignored and Inf counts as the largest finite value. The programs of a channel meet in an atomic maximum, whose
result does not depend on their order: magnitudes are ordered as their bits are, taken for integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start
from tokenspeed_kernel_triton_fake_quant.early import let_next_start
from tokenspeed_kernel_triton_fake_quant.operands import tiled, warps
from tokenspeed_kernel_triton_fake_quant.rounding import larger, largest
from tokenspeed_kernel_triton_fake_quant.tiles import PER_COLUMN, SIZES, has_rest, rest, row_of_tiles, tile

__all__ = ["FINITE_MAX", "PARTIALS", "channel_amax", "partial_amax"]

FINITE_MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float16, torch.bfloat16)}

_WIDE = ((8192, (1, 16384)), (512, (1, 8192)), (64, (8, 512)), (0, (64, 16)))  # many bytes on their way at a time
_TALL = ((64, (64, 128)), (0, (512, 16)))  # many elements between two atomics, down the columns
PARTIALS = tl.constexpr(512)
"""Programs that share a tensor, each of which finds one maximum: enough to fill a GPU, and so few that every program
of the next kernel can take the largest of theirs, which saves the launch that would zero a place for an atomic one."""


@triton.jit(do_not_specialize=["tiles", *SIZES])
def _partial_amax_kernel(
    x_ptr, s_ptr,
    tiles: tl.int64,
    rows: tl.int64, cols: tl.int64, mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, sc: tl.int64,
    LAYOUT: tl.constexpr, VARIES: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    if EARLY:
        let_next_start()
    so_far = tl.zeros((ROWS, COLS), x_ptr.dtype.element_ty)
    row_length = tl.cast(tl.cdiv(cols, COLS), tl.int32)  # in tiles
    for number in range(tl.program_id(0), tl.cast(tiles, tl.int32), tl.num_programs(0)):
        row_tile = 0 if LAYOUT == 1 else number // row_length
        col_tile = number if LAYOUT == 1 else number % row_length
        x_offsets, _, _, mask, _ = tile(
            row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
            LAYOUT, VARIES, ALIGNED, INT64, ROWS, COLS,
        )  # fmt: skip
        if LAYOUT == 1 and (col_tile + 1) * COLS <= cols:  # a mask is half of the work
            so_far = larger(so_far, tl.load(x_ptr + x_offsets))
        else:
            so_far = larger(so_far, tl.load(x_ptr + x_offsets, mask=mask, other=0.0))
    so_far = so_far.to(tl.float32)
    found = largest(tl.reshape(so_far, (ROWS * COLS,)), 0, FINITE_MAX)
    if has_rest(0, tl.program_id(0), cols, LAYOUT):
        last, _, last_mask, _ = rest(cols, sc, False, INT64)
        some = tl.load(x_ptr + last, mask=last_mask, other=0.0).to(tl.float32)
        found = tl.maximum(found, largest(tl.reshape(some, (16,)), 0, FINITE_MAX))
    tl.store(s_ptr + tl.program_id(0), found)


@triton.jit(do_not_specialize=SIZES)
def _channel_amax_kernel(
    x_ptr, s_ptr,
    rows: tl.int64, cols: tl.int64, mid: tl.int64, low: tl.int64,
    x0: tl.int64, x1: tl.int64, x2: tl.int64, xc: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64, yc: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, sc: tl.int64,
    LAYOUT: tl.constexpr, VARIES: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    row_tile = row_of_tiles()
    col_tile = tl.program_id(0)
    x_offsets, _, s_offsets, mask, s_mask = tile(
        row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
        LAYOUT, VARIES, ALIGNED, INT64, ROWS, COLS,
    )  # fmt: skip
    _meet(x_ptr, s_ptr, x_offsets, s_offsets, mask, s_mask, VARIES, ROWS, FINITE_MAX)
    if has_rest(row_tile, col_tile, cols, LAYOUT):
        last, s_last, last_mask, s_last_mask = rest(cols, sc, VARIES, INT64)
        _meet(x_ptr, s_ptr, last, s_last, last_mask, s_last_mask, VARIES, 1, FINITE_MAX)


@triton.jit
def _meet(
    x_ptr, s_ptr, x_offsets, s_offsets, mask, s_mask,
    VARIES: tl.constexpr, ROWS: tl.constexpr, FINITE_MAX: tl.constexpr,
):  # fmt: skip
    """Raise the maxima of the channels of a tile."""
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    if VARIES == 1:  # a channel runs down the columns
        found = largest(x, 0, FINITE_MAX)
        offsets = tl.max(tl.where(s_mask, s_offsets, -1), axis=0)  # the same all down, but where the tile has ended
        is_there = offsets >= 0
    elif ROWS == 1:
        found = tl.max(largest(x, 1, FINITE_MAX), axis=0)
        offsets = s_offsets
        is_there = s_mask
    else:
        found = largest(x, 1, FINITE_MAX)
        offsets = tl.reshape(s_offsets, (ROWS,))
        is_there = tl.reshape(s_mask, (ROWS,))
    tl.atomic_max(s_ptr + offsets, found.to(tl.int32, bitcast=True), mask=is_there, sem="relaxed")


_partial_kernel, _channel_kernel = Kernel(_partial_amax_kernel), Kernel(_channel_amax_kernel)


def partial_amax(x: torch.Tensor, start: Start, early: bool) -> torch.Tensor:
    """Return as many float32 as :data:`PARTIALS`, of which the largest is the largest magnitude of ``x``.

    With ``early``, the next kernel may start at once, and has to wait for this one itself.
    """
    tiling = tiled(x, x, None, _WIDE)
    if tiling is None:
        return partial_amax(x.contiguous(), start, early)
    amax = torch.empty(PARTIALS.value, dtype=torch.float32, device=x.device)
    across, rows, more_rows = tiling.grid
    constants = (*tiling.constants, early, FINITE_MAX[x.dtype])
    sizes = (across * rows * more_rows, *tiling.sizes)
    start(_partial_kernel, (PARTIALS.value, 1, 1), (x, amax), sizes, constants, 8)
    return amax


def channel_amax(x: torch.Tensor, axis: int, start: Start) -> torch.Tensor:
    """Return the largest magnitude of each channel of ``axis``, float32, in a shape that broadcasts to ``x``."""
    bits = torch.zeros([n if i == axis else 1 for i, n in enumerate(x.shape)], dtype=torch.int32, device=x.device)
    tiling = tiled(x, x, bits)
    tall = tiling is not None and tiling.constants[1] == PER_COLUMN
    if tall:
        tiling = tiled(x, x, bits, _TALL)
    if tiling is None:
        return channel_amax(x.contiguous(), axis, start)
    constants = (*tiling.constants, FINITE_MAX[x.dtype])
    start(_channel_kernel, tiling.grid, (x, bits), tiling.sizes, constants, 8 if tall else warps(x))
    return bits.view(torch.float32)
