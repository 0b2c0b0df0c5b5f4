# SPDX-License-Identifier: Apache-2.0
"""Calls of the integer slots: ``fake_quant_int8_per_channel``, ``_int8_affine`` and ``_int_grouped``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tokenspeed_kernel.testing import grid_values as values
from tokenspeed_kernel.testing.grid import FLOATS, Case, dtype_name, random
from tokenspeed_kernel.testing.grid_values import both_signs, case

__all__ = ["fake_quant_int8_affine", "fake_quant_int8_per_channel", "fake_quant_int_grouped"]

_STEPS = (1.0, 0.5, 0.1, 0.0123291015625)  # of the last two the reciprocal is rounded, and moves ties
_BEYOND = (126.5, 127.0, 127.4, 127.5, 127.6, 128.0, 128.5, 128.6, 130.0, 1e3, 1e10, 1e19, 1e30, 3e38, math.inf)


def _scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01


# --- per channel ----------------------------------------------------------------------------------------------------


def fake_quant_int8_per_channel() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_int8_per_channel(weight, ch_axis, scale)``."""
    return (*_channel_shapes(), *_channel_values(), *_channel_axes(), *_channel_malformed())


def _channel_shapes() -> Iterator[Case]:
    for shape in (*values.SHAPES, (64, 3, 3, 3)):
        yield case("shapes", f"weight{list(shape)}", random(shape))
        yield case("shapes", f"weight{list(shape)}, a scale", random(shape), 0, _scale(shape[0]))
    yield case("shapes", "large", values.large)
    yield case("shapes", "tall", values.tall)
    yield from values.of_every_dtype("dtypes", "", random((33, 65)))
    yield from values.of_every_dtype("dtypes", "a scale", random((33, 65)), 0, _scale(33))
    for dtype in FLOATS:
        yield case("dtypes", f"scale {dtype_name(dtype)}", random((33, 65)), 0, _scale(33).to(dtype))
    yield case("dtypes", "every bfloat16", values.every_bfloat16())
    yield case("dtypes", "every bfloat16, a scale", values.every_bfloat16(), 0, torch.full((256,), 0.1))
    for shape in ((33, 65), (6, 3, 5, 8)):
        yield from values.in_layouts(f"weight{list(shape)}", random(shape))
    yield from values.in_layouts("weight[6, 9], ch_axis 1, a scale", random((6, 9)), 1, _scale(9))
    yield case("options", "scale None", random((6, 9)), 0, None)
    yield case("options", "ch_axis by keyword", random((6, 9)), ch_axis=1)
    yield case("options", "scale by keyword", random((6, 9)), scale=_scale(6))


def _channel_values() -> Iterator[Case]:
    for step in _STEPS:
        scale, ties = torch.full((2,), step), values.steps(-131, 130, step)
        x = torch.stack([ties, -ties])
        yield from values.of_every_dtype("ties", f"scale {step}", x, 0, scale)
        lead = torch.full((2, 1), step) * 127  # what makes that scale
        inside = values.steps(-127, 126, step)
        yield from values.of_every_dtype("ties", f"maximum {127 * step}", torch.cat([lead, inside.expand(2, -1)], 1))
        yield from values.of_every_dtype(
            "saturation", f"scale {step}", both_signs(torch.tensor(_BEYOND)).expand(2, -1) * step, 0, scale
        )
    for name, x in values.nonfinite_rows(67).items():
        yield from values.of_every_dtype("nonfinite", name, x)
        yield from values.of_every_dtype("nonfinite", f"{name}, a scale", x, 0, _scale(4))
    for dtype in FLOATS:
        tiny, name = values.tiny_rows(dtype, 65), dtype_name(dtype)
        yield case("tiny", name, tiny)
        for step in (0.0, 1e-7):
            yield case("tiny", f"{name}, scale {step}", tiny, 0, torch.full((4,), step))
    for size in (*values.SIZES, 0.0):
        for dtype in values.HALVES:
            x = torch.stack([random((129,)) * size, random((129,), 1)]).to(dtype)
            yield case("scales", f"{size} {dtype_name(dtype)}", x)
            yield case("scales", f"{size} {dtype_name(dtype)}, a scale", x, 0, torch.tensor([size, -size]))


