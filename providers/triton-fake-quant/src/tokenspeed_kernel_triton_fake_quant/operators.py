# SPDX-License-Identifier: Apache-2.0
"""The operators of ``torch.library``: what compilers, dispatch modes and functorch see of the kernels.

Imported when the first of these asks: torch imports its compiler to make one, which takes longer than all the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import triton_op

from tokenspeed_kernel_triton_fake_quant import fp8, int8, int8_per_channel, int_grouped, mxfp4, nvfp4
from tokenspeed_kernel_triton_fake_quant.doors import Kernel

__all__ = [
    "fake_quant_fp8",
    "fake_quant_int8",
    "fake_quant_int8_dynamic",
    "fake_quant_int8_gradient",
    "fake_quant_int_grouped",
    "fake_quant_mxfp4",
    "fake_quant_nvfp4",
]


@triton_op("tokenspeed_triton::fake_quant_fp8", mutates_args=())
def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` on the E4M3 grid of ``scale``."""
    return fp8.quantize(x, scale, Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_int_grouped", mutates_args=())
def fake_quant_int_grouped(weight: torch.Tensor, bits: int, size: int, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``weight`` as integers with a scale per group."""
    return int_grouped.quantize(weight, bits, size, scale, Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_mxfp4", mutates_args=())
def fake_quant_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in MXFP4."""
    return mxfp4.quantize(x, Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_nvfp4", mutates_args=())
def fake_quant_nvfp4(x: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` in NVFP4 under ``amax``, or under its own."""
    return nvfp4.quantize(x, amax, Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_int8", mutates_args=())
def fake_quant_int8(x: torch.Tensor, kind: int, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` on an int8 grid."""
    return int8.quantize(x, int8.Grid(kind, first, second), Kernel.record)


@triton_op("tokenspeed_triton::fake_quant_int8_gradient", mutates_args=())
def fake_quant_int8_gradient(
    x: torch.Tensor, grad: torch.Tensor, kind: int, first: torch.Tensor, second: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient for ``x`` from that of ``x`` on an int8 grid."""
    return int8.quantize(x, int8.Grid(kind, first, second), Kernel.record, grad)


@triton_op("tokenspeed_triton::fake_quant_int8_dynamic", mutates_args=())
def fake_quant_int8_dynamic(weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` on the int8 grid of each channel, and the channels' largest magnitudes."""
    y, grid, _ = int8_per_channel.dynamic(weight, axis, Kernel.record)
    return y, grid.first


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.kind, first, second = inputs
    ctx.save_for_backward(x, first, second)


def _keep_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, ctx.kind, first, second = inputs
    ctx.save_for_backward(x, first, second)


def _keep_of_dynamic(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.kind = int8.AMAX
    ctx.save_for_backward(inputs[0], output[1], None)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    x, first, second = ctx.saved_tensors
    result: torch.Tensor = fake_quant_int8_gradient(x, grad, ctx.kind, first, second)
    return result


fake_quant_fp8.register_autograd(lambda ctx, grad: (grad, None))
fake_quant_int_grouped.register_autograd(lambda ctx, grad: (grad, None, None, None))
fake_quant_mxfp4.register_autograd(lambda ctx, grad: grad)
fake_quant_nvfp4.register_autograd(lambda ctx, grad: (grad, None))
fake_quant_int8.register_autograd(lambda ctx, grad: (_gradient(ctx, grad), None, None, None), setup_context=_keep)
fake_quant_int8_gradient.register_autograd(
    lambda ctx, grad: (None, _gradient(ctx, grad), None, None, None), setup_context=_keep_of_gradient
)
fake_quant_int8_dynamic.register_autograd(
    lambda ctx, grad, _: (_gradient(ctx, grad), None), setup_context=_keep_of_dynamic
)
