# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_fp8``: values on the E4M3 grid of a scale."""

from __future__ import annotations

import torch

from tokenspeed_kernel.reference.arguments import arithmetic_dtype, broadcasting, floored, require_float
from tokenspeed_kernel.reference.rounding import to_e4m3
from tokenspeed_kernel.reference.straight_through import scaled

__all__ = ["fake_quant_fp8"]


def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return ``x`` on the FP8 E4M3 grid of ``scale``.

    That is ``E4M3(clamp(x / s, -448, 448)) * s`` with ``s = max(scale, 1e-12)``. Rounding is to nearest, ties to even;
    subnormals are kept; infinities saturate; NaN stays NaN, and a NaN scale gives NaN. Arithmetic is float32 (float64
    for float64 inputs), and the result is rounded once to the dtype of ``x``.

    Args:
        x: float32, float16, bfloat16 or float64, any shape and strides.
        scale: step of the grid, in units of ``x``: a number, or a tensor that broadcasts to the shape of ``x`` (one
            element for the whole tensor, ``(C, 1, ...)`` for channels). One of another device or dtype is converted.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the memory format of ``x``. Its gradient for ``x`` is
        the identity (straight-through estimator); ``scale`` gets none.

    Raises:
        TypeError: ``x`` or ``scale`` is not real floating point.
        ValueError: ``scale`` does not broadcast to the shape of ``x``.

    Formula: OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3, with saturation.
    """
    require_float("fake_quant_fp8", "x", x)
    step = floored(broadcasting("fake_quant_fp8", "scale", scale, x))
    return scaled(x, to_e4m3(x.detach().to(arithmetic_dtype(x)) / step), step)
