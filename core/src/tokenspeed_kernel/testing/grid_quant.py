# SPDX-License-Identifier: Apache-2.0
"""Calls of the ``fake_quant_*`` slots: of ``fake_quant_fp8`` so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tokenspeed_kernel.testing.grid import FLOATS, LAYOUTS, Call, Case, dtype_name, random

__all__ = ["fake_quant_fp8"]

_SHAPES = ((), (1,), (0,), (4, 0), (7,), (127,), (1023,), (1024,), (1025,), (3, 129), (2, 3, 5, 7))
_HALVES = (torch.float32, torch.float16, torch.bfloat16)
_SATURATING = (447.9, 448.0, 448.1, 463.9, 464.0, 464.1, 480.0, 1000.0, 6e4)
_TINY = (0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-11, 2.0**-6, 2.0**-7, 2.0**-14, 2.0**-24, 2.0**-126, 2.0**-149)


def fake_quant_fp8() -> tuple[Case, ...]:
    """Return the cases of ``fake_quant_fp8(x, scale)``."""
    return (*_shapes(), *_dtypes(), *_strides(), *_values(), *_scales(), *_channels(), *_malformed())


def _case(
    group: str,
    name: str,
    x: Callable[[], torch.Tensor],
    scale: Callable[[], torch.Tensor | float],
    *,
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradient: bool = True,
    malformed: bool = False,
) -> Case:
    def build(device: str) -> Call:
        value, step = x().to(device), scale()
        if layout is not None:
            value = layout(value)
        return Call((value, step.to(device) if isinstance(step, torch.Tensor) else step))

    return Case(name=name, group=group, build=build, gradients=(0,) if gradient else (), malformed=malformed)


def _shapes() -> Iterator[Case]:
    for shape in _SHAPES:
        yield _case("shapes", f"x{list(shape)}", lambda s=shape: random(s), lambda: torch.tensor([0.1]))  # type: ignore[misc]  # mypy infers no lambda with a default
    yield Case(name="large", group="shapes", build=_large, gradients=(0,))
    yield _case("shapes", "x[33, 65], scale[1, 1]", lambda: random((33, 65)), lambda: torch.full((1, 1), 0.3))
    yield _case("shapes", "x[], scale[1]", lambda: random(()), lambda: torch.full((1,), 0.3))


def _large(device: str) -> Call:
    shape = (2053, 8209) if device.startswith("cuda") else (131, 1031)  # many blocks of any size, at the price of each
    return Call((random(shape).to(device), torch.tensor([0.1], device=device)))


def _dtypes() -> Iterator[Case]:
    for dtype in FLOATS:
        name = f"x {dtype_name(dtype)}"
        yield _case("dtypes", name, lambda d=dtype: random((33, 65)).to(d), lambda: torch.tensor(0.1))  # type: ignore[misc]  # as above
        yield _case("dtypes", f"x {dtype_name(dtype)}, a number", lambda d=dtype: random((5, 7)).to(d), lambda: 0.1)  # type: ignore[misc]  # as above
        scale = f"scale {dtype_name(dtype)}"
        yield _case("dtypes", scale, lambda: random((33, 65)), lambda d=dtype: torch.tensor(0.1).to(d))  # type: ignore[misc]  # as above
    for number in (0.1, 1.0):
        yield _case("dtypes", f"every bfloat16, scale {number}", _every_bfloat16, lambda n=number: torch.tensor(n))  # type: ignore[misc]  # as above


def _every_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _strides() -> Iterator[Case]:
    for name, layout in LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((33, 65), (2, 3, 5, 8)):
                yield _case(
                    "strides",
                    f"{name} x{list(shape)} {dtype_name(dtype)}",
                    lambda s=shape, d=dtype: random(s).to(d),  # type: ignore[misc]  # as above
                    lambda: torch.tensor(0.1),
                    layout=layout,
                    gradient=name != "negated",
                )
        yield _case(
            "strides",
            f"{name} x[6, 9], scale[6, 1]",
            lambda: random((6, 9)),
            lambda: torch.arange(1.0, 7.0)[:, None] / 7,
            layout=layout,
            gradient=name != "negated",
        )


def _both_signs(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, -values])


def _ties() -> torch.Tensor:
    """Return every value halfway between two E4M3 numbers, and its neighbours in float32."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448, in order
    ties = ((codes[1:] + codes[:-1]) / 2).float()
    near = [torch.nextafter(ties, torch.full_like(ties, towards)) for towards in (0.0, 1e9)]
    return _both_signs(torch.cat([ties, *near]))


