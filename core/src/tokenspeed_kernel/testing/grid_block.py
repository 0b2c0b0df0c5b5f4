# SPDX-License-Identifier: Apache-2.0
"""Calls of the FP4 slots: ``fake_quant_nvfp4_*`` in blocks of 16, ``fake_quant_mxfp4_*`` in blocks of 32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tokenspeed_kernel.testing import grid_values as values
from tokenspeed_kernel.testing.grid import FLOATS, Case, dtype_name, random
from tokenspeed_kernel.testing.grid_values import both_signs, case

__all__ = [
    "fake_quant_mxfp4_dynamic",
    "fake_quant_mxfp4_weight",
    "fake_quant_nvfp4_dynamic",
    "fake_quant_nvfp4_weight",
]

_LARGEST = 2688.0  # 6 * 448: a tensor maximum of it makes the tensor's scale 1
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_BEYOND = (5.99, 6.01, 6.5, 7.0, 7.5, 7.99)

_Others = Callable[[torch.Tensor], tuple[object, ...]]
"""The arguments after a tensor: its maximum where the slot is given one."""


def fake_quant_nvfp4_weight() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_nvfp4_weight(weight, tensor_amax)``."""

    def maximum(x: torch.Tensor) -> tuple[object, ...]:
        return (torch.where(x.isfinite(), x.abs().double(), 0.0).amax(),)

    given = torch.tensor(700.0)
    return (
        *_shapes(16, given),
        *_dtypes_and_strides(given),
        *_values(16, maximum),
        *_nvfp4_values(maximum),
        *_nvfp4_maxima(),
        *_malformed(given),
    )


def fake_quant_nvfp4_dynamic() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_nvfp4_dynamic(x)``."""
    return (*_shapes(16), *_dtypes_and_strides(), *_values(16, _nothing), *_nvfp4_values(_nothing), *_malformed())


def fake_quant_mxfp4_weight() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_mxfp4_weight(weight)``."""
    return (*_shapes(32), *_dtypes_and_strides(), *_values(32, _nothing), *_mxfp4_values(), *_malformed())


def fake_quant_mxfp4_dynamic() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_mxfp4_dynamic(x)``."""
    return fake_quant_mxfp4_weight()


def _nothing(x: torch.Tensor) -> tuple[object, ...]:
    return ()


def _shapes(block: int, *others: object) -> Iterator[Case]:
    # [33, 16] and [3, 48]: rows of whole blocks that are no whole blocks of twice the size.
    for shape in (*values.SHAPES, (block,), (block + 1,), (2 * block - 1,), (33, 16), (3, 48), (2, 3, 4 * block)):
        yield case("shapes", f"x{list(shape)}", random(shape), *others)
    yield case("shapes", "large", values.large, *others)
    yield case("shapes", "tall", values.tall, *others)


def _dtypes_and_strides(*others: object) -> Iterator[Case]:
    for width in (65, 96):
        yield from values.of_every_dtype("dtypes", f"x[33, {width}]", random((33, width)), *others)
    shapes: tuple[tuple[int, ...], ...] = ((33, 65), (6, 64), (2, 3, 5, 40))
    for shape in shapes:
        yield from values.in_layouts(f"x{list(shape)}", random(shape), *others)
    everything = values.every_bfloat16()
    yield case("dtypes", "every bfloat16", everything, *others)
    yield case("dtypes", "every finite bfloat16", torch.where(everything.isfinite(), everything, 1.0), *others)


def _led(numbers: torch.Tensor, block: int, first: float) -> torch.Tensor:
    """Return the numbers in rows of one block, each led by what sets the block's scale."""
    room = block - 1
    padded = torch.cat([numbers, numbers.new_zeros(-len(numbers) % room)]).reshape(-1, room)
    return torch.cat([torch.full((len(padded), 1), first), padded], 1)


def _with_largest(rows: torch.Tensor, largest: float = _LARGEST) -> torch.Tensor:
    """Return the rows, and one that holds the tensor's maximum: by default what makes its scale in nvfp4 1."""
    top = torch.zeros_like(rows[:1])
    top[0, 0] = largest
    return torch.cat([rows, top])


def _values(block: int, others: _Others) -> Iterator[Case]:
    groups = {
        "ties": both_signs(values.with_neighbours(torch.tensor(_E2M1_TIES))),
        "tiny": both_signs(torch.tensor([*_E2M1, 2.0**-126, 2.0**-149, 1e-3])),
    }
    for group, numbers in groups.items():
        rows = _with_largest(_led(numbers, block, 6.0))
        yield from values.of_every_dtype(group, "of E2M1", rows, *others(rows))
        for power in (-3, 40, -40):
            x = rows * 2.0**power
            yield case(group, f"of E2M1 times 2**{power}", x, *others(x))
    for name, x in values.nonfinite_rows(3 * block + 5).items():
        yield from values.of_every_dtype("nonfinite", name, x, *others(x))
    alone = torch.ones(2, 2 * block)
    for number in (math.nan, math.inf, -math.inf):
        alone[0, 3] = number
        yield case("nonfinite", f"{number} among ones", alone.clone(), *others(alone))
    for dtype in FLOATS:
        tiny, name = values.tiny_rows(dtype, 2 * block + 1), dtype_name(dtype)
        yield case("tiny", name, tiny, *others(tiny))
        yield case("tiny", f"{name}, zeros", torch.zeros_like(tiny), *others(torch.zeros(1)))
    for size in values.SIZES:
        for dtype in values.HALVES:
            name = f"{size} {dtype_name(dtype)}"
            x = (random((5, 129)) * size).to(dtype)
            yield case("scales", name, x, *others(x))
            mixed = torch.cat([x, random((2, 129), 1).to(dtype)])
            yield case("scales", f"{name}, beside others", mixed, *others(mixed))