def _channel_axes() -> Iterator[Case]:
    for shape in ((5, 33, 7, 9), (8, 8), (3, 1030), (6,)):  # (8, 8): the shape does not tell which axis is meant
        for axis in range(len(shape)):
            for signed in (axis, axis - len(shape)):
                name = f"weight{list(shape)}, ch_axis {signed}"
                yield case("channels", name, random(shape), signed)
                yield case("channels", f"{name}, a scale", random(shape), signed, _scale(shape[axis]))
    yield case("channels", "special scales", random((7, 9)), 0, torch.tensor(values.SPECIAL_SCALES))
    yield case("channels", "sliced scale", random((8, 9)), 0, values.sliced(_scale(8)))
    for name, scale in {
        "[8, 1]": _scale(8, 1),
        "[1, 8]": _scale(1, 8),
        "[1]": _scale(1),
        "[]": torch.tensor(0.3),
    }.items():
        yield case("channels", f"scale{name} for ch_axis 0", random((8, 8)), 0, scale)


def _channel_malformed() -> Iterator[Case]:
    yield from values.malformed_inputs(name="weight")
    square = torch.ones(4, 4)
    calls: dict[str, tuple[object, ...]] = {
        "weight[4, 4], ch_axis 2": (square, 2),
        "weight[4, 4], ch_axis -3": (square, -3),
        "weight[], ch_axis 0": (torch.ones(()), 0),
        "scale int64": (square, 0, torch.ones(4, dtype=torch.int64)),
        "scale[5] for 4 channels": (square, 0, torch.ones(5)),
        "scale[0] for 4 channels": (square, 0, torch.ones(0)),
        "scale[2, 4] for 4 channels": (square, 0, torch.ones(2, 4)),
    }
    for name, call in calls.items():
        yield case("malformed", name, *call, gradient=False, malformed=True)


# --- affine ---------------------------------------------------------------------------------------------------------

_RANGES = (
    (0.0, 6.0),
    (-6.0, 0.0),
    (-0.3, 2.7),
    (1.0, 5.0),
    (-5.0, -1.0),
    (5.0, -5.0),
    (0.0, 0.0),
    (-1e-30, 1e-30),
    (-1e-10, 3e-10),
    (-1e30, 3e30),
    (-3e38, 3e38),
    (-math.inf, math.inf),
    (0.0, math.inf),
    (-math.inf, 1.0),
    (math.nan, 1.0),
    (-1.0, math.nan),
)


