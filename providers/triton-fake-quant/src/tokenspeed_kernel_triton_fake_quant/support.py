# SPDX-License-Identifier: Apache-2.0
"""What every kernel here asks of its arguments. The answer is given at each call, so it costs as little as it can."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["DTYPES", "PLAIN", "STRIDED", "is_dynamo_compiling", "is_functorch_active", "unfit"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Names of this module, which Python finds soonest.
STRIDED = torch.strided
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_functorch_active = torch._C._are_functorch_transforms_active


def unfit(name: str, x: torch.Tensor) -> str | None:
    """Return why no kernel here serves the tensor to quantize, or None."""
    if type(x) not in PLAIN:
        return f"{name} is a {type(x).__name__}, the kernel serves plain tensors"
    if not x.is_cuda:
        return f"{name} is on {x.device}, the kernel runs on CUDA devices"
    if x.dtype not in DTYPES:
        return f"{name} is {x.dtype}, the kernel serves float32, float16 and bfloat16"
    if x.layout is not STRIDED:
        return f"{name} has the layout {x.layout}, the kernel serves strided tensors"
    if is_functorch_active() and not is_dynamo_compiling():
        return "a functorch transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active, of which the kernel knows nothing"
    return None
