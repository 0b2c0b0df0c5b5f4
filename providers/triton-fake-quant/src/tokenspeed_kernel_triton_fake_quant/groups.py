# SPDX-License-Identifier: Apache-2.0
"""Where a program of a grouped kernel reads and writes: a tile of whole groups, which lie along the last axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.support import PLAIN

__all__ = [
    "LONGEST",
    "SIZES",
    "Grouping",
    "channels_grouped",
    "group_offsets",
    "group_scale_offsets",
    "grouped",
    "grouping",
]

_INT32_LIMIT = 2**31 - 2**16
_PACKED, _STRIDED = 0, 1
LONGEST = 16384  # elements of a group that one program holds; a longer one is read twice

SIZES = [
    *("groups", "rows", "row_groups", "cols", "size", "mid", "low"),
    *("x0", "x1", "x2", "xc", "y0", "y1", "y2", "yc"),
]
"""The kernel arguments that hold :attr:`Grouping.sizes`: a new shape must compile nothing, so none is specialised."""


class Grouping(NamedTuple):
    """How a call is cut into tiles of groups."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    """Values of :data:`SIZES`; ``row_groups`` groups of ``size`` elements, the last maybe short, are in a row."""
    constants: tuple[int | bool, ...]
    """LAYOUT, EXACT (whether a group fills its place in the tile), ALIGNED, ROWS_FIRST, LOOP, INT64, GROUPS and SIZE
    of a tile."""
    warps: int

    @property
    def is_packed(self) -> bool:
        """Whether groups lie one after the other."""
        return self.constants[0] == _PACKED

    @property
    def is_aligned(self) -> bool:
        """Whether groups lie one after the other, each of a multiple of 16 elements."""
        return bool(self.constants[2])

    @property
    def tile(self) -> int:
        """How many elements a program has places for."""
        return self.constants[-2] * self.constants[-1]


@lru_cache(maxsize=4096)
def grouping(shape: tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...], size: int, tile: int) -> Grouping | None:
    """Return the grouping of a call, in groups of ``size`` and tiles of about ``tile`` elements.

    None if more than three axes before the last are left after merging.
    """
    cols = shape[-1]
    size = int(min(size, cols))  # a place in a tile is a constant, even where a size is a symbol
    outer, steps = _merged_rows(shape[:-1], x[:-1], y[:-1])
    if len(outer) > 3:
        return None
    missing = 3 - len(outer)
    outer = [1] * missing + outer
    walks = [[0] * missing + s for s in steps]
    rows = outer[0] * outer[1] * outer[2]
    row_groups = -(-cols // size)
    packed = x == y and cols % size == 0 and _is_contiguous(shape, x)
    place = min(max(triton.next_power_of_2(size), 16), LONGEST)
    tile_groups = max(tile // place, 1)
    exact = packed and place == size
    aligned = packed and size % 16 == 0
    rows_first = not packed and x[-1] > (walks[0][2] if outer[2] > 1 else x[-1])
    reach = max(
        sum((n - 1) * s for n, s in zip((*outer, cols), (*walk, last), strict=True))
        for walk, last in zip(walks, (x[-1], y[-1]), strict=True)
    )
    wide = bool(max(reach, rows * row_groups * place) >= _INT32_LIMIT)
    numbers = (rows * row_groups, rows, row_groups, cols, size, outer[1], outer[2], *walks[0], x[-1], *walks[1], y[-1])
    layout = _PACKED if packed else _STRIDED
    constants = (layout, exact, aligned, rows_first, size > place, wide, tile_groups, place)
    warps = max(1, min(place * tile_groups // 512, 16)) if place > 1024 else 1
    return Grouping((-(-rows * row_groups // tile_groups), 1, 1), numbers, constants, warps)


def _merged_rows(
    shape: Sequence[int], x: Sequence[int], y: Sequence[int]
) -> tuple[list[int], tuple[list[int], list[int]]]:
    """Return sizes and strides of the axes before the last, without those of one element, neighbours made one."""
    sizes: list[int] = []
    steps: tuple[list[int], list[int]] = ([], [])
    for size, *both in zip(shape, x, y, strict=True):
        if size == 1:
            continue
        if sizes and all(done[-1] == step * size for done, step in zip(steps, both, strict=True)):
            sizes[-1] *= size
            for done, step in zip(steps, both, strict=True):
                done[-1] = step
        else:
            sizes.append(size)
            for done, step in zip(steps, both, strict=True):
                done.append(step)
    return sizes, steps


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def channels_grouped(x: torch.Tensor, axis: int, tile: int) -> Grouping | None:
    """Return the grouping of a contiguous tensor of which each element along ``axis`` has a row, which is a group.

    None if the tensor is not such, has no elements, or has rows that no program can hold.
    """
    if type(x) in PLAIN:
        return _channels_grouped(x.shape, x.stride(), axis, tile)
    return _channels_grouped.__wrapped__(tuple(x.shape), x.stride(), axis, tile)


@lru_cache(maxsize=4096)
def _channels_grouped(shape: tuple[int, ...], strides: tuple[int, ...], axis: int, tile: int) -> Grouping | None:
    rows = shape[axis]
    size = math.prod(shape[:axis]) * math.prod(shape[axis + 1 :])
    if not (rows * size > 0 and size <= LONGEST and _is_contiguous(shape, strides)):
        return None
    if strides[axis] != size and rows != 1:
        return None
    return grouping.__wrapped__((rows, size), (size, 1), (size, 1), size, tile)


def grouped(x: torch.Tensor, y: torch.Tensor, size: int, tile: int) -> Grouping | None:
    """Return the grouping of a kernel of ``x``; None if the strides are beyond it."""
    if type(x) not in PLAIN:  # its sizes may be symbols, which are no keys of a cache
        return grouping.__wrapped__(tuple(x.shape), x.stride(), y.stride(), size, tile)
    strides = x.stride()
    return grouping(x.shape, strides, strides if x.is_contiguous() else y.stride(), size, tile)


@triton.jit
def _number(value, INT64: tl.constexpr):
    return tl.cast(value, tl.int64 if INT64 else tl.int32)


@triton.jit
def group_offsets(
    group,
    within,
    groups,
    rows,
    row_groups,
    cols,
    size,
    mid,
    low,
    x0,
    x1,
    x2,
    xc,
    y0,
    y1,
    y2,
    yc,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    INT64: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return the offsets in input and output, and the mask, of elements ``within`` the groups numbered ``group``."""
    length = _number(size, INT64)
    mask = group < _number(groups, INT64)
    if LAYOUT == 0:
        if EXACT:
            length = SIZE
        elif ALIGNED:  # true already; written so that the compiler sees it, and uses wide loads
            length = length // 16 * 16
        x_offsets = group * length + within
        y_offsets = x_offsets
    else:
        row, place = _row_and_place(group, rows, row_groups, ROWS_FIRST, INT64)
        col = place * length + within
        mask = mask & (col < _number(cols, INT64))
        mid = _number(mid, INT64)
        low = _number(low, INT64)
        last = row % low
        middle = row // low % mid
        first = row // low // mid
        x_offsets = first * _number(x0, INT64) + middle * _number(x1, INT64) + last * _number(x2, INT64)
        y_offsets = first * _number(y0, INT64) + middle * _number(y1, INT64) + last * _number(y2, INT64)
        x_offsets = x_offsets + col * _number(xc, INT64)
        y_offsets = y_offsets + col * _number(yc, INT64)
    return x_offsets, y_offsets, mask & (within < length)


@triton.jit
def group_scale_offsets(group, rows, row_groups, ROWS_FIRST: tl.constexpr, INT64: tl.constexpr):
    """Return the offsets of the groups' scales, which lie one after the other in the order of rows."""
    row, place = _row_and_place(group, rows, row_groups, ROWS_FIRST, INT64)
    return row * _number(row_groups, INT64) + place


@triton.jit
def _row_and_place(group, rows, row_groups, ROWS_FIRST: tl.constexpr, INT64: tl.constexpr):
    if ROWS_FIRST:  # neighbours in memory are in neighbouring rows
        row = group % _number(rows, INT64)
        place = group // _number(rows, INT64)
    else:
        row = group // _number(row_groups, INT64)
        place = group % _number(row_groups, INT64)
    return row, place
