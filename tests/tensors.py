# SPDX-License-Identifier: Apache-2.0
"""Tensors to quantize, and what it means that two are the same. Needs torch: skip a test without it first."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel.testing.parity import differing_bits

__all__ = ["assert_same_bits", "random_tensor"]


def assert_same_bits(actual: torch.Tensor, expected: Any) -> None:
    """Compare dtype, shape and bits, NaN with NaN; numbers in lists are of the dtype of ``actual``."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=actual.dtype)
    got, wanted = (f"{t.dtype} of {tuple(t.shape)}" for t in (actual, expected))
    assert got == wanted, f"{got} instead of {wanted}"
    difference = differing_bits(actual.detach(), expected.detach())
    assert difference is None, difference


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0
) -> torch.Tensor:
    """Return normal numbers of the standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
