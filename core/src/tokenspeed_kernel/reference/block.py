# SPDX-License-Identifier: Apache-2.0
"""The block formats: E2M1 elements that share a scale, NVFP4 in blocks of 16 and MXFP4 in blocks of 32.

Blocks lie along the last axis; the last one may be short. NaN stays in its element and is ignored in maxima, an
infinite maximum counts as the largest finite value of the input's dtype. Arithmetic is float32 (float64 for float64
inputs), and the result is rounded once to the input's dtype.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.reference.arguments import arithmetic_dtype, constant, one_element, require_float, require_rank
from tokenspeed_kernel.reference.maxima import group_amax, overall_amax, to_elements
from tokenspeed_kernel.reference.rounding import to_e2m1, to_e4m3
from tokenspeed_kernel.reference.straight_through import scaled

__all__ = [
    "fake_quant_mxfp4_dynamic",
    "fake_quant_mxfp4_weight",
    "fake_quant_nvfp4_dynamic",
    "fake_quant_nvfp4_weight",
]

_NVFP4_BLOCK = 16
_MXFP4_BLOCK = 32
_E2M1_MAX = 6.0
_E2M1_LARGEST_EXPONENT = 2
_E4M3_MAX = 448.0
_E8M0_LARGEST_EXPONENT = 127  # the smallest is its negative


def fake_quant_nvfp4_weight(weight: torch.Tensor, tensor_amax: torch.Tensor | float) -> torch.Tensor:
    """Return ``weight`` in NVFP4: E2M1 elements, an E4M3 scale per block of 16, one scale per tensor.

    The tensor's scale is ``t = tensor_amax / (448 * 6)``; a block's is ``b = E4M3(block amax / (6 * t))``, at most 448;
    with ``e = b * t`` an element is ``E2M1(x / e) * e``, and a zero of its sign where ``e`` is zero.

    Args:
        weight: float32, float16, bfloat16 or float64, one axis or more, any strides.
        tensor_amax: largest magnitude of the tensor: a number, or a tensor of one element; NaN or a negative counts as
            zero, an infinity as the largest finite value of the dtype of ``weight``.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the memory format of ``weight``. Its gradient
        for ``weight`` is the identity (straight-through estimator); ``tensor_amax`` gets none.

    Raises:
        TypeError: ``weight`` or ``tensor_amax`` is not real floating point.
        ValueError: ``weight`` has no axis, or ``tensor_amax`` not one element.

    Formula: the NVFP4 format as NVIDIA documents it.
    """
    _check("fake_quant_nvfp4_weight", "weight", weight)
    largest = one_element("fake_quant_nvfp4_weight", "tensor_amax", tensor_amax, weight)
    largest = largest.nan_to_num(nan=0.0, posinf=torch.finfo(weight.dtype).max).clamp(min=0.0)
    return _nvfp4(weight, group_amax(weight, _NVFP4_BLOCK), largest)


def fake_quant_nvfp4_dynamic(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in NVFP4 under its own largest magnitude: see :func:`fake_quant_nvfp4_weight`.

    Args:
        x: float32, float16, bfloat16 or float64, one axis or more, any strides.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the memory format of ``x``. Its gradient is the
        identity (straight-through estimator); none passes through the maxima.

    Raises:
        TypeError: ``x`` is not real floating point.
        ValueError: ``x`` has no axis.

    Formula: the NVFP4 format as NVIDIA documents it.
    """
    _check("fake_quant_nvfp4_dynamic", "x", x)
    block_amax = group_amax(x, _NVFP4_BLOCK)
    return _nvfp4(x, block_amax, overall_amax(block_amax))


def fake_quant_mxfp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` in MXFP4: E2M1 elements, and a power of two per block of 32.

    The exponent of a block is ``e = floor(log2(block amax)) - 2``, within ±127; an element is
    ``E2M1(x / 2**e) * 2**e``, so that the largest of a block may saturate at ``6 * 2**e``.

    Args:
        weight: float32, float16, bfloat16 or float64, one axis or more, any strides.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the memory format of ``weight``. Its gradient is
        the identity (straight-through estimator).

    Raises:
        TypeError: ``weight`` is not real floating point.
        ValueError: ``weight`` has no axis.

    Formula: OCP Microscaling Formats (MX) Specification 1.0, MXFP4, section 6.3 for the scale.
    """
    _check("fake_quant_mxfp4_weight", "weight", weight)
    return _mxfp4(weight)


def fake_quant_mxfp4_dynamic(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in MXFP4, as :func:`fake_quant_mxfp4_weight` does for a weight.

    Args:
        x: float32, float16, bfloat16 or float64, one axis or more, any strides.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the memory format of ``x``. Its gradient is the
        identity (straight-through estimator); none passes through the maxima.

    Raises:
        TypeError: ``x`` is not real floating point.
        ValueError: ``x`` has no axis.

    Formula: OCP Microscaling Formats (MX) Specification 1.0, MXFP4, section 6.3 for the scale.
    """
    _check("fake_quant_mxfp4_dynamic", "x", x)
    return _mxfp4(x)


def _check(slot: str, argument: str, value: torch.Tensor) -> None:
    require_float(slot, argument, value)
    require_rank(slot, argument, value, 1)


def _nvfp4(x: torch.Tensor, block_amax: torch.Tensor, tensor_amax: torch.Tensor) -> torch.Tensor:
    tensor_scale = tensor_amax / constant(_E4M3_MAX * _E2M1_MAX, tensor_amax)
    block_scale = to_e4m3(block_amax / (tensor_scale * _E2M1_MAX))
    # A tensor scale of zero makes the quotient infinite or NaN.
    step = torch.where(tensor_scale > 0, block_scale * tensor_scale, 0.0)
    step = to_elements(step, _NVFP4_BLOCK, x)
    # Under a step of zero any divisor will do: the product with it leaves a zero of the element's sign, or NaN.
    divisor = torch.where(step > 0, step, 1.0)
    return scaled(x, to_e2m1(x.detach().to(step.dtype) / divisor), step)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    step = to_elements(_block_power(group_amax(x, _MXFP4_BLOCK)), _MXFP4_BLOCK, x)
    return scaled(x, to_e2m1(x.detach().to(arithmetic_dtype(x)) / step), step)


def _block_power(amax: torch.Tensor) -> torch.Tensor:
    """Return ``2**e`` of each block, found by exact products and comparisons.

    Logarithms and ``exp2`` round, and ``exp2`` flushes the subnormal 2**-127; traces and vmap do not take a view of the
    bits.
    """
    power = torch.full_like(amax, 2.0**-_E8M0_LARGEST_EXPONENT)
    for exponent in (64, 64, 64, 32, 16, 8, 4, 2, 1):  # not 128: a float32 does not hold that power
        higher = power * 2.0**exponent
        power = torch.where(higher * 2.0**_E2M1_LARGEST_EXPONENT <= amax, higher, power)
    return power.clamp(max=2.0**_E8M0_LARGEST_EXPONENT)
