# SPDX-License-Identifier: Apache-2.0
"""Maxima of magnitudes over channels, groups and tensors, and the way back from a group's value to its elements.

NaN is ignored; an infinity counts as the largest finite value of the input's dtype; nothing has the maximum 0. No
gradient passes through a maximum.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.reference.arguments import arithmetic_dtype

__all__ = ["channel_amax", "group_amax", "overall_amax", "to_elements"]


def channel_amax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the maximum of each channel of ``axis``, (C,), in the arithmetic dtype."""
    rows = _magnitudes(x).movedim(axis, 0).unsqueeze(-1).flatten(1)
    return torch.nn.functional.pad(rows, (0, 1)).amax(1).to(arithmetic_dtype(x))  # a zero: amax refuses nothing


def group_amax(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the maximum of each group of ``size`` along the last axis, (..., groups), in the arithmetic dtype.

    The last group may be short.
    """
    padded = torch.nn.functional.pad(_magnitudes(x), (0, -x.shape[-1] % size))
    groups: torch.Tensor = padded.unflatten(-1, (-1, size))
    return groups.amax(-1).to(arithmetic_dtype(x))


def overall_amax(maxima: torch.Tensor) -> torch.Tensor:
    """Return the largest of some maxima, 0-d."""
    return torch.nn.functional.pad(maxima.flatten(), (0, 1)).amax(0)


def to_elements(groups: torch.Tensor, size: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape of ``like`` that has for each element what ``groups`` (..., groups) has for it.

    Looked up, not expanded and sliced: Inductor (torch 2.14, CPU) reads past the end of a short last group then.
    """
    return groups.index_select(-1, torch.arange(like.shape[-1], device=groups.device) // size)


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().abs().nan_to_num(nan=0.0)  # infinities: the dtype's largest
