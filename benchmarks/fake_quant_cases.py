# SPDX-License-Identifier: Apache-2.0
"""What ``fake_quant.py`` measures: the slots with their arguments, the data, and the bars. No clock, no peer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[1]
sys.path += [str(_ROOT / "core" / "src"), str(_ROOT / "providers" / "triton-fake-quant" / "src")]  # installed ones win

SHAPES = {"weight": (4096, 14336), "activation": (16384, 8192), "small": (256, 256), "exactness": (1024, 1024)}
SMOKE_SHAPES = {"weight": (64, 256), "activation": (96, 128), "small": (16, 128), "exactness": (32, 256)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNITS = (1e-30, 1.0, 1e30)  # standard deviations of the data of which only the bits matter

_ONE_PROGRAM = 16384  # elements of a channel that one program can hold, so that it reads them once
SUPPORTS_BAR = 1.0  # microseconds, for the answer whether a kernel serves a call
FIRST_CALL_BAR = 0.3  # seconds, once Triton itself has started
_CALL_BARS = {"call": 20.0, "call with grad": 30.0}  # microseconds


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to call a slot."""

    slot: str
    home: str
    """The shape that the slot is for: that of a weight or of an activation."""
    others: Callable[[torch.Tensor, float], tuple[object, ...]] = lambda x, unit: ()
    """What follows the tensor in a call, for data of this standard deviation."""
    form: str = ""
    blocks: bool = False
    masked: bool = False
    """Whether the gradient is zero where the code was out of range; else it is the identity."""
    whole: bool = False
    """Whether a maximum over the whole tensor comes first, so that it is read twice."""
    channels: bool = False
    """Whether a maximum over each row comes first."""

    @property
    def label(self) -> str:
        """A short name."""
        name = self.slot.removeprefix("fake_quant_")
        return f"{name}, {self.form}" if self.form else name


def _number(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=x.device)


def _channel_scales(x: torch.Tensor, unit: float) -> torch.Tensor:
    return torch.linspace(0.02, 0.05, x.shape[0], device=x.device) * unit  # the small ones make some values saturate


CASES = (
    Case(slot="fake_quant_fp8", home="activation", others=lambda x, unit: (_number(x, 5 * unit / 448),)),
    Case(
        slot="fake_quant_int8_per_channel",
        home="weight",
        form="dynamic",
        others=lambda x, unit: (0,),
        masked=True,
        channels=True,
    ),
    Case(
        slot="fake_quant_int8_per_channel",
        home="weight",
        form="given scale",
        masked=True,
        others=lambda x, unit: (0, _channel_scales(x, unit)),
    ),
    Case(
        slot="fake_quant_int8_affine",
        home="activation",
        masked=True,
        others=lambda x, unit: (_number(x, -3 * unit), _number(x, 4 * unit)),
    ),
    Case(slot="fake_quant_int_grouped", home="weight", others=lambda x, unit: (4, 128)),
    Case(slot="fake_quant_nvfp4_weight", home="weight", others=lambda x, unit: (_number(x, 5 * unit),), blocks=True),
    Case(slot="fake_quant_nvfp4_dynamic", home="activation", blocks=True, whole=True),
    Case(slot="fake_quant_mxfp4_weight", home="weight", blocks=True),
    Case(slot="fake_quant_mxfp4_dynamic", home="activation", blocks=True),
)


def data(shape: tuple[int, ...], dtype: torch.dtype, device: str, unit: float = 1.0, odd: bool = False) -> torch.Tensor:
    """Return normally distributed values, the same at each call; ``odd`` puts NaN and infinities among them."""
    generator = torch.Generator(device).manual_seed(20)
    x = torch.randn(shape, generator=generator, device=device) * unit
    if odd:
        flat = x.view(-1)
        flat[5::997], flat[7::1999], flat[11::2003] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def share_bar(case: Case, dtype: str, shape: tuple[int, ...], what: str) -> float:
    """Return the least share of the bandwidth of torch.clone that is good enough.

    Where a tensor may be read twice, one and a half times the bytes of a clone move; in a backward, one more bit an
    element, which says where the gradient passes.
    """
    bar = 0.98 if dtype == "fp32" else 0.92 if case.blocks else 0.97
    if what == "backward":
        moved = 2 * torch.finfo(DTYPES[dtype]).bits
        return bar * moved / (moved + 1)
    return 0.95 / 1.5 if case.whole or (case.channels and shape[-1] > _ONE_PROGRAM) else bar


def call_bar(what: str) -> float:
    """Return the most microseconds that the host may spend on a call of a small tensor."""
    return _CALL_BARS[what]


def new_tensors(dtype: torch.dtype, device: str, sizes: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
    """Return one matrix per size and layout: contiguous, not aligned, transposed, part of wider and of more rows."""
    made: list[torch.Tensor] = []
    for rows, columns in sizes:
        flat = data((2 * rows * (columns + 3) + 1,), dtype, device)
        area = rows * columns
        made += [
            flat[:area].view(rows, columns),
            flat[1 : area + 1].view(rows, columns),
            flat[:area].view(columns, rows).t(),
            flat[: rows * (columns + 3)].view(rows, columns + 3)[:, :columns],
            flat[: 2 * area].view(2 * rows, columns)[::2],
        ]
    return made


# A kernel may have variants: for tiles of another power of two, or of several together (three make 7/8 of the next),
# for sizes that are no multiple of 16, for few rows.
WARM_SIZES = tuple(
    (rows, columns - less)
    for rows in (48, 37, 208, 131)
    for columns in (512, 1024, *(eighths * place for place in (256, 512, 1024, 2048) for eighths in (7, 8)))
    for less in (0, 3, 16)
)
NEW_SIZES = ((61, 1184), (96, 333), (129, 5040), (77, 3999), (23, 11111))


def differing(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many elements have other bits; NaN equals NaN, whatever its payload, and -0 differs from +0."""
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    other = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    return int((other & ~(actual.isnan() & expected.isnan())).sum())
