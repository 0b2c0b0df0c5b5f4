# SPDX-License-Identifier: Apache-2.0
"""Bit-for-bit comparison, and inputs that reach every branch of the format."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

SPECIAL = (
    *(448, 464, 465, 480, 1000, -1000, math.inf, -math.inf, math.nan, 0.0, -0.0),
    *(17.0, 19.0, 21.0, -17.0, 1.0625, 1.1875, 2.0**-6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), 2.0**-30, 1e-45),
)


@pytest.fixture
def assert_same_bits() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a check that two tensors hold the same bits, NaN payloads and signs apart, in the same layout."""
    import torch

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(actual), nan)
        bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
        wrong = (actual.contiguous().view(bits) != expected.contiguous().view(bits)) & ~nan
        assert not wrong.any(), f"{int(wrong.sum())} differ: {actual[wrong][:3]} instead of {expected[wrong][:3]}"

    return check


@pytest.fixture
def make_input() -> Callable[..., torch.Tensor]:
    """Return a maker of seeded inputs: values of every scale around ``size``, and the special ones that fit."""
    import torch

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: str, size: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, max(shape[-1:] or (1,), default=1)) * size
        flat = x.reshape(-1)
        special = torch.tensor(SPECIAL)[: flat.numel()]
        flat[: special.numel()] = special * size
        return flat.reshape(shape).to(device, dtype)

    return make
