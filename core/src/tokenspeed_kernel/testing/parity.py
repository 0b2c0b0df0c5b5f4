# SPDX-License-Identifier: Apache-2.0
"""What counts as equal: bits for the ``fake_quant_*`` slots, tolerances relative to an oracle for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.reference import attention, quant
from tokenspeed_kernel.testing.grid import Call, dtype_name

__all__ = ["YARDSTICKS", "Yardstick", "differing_bits", "largest_finite"]

_VANISHES = 1e-6  # of the largest gradient: float32 has seven digits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What a slot's results are held against."""

    oracle: Callable[..., torch.Tensor]
    """Computes what is right: for slots with tolerances in float64."""
    host: Callable[..., torch.Tensor]
    """The portable path, in the call's own dtypes: what a caller runs where the slot returns None."""
    values: Mapping[torch.dtype, float]
    """Largest difference, relative to the largest value; 0 asks for the same bits."""
    gradients: Mapping[torch.dtype, float]
    straight_through: bool = False
    """Whether the gradient is an estimator's, which no numeric differentiation finds, and a scale has none."""

    def check(self, actual: object, expected: torch.Tensor, call: Call, tighter: float | None = None) -> str | None:
        """Return what is wrong with a result, or None. ``tighter`` replaces the tolerance where that is larger."""
        like = call.args[0]
        if not isinstance(actual, torch.Tensor):
            return f"returned {actual!r:.80} instead of a tensor"
        if actual.dtype != like.dtype or actual.shape != expected.shape or actual.device != like.device:
            got = f"{dtype_name(actual.dtype)}{list(actual.shape)} on {actual.device}"
            return f"returned {got} instead of {dtype_name(like.dtype)}{list(expected.shape)} on {like.device}"
        actual, expected = actual.detach(), expected.detach()
        tolerance = self.values[like.dtype]
        if tolerance:
            return _far(actual, expected, min(tolerance, tighter or tolerance))
        return differing_bits(actual, expected) or _other_format(actual, expected, like)

    def check_gradient(
        self,
        actual: torch.Tensor | None,
        expected: torch.Tensor,
        tighter: float | None = None,
        beside: float = 0.0,
    ) -> str | None:
        """Return what is wrong with a gradient, or None. ``beside`` is the largest value of the call's gradients."""
        if actual is None:
            return "there is none"
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return f"it is {dtype_name(actual.dtype)}{list(actual.shape)}"
        tolerance = self.gradients[actual.dtype]
        return _far(actual, expected, min(tolerance, tighter or tolerance), beside)


def largest_finite(*tensors: torch.Tensor) -> float:
    """Return the largest magnitude of what is finite in the tensors, 0 if nothing is."""
    return max((float(t.detach()[t.isfinite()].abs().max()) for t in tensors if t.isfinite().any()), default=0.0)


def differing_bits(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return where two tensors of one shape and dtype differ in their bits, NaN payloads and signs apart, or None."""
    nan = torch.isnan(expected)
    if actual.isnan().equal(nan):
        bits = _BITS[expected.element_size()]
        left, right = (t.resolve_neg().contiguous().view(bits) for t in (actual, expected))
        wrong = (left != right) & ~nan
    else:
        wrong = actual.isnan() != nan
    return _where(wrong, actual, expected) if wrong.any() else None


def _where(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    got, wanted = actual[index].item(), expected[index].item()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ, the first at {list(index)}: {got} instead of {wanted}"
    )


def _other_format(actual: torch.Tensor, expected: torch.Tensor, like: torch.Tensor) -> str | None:
    if like.shape != expected.shape or not torch.ops.aten.is_non_overlapping_and_dense(like):
        return None
    axes = [axis for axis, size in enumerate(like.shape) if size > 1] if like.numel() else []
    if all(actual.stride(axis) == like.stride(axis) for axis in axes):
        return None
    return f"returned strides {actual.stride()} for an x of strides {like.stride()}"


def _far(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, beside: float = 0.0) -> str | None:
    """Return where values are further from the expected ones than ``tolerance`` times the largest finite of these.

    Where that is next to nothing ``beside`` another value, the terms of a sum cancel (the gradient of queries that see
    one key, say), and what is left is the rounding of terms as large as that value.
    """
    wanted, got = expected.double(), actual.double()
    finite = wanted.isfinite()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    largest = largest_finite(wanted)
    if largest < _VANISHES * beside:
        largest = beside
    wrong = ~same & ~(finite & ((got - wanted).abs() <= tolerance * largest))
    if not wrong.any():
        return None
    worst = largest_finite((got - wanted)[finite]) / largest if largest else float("inf")
    return f"{_where(wrong, actual, expected)} (worst {worst:.2g} of the largest, allowed {tolerance:.2g})"


def _exact_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return attention.sdpa(q.double(), k.double(), v.double(), *args, **kwargs)


def _exact_ms_deform_attn(
    value: torch.Tensor, spatial_shapes: Any, locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    # The coordinates stay in the call's own precision: in another one a sample may lie in another pixel.
    in_double = value.dtype == torch.float64
    locations = locations if in_double or locations.dtype != torch.float64 else locations.float()
    return attention.ms_deform_attn(value.double(), spatial_shapes, locations, weights.double())


def _tolerances(float32: float, float16: float, bfloat16: float) -> Mapping[torch.dtype, float]:
    return {torch.float32: float32, torch.float16: float16, torch.bfloat16: bfloat16, torch.float64: float32}


def _same_bits_as(reference: Callable[..., torch.Tensor]) -> Yardstick:
    return Yardstick(
        oracle=reference,
        host=reference,
        values=_tolerances(0.0, 0.0, 0.0),
        gradients=_tolerances(1e-6, 1e-6, 1e-6),
        straight_through=True,
    )


YARDSTICKS: Mapping[str, Yardstick] = {
    "fake_quant_fp8": _same_bits_as(quant.fake_quant_fp8),
    "fake_quant_int8_affine": _same_bits_as(quant.fake_quant_int8_affine),
    "fake_quant_int8_per_channel": _same_bits_as(quant.fake_quant_int8_per_channel),
    "fake_quant_int_grouped": _same_bits_as(quant.fake_quant_int_grouped),
    "fake_quant_mxfp4_dynamic": _same_bits_as(quant.fake_quant_mxfp4_dynamic),
    "fake_quant_mxfp4_weight": _same_bits_as(quant.fake_quant_mxfp4_weight),
    "fake_quant_nvfp4_dynamic": _same_bits_as(quant.fake_quant_nvfp4_dynamic),
    "fake_quant_nvfp4_weight": _same_bits_as(quant.fake_quant_nvfp4_weight),
    "ms_deform_attn": Yardstick(
        oracle=_exact_ms_deform_attn,
        host=attention.ms_deform_attn,
        values=_tolerances(1e-5, 1e-3, 1e-2),
        gradients=_tolerances(1e-4, 4e-3, 4e-2),
    ),
    "sdpa": Yardstick(
        oracle=_exact_sdpa,
        host=attention.sdpa,
        values=_tolerances(1e-5, 2e-3, 2e-2),
        gradients=_tolerances(1e-4, 4e-3, 4e-2),
    ),
}
"""By slot. The contract gives no tolerance for gradients of attention in halves: four times that of the values."""
