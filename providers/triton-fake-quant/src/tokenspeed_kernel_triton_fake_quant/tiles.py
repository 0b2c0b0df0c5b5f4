# SPDX-License-Identifier: Apache-2.0
"""Where a program of an elementwise kernel reads and writes: any rank and strides, as a tile of rows and columns.

Axes are ordered by the input's strides and merged wherever memory allows, so that what is dense becomes one long row
and neighbours in memory stay neighbours in a tile. A second operand (a scale) is walked with strides of its own, zero
along the axes that it broadcasts over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["PER_COLUMN", "SIZES", "TILES", "Shapes", "Tiling", "has_rest", "rest", "row_of_tiles", "tile", "tiling"]

_INT32_LIMIT = 2**31 - 2**16
_GRID_LIMIT = 65535  # programs along the second and third axis of a grid
_ROWS, _ONE_ROW, _STRIDED = 0, 1, 2

Shapes = tuple[tuple[int, tuple[int, int]], ...]
"""Of tiles: columns from which one is used, and its rows and columns."""

TILES: Shapes = ((512, (1, 1024)), (64, (8, 128)), (0, (64, 16)))
"""What most kernels use: the widest for which a row has enough columns."""

PER_ROW, PER_COLUMN, PER_ELEMENT = 0, 1, 2
"""How an operand varies in a tile; ``PER_ROW`` includes one element for all."""

SIZES = [
    *("rows", "cols", "mid", "low"),
    *("x0", "x1", "x2", "xc", "y0", "y1", "y2", "yc", "s0", "s1", "s2", "sc"),
]
"""The kernel arguments that hold :attr:`Tiling.sizes`: a new shape must compile nothing, so none is specialised."""


class Tiling(NamedTuple):
    """How a call is cut into tiles."""

    grid: tuple[int, int, int]
    """Programs: tiles along a row; rows of tiles, which of the second and third axis together make one number."""
    sizes: tuple[int, ...]
    """Values of :data:`SIZES`: three outer axes of ``rows / mid / low``, ``mid`` and ``low`` elements."""
    constants: tuple[int | bool, ...]
    """LAYOUT, VARIES (how the operand does), ALIGNED, INT64, ROWS and COLS of a tile."""
    has_bytes: bool
    """Whether any eight neighbours of a tile are eight whole, aligned neighbours in a dense output."""


def tiling(
    shape: tuple[int, ...],
    x: tuple[int, ...],
    y: tuple[int, ...],
    operand: tuple[int, ...] | None = None,
    shapes: Shapes = TILES,
) -> Tiling | None:
    """Return the tiling of a call from its shape and the strides of input, output and operand.

    Of ``shapes``, the first is for one long row. Where an operand differs by column, the second of :data:`TILES` takes
    the first one's place, so that what is made of the operand once serves several rows. None if more than four axes are
    left after merging.
    """
    sizes, strides = _merged(shape, (x, y, operand or (0,) * len(shape)))
    if len(sizes) > 4:
        return None
    outer = [1] * (4 - len(sizes)) + sizes[:-1]
    cols = sizes[-1]
    walks = [[0] * (4 - len(sizes)) + list(s) for s in strides]
    rows = outer[0] * outer[1] * outer[2]
    unit = walks[0][3] == 1 == walks[1][3]
    if rows == 1 and unit:
        layout = _ONE_ROW
    elif unit and outer[0] * outer[1] == 1:
        layout = _ROWS
    else:
        layout = _STRIDED
    aligned = layout == _ROWS and not any(n % 16 for n in (cols, walks[0][2], walks[1][2]))
    varies = PER_ROW
    if walks[2][3] != 0:
        varies = PER_ELEMENT if any(walks[2][:3]) else PER_COLUMN
    if varies == PER_COLUMN and rows > 1 and shapes is TILES:
        shapes = TILES[1:]
    tile_rows, tile_cols = shapes[0][1] if layout == _ONE_ROW else next(s for least, s in shapes if cols >= least)
    row_tiles = -(-rows // tile_rows)
    reach = max(sum((n - 1) * s for n, s in zip((*outer, cols), walk, strict=True)) for walk in walks)
    numbers = (rows, cols, outer[1], outer[2], *walks[0], *walks[1], *walks[2])
    wide = bool(max(reach, rows * cols) >= _INT32_LIMIT)
    constants = (layout, varies, aligned, wide, tile_rows, tile_cols)
    grid = (-(-cols // tile_cols), min(row_tiles, _GRID_LIMIT), -(-row_tiles // _GRID_LIMIT))
    has_bytes = layout == _ONE_ROW or bool(aligned and walks[1][2] == cols)
    return Tiling(grid, numbers, constants, has_bytes)


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides without axes of one element, those that are contiguous in every tensor made one."""
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axes.sort(key=lambda axis: -strides[0][axis])  # a stable sort: axes that are expanded keep their order
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        steps = [s[axis] for s in strides]
        if sizes and all(done[-1] == step * shape[axis] for done, step in zip(merged, steps, strict=True)):
            sizes[-1] *= shape[axis]
            for done, step in zip(merged, steps, strict=True):
                done[-1] = step
        else:
            sizes.append(shape[axis])
            for done, step in zip(merged, steps, strict=True):
                done.append(step)
    if not sizes:
        return [1], [[1], [1], *([0] for _ in strides[2:])]
    return sizes, merged


