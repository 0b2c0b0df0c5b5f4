# SPDX-License-Identifier: Apache-2.0
"""Calls of ``fake_quant_fp8``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tokenspeed_kernel.testing import grid_values as values
from tokenspeed_kernel.testing.grid import FLOATS, Case, dtype_name, random
from tokenspeed_kernel.testing.grid_values import both_signs, case

__all__ = ["fake_quant_fp8"]

_SATURATING = (447.9, 448.0, 448.1, 463.9, 464.0, 464.1, 480.0, 1000.0, 6e4)
_TINY = (0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-11, 2.0**-6, 2.0**-7, 2.0**-14, 2.0**-24, 2.0**-126, 2.0**-149)


def fake_quant_fp8() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_fp8(x, scale)``."""
    return (*_shapes(), *_dtypes(), *_strides(), *_values(), *_scales(), *_channels(), *_malformed())


def _shapes() -> Iterator[Case]:
    for shape in ((), *values.SHAPES):
        yield case("shapes", f"x{list(shape)}", random(shape), torch.tensor([0.1]))
    yield case("shapes", "large", values.large, torch.tensor([0.1]))
    yield case("shapes", "x[33, 65], scale[1, 1]", random((33, 65)), torch.full((1, 1), 0.3))
    yield case("shapes", "x[], scale[1]", random(()), torch.full((1,), 0.3))


def _dtypes() -> Iterator[Case]:
    for dtype in FLOATS:
        name = dtype_name(dtype)
        yield case("dtypes", f"x {name}", random((33, 65)).to(dtype), torch.tensor(0.1))
        yield case("dtypes", f"x {name}, a number", random((5, 7)).to(dtype), 0.1)
        yield case("dtypes", f"scale {name}", random((33, 65)), torch.tensor(0.1).to(dtype))
    for number in (0.1, 1.0):
        yield case("dtypes", f"every bfloat16, scale {number}", values.every_bfloat16(), torch.tensor(number))


def _strides() -> Iterator[Case]:
    for shape in ((33, 65), (2, 3, 5, 8)):
        yield from values.in_layouts(f"x{list(shape)}", random(shape), torch.tensor(0.1))
    yield from values.in_layouts("x[6, 9], scale[6, 1]", random((6, 9)), torch.arange(1.0, 7.0)[:, None] / 7)


def _special(*numbers: float) -> torch.Tensor:
    return torch.cat([both_signs(torch.tensor(numbers)), random((37,))])


def _values() -> Iterator[Case]:
    nonfinite = _special(math.nan, math.inf, 1.0, math.nan)
    groups = {
        "ties": both_signs(values.e4m3_ties()),
        "saturation": _special(*_SATURATING),
        "nonfinite": nonfinite,
        "tiny": _special(*_TINY),
    }
    for group, x in groups.items():
        for scale in (1.0, 0.5, 0.1):
            yield from values.of_every_dtype(group, f"scale {scale}", x, torch.tensor(scale))
    for scale in (math.nan, math.inf):
        yield case("nonfinite", f"scale {scale}", nonfinite, torch.tensor(scale))
    yield case("nonfinite", "all NaN", torch.full((5, 3), math.nan), torch.tensor(1.0))


def _scales() -> Iterator[Case]:
    for size in (*values.SIZES, 0.0, -0.0, -1.0):
        for dtype in values.HALVES:
            x = torch.cat([random((129,)) * size, random((65,), 1)]).to(dtype)
            yield case("scales", f"{size}, x {dtype_name(dtype)}", x, torch.tensor([size]))


def _channels() -> Iterator[Case]:
    for shape in ((5, 33, 7, 65), (8, 8), (3, 1030), (6,)):  # (8, 8): the shape does not tell which axis is meant
        for axis in range(len(shape)):
            sizes = tuple(n if i == axis else 1 for i, n in enumerate(shape))
            yield _channel_case(shape, sizes)
            if axis and len(shape) > 1:
                yield _channel_case(shape, sizes[axis:])
    yield _channel_case((4, 6, 5), (4, 1, 5))
    yield _channel_case((4, 6, 5), (4, 6, 5))
    yield _channel_case((4, 0), (4, 1))
    special = torch.tensor(values.SPECIAL_SCALES)[:, None]
    yield case("channels", "x[7, 9], special scales", random((7, 9)), special)
    yield case("channels", "x[8, 9], sliced scale", random((8, 9)), values.sliced(torch.arange(1.0, 9.0)[:, None] / 8))


def _channel_case(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Case:
    scale = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) + 0.01
    return case("channels", f"x{list(shape)}, scale{list(sizes)}", random(shape), scale)


def _malformed() -> Iterator[Case]:
    yield from values.malformed_inputs(torch.tensor(1.0))
    scales = {
        "scale int64": torch.ones(1, dtype=torch.int64),
        "scale[2] for x[3]": torch.ones(2),
        "scale[2, 3] for x[3]": torch.ones(2, 3),
        "scale[0] for x[3]": torch.ones(0),
    }
    for name, scale in scales.items():
        yield case("malformed", name, torch.ones(3), scale, gradient=False, malformed=True)
