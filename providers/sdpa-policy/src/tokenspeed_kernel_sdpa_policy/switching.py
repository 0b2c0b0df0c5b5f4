# SPDX-License-Identifier: Apache-2.0
"""Switch the attention modules of a model between the fused op and their own manual math.

A module says that it has both by a boolean attribute ``fused_attn``, as timm's do. Only that attribute is written.
"""

from __future__ import annotations

from inspect import getattr_static

import torch

__all__ = ["set_fused_attention"]


def set_fused_attention(model: torch.nn.Module, enabled: bool = True) -> int:
    """Set ``fused_attn`` to ``enabled`` on every module of ``model`` that has it; return how many this switched.

    A module that was at ``enabled`` already is not counted, so a second call returns 0. One that the model holds twice
    is counted once, and wrappers (``DataParallel``, ``torch.compile``) are looked through. An attribute ``fused_attn``
    that is no bool is somebody else's and is left alone; so is a TorchScript module, whose flag is a constant of its
    code. The flag is no part of ``state_dict``.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, or ``enabled`` is no bool. Nothing is switched then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the network that a wrapper object holds"
        )
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, got {enabled!r}")
    switched = 0
    for module in model.modules():
        # Static: a wrapper that forwards look-ups to the module inside must not count as a second one.
        flag = getattr_static(module, "fused_attn", None)
        if isinstance(flag, bool) and flag is not enabled:
            module.fused_attn = enabled  # type: ignore[assignment]  # nn.Module types its attributes as tensors
            switched += 1
    return switched