@triton.jit
def _number(value, ALIGNED: tl.constexpr, INT64: tl.constexpr):
    value = tl.cast(value, tl.int64 if INT64 else tl.int32)
    if ALIGNED:  # true already; written so that the compiler sees it, and uses wide loads
        value = value // 16 * 16
    return value


@triton.jit
def row_of_tiles():
    """Return the number of this program's row of tiles."""
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)


@triton.jit
def tile(
    row_tile, col_tile, rows, cols, mid, low, x0, x1, x2, xc, y0, y1, y2, yc, s0, s1, s2, sc,
    LAYOUT: tl.constexpr, VARIES: tl.constexpr, ALIGNED: tl.constexpr, INT64: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Return a tile's offsets in input, output and operand, and the masks of the tile and of the operand.

    Those are (ROWS, COLS), and of an operand (ROWS, 1), or one number in a tile of one row, (1, COLS), or (ROWS, COLS).
    """
    row = _number(row_tile, False, INT64)
    if ROWS > 1:  # else it stays one number, which a program computes with once
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
    col = _number(col_tile, False, INT64) * COLS + tl.arange(0, COLS)[None, :]
    is_row = row < _number(rows, False, INT64)
    is_col = col < _number(cols, False, INT64)
    # Up to a multiple of 16, so that the compiler uses wide loads; `rest` has the others.
    mask = is_row & (col < _number(cols, ALIGNED | (LAYOUT == 1), INT64))
    if LAYOUT == 2:
        x_offsets = _row_offsets(row, mid, low, x0, x1, x2, INT64) + col * _number(xc, False, INT64)
        y_offsets = _row_offsets(row, mid, low, y0, y1, y2, INT64) + col * _number(yc, False, INT64)
        s_offsets = _row_offsets(row, mid, low, s0, s1, s2, INT64)
    else:
        if LAYOUT == 1:
            x_offsets = col
            y_offsets = col
        else:
            x_offsets = row * _number(x2, ALIGNED, INT64) + col
            y_offsets = row * _number(y2, ALIGNED, INT64) + col
        s_offsets = row * _number(s2, False, INT64)
    if VARIES == 0:
        return x_offsets, y_offsets, s_offsets, mask, is_row
    elif VARIES == 1:  # noqa: RET505 -- what follows a return is compiled too, and these are of other shapes
        return x_offsets, y_offsets, col * _number(sc, False, INT64), mask, is_col
    else:
        return x_offsets, y_offsets, s_offsets + col * _number(sc, False, INT64), mask, mask


@triton.jit
def has_rest(row_tile, col_tile, cols, LAYOUT: tl.constexpr):
    """Return whether this program has to see to what :func:`tile` leaves of one long row."""
    return (LAYOUT == 1) & (row_tile + col_tile == 0) & (cols % 16 != 0)


@triton.jit
def rest(cols, sc, VARIES: tl.constexpr, INT64: tl.constexpr):
    """Return what :func:`tile` does, for the last elements of one long row; in input and output they are the same."""
    end = _number(cols, False, INT64)
    col = end // 16 * 16 + tl.arange(0, 16)[None, :]
    mask = col < end
    if VARIES == 0:
        return col, end * 0, mask, end > 0
    else:  # noqa: RET505 -- as above
        return col, col * _number(sc, False, INT64), mask, mask


@triton.jit
def _row_offsets(row, mid, low, s0, s1, s2, INT64: tl.constexpr):
    mid = _number(mid, False, INT64)
    low = _number(low, False, INT64)
    upper = row // low
    offsets = row % low * _number(s2, False, INT64) + upper % mid * _number(s1, False, INT64)
    return offsets + upper // mid * _number(s0, False, INT64)
