# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_int8_affine``: values on the int8 grid that spans a range, whose gradient stops outside of it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd import forward_ad

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, is_plain
from tokenspeed_kernel_triton_fake_quant.int8 import NUMBERS, RANGE, Grid, in_tensors, masked, on_grid
from tokenspeed_kernel_triton_fake_quant.operands import FLOATS, as_one, unfit_scale
from tokenspeed_kernel_triton_fake_quant.support import DTYPES, PLAIN, STRIDED, is_functorch_active, unfit

__all__ = ["fake_quant_int8_affine", "supports"]


def fake_quant_int8_affine(
    x: torch.Tensor, lo: torch.Tensor | float, hi: torch.Tensor | float, scalars: bool = False
) -> torch.Tensor:
    """Return ``x`` on the int8 grid that spans ``lo`` to ``hi``, widened to contain 0, bit for bit as the reference.

    Args:
        x: float32, float16 or bfloat16 on a GPU, any shape and strides. Not written.
        lo: lower end of the range, in units of ``x``: a number, or a tensor of one element on the same device.
        hi: upper end, likewise.
        scalars: how an export records the range; without effect here.

    Returns:
        A new tensor with the shape, dtype and, for a dense ``x``, the strides of ``x``. Its gradient for ``x`` is the
        identity where the code before the clamp is within its range, and zero elsewhere; ``lo`` and ``hi`` have none.

    Raises:
        ValueError: ``lo`` or ``hi`` has not one element.

    Formula: PyTorch's documentation of torch.fake_quantize_per_tensor_affine.
    """
    if isinstance(lo, torch.Tensor) or isinstance(hi, torch.Tensor):
        lo, hi = as_one("fake_quant_int8_affine", "lo", lo, x), as_one("fake_quant_int8_affine", "hi", hi, x)
        grid = Grid(RANGE, lo, hi)
        plain = is_plain(x, lo, hi)
    else:
        grid = Grid(NUMBERS, float(lo), float(hi))
        plain = is_plain(x)
    if not plain:
        from tokenspeed_kernel_triton_fake_quant import operators

        quantized: torch.Tensor = operators.fake_quant_int8(x, *in_tensors(grid, x)[:3])
        return quantized
    return masked(on_grid, x, grid, Kernel.launch)


def supports(x: torch.Tensor, lo: Any, hi: Any, scalars: bool = False) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if (  # the usual ones, soon: each of the calls below takes its time
        type(x) in PLAIN
        and type(lo) in PLAIN
        and type(hi) in PLAIN
        and x.is_cuda
        and x.dtype in DTYPES
        and x.layout is STRIDED
        and not is_functorch_active()
        and forward_ad._current_level < 0
        and (lo.ndim == 0 == hi.ndim or lo.numel() == 1 == hi.numel())  # a property is sooner than a method
        and lo.get_device() == hi.get_device() == x.get_device()
        and lo.dtype in FLOATS
        and hi.dtype in FLOATS
    ):
        return True
    return unfit("x", x) or unfit_scale("lo", lo, x, False) or unfit_scale("hi", hi, x, False) or True
