# SPDX-License-Identifier: Apache-2.0
"""Which graph capture is on, asked once a slot call and at the price of three attribute reads.

torch is looked at only if the process has imported it: without it nothing can be captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

__all__ = ["bind", "captures_cuda_graph", "dynamo_capture", "is_exporting_or_tracing", "watch"]


def _ask_torch() -> bool:
    """Return whether Dynamo is tracing, until :func:`bind` has found torch; outside a trace, let it look."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)  # another thread may be importing torch right now
    if compiler is None:
        return False
    if compiler.is_dynamo_compiling():
        return True
    bind()
    return False


class _Watch:
    """torch's own answers, or those of a process without torch."""

    __slots__ = ("compiler", "is_dynamo_compiling", "is_tracing")

    def __init__(self) -> None:
        self.is_dynamo_compiling: Callable[[], bool] = _ask_torch
        self.is_tracing: Callable[[], bool] = bool
        self.compiler: Any = SimpleNamespace(_is_exporting_flag=False)


watch = _Watch()


def bind() -> None:
    """Use torch's own answers from now on, if torch has been imported."""
    torch = sys.modules.get("torch")
    if torch is None or watch.is_dynamo_compiling is not _ask_torch or not hasattr(torch, "compiler"):
        return
    # The public torch.jit.is_tracing() and torch.compiler.is_exporting() wrap these two and cost three times as much.
    watch.is_tracing = torch._C._is_tracing
    if hasattr(torch.compiler, "_is_exporting_flag"):
        watch.compiler = torch.compiler
    watch.is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def is_exporting_or_tracing() -> str | None:
    """Return ``"onnx"``, ``"export"`` or ``"trace"`` while Python itself runs under that capture, else None."""
    if watch.is_tracing():
        return _onnx_or("trace")
    return _onnx_or("export") if watch.compiler._is_exporting_flag else None


def dynamo_capture() -> str:
    """Return ``"onnx"``, ``"export"`` or ``"compile"``: what Dynamo traces for. To be asked outside the traced code.

    Up to torch 2.11 its flag is up under ``torch.compile`` as under a strict ``torch.export``: the stack tells which.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.export."):
            return _onnx_or("export")
        frame = frame.f_back
    return "compile"


def _onnx_or(kind: str) -> str:
    return "onnx" if sys.modules["torch"].onnx.is_in_onnx_export() else kind


def captures_cuda_graph() -> bool:
    """Return whether the current CUDA stream is being captured into a graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
