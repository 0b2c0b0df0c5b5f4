# SPDX-License-Identifier: Apache-2.0
"""The integer formats: int8 per channel, int8 in a range, and small integers in groups. A zero result is +0."""

from __future__ import annotations

import ctypes
import math
import warnings

import torch

from tokenspeed_kernel.reference.arguments import (
    arithmetic_dtype,
    broadcasting,
    channel_axis,
    constant,
    floored,
    known,
    one_element,
    require_float,
    require_rank,
)
from tokenspeed_kernel.reference.maxima import channel_amax, group_amax, to_elements
from tokenspeed_kernel.reference.straight_through import is_recorded, scaled

__all__ = ["fake_quant_int8_affine", "fake_quant_int8_per_channel", "fake_quant_int_grouped"]

_INT8_MIN, _INT8_MAX = -128, 127
_FLOAT32_MAX = torch.finfo(torch.float32).max


def fake_quant_int8_per_channel(
    weight: torch.Tensor, ch_axis: int = 0, scale: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Return ``weight`` on the symmetric int8 grid of each channel.

    The code is ``clamp(rint(w * RN(1 / s)), -128, 127)``, ties to even, and the value ``code * s`` with
    ``s = max(scale, 1e-12)``. Infinities saturate; NaN stays NaN, and a NaN scale gives NaN. Arithmetic is float32
    (float64 for float64 inputs), and the result is rounded once to the dtype of ``weight``. Those are the bits of
    torch.fake_quantize_per_channel_affine but for NaN, infinities, codes beyond 2**63 and the sign of zero; an export
    or a trace of anything but float64 records that operator, if the scale is one per channel.

    Args:
        weight: float32, float16, bfloat16 or float64, one axis or more, any strides.
        ch_axis: axis of the channels; a negative one counts from the end.
        scale: step of the grid, in units of ``weight``: one per channel, shape (C,), or anything that broadcasts to the
            shape of ``weight``, or a number. By default the channel's largest magnitude divided by 127, NaN ignored and
            an infinity counted as the largest finite value of the dtype.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the memory format of ``weight``. Its gradient
        for ``weight`` is the identity where the code before the clamp is within its range, and zero elsewhere and at
        NaN; the scale gets none.

    Raises:
        TypeError: ``weight`` or ``scale`` is not real floating point.
        ValueError: ``scale`` does not broadcast to the shape of ``weight``.
        IndexError: ``weight`` has no axis ``ch_axis``.

    Formula: PyTorch's documentation of torch.fake_quantize_per_channel_affine.
    """
    slot = "fake_quant_int8_per_channel"
    require_float(slot, "weight", weight)
    axis = channel_axis(slot, "ch_axis", ch_axis, weight)
    channels = [1] * weight.dim()
    channels[axis] = -1
    if scale is None:
        amax = channel_amax(weight, axis)
        scale = (amax / constant(_INT8_MAX, amax)).view(channels)
    elif isinstance(scale, torch.Tensor) and scale.dim() == 1 and known(scale.shape[0]) == known(weight.shape[axis]):
        scale = scale.reshape(channels)
    step = floored(broadcasting(slot, "scale", scale, weight))

    if is_recorded() and weight.dtype != torch.float64:  # the operator computes in float32
        steps = _one_per_channel(step, weight, axis)
        if steps is not None:
            zero = torch.zeros_like(steps, dtype=torch.int32)
            single = weight.to(torch.float32)
            recorded = torch.fake_quantize_per_channel_affine(single, steps, zero, axis, _INT8_MIN, _INT8_MAX)
            return recorded.to(weight.dtype)
    code = torch.round(weight.detach().to(step.dtype) * torch.reciprocal(step))
    return _scaled_int8(weight, code, step)


def fake_quant_int8_affine(
    x: torch.Tensor, lo: torch.Tensor | float, hi: torch.Tensor | float, scalars: bool = False
) -> torch.Tensor:
    """Return ``x`` on the int8 grid that spans ``lo`` to ``hi``, which is widened to contain 0.

    With ``scale = max((hi - lo) / 255, 1e-12)`` and the zero point ``z = clamp(rint(-128 - lo / scale), -128, 127)``
    the code is ``clamp(rint(x * RN(1 / scale)) + z, -128, 127)``, ties to even, and the value ``(code - z) * scale``.
    An infinity in the range, or a range that overflows, counts as the largest finite float32; infinities in ``x``
    saturate; NaN stays NaN, and gives NaN in ``lo`` or ``hi``. Arithmetic is float32 (float64 for float64 inputs), and
    the result is rounded once to the dtype of ``x``.

    Args:
        x: float32, float16, bfloat16 or float64, any shape and strides.
        lo: lower end of the range, in units of ``x``: a number, or a tensor that broadcasts to the shape of ``x``.
        hi: upper end, likewise.
        scalars: under an export or a trace, record torch.fake_quantize_per_tensor_affine with scale and zero point as
            Python numbers; ``lo`` and ``hi`` have one element then. The values are the same, but for NaN, infinities
            and the sign of zero. While torch.export runs, a tensor has no value to read: give numbers, else the
            operator is recorded with tensors. A float64 ``x``, for which it is not exact, is recorded as it is
            computed.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the memory format of ``x``. Its gradient for ``x`` is
        the identity where the code before the clamp is within its range, and zero elsewhere and at NaN; ``lo`` and
        ``hi`` get none.

    Raises:
        TypeError: ``x``, ``lo`` or ``hi`` is not real floating point.
        ValueError: ``lo`` or ``hi`` does not broadcast to the shape of ``x``, or ``scalars`` is asked of several.

    Formula: PyTorch's documentation of torch.fake_quantize_per_tensor_affine.
    """
    slot = "fake_quant_int8_affine"
    require_float(slot, "x", x)
    as_tensor = one_element if scalars else broadcasting
    scale, zero = _affine_grid(as_tensor(slot, "lo", lo, x), as_tensor(slot, "hi", hi, x))
    if scalars and is_recorded() and x.dtype != torch.float64:  # the operator computes in float32
        step, point = _recorded_grid(lo, hi, scale, zero)
        single = x.to(torch.float32)
        return torch.fake_quantize_per_tensor_affine(single, step, point, _INT8_MIN, _INT8_MAX).to(x.dtype)  # type: ignore[arg-type]  # both numbers or both tensors
    code = torch.round(x.detach().to(scale.dtype) * torch.reciprocal(scale)) + zero
    return _scaled_int8(x, code, scale, zero)


def fake_quant_int_grouped(
    weight: torch.Tensor, bits: int, group_size: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``weight`` as integers of ``bits`` bits with one scale per group of a row.

    The code is ``clamp(rint(w / s), -2**(bits - 1), 2**(bits - 1) - 1)``, ties to even, and the value ``code * s`` with
    ``s = max(scale, 1e-12)``. Infinities saturate; NaN stays NaN, and a NaN scale gives NaN. Arithmetic is float32
    (float64 for float64 inputs), and the result is rounded once to the dtype of ``weight``.

    Args:
        weight: (out, in): float32, float16, bfloat16 or float64, any strides.
        bits: 2 to 8.
        group_size: elements in a group along the last axis, 1 or more; the last group may be short.
        scale: (out, groups): step of each group, in units of ``weight``. By default the group's largest magnitude
            divided by the largest code, NaN ignored and an infinity counted as the largest finite value of the dtype.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``weight``, the memory format of ``weight``. Its gradient
        for ``weight`` is the identity (straight-through estimator); the scale gets none.

    Raises:
        TypeError: ``weight`` or ``scale`` is not real floating point.
        ValueError: ``weight`` has not two axes, ``bits`` or ``group_size`` is none of those above, or ``scale`` is of
            another shape.
    """
    slot = "fake_quant_int_grouped"
    require_float(slot, "weight", weight)
    require_rank(slot, "weight", weight, 2, 2)
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"{slot}: bits must be an integer from 2 to 8, got {bits!r}")
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"{slot}: group_size must be an integer, 1 or more, got {group_size!r}")
    size = min(group_size, max(known(weight.shape[1]), 1))  # a group past the end would be padded in vain
    largest = 2 ** (bits - 1) - 1
    if scale is None:
        amax = group_amax(weight, size)
        scale = amax / constant(largest, amax)
    else:
        scale = _group_scale(slot, scale, weight, size)
    step = to_elements(floored(scale), size, weight)
    code = torch.round(weight.detach().to(step.dtype) / step).clamp(-largest - 1, largest)
    return scaled(weight, code, step, keep_sign_of_zero=False)


