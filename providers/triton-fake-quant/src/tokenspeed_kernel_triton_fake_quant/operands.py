# SPDX-License-Identifier: Apache-2.0
"""The tensor beside the one to quantize: a scale that broadcasts, as the kernels want it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from tokenspeed_kernel_triton_fake_quant.support import DTYPES, PLAIN, STRIDED, is_functorch_active
from tokenspeed_kernel_triton_fake_quant.tiles import TILES, Shapes, Tiling, tiling

__all__ = [
    "FLOATS",
    "as_float32",
    "as_one",
    "as_operand",
    "broadcasts",
    "serves",
    "tiled",
    "unfit_operand",
    "unfit_scale",
    "warps",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that scales may have."""


def serves(x: torch.Tensor, scale: Any) -> bool:
    """Return whether a kernel serves a tensor with another beside it, whose shape is not looked at.

    The usual answer in one call, which is soon; :func:`unfit` and :func:`unfit_operand` say why not.
    Two slots, which ask more than that of their tensors, ask this without the call, for its time.
    """
    return (
        type(x) in PLAIN
        and type(scale) in PLAIN
        and x.is_cuda
        and x.dtype in DTYPES
        and x.layout is STRIDED
        and not is_functorch_active()
        and forward_ad._current_level < 0
        and scale.get_device() == x.get_device()
        and scale.dtype in FLOATS
    )


def unfit_operand(name: str, value: torch.Tensor, x: torch.Tensor) -> str | None:
    """Return why a tensor cannot be taken beside ``x``, or None; its shape is not looked at."""
    if type(value) not in PLAIN:
        return f"{name} is a {type(value).__name__}, the kernel serves plain tensors"
    if value.get_device() != x.get_device():
        return f"{name} is on {value.device}, the tensor to quantize on {x.device}"
    if value.dtype not in FLOATS:
        return f"{name} is {value.dtype}, not one of the floating-point dtypes that scales have"
    return None


def broadcasts(shape: torch.Size, whole: torch.Size) -> bool:
    """Return whether a tensor of the one shape broadcasts to the other."""
    axis = len(whole) - len(shape)
    if axis < 0:
        return False
    for size in shape:
        if size != 1 and size != whole[axis]:
            return False
        axis += 1
    return True


def unfit_scale(name: str, value: Any, x: torch.Tensor, may_broadcast: bool) -> str | None:
    """Return why a number or tensor cannot be taken beside ``x``, or None.

    It has one element, or where it ``may_broadcast``, any shape that broadcasts to that of ``x``.
    """
    if isinstance(value, (int, float)):  # soon, for whether it is a tensor takes longer
        return None
    if not isinstance(value, torch.Tensor):
        return f"{name} is {value!r}, neither a tensor nor a number"
    if (fault := unfit_operand(name, value, x)) or value.numel() == 1:
        return fault
    if may_broadcast:
        return None if broadcasts(value.shape, x.shape) else _misfit(name, value, x)
    return f"{name} has {value.numel()} elements, the kernel takes one"


def _misfit(name: str, value: torch.Tensor, x: torch.Tensor) -> str:
    return f"{name} of shape {tuple(value.shape)} does not broadcast to {tuple(x.shape)}"


def as_operand(slot: str, name: str, value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """Return a scale as a float32 tensor on the device of ``x``, which has one element or broadcasts to ``x``.

    Raises:
        ValueError: it does not.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1 and not broadcasts(value.shape, x.shape):
        fault = _misfit(name, value, x)
        raise ValueError(f"{slot}: {fault}; give one element, or one size per axis that is 1 or that axis's")
    return as_float32(value, x)


def as_one(slot: str, name: str, value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """Return a number, or a tensor of one element, as a float32 tensor on the device of ``x``.

    Raises:
        ValueError: it has not one element.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{slot}: {name} must be a number or have one element, got shape {tuple(value.shape)}")
    return as_float32(value, x)


def as_float32(value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor beside ``x``, and a tensor as it is, in float32."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=torch.float32, device=x.device)
    return value if value.dtype == torch.float32 else value.float()


def tiled(
    x: torch.Tensor,
    y: torch.Tensor,
    operand: torch.Tensor | None = None,
    shapes: Shapes | None = None,
    axis: int | None = None,
) -> Tiling | None:
    """Return the tiling of an elementwise kernel of ``x`` and ``operand``; None if the strides are beyond it.

    The operand broadcasts to ``x``, or has one element for each along ``axis``.
    """
    sizes = steps = None
    if operand is not None and operand.numel() != 1:
        sizes, steps = operand.shape, operand.stride()
    if type(x) not in PLAIN:  # its sizes may be symbols, which are no keys of a cache
        return _tiling_beside.__wrapped__(tuple(x.shape), x.stride(), y.stride(), sizes, steps, axis, shapes)
    strides = x.stride()
    dense = strides if y is x or x.is_contiguous() else y.stride()
    return _tiling_beside(x.shape, strides, dense, sizes, steps, axis, shapes)


def warps(x: torch.Tensor) -> int:
    """Return how many warps share a tile of 1024 elements: each thread reads 32 bytes."""
    return x.element_size()


@lru_cache(maxsize=4096)
def _tiling_beside(
    shape: tuple[int, ...],
    x: tuple[int, ...],
    y: tuple[int, ...],
    sizes: tuple[int, ...] | None,
    steps: tuple[int, ...] | None,
    axis: int | None,
    shapes: Shapes | None,
) -> Tiling | None:
    """Return the tiling for an operand of these sizes and steps; None stands for ``TILES``, whose hash takes long."""
    walk = None
    if sizes is not None and steps is not None:
        along = tuple(step if size != 1 else 0 for size, step in zip(sizes, steps, strict=True))
        after = 0 if axis is None else len(shape) - 1 - axis
        walk = (0,) * (len(shape) - len(along) - after) + along + (0,) * after
    return tiling(shape, x, y, walk, shapes or TILES)
