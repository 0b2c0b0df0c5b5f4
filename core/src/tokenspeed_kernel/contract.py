# SPDX-License-Identifier: Apache-2.0
"""What a slot promises, as a value that a host declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["SlotContract"]


@dataclass(frozen=True, kw_only=True)
class SlotContract:
    """An operation by name: the operator behind it, and how the core may treat a failure of one of its kernels."""

    name: str
    """The flat slot name, ``"fake_quant_fp8"``."""
    family: str
    mode: str
    """With ``family`` the operator: the name that ``register_kernel`` and ``select_kernel`` know the slot by."""
    summary: str = ""
    """The call signature and what it computes, in one line."""
    reference: Callable[..., Any] | str | None = None
    """The portable implementation, registered at priority 0; None if the caller keeps its own."""
    validate: Callable[..., object] | str | None = None
    """Called with a failed call's arguments: raises if they are at fault, so that no kernel is blamed for them."""
    portable_in: frozenset[str] = frozenset({"export", "onnx", "trace"})
    """The captures that record portable math: there only references run, and a slot without one returns None.
    ``"export"`` is ``torch.export``, ``"onnx"`` both ONNX exporters, ``"trace"`` is ``torch.jit.trace``."""
    mutates: bool = False
    """Whether a call writes to its arguments. Such a call may return None, and is never run again after a failure."""
