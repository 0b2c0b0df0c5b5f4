# SPDX-License-Identifier: Apache-2.0
"""The arguments of the quantization references: their checks, and the numbers and tensors that scales are made of."""

from __future__ import annotations

import warnings

import torch

__all__ = [
    "arithmetic_dtype",
    "broadcasting",
    "channel_axis",
    "constant",
    "floored",
    "known",
    "one_element",
    "require_float",
    "require_rank",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SCALE_FLOOR = 1e-12


def require_float(slot: str, argument: str, value: torch.Tensor) -> None:
    """Raise a TypeError unless ``value`` is of one of the four dtypes that the slots take."""
    if value.dtype not in _FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise TypeError(f"{slot}: {argument} must be one of {names}, got {value.dtype}; convert it first")


def require_rank(slot: str, argument: str, value: torch.Tensor, least: int, most: int | None = None) -> None:
    """Raise a ValueError unless ``value`` has ``least`` axes or more, and no more than ``most``."""
    if value.dim() < least or (most is not None and value.dim() > most):
        wanted = f"{least} axes" if least == most else f"{least} axis or more"
        raise ValueError(f"{slot}: {argument} must have {wanted}, got shape {tuple(value.shape)}")


def channel_axis(slot: str, argument: str, axis: int, value: torch.Tensor) -> int:
    """Return ``axis`` counted from the front, once it is known to be one of ``value``'s."""
    if not -value.dim() <= axis < value.dim():
        raise IndexError(f"{slot}: {argument} {axis} is no axis of a tensor of shape {tuple(value.shape)}")
    return axis % value.dim()


def arithmetic_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for a float64 ``x``, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def constant(number: float, like: torch.Tensor) -> torch.Tensor:
    """Return ``number`` as a 0-d tensor with the dtype and device of ``like``.

    To divide by: PyTorch on CUDA multiplies by the reciprocal where a divisor is a Python number or a CPU scalar.
    full() writes the number on the device; as_tensor() would copy it there and wait.
    """
    return torch.full((), number, dtype=like.dtype, device=like.device)


def floored(scale: torch.Tensor) -> torch.Tensor:
    """Return ``scale``, at least 1e-12; NaN stays."""
    return scale.clamp(min=_SCALE_FLOOR)


def broadcasting(slot: str, argument: str, value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as a tensor to compute with, on ``x``'s device, once it is known to broadcast to ``x``'s shape.

    One element, of whatever rank, becomes 0-d.
    """
    if not isinstance(value, torch.Tensor):
        return _number(slot, argument, value, x)
    require_float(slot, argument, value)
    if not torch.jit.is_tracing():  # sizes are traced there: looking at one would warn and freeze it
        if value.numel() == 1:
            value = value.reshape(())
        fits = value.dim() <= x.dim() and all(
            n in (1, m) for n, m in zip(reversed(value.shape), reversed(x.shape), strict=False)
        )
        if not fits:
            raise ValueError(
                f"{slot}: {argument} of shape {tuple(value.shape)} does not broadcast to the input's shape "
                f"{tuple(x.shape)}; give one element, or one size per axis of the input that is 1 or that axis's"
            )
    return value.detach().to(device=x.device, dtype=arithmetic_dtype(x))


def one_element(slot: str, argument: str, value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """Return ``value``, a number or a tensor of one element, as a 0-d tensor to compute with, on ``x``'s device."""
    if not isinstance(value, torch.Tensor):
        return _number(slot, argument, value, x)
    require_float(slot, argument, value)
    if not torch.jit.is_tracing() and value.numel() != 1:
        raise ValueError(
            f"{slot}: {argument} must have one element, got shape {tuple(value.shape)} "
            f"for an input of shape {tuple(x.shape)}"
        )
    return value.detach().to(device=x.device, dtype=arithmetic_dtype(x)).reshape(())


def known(size: int) -> int:
    """Return a size to decide by. In a trace it is a tensor, and the graph keeps what was decided."""
    if not torch.jit.is_tracing():
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(size)


def _number(slot: str, argument: str, value: float, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{slot}: {argument} must be a tensor or a real number, got {value!r}")
    # In two steps: full() refuses a number that overflows the dtype, where a conversion gives infinity.
    return torch.full((), value, dtype=torch.float64, device=x.device).to(arithmetic_dtype(x))
