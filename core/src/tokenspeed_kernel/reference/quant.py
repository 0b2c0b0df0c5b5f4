# SPDX-License-Identifier: Apache-2.0
"""What the quantization slots compute, in plain PyTorch: the definition in code, and the oracle of parity tests.

No function here synchronises with the device or keeps a table on the CPU, so each can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

__all__ = ["fake_quant_fp8"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SCALE_FLOOR = 1e-12
_E4M3_MAX = 448.0
_E4M3_MIN_EXPONENT = -6  # of a normal number; below it the grid no longer gets finer
_E4M3_MAX_EXPONENT = 8
_E4M3_MANTISSA_BITS = 3


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
    _require_float("fake_quant_fp8", "x", x)
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = _scale_for("fake_quant_fp8", x, scale, arithmetic)
    if torch.jit.is_tracing():  # a traced autograd function is an opaque node that no exporter reads
        return _fp8_value(x, step)
    quantized: torch.Tensor = _StraightThroughFp8.apply(x, step)
    return quantized


class _StraightThroughFp8(torch.autograd.Function):
    """The value forward and the identity backward. ``x + (q - x)`` would do the same, but is not always ``q``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _fp8_value(x, scale)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        """Keep nothing: the gradient does not depend on the inputs."""

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _fp8_value(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    step = scale.clamp(min=_SCALE_FLOOR)
    code = (x.to(step.dtype) / step).clamp(-_E4M3_MAX, _E4M3_MAX)
    value = _round_to_e4m3(code) * step
    # Not `.to` alone: where it changes nothing, Dynamo of torch 2.11 loses the gradient of the autograd function.
    return value if value.dtype == x.dtype else value.to(x.dtype)


def _round_to_e4m3(code: torch.Tensor) -> torch.Tensor:
    """Round values within ±448 to the nearest E4M3 number, ties to even."""
    if code.dtype == torch.float32:
        return code.to(torch.float8_e4m3fn).to(torch.float32)
    # torch casts float64 to E4M3 through float32, which rounds twice. The grid's step doubles with each power of two;
    # as it is a power of two itself, dividing by it and multiplying again is exact.
    magnitude = code.abs()
    step = torch.full_like(code, 2.0 ** (_E4M3_MIN_EXPONENT - _E4M3_MANTISSA_BITS))
    for exponent in range(_E4M3_MIN_EXPONENT + 1, _E4M3_MAX_EXPONENT + 1):
        step = torch.where(magnitude >= 2.0**exponent, 2.0 ** (exponent - _E4M3_MANTISSA_BITS), step)
    return torch.round(code / step) * step


def _require_float(slot: str, argument: str, value: torch.Tensor) -> None:
    if value.dtype not in _FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise TypeError(f"{slot}: {argument} must be one of {names}, got {value.dtype}; convert it first")


def _scale_for(slot: str, x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``scale`` as a tensor of ``dtype`` on the device of ``x``, once it is known to broadcast to its shape."""
    if not isinstance(scale, torch.Tensor):
        if not isinstance(scale, (int, float)):
            raise TypeError(f"{slot}: scale must be a tensor or a real number, got {scale!r}")
        # full() writes the number on the device; as_tensor() would copy it there and wait
        return torch.full((), scale, dtype=dtype, device=x.device)
    _require_float(slot, "scale", scale)
    if torch.jit.is_tracing():  # sizes are traced there: looking at one would warn and freeze it
        return scale.detach().to(device=x.device, dtype=dtype)
    if scale.numel() == 1:
        scale = scale.reshape(())
    fits = scale.dim() <= x.dim() and all(
        n in (1, m) for n, m in zip(reversed(scale.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{slot}: scale of shape {tuple(scale.shape)} does not broadcast to x of shape {tuple(x.shape)}; "
            "give one element, or one size per axis of x that is 1 or that axis's"
        )
    return scale.detach().to(device=x.device, dtype=dtype)
