# SPDX-License-Identifier: Apache-2.0
"""What every kernel here asks of its arguments. The answer is given at each call, so it costs as little as it can."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["PLAIN", "unfit"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# Names of this module, which Python finds soonest.
_STRIDED = torch.strided
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack


def unfit(name: str, x: torch.Tensor) -> str | None:
    """Return why no kernel here serves the tensor to quantize, or None."""
    if type(x) not in PLAIN:
        return f"{name} is a {type(x).__name__}, the kernel serves plain tensors"
    if not x.is_cuda:
        return f"{name} is on {x.device}, the kernel runs on CUDA devices"
    if x.dtype not in _DTYPES:
        return f"{name} is {x.dtype}, the kernel serves float32, float16 and bfloat16"
    if x.layout is not _STRIDED:
        return f"{name} has the layout {x.layout}, the kernel serves strided tensors"
    if not _is_dynamo_compiling() and _functorch_interpreter() is not None:
        return "a functorch transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active, of which the kernel knows nothing"
    return None
