# SPDX-License-Identifier: Apache-2.0
"""What the grids of the quantization slots share: shapes, values on the edges of formats, and how a case is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tokenspeed_kernel.testing.grid import FLOATS, LAYOUTS, Call, Case, dtype_name, random

__all__ = [
    "HALVES",
    "SHAPES",
    "SIZES",
    "SPECIAL_SCALES",
    "both_signs",
    "case",
    "e4m3_ties",
    "every_bfloat16",
    "in_layouts",
    "large",
    "malformed_inputs",
    "nonfinite_rows",
    "of_every_dtype",
    "sliced",
    "steps",
    "tall",
    "tiny_rows",
    "with_neighbours",
]

SHAPES = ((1,), (0,), (4, 0), (0, 4), (7,), (127,), (1023,), (1024,), (1025,), (127, 1), (3, 129), (2, 3, 5, 7))
HALVES = (torch.float32, torch.float16, torch.bfloat16)  # a half is what overflows and gets subnormal first
SIZES = (1e-42, 1e-38, 1e-30, 1e-20, 1e-13, 1e-12, 1e-6, 3.0, 1e6, 1e20, 1e30, 1e38)
SPECIAL_SCALES = (0.0, math.nan, -1.0, 1e-30, 1e30, math.inf, 1.0)


def case(
    group: str,
    name: str,
    x: object,
    *others: object,
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradient: bool = True,
    malformed: bool = False,
    **options: object,
) -> Case:
    """Return the case that calls a slot with ``x``, others and options.

    Each of them is a tensor, of which every call gets a copy, a function of the device that makes one, or a value.
    """

    def build(device: str) -> Call:
        value = _made(x, device)
        if layout is not None and isinstance(value, torch.Tensor):
            value = layout(value)
        rest = (_made(other, device) for other in others)
        return Call((value, *rest), {key: _made(option, device) for key, option in options.items()})

    return Case(name=name, group=group, build=build, gradients=(0,) if gradient else (), malformed=malformed)


def _made(value: object, device: str) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    return value(device) if callable(value) else value


def of_every_dtype(group: str, name: str, x: torch.Tensor, *others: object) -> Iterator[Case]:
    """Yield a case for each dtype of ``x``."""
    for dtype in FLOATS:
        title = f"{dtype_name(dtype)}, {name}" if name else dtype_name(dtype)
        yield case(group, title, x.to(dtype), *others)


def in_layouts(name: str, x: torch.Tensor, *others: object) -> Iterator[Case]:
    """Yield a case for each layout of ``x``, and for each of float32 and bfloat16."""
    for layout, change in LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{layout} {name} {dtype_name(dtype)}"
            yield case("strides", title, x.to(dtype), *others, layout=change, gradient=layout != "negated")


def malformed_inputs(*others: object, name: str = "x") -> Iterator[Case]:
    """Yield calls with a first argument that no quantization slot takes."""
    for dtype in (torch.int64, torch.complex64):
        x = torch.ones((2, 32), dtype=dtype)
        yield case("malformed", f"{name} {dtype_name(dtype)}", x, *others, gradient=False, malformed=True)


def large(device: str) -> torch.Tensor:
    """Return many blocks of any size; on the CPU few enough elements that torch stays on one thread."""
    return random((2053, 8209) if device.startswith("cuda") else (31, 1031)).to(device)


def tall(device: str) -> torch.Tensor:
    """Return more rows than two dimensions of a CUDA grid count."""
    return random((70_001, 33) if device.startswith("cuda") else (701, 33)).to(device)


def sliced(scale: torch.Tensor) -> Callable[[str], torch.Tensor]:
    """Return what makes a scale of these values whose elements lie apart in memory."""
    return lambda device: LAYOUTS["sliced"](scale.to(device))


def both_signs(values: torch.Tensor) -> torch.Tensor:
    """Return the values and their negatives, in one dimension."""
    return torch.cat([values, -values])


def with_neighbours(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values with the next ones above and below."""
    return torch.cat([values, *(torch.nextafter(values, torch.full_like(values, to)) for to in (-math.inf, math.inf))])


def e4m3_ties() -> torch.Tensor:
    """Return every value halfway between two E4M3 numbers, and its neighbours in float32."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448, in order
    return with_neighbours(((codes[1:] + codes[:-1]) / 2).float())


def steps(first: int, last: int, step: float) -> torch.Tensor:
    """Return ``(n + 0.5) * step`` for each whole ``n`` from first to last, rounded once, and its neighbours."""
    return with_neighbours((torch.arange(first, last + 1) + 0.5) * torch.tensor(step))


def every_bfloat16() -> torch.Tensor:
    """Return each bfloat16 number, NaNs and infinities too, in 256 rows."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)


def nonfinite_rows(width: int) -> dict[str, torch.Tensor]:
    """Return rows of random values with NaN, infinities or both among them, by what they hold."""
    x = random((4, width), 3)
    nan, infinite, both = x.clone(), x.clone(), x.clone()
    nan[0, width // 2] = nan[2, -1] = math.nan
    nan[1] = math.nan
    infinite[0, 0], infinite[1, -1], infinite[2] = math.inf, -math.inf, math.inf
    infinite[2, ::2] = 1e-3  # beside an infinity
    both[0, 0], both[0, 1], both[1, :-1], both[1, -1], both[2] = math.nan, math.inf, math.nan, -math.inf, -math.inf
    return {"NaN": nan, "all NaN": torch.full_like(x, math.nan), "infinities": infinite, "NaN and infinities": both}


def tiny_rows(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return rows around the smallest normal number of a dtype, of zeros of both signs, and of subnormal numbers."""
    tiny = torch.finfo(dtype).tiny
    least = tiny * torch.finfo(dtype).eps
    x = random((4, width), 5).clamp(-30, 30).to(torch.float64) * tiny
    rows = [x[0], x[1] / 64, torch.zeros_like(x[2]), torch.full_like(x[3], least)]
    rows[2][::2] = -0.0
    rows[3][::3] *= -3
    rows[3][1::4] = -0.0
    return torch.stack(rows).to(dtype)
