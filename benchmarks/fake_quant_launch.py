# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that does nothing: what its launch costs the host is the floor of every call on a machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _nothing(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


def launch(x: torch.Tensor, y: torch.Tensor) -> None:
    """Launch it the way that Triton documents."""
    _nothing[(1,)](x, y, x.numel(), BLOCK=128)
