# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_fp8`` by arithmetic on the E4M3 grid, without an FP8 dtype. Imported when it is first chosen."""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["fake_quant_fp8", "supports"]


def supports(x: torch.Tensor, scale: torch.Tensor | float) -> Literal[True] | str:
    """Return True if the kernel serves these arguments, else the reason why not."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}, the kernel serves float32, float16 and bfloat16"
    if not isinstance(scale, torch.Tensor) or scale.device != x.device:
        return "scale must be a tensor on the device of x"
    if not scale.is_floating_point():
        return f"scale is {scale.dtype}, not floating point"
    if scale.numel() != 1:
        return f"scale has {scale.numel()} elements, the kernel serves one per tensor"
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return "a graph is being captured"
    return True


def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` on the FP8 E4M3 grid of ``scale``.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. Not written.
        scale: step of the grid, in units of ``x``: one element, any floating dtype.

    Returns:
        A new tensor with the shape and dtype of ``x``. Its gradient for ``x`` is the identity; ``scale`` has none.

    Formula: OCP 8-bit Floating Point Specification (OFP8) 1.0, E4M3, with saturation.
    """
    quantized: torch.Tensor = _FakeQuantFp8.apply(x, scale.detach().reshape(()))
    return quantized


class _FakeQuantFp8(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        step = scale.float().clamp(min=1e-12)
        code = (x.float() / step).clamp(-448.0, 448.0)
        # frexp: code = m * 2**e with 0.5 <= |m| < 1, so E4M3's three bits behind the leading one step by 2**(e - 4).
        _, exponent = torch.frexp(code)
        grid = torch.ldexp(torch.ones_like(code), exponent.clamp(min=-5) - 4)
        return (torch.round(code / grid) * grid * step).to(x.dtype)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        """Keep nothing: the gradient does not depend on the inputs."""

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