def _scaled_int8(
    x: torch.Tensor, code: torch.Tensor, step: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    inside = (code >= _INT8_MIN) & (code <= _INT8_MAX)  # False at NaN
    code = code.clamp(_INT8_MIN, _INT8_MAX)
    return scaled(x, code if zero is None else code - zero, step, inside=inside, keep_sign_of_zero=False)


def _one_per_channel(step: torch.Tensor, weight: torch.Tensor, axis: int) -> torch.Tensor | None:
    """Return ``step``, which broadcasts to ``weight``, as one per channel, (C,); None if it varies within a channel."""
    first = weight.dim() - step.dim()  # the axis of weight that step's first one meets
    if any(known(size) != 1 for n, size in enumerate(step.shape, first) if n != axis):
        return None
    return step.reshape(-1).expand(weight.shape[axis])


def _affine_grid(lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point."""
    lo, hi = (_finite(end) for end in (lo.clamp(max=0.0), hi.clamp(min=0.0)))
    span = _finite(hi - lo)
    scale = floored(span / constant(_INT8_MAX - _INT8_MIN, span))
    return scale, torch.round(_INT8_MIN - lo / scale).clamp(_INT8_MIN, _INT8_MAX)


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(nan=float("nan"), posinf=_FLOAT32_MAX, neginf=-_FLOAT32_MAX)


def _recorded_grid(
    lo: torch.Tensor | float, hi: torch.Tensor | float, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[float, int] | tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point as Python numbers; as tensors where torch.export leaves no value to read."""
    if not isinstance(lo, torch.Tensor) and not isinstance(hi, torch.Tensor):
        return _affine_grid_of_numbers(float(lo), float(hi))
    zero = zero.nan_to_num(nan=0.0).to(torch.int32)  # the scale is NaN, too
    if not torch.jit.is_tracing():
        return scale, zero
    with warnings.catch_warnings():  # that the trace keeps the numbers is what was asked for
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return scale.item(), int(zero.item())


def _affine_grid_of_numbers(lo: float, hi: float) -> tuple[float, int]:
    """Return what :func:`_affine_grid` does. Rounding a double to float32 gives what float32 arithmetic does."""
    if math.isnan(lo) or math.isnan(hi):
        return float("nan"), 0
    lo = max(_float32(min(lo, 0.0)), -_FLOAT32_MAX)
    hi = min(_float32(max(hi, 0.0)), _FLOAT32_MAX)
    scale = max(_float32(min(_float32(hi - lo), _FLOAT32_MAX) / (_INT8_MAX - _INT8_MIN)), _float32(1e-12))
    point = round(_float32(_INT8_MIN - _float32(lo / scale)))
    return scale, max(_INT8_MIN, min(point, _INT8_MAX))


# Dynamo does not trace the conversion; it takes the result of a function with this mark for a constant.
_affine_grid_of_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's mark on functions


def _float32(number: float) -> float:
    return ctypes.c_float(number).value


def _group_scale(slot: str, scale: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{slot}: scale must be a tensor, got {scale!r}")
    require_float(slot, "scale", scale)
    wanted = (known(weight.shape[0]), -(-known(weight.shape[1]) // size))
    if tuple(known(n) for n in scale.shape) != wanted:
        raise ValueError(
            f"{slot}: scale of shape {tuple(scale.shape)} does not fit weight of shape {tuple(weight.shape)}: "
            f"with groups of {size} it must be {wanted}"
        )
    return scale.detach().to(device=weight.device, dtype=arithmetic_dtype(weight))
