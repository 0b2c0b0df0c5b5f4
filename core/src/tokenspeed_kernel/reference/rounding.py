# SPDX-License-Identifier: Apache-2.0
"""Rounding to small floating-point formats, to nearest with ties to even, exact for float32 and float64."""

from __future__ import annotations

import torch

from tokenspeed_kernel.reference.straight_through import is_recorded

__all__ = ["to_e2m1", "to_e4m3"]


def to_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 number (OFP8 1.0) nearest to ``value``; beyond ±448 it is ±448, NaN stays."""
    code = value.clamp(-448.0, 448.0)
    if code.dtype == torch.float32 and not is_recorded():
        return code.to(torch.float8_e4m3fn).to(torch.float32)
    # torch casts float64 to E4M3 through float32, which rounds twice; exporters do not all know the dtype.
    return _to_grid(code, smallest_exponent=-6, largest_exponent=8, mantissa_bits=3)


def to_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 number (OCP MX 1.0) nearest to ``value``; beyond ±6 it is ±6, NaN stays."""
    return _to_grid(value.clamp(-6.0, 6.0), smallest_exponent=0, largest_exponent=2, mantissa_bits=1)


def _to_grid(code: torch.Tensor, *, smallest_exponent: int, largest_exponent: int, mantissa_bits: int) -> torch.Tensor:
    """Round to numbers of so many mantissa bits; below ``2**smallest_exponent`` the grid gets no finer.

    The grid's step doubles with each power of two; as it is a power of two itself, dividing by it and multiplying again
    is exact.
    """
    magnitude = code.abs()
    step = torch.full_like(code, 2.0 ** (smallest_exponent - mantissa_bits))
    for exponent in range(smallest_exponent + 1, largest_exponent + 1):
        step = torch.where(magnitude >= 2.0**exponent, 2.0 ** (exponent - mantissa_bits), step)
    return torch.round(code / step) * step