def _values() -> Iterator[Case]:
    def special(values: tuple[float, ...]) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat([_both_signs(torch.tensor(values)), random((37,))])

    nonfinite = special((math.nan, math.inf, 1.0, math.nan))
    makers = {"ties": _ties, "saturation": special(_SATURATING), "nonfinite": nonfinite, "tiny": special(_TINY)}
    for group, make in makers.items():
        for dtype in FLOATS:
            for scale in (1.0, 0.5, 0.1):
                yield _case(
                    group,
                    f"{dtype_name(dtype)}, scale {scale}",
                    lambda m=make, d=dtype: m().to(d),  # type: ignore[misc]  # as above
                    lambda n=scale: torch.tensor(n),  # type: ignore[misc]  # as above
                )
    for scale in (math.nan, math.inf):
        yield _case("nonfinite", f"scale {scale}", nonfinite, lambda n=scale: torch.tensor(n))  # type: ignore[misc]  # as above
    yield _case("nonfinite", "all NaN", lambda: torch.full((5, 3), math.nan), lambda: torch.tensor(1.0))


def _scales() -> Iterator[Case]:
    for size in (1e-30, 1e-20, 1e-13, 1e-12, 1e-6, 3.0, 1e6, 1e20, 1e30, 0.0, -0.0, -1.0):
        for dtype in _HALVES:
            yield _case(
                "scales",
                f"{size}, x {dtype_name(dtype)}",
                lambda n=size, d=dtype: torch.cat([random((129,)) * n, random((65,), 1)]).to(d),  # type: ignore[misc]  # as above
                lambda n=size: torch.tensor([n]),  # type: ignore[misc]  # as above
            )


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
    special = torch.tensor([0.0, math.nan, -1.0, 1e-30, 1e30, math.inf, 1.0])
    yield _case("channels", "x[7, 9], special scales", lambda: random((7, 9)), lambda: special[:, None])
    wide = (torch.arange(1.0, 17.0) / 8)[::2, None]
    yield _case("channels", "x[8, 9], sliced scale", lambda: random((8, 9)), lambda: wide)


def _channel_case(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Case:
    def scale() -> torch.Tensor:
        return torch.rand(sizes, generator=torch.Generator().manual_seed(1)) + 0.01

    return _case("channels", f"x{list(shape)}, scale{list(sizes)}", lambda: random(shape), scale)


def _malformed() -> Iterator[Case]:
    makers: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
        "x int64": (lambda: torch.ones(3, dtype=torch.int64), lambda: torch.tensor(1.0)),
        "x complex64": (lambda: torch.ones(3, dtype=torch.complex64), lambda: torch.tensor(1.0)),
        "scale int64": (lambda: torch.ones(3), lambda: torch.ones(1, dtype=torch.int64)),
        "scale[2] for x[3]": (lambda: torch.ones(3), lambda: torch.ones(2)),
        "scale[2, 3] for x[3]": (lambda: torch.ones(3), lambda: torch.ones(2, 3)),
        "scale[0] for x[3]": (lambda: torch.ones(3), lambda: torch.ones(0)),
    }
    for name, (x, scale) in makers.items():
        yield _case("malformed", name, x, scale, gradient=False, malformed=True)
