# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_fp8``: a value on the E4M3 grid of its scale, and the straight-through gradient."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

__all__ = ["fake_quant_fp8", "supports"]

_BLOCK = 1024  # elements per program
_INT32_LIMIT = 2**31 - _BLOCK
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["numel", "channels", "inner"])  # a new shape must not compile anything
def _fake_quant_fp8_kernel(
    x_ptr, scale_ptr, y_ptr, numel, channels, inner, PER_CHANNEL: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    if INT64:
        pid = pid.to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + (offs // inner) % channels, mask=mask, other=1.0)
    else:
        scale = tl.load(scale_ptr)
    # Maxima and clamps drop a NaN unless told otherwise; `/` is approximate, div_rn is IEEE division.
    step = tl.maximum(scale, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    code = tl.clamp(tl.div_rn(x, step), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 2**23 grid steps leaves no bits below the step, so the sum is rounded to the grid, ties to even; taking
    # them away again is exact. The step is 2**(exponent - 3), and 2**-9 among the subnormals. Rounding in arithmetic
    # rather than by a cast needs no FP8 unit, and the interpreter's cast is wrong where rounding carries.
    bits = code.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 127 - 6)
    steps = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    rounded = (magnitude + steps) - steps
    signed = (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    tl.store(y_ptr + offs, (signed * step).to(y_ptr.dtype.element_ty), mask=mask)


@triton_op("tokenspeed_triton::fake_quant_fp8", mutates_args=())
def _fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor, channels: int, inner: int) -> torch.Tensor:
    y = torch.empty_like(x)
    numel = x.numel()
    if numel:
        with torch.cuda.device_of(x):  # Triton launches on the current device, whatever its arguments' is
            wrap_triton(_fake_quant_fp8_kernel)[(triton.cdiv(numel, _BLOCK),)](
                x_ptr=x,
                scale_ptr=scale,
                y_ptr=y,
                numel=numel,
                channels=channels,
                inner=inner,
                PER_CHANNEL=channels > 1,
                INT64=numel > _INT32_LIMIT,
                BLOCK=_BLOCK,
            )
    return y


def _backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return grad, None, None, None


_fake_quant_fp8.register_autograd(_backward)


def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` on the FP8 E4M3 grid of ``scale``, bit for bit as the reference does.

    Args:
        x: float32, float16 or bfloat16, contiguous, on a GPU, any shape. Not written.
        scale: step of the grid, in units of ``x``: one element, or one per channel of one axis in a shape that
            broadcasts to that of ``x``; any floating dtype, on the same device.

    Returns:
        A new tensor with the shape, strides and dtype of ``x``. Its gradient for ``x`` is the identity, ``scale`` has
        none.

    Raises:
        ValueError: :func:`supports` would have declined the arguments.

    Formula: OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3, with saturation.
    """
    layout = _scale_layout(x, scale)
    if isinstance(layout, str):
        raise ValueError(f"fake_quant_fp8: {layout}")
    channels, inner = layout
    quantized: torch.Tensor = _fake_quant_fp8(x, scale.detach().float().reshape(-1), channels, inner)
    return quantized


def supports(x: torch.Tensor, scale: torch.Tensor | float) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if not isinstance(scale, torch.Tensor):
        return "scale is a number, the kernel takes a tensor"
    if not x.is_cuda:
        return f"x is on {x.device}, the kernel runs on CUDA devices"
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, the kernel serves float32, float16 and bfloat16"
    if scale.device != x.device:
        return f"scale is on {scale.device}, x on {x.device}"
    if not scale.is_floating_point():
        return f"scale is {scale.dtype}, not floating point"
    if not x.is_contiguous():
        return f"x has strides {tuple(x.stride())}, the kernel serves contiguous tensors"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    layout = _scale_layout(x, scale)
    return layout if isinstance(layout, str) else True


def _scale_layout(x: torch.Tensor, scale: torch.Tensor) -> tuple[int, int] | str:
    """Return (channels, elements of ``x`` in a row that share a channel), or why ``scale`` has no such layout."""
    if scale.numel() == 1:
        return 1, 1
    axes = [axis for axis, size in enumerate(scale.shape) if size != 1]
    shape = x.shape[x.dim() - scale.dim() :] if scale.dim() <= x.dim() else ()
    if len(axes) != 1 or not shape or scale.shape[axes[0]] != shape[axes[0]]:
        return f"scale of shape {tuple(scale.shape)} is not one per tensor or channel of x of shape {tuple(x.shape)}"
    inner = 1
    for size in shape[axes[0] + 1 :]:
        inner *= size
    return scale.shape[axes[0]], inner