def _nvfp4_values(others: _Others) -> Iterator[Case]:
    blocks = _with_largest(values.e4m3_ties()[:, None] * torch.linspace(6.0, -6.0, 16))
    yield from values.of_every_dtype("ties", "of block scales", blocks, *others(blocks))
    midpoints = both_signs(torch.tensor(_E2M1_TIES))
    for largest in (_LARGEST, 700.0, 1e-3):
        scale = torch.tensor(largest) / torch.tensor(_LARGEST)
        steps = (1 + torch.arange(8) / 8) * scale  # of elements: the reciprocals of most are rounded, and move ties
        rows = torch.cat([_led(values.with_neighbours(midpoints * step), 16, float(6 * step)) for step in steps])
        blocks = _with_largest(rows, largest)
        yield from values.of_every_dtype("ties", f"of E2M1, maximum {largest}", blocks, *others(blocks))
    beyond = _with_largest(torch.tensor([5.9, 6.0, 6.1])[:, None] * torch.linspace(448.0, -448.0, 16))
    yield case("saturation", "block scales up to 448", beyond.clamp(-_LARGEST, _LARGEST), *others(beyond))
    # Elements lie beyond 6 times a block scale that is rounded down: far beyond, where that is subnormal.
    downwards = torch.tensor([17.0, 1.0624, 21.99, 1.49 / 512, 2.49 / 512, 3.49 / 512])
    rounded = _with_largest(downwards[:, None] * torch.linspace(6.0, -6.0, 16))
    yield from values.of_every_dtype("saturation", "block scales rounded down", rounded, *others(rounded))
    small = torch.full((2, 16), 0.005)
    small[0, 0] = _LARGEST  # the other block's scale is less than half the smallest E4M3: zeros of both signs
    small[1, ::2] *= -1
    yield from values.of_every_dtype("tiny", "a block scale of zero", small, *others(small))


def _nvfp4_maxima() -> Iterator[Case]:
    x = random((5, 131), 7)
    of_nvfp4 = (0.0, -0.0, 1e-45, 1e-38, 1e-30, 1e-6, 0.5, 1e3, _LARGEST, 1e6, 1e30, 3e38, math.inf, -1.0, math.nan)
    for maximum in of_nvfp4:
        for dtype in FLOATS:
            name = f"{dtype_name(dtype)}, tensor_amax {maximum}"
            yield case("options", name, x.to(dtype), torch.tensor(maximum))
        scaled = x * (maximum if math.isfinite(maximum) else 1.0) / 700
        yield case("options", f"of that size, tensor_amax {maximum}", scaled, torch.tensor(maximum))
    for p in (17.0, 19.0, 464.0, 500.0, 1e6):
        block = torch.tensor([[6 * p, 3 * p, -p, *[0.0] * 13]])
        yield case("saturation", f"a block beyond tensor_amax, {p}", block, torch.tensor(_LARGEST))
    infinite = torch.full((2, 16), math.inf)
    infinite[:, ::2] = 3e3
    yield from values.of_every_dtype("nonfinite", "infinities beyond tensor_amax", infinite, torch.tensor(_LARGEST))
    # The largest float16 is less than this maximum, so that its blocks have a scale less than 448.
    yield case("nonfinite", "float16, tensor_amax 1e6", infinite.to(torch.float16), torch.tensor(1e6))
    for dtype in FLOATS:
        yield case("dtypes", f"tensor_amax {dtype_name(dtype)}", x, torch.tensor(700.0).to(dtype))
    yield case("options", "tensor_amax[1]", x, torch.tensor([700.0]))
    yield case("options", "tensor_amax by keyword", x, tensor_amax=torch.tensor(700.0))


def _mxfp4_values() -> Iterator[Case]:
    beyond = _led(both_signs(torch.tensor(_E2M1_BEYOND)), 32, 4.0)
    for power in (0, -5, 10):
        yield from values.of_every_dtype("saturation", f"beyond 6 times 2**{power}", beyond * 2.0**power)
    powers = 2.0 ** torch.arange(-149.0, 128.0, dtype=torch.float64)
    near = values.with_neighbours(powers.float())  # a rounded logarithm gives some of these the next exponent
    blocks = (near[:, None] * torch.linspace(1.0, -1.0, 32)).contiguous()
    yield from values.of_every_dtype("scales", "around powers of two", blocks)
    yield case("scales", "around powers of two, float64's", powers[:, None] ** 7 * torch.linspace(1.0, -1.0, 32))


def _malformed(*others: object) -> Iterator[Case]:
    yield from values.malformed_inputs(*others)
    yield case("malformed", "x[]", torch.ones(()), *others, gradient=False, malformed=True)