def fake_quant_int8_affine() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_int8_affine(x, lo, hi, scalars)``."""
    return (*_affine_shapes(), *_affine_values(), *_affine_ranges(), *_affine_malformed())


def _affine_shapes() -> Iterator[Case]:
    ends = (torch.tensor(-20.0), torch.tensor(30.0))
    for shape in ((), *values.SHAPES):
        yield case("shapes", f"x{list(shape)}", random(shape), *ends)
    yield case("shapes", "large", values.large, *ends)
    yield case("shapes", "lo[1], hi[1]", random((33, 65)), torch.tensor([-20.0]), torch.tensor([30.0]))
    yield from values.of_every_dtype("dtypes", "", random((33, 65)), *ends)
    yield from values.of_every_dtype("dtypes", "numbers", random((5, 7)), -0.7, 2.9)
    for dtype in FLOATS:
        lo, hi = torch.tensor(-0.7).to(dtype), torch.tensor(2.9).to(dtype)
        yield case("dtypes", f"lo and hi {dtype_name(dtype)}", random((33, 65)), lo, hi)
    yield case("dtypes", "every bfloat16", values.every_bfloat16(), *ends)
    for shape in ((33, 65), (2, 3, 5, 8)):
        yield from values.in_layouts(f"x{list(shape)}", random(shape), *ends)


def _affine_values() -> Iterator[Case]:
    for step in _STEPS:
        for zero in (0, 1, -37, 127):  # the zero point is added after rounding: an odd one would move every tie
            ends = [torch.tensor(float(n - zero)) * torch.tensor(step) for n in (-128, 127)]
            name = f"step {step}, zero point {zero}"
            yield case("ties", name, values.steps(-260, 260, step), *ends)
            beyond = both_signs(torch.tensor(_BEYOND)) * step - zero * step
            yield from values.of_every_dtype("saturation", name, beyond, *ends)
        yield from values.of_every_dtype("ties", f"step {step}", values.steps(-130, 130, step), -128 * step, 127 * step)
    for end in values.steps(-130, 3, 1.0)[::7]:
        yield case("ties", f"zero point of lo {float(end)}", random((65,)), end, end + 255)
    for name, x in values.nonfinite_rows(67).items():
        yield from values.of_every_dtype("nonfinite", name, x, torch.tensor(-20.0), torch.tensor(30.0))
    for dtype in FLOATS:
        for step in (0.0, 1e-7):
            lo, hi = torch.tensor(-99 * step), torch.tensor(156 * step)
            yield case("tiny", f"{dtype_name(dtype)}, step {step}", values.tiny_rows(dtype, 65), lo, hi)
    for size in (*values.SIZES, 0.0):
        for dtype in values.HALVES:
            x = torch.stack([random((129,)) * size, random((129,), 1)]).to(dtype)
            yield case("scales", f"{size} {dtype_name(dtype)}", x, torch.tensor(-9 * size), torch.tensor(3 * size))


def _affine_ranges() -> Iterator[Case]:
    x = torch.cat([random((67,)), torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e30, -1e30])])
    # First, and finite: what graphs and captures can hold. The operator that these record for it swallows NaN.
    yield case("options", "scalars, of numbers, finite", random((3, 67)), -0.3, 2.7, True)
    yield case("options", "scalars, of numbers", x, -0.3, 2.7, True)
    yield case("options", "scalars, of tensors", x, torch.tensor(-0.3), torch.tensor(2.7), True)
    yield case("options", "scalars by keyword", x, torch.tensor(-0.3), torch.tensor(2.7), scalars=True)
    yield case("options", "lo a number, hi a tensor", x, -0.3, torch.tensor(2.7))
    for lo, hi in _RANGES:
        name = f"from {lo} to {hi}"
        yield case("options", name, x, torch.tensor(lo), torch.tensor(hi))
        yield case("options", f"{name}, numbers", x, lo, hi)
        yield case("options", f"{name}, float16", x.to(torch.float16), torch.tensor(lo), torch.tensor(hi))
        yield case("options", f"{name}, float64", x.double(), torch.tensor(lo), torch.tensor(hi))
        yield case("options", f"{name}, scalars", x, torch.tensor(lo), torch.tensor(hi), True)
    several: dict[str, tuple[int, ...]] = {"row": (33, 1), "column": (65,), "element": (33, 65)}
    for name, sizes in several.items():
        width = _scale(*sizes)
        yield case("channels", f"a range for each {name}", random((33, 65)), -20 * width, 30 * width)


def _affine_malformed() -> Iterator[Case]:
    yield from values.malformed_inputs(torch.tensor(-1.0), torch.tensor(1.0))
    one = torch.tensor(1.0)
    ends: dict[str, tuple[object, object]] = {
        "lo[2] for x[3]": (torch.zeros(2), one),
        "hi[2, 3] for x[3]": (-one, torch.ones(2, 3)),
        "lo complex64": (torch.zeros((), dtype=torch.complex64), one),
        "hi int64": (-one, torch.ones((), dtype=torch.int64)),
    }
    for name, (lo, hi) in ends.items():
        yield case("malformed", name, torch.ones(3), lo, hi, gradient=False, malformed=True)


# --- grouped --------------------------------------------------------------------------------------------------------


def fake_quant_int_grouped() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_int_grouped(weight, bits, group_size, scale)``."""
    return (*_grouped_shapes(), *_grouped_values(), *_grouped_scales(), *_grouped_malformed())


