# SPDX-License-Identifier: Apache-2.0
"""Tiles of elementwise kernels, as a pure function: each element is reached once, whatever the strides."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel_triton_fake_quant.tiles import SIZES, TILES, Tiling, tiling  # noqa: E402

ROWS, ONE_ROW, STRIDED = 0, 1, 2
PER_ROW, PER_COLUMN, PER_ELEMENT = 0, 1, 2
SMALL = ((32, (1, 16)), (8, (4, 8)), (0, (8, 4)))  # tiles that a test tensor has many of
TALL = ((8, (16, 8)), (0, (32, 4)))  # as the maxima of channels have them: more rows than columns


def _reached(cut: Tiling) -> torch.Tensor:
    """Return (elements, 3): offsets in input, output and operand, as the programs of a grid compute them."""
    n = dict(zip(SIZES, cut.sizes, strict=True))
    layout, varies, is_aligned, _, rows, cols = cut.constants
    if is_aligned:  # what a kernel that believes it computes with
        n |= {name: n[name] // 16 * 16 for name in ("cols", "x2", "y2")}
    row_tiles = torch.arange(cut.grid[1] * cut.grid[2])
    row = (row_tiles[:, None] * rows + torch.arange(rows)).reshape(-1, 1)
    col = (torch.arange(cut.grid[0])[:, None] * cols + torch.arange(cols)).reshape(1, -1)
    end = n["cols"] // 16 * 16 if layout == ONE_ROW else n["cols"]  # the rest is for one program to do besides
    is_there = (row < n["rows"]) & (col < end)
    if layout == ONE_ROW:
        row, col = row[:1], torch.cat([col[col < end], torch.arange(end, n["cols"])])[None, :]
        is_there = torch.ones_like(col, dtype=torch.bool)
    outer = (row // n["low"] // n["mid"], row // n["low"] % n["mid"], row % n["low"])
    reached = []
    for tensor in "xys":
        along_row = col * n[f"{tensor}c"] if layout == STRIDED or tensor == "s" else col
        down = (
            sum(axis * n[f"{tensor}{i}"] for i, axis in enumerate(outer))
            if layout == STRIDED
            else row * n[f"{tensor}2"]
        )
        if tensor == "s":
            offsets = {PER_ROW: down + 0 * col, PER_COLUMN: along_row + 0 * row, PER_ELEMENT: down + along_row}[varies]
        else:
            offsets = along_row + (0 * row if layout == ONE_ROW else down)
        reached.append(offsets[is_there])
    return torch.stack(reached, 1)


def _of_elements(x: torch.Tensor, *strides: tuple[int, ...]) -> torch.Tensor:
    """Return (elements, 3): the offsets that strides give, in the order of indices."""
    index = torch.cartesian_prod(*map(torch.arange, x.shape)).reshape(-1, x.dim()) if x.dim() else torch.zeros(1, 0)
    return torch.stack([(index * torch.tensor(s)).sum(1) for s in strides], 1).long()


def _assert_each_once(
    x: torch.Tensor, operand: torch.Tensor | None, shapes: tuple[tuple[int, tuple[int, int]], ...]
) -> Tiling | None:
    y = torch.empty_like(x)
    steps = (0,) * x.dim() if operand is None else operand.expand(x.shape).stride()
    steps = tuple(step if size > 1 else 0 for step, size in zip(steps, x.shape, strict=True))
    cut = tiling(tuple(x.shape), x.stride(), y.stride(), steps, shapes)
    if cut is None:
        return None
    actual, expected = _reached(cut), _of_elements(x, x.stride(), y.stride(), steps)
    by_output = (table[table[:, 1].argsort()] for table in (actual, expected))  # an output's offsets are all different
    assert torch.equal(*by_output), f"x {tuple(x.shape)} of strides {x.stride()}, operand {steps}: {cut}"
    return cut


def _random_input(rng: random.Random) -> torch.Tensor:
    """Return a tensor of up to five axes: permuted, sliced and expanded at random."""
    shape = [rng.choice([1, 2, 3, 5, 8, 16, 17]) for _ in range(rng.randrange(6))]
    order = rng.sample(range(len(shape)), len(shape))
    room = [2 * n if rng.random() < 0.2 else n for n in shape]
    x = torch.empty([room[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    x = x[tuple(slice(None, None, 2) if m != n else slice(None) for n, m in zip(shape, room, strict=True))]
    for axis, size in enumerate(shape):
        if rng.random() < 0.1:
            x = x.narrow(axis, 0, 1).expand([size if i == axis else n for i, n in enumerate(x.shape)])
    return x


@pytest.mark.parametrize("seed", range(8))
def test_each_element_is_reached_once(seed: int) -> None:
    """Permuted, sliced and expanded inputs, beside operands that broadcast in every way, in tiles of every shape."""
    rng = random.Random(seed)  # noqa: S311 -- test data
    layouts = set()
    for _ in range(150):
        x = _random_input(rng)
        sizes = [n if rng.random() < 0.4 else 1 for n in x.shape]
        operand = torch.empty(sizes[::-1]).permute(list(range(len(sizes)))[::-1]) if rng.random() < 0.5 else None
        for shapes in (SMALL, TALL, TILES):
            cut = _assert_each_once(x, operand, shapes)
            layouts.add(None if cut is None else cut.constants[0])
    assert layouts >= {ROWS, ONE_ROW, STRIDED}


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 65])
def test_edges_of_tiles(rows: int, columns: int) -> None:
    """One size below, at and above those of tiles, with a scale per row, per column and for each element."""
    x = torch.empty(rows, columns)
    for values in (x, x.t(), torch.empty(rows, columns + 1)[:, 1:]):
        n, m = values.shape
        for operand in (None, torch.empty(n, 1), torch.empty(m), torch.empty(n, m), torch.empty(m, n).t()):
            assert _assert_each_once(values, operand, TILES) is not None


@pytest.mark.parametrize(
    ("x", "layout"),
    [
        (torch.empty(()), ONE_ROW),
        (torch.empty(4, 5, 6, 7), ONE_ROW),
        (torch.empty(4, 6, 5, 7).permute(3, 1, 0, 2), ONE_ROW),  # dense in another order: the output is so, too
        (torch.empty(4, 5, 6, 7).contiguous(memory_format=torch.channels_last), ONE_ROW),
        (torch.empty(33, 70)[:, :64], ROWS),
        (torch.empty(33, 64)[:, ::2], STRIDED),
        (torch.empty(1, 64).expand(33, 64), STRIDED),
    ],
    ids=["0-d", "contiguous", "permuted", "channels last", "columns cut off", "every other column", "expanded"],
)
def test_what_memory_allows_is_one_row(x: torch.Tensor, layout: int) -> None:
    """Dense tensors are one long row in whatever order their axes lie; others are walked row by row."""
    cut = _assert_each_once(x, None, SMALL)
    assert cut is not None
    assert cut.constants[0] == layout


def test_more_axes_than_a_tile_walks_have_none() -> None:
    """Five axes that cannot be merged are for the caller to copy."""
    x = torch.empty(6, 6, 6, 6, 6)[::2, ::2, ::2, ::2, ::2]
    assert _assert_each_once(x, None, TILES) is None
    assert _assert_each_once(x[:, 0], None, TILES) is not None


@pytest.mark.parametrize(
    ("shape", "strides", "is_wide"),
    [
        ((2**31 - 2**16 - 1,), (1,), False),
        ((2**31 - 2**16,), (1,), True),
        ((2**20, 2**11), (2**11, 1), True),
        ((2**20, 2**10), (2**10, 1), False),
        ((2, 8), (2**31, 1), True),
        ((2, 2**25), (0, 50), False),
        ((2, 2**26), (0, 50), True),
    ],
    ids=str,
)
def test_offsets_are_64_bit_where_32_do_not_hold_them(
    shape: tuple[int, ...], strides: tuple[int, ...], is_wide: bool
) -> None:
    """Elements in all, or the reach of strides, decide; a tile's overhang past the end still fits below."""
    dense = (shape[-1], 1)[-len(shape) :]
    cut = tiling(shape, strides, dense)
    assert cut is not None
    assert cut.constants[3] is is_wide
    assert is_wide or cut.grid[0] * cut.constants[5] < 2**31


def test_a_grid_keeps_to_its_limits() -> None:
    """More rows of tiles than an axis of a grid has programs go on along the third one (case 37)."""
    for rows in (65534, 65535, 65536, 5_000_000, 70_000_000):
        cut = tiling((rows, 3), (7, 2), (3, 1), None, ((0, (1, 4)),))
        assert cut is not None
        assert max(cut.grid[1:]) <= 65535
        assert cut.grid[1] * cut.grid[2] >= rows


def test_shapes_decide_on_few_constants() -> None:
    """What a kernel is compiled for comes from a small set, however many shapes there are."""
    rng = random.Random(0)  # noqa: S311 -- test data
    seen = set()
    for _ in range(3000):
        x = _random_input(rng)
        cut = tiling(tuple(x.shape), x.stride(), torch.empty_like(x).stride())
        if cut is not None:
            seen.add(cut.constants)
    allowed = {(rows, cols) for _, (rows, cols) in TILES}
    assert {constants[4:] for constants in seen} <= allowed
    assert all(len({constants[i] for constants in seen}) <= 3 for i in range(4))
    assert len(seen) <= 3 * 2 * 2 * len(TILES)
