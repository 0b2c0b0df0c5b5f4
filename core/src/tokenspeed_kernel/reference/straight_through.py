# SPDX-License-Identifier: Apache-2.0
"""The last step of every quantization reference: code times step, with the straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel.capture import dynamo_capture

__all__ = ["is_recorded", "scaled"]


def scaled(
    x: torch.Tensor,
    code: torch.Tensor,
    step: torch.Tensor,
    *,
    inside: torch.Tensor | None = None,
    keep_sign_of_zero: bool = True,
) -> torch.Tensor:
    """Return ``code * step``, rounded once to the dtype of ``x``, with the gradient that ``x`` is to have.

    That is the identity: everywhere, or where ``inside`` is True, and zero elsewhere. ``code`` has the shape of ``x``.
    """
    if is_recorded():  # an autograd function would be an opaque node there, and what is recorded is not trained
        return _scaled(x, code, step, keep_sign_of_zero)
    result: torch.Tensor = _StraightThrough.apply(x, code, step, inside, keep_sign_of_zero)
    return result


def is_recorded() -> bool:
    """Return whether torch.jit.trace, torch.export or an ONNX exporter records what runs."""
    if torch.compiler.is_dynamo_compiling():
        return _is_exported_by_dynamo()
    return torch.jit.is_tracing() or bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _is_exported_by_dynamo() -> bool:
    return dynamo_capture() != "compile"


# What torch.compiler.assume_constant_result does, without importing Dynamo: the answer is in the stack of the trace.
_is_exported_by_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's mark on functions


class _StraightThrough(torch.autograd.Function):
    """The value forward and the identity backward. ``x + (q - x)`` would do the same, but is not always ``q``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, code: torch.Tensor, step: torch.Tensor, inside: torch.Tensor | None, keep_sign_of_zero: bool
    ) -> torch.Tensor:
        return _scaled(x, code, step, keep_sign_of_zero)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (inside,) = ctx.saved_tensors
        # Not a product: an infinite gradient times zero would be NaN.
        return grad if inside is None else torch.where(inside, grad, 0.0), None, None, None, None


def _scaled(x: torch.Tensor, code: torch.Tensor, step: torch.Tensor, keep_sign_of_zero: bool) -> torch.Tensor:
    value = code * step
    # Not `.to` alone: where it changes nothing, Dynamo of torch 2.11 loses the gradient of the autograd function.
    value = value if value.dtype == x.dtype else value.to(x.dtype)
    # Not `+ 0.0`, which compilers drop. After the last rounding, in which a negative value may become zero.
    return value if keep_sign_of_zero else torch.where(value == 0, 0.0, value)
