# SPDX-License-Identifier: Apache-2.0
"""Tiles of grouped kernels, as a pure function: each element is reached once, in its own group."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel_triton_fake_quant.groups import LONGEST, SIZES, Grouping, grouping  # noqa: E402

PACKED, STRIDED = 0, 1


def _reached(cut: Grouping) -> torch.Tensor:
    """Return (elements, 3): offsets in input and output, and in the scales, as the programs of a grid compute them."""
    n = dict(zip(SIZES, cut.sizes, strict=True))
    layout, is_exact, is_aligned, rows_first, is_loop, _, groups, size = cut.constants
    if is_exact or is_aligned:  # what a kernel that believes it computes with
        n["size"] = size if is_exact else n["size"] // 16 * 16
    programs = cut.grid[0] * cut.grid[1] * cut.grid[2]
    group = (torch.arange(programs)[:, None] * groups + torch.arange(groups)).reshape(-1, 1)
    within = torch.arange(-(-n["size"] // size) * size if is_loop else size)
    row, place = group // n["row_groups"], group % n["row_groups"]
    if rows_first:
        row, place = group % n["rows"], group // n["rows"]
    is_there = (group < n["groups"]) & (within < n["size"])
    if layout == PACKED:
        offsets = [group * n["size"] + within] * 2
    else:
        col = place * n["size"] + within
        is_there = is_there & (col < n["cols"])
        outer = (row // n["low"] // n["mid"], row // n["low"] % n["mid"], row % n["low"])
        offsets = [sum(axis * n[f"{t}{i}"] for i, axis in enumerate(outer)) + col * n[f"{t}c"] for t in "xy"]
    scales = (row * n["row_groups"] + place).expand_as(offsets[0])
    return torch.stack([table[is_there] for table in (*offsets, scales)], 1)


def _assert_each_once(x: torch.Tensor, size: int, tile: int) -> Grouping | None:
    y = torch.empty_like(x)
    cut = grouping(tuple(x.shape), x.stride(), y.stride(), size, tile)
    if cut is None:
        return None
    index = torch.cartesian_prod(*map(torch.arange, x.shape)).reshape(-1, x.dim())
    row_groups = -(-x.shape[-1] // size)
    rows = torch.arange(x.numel()) // x.shape[-1]
    scales = rows * row_groups + index[:, -1] // size
    expected = torch.stack([*((index * torch.tensor(t.stride())).sum(1) for t in (x, y)), scales], 1)
    by_output = (table[table[:, 1].argsort()] for table in (_reached(cut), expected))
    assert torch.equal(*by_output), f"x {tuple(x.shape)} of strides {x.stride()}, groups of {size}: {cut}"
    return cut


@pytest.mark.parametrize("seed", range(8))
def test_each_element_is_reached_once_in_its_group(seed: int) -> None:
    """Permuted, sliced and expanded inputs of one to five axes, in groups that divide a row, do not, or exceed it."""
    rng = random.Random(seed)  # noqa: S311 -- test data
    layouts = set()
    for _ in range(150):
        shape = [rng.choice([1, 2, 3, 5]) for _ in range(rng.randrange(4))] + [rng.choice([1, 7, 16, 33, 64, 80])]
        order = rng.sample(range(len(shape)), len(shape))
        x = torch.empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
        axis = rng.randrange(len(shape))
        how = rng.randrange(4)
        if how == 1:
            x = torch.empty([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
        elif how == 2:
            x = x.narrow(axis, 0, 1).expand(shape)
        for size in (1, 3, 16, 32, 200):
            cut = _assert_each_once(x, size, rng.choice([16, 64, 2048]))
            layouts.add(None if cut is None else cut.constants[0])
    assert layouts >= {PACKED, STRIDED}


def test_a_group_that_no_program_holds_is_walked() -> None:
    """Rows beyond the longest place are read piece by piece, each element once (also a last, shorter group)."""
    cols = 2 * LONGEST + 37
    for x in (torch.empty(2, cols), torch.empty(cols, 2).t()):
        for size in (cols, LONGEST, LONGEST + 1):
            cut = _assert_each_once(x, size, 2048)
            assert cut is not None
            assert cut.constants[4] is (size > LONGEST)


@pytest.mark.parametrize(
    ("shape", "layout"), [((33, 16), PACKED), ((1, 16), PACKED), ((4, 20), STRIDED), ((3, 5, 64), PACKED)]
)
def test_whole_groups_of_contiguous_rows_are_packed(shape: tuple[int, ...], layout: int) -> None:
    """Only where groups divide a row may they be numbered through all rows (cases 17, 43)."""
    cut = _assert_each_once(torch.empty(shape), 16, 1024)
    assert cut is not None
    assert cut.constants[0] == layout


def test_more_axes_than_a_tile_walks_have_none() -> None:
    """Four axes before the last that cannot be merged are for the caller to copy."""
    x = torch.empty(6, 6, 6, 6, 32)[::2, ::2, ::2, ::2]
    assert _assert_each_once(x, 16, 1024) is None
    assert _assert_each_once(x[0], 16, 1024) is not None


@pytest.mark.parametrize(
    ("shape", "strides", "is_wide"),
    [
        ((2**16, 2**14), (2**14, 1), False),
        ((2**16, 2**15), (2**15, 1), True),
        ((2**27, 15), (15, 1), True),  # a group of 15 has a place of 16
        ((2, 16), (2**31, 1), True),
    ],
    ids=str,
)
def test_offsets_are_64_bit_where_32_do_not_hold_them(
    shape: tuple[int, int], strides: tuple[int, int], is_wide: bool
) -> None:
    """The elements of all places, or the reach of strides, decide."""
    cut = grouping(shape, strides, (shape[1], 1), 16, 1024)
    assert cut is not None
    assert cut.constants[5] is is_wide


def test_tall_tensors_have_a_grid() -> None:
    """Five million rows keep to a grid's limits (case 37)."""
    for shape in ((5_000_000, 16), (5_000_000, 32), (16, 5_000_000)):
        cut = grouping(shape, (shape[1], 1), (shape[1], 1), 16, 1024)
        assert cut is not None
        assert max(cut.grid[1:]) <= 65535
        assert cut.grid[0] < 2**31


def test_sizes_decide_on_few_constants() -> None:
    """What a kernel is compiled for comes from a small set, however many shapes and group sizes there are."""
    seen = set()
    for rows in (1, 3, 64):
        for cols in range(1, 300, 7):
            for size in range(1, 300, 11):
                for strides in ((cols, 1), (cols + 1, 1), (1, rows)):
                    cut = grouping((rows, cols), strides, (cols, 1), size, 2048)
                    assert cut is not None
                    seen.add(cut.constants)
    assert {constants[7] for constants in seen} == {16, 32, 64, 128, 256, 512}
    assert all(constants[6] * constants[7] == 2048 for constants in seen)
    assert len(seen) <= 6 * 6, "a place, and packed exactly, aligned or not, or strided in two orders"