def _groups(weight: torch.Tensor, size: int) -> tuple[int, int]:
    return weight.shape[0], -(-weight.shape[1] // size)


def _grouped_shapes() -> Iterator[Case]:
    for shape in ((1, 1), (0, 32), (4, 0), (1, 127), (3, 129), (5, 1024), (2, 1025), (127, 1), (33, 16)):
        yield case("shapes", f"weight{list(shape)}", random(shape), 4, 32)
    yield case("shapes", "large", values.large, 4, 128)
    yield case("shapes", "tall", values.tall, 4, 32)
    yield from values.of_every_dtype("dtypes", "", random((33, 65)), 4, 32)
    yield from values.of_every_dtype("dtypes", "a scale", random((33, 65)), 4, 32, _scale(33, 3))
    for dtype in FLOATS:
        yield case("dtypes", f"scale {dtype_name(dtype)}", random((33, 65)), 4, 32, _scale(33, 3).to(dtype))
    yield case("dtypes", "every bfloat16", values.every_bfloat16(), 8, 32)
    yield from values.in_layouts("weight[33, 65]", random((33, 65)), 4, 32)
    yield from values.in_layouts("weight[6, 9], a scale", random((6, 9)), 4, 4, _scale(6, 3))
    for bits in range(2, 9):
        for size in (1, 3, 16, 32, 128, 1000):
            yield case("options", f"{bits} bits, groups of {size}", random((5, 131)), bits, size)
    yield case("options", "by keyword", random((5, 131)), bits=4, group_size=32)
    yield case("options", "scale by keyword", random((5, 131)), 4, 32, scale=_scale(5, 5))
    yield case("options", "scale None", random((5, 131)), 4, 32, None)


def _grouped_values() -> Iterator[Case]:
    for bits in (2, 3, 4, 8):
        most = 2 ** (bits - 1) - 1
        for step in _STEPS:
            ties, scale = values.steps(-most - 3, most + 3, step), torch.full((2, 1), step)
            yield from values.of_every_dtype(
                "ties", f"{bits} bits, scale {step}", ties.expand(2, -1), bits, 4096, scale
            )
            inside = values.steps(-most, most - 1, step)
            lead = torch.full((1,), step) * most  # what makes that scale
            yield case("ties", f"{bits} bits, maximum {most * step}", torch.cat([lead, inside])[None], bits, 4096)
        x = both_signs(torch.tensor([*(most + n for n in (0.0, 0.4, 0.5, 0.6, 1.0, 1.5, 2.0)), *_BEYOND[8:]]))
        yield from values.of_every_dtype("saturation", f"{bits} bits", x.reshape(2, -1), bits, 64, torch.ones(2, 1))
    for name, x in values.nonfinite_rows(101).items():
        yield from values.of_every_dtype("nonfinite", name, x, 4, 32)
        yield from values.of_every_dtype("nonfinite", f"{name}, a scale", x, 4, 32, _scale(4, 4))
    for dtype in FLOATS:
        tiny, name = values.tiny_rows(dtype, 65), dtype_name(dtype)
        yield case("tiny", name, tiny, 8, 32)
        for step in (0.0, 1e-7):
            yield case("tiny", f"{name}, scale {step}", tiny, 4, 32, torch.full((4, 3), step))
    for size in (*values.SIZES, 0.0):
        for dtype in values.HALVES:
            x = torch.stack([random((129,)) * size, random((129,), 1)]).to(dtype)
            yield case("scales", f"{size} {dtype_name(dtype)}", x, 4, 32)
            yield case("scales", f"{size} {dtype_name(dtype)}, a scale", x, 4, 32, torch.full((2, 5), size))


def _grouped_scales() -> Iterator[Case]:
    for shape, size in (((5, 131), 32), ((4, 128), 32), ((7, 9), 1), ((3, 5), 100), ((4, 16), 4)):
        x = random(shape)  # [4, 128] in groups of 32: the shape of the scale does not tell its axes
        yield case("channels", f"weight{list(shape)}, groups of {size}", x, 4, size, _scale(*_groups(x, size)))
    special = torch.tensor(values.SPECIAL_SCALES).expand(2, 7)
    yield case("channels", "special scales", random((2, 28)), 4, 4, special)
    yield case("channels", "sliced scale", random((8, 9)), 4, 3, values.sliced(_scale(8, 3)))


def _grouped_malformed() -> Iterator[Case]:
    yield from values.malformed_inputs(4, 32, name="weight")
    x = torch.ones(4, 64)
    calls: dict[str, tuple[object, ...]] = {
        "weight[64]": (torch.ones(64), 4, 32),
        "weight[2, 4, 8]": (torch.ones(2, 4, 8), 4, 32),
        "weight[]": (torch.ones(()), 4, 32),
        "1 bit": (x, 1, 32),
        "9 bits": (x, 9, 32),
        "groups of 0": (x, 4, 0),
        "groups of -1": (x, 4, -1),
        "scale int64": (x, 4, 32, torch.ones((4, 2), dtype=torch.int64)),
        "scale[4, 3] for 2 groups": (x, 4, 32, torch.ones(4, 3)),
        "scale[3, 2] for 4 rows": (x, 4, 32, torch.ones(3, 2)),
        "scale[2, 4]": (x, 4, 32, torch.ones(2, 4)),
    }
    for name, call in calls.items():
        yield case("malformed", name, *call, gradient=False, malformed=True)
