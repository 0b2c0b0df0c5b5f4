# SPDX-License-Identifier: Apache-2.0
"""Which graph capture is on.

torch is looked at only if the process has imported it: without it nothing can be captured.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["captures_cuda_graph", "dynamo_capture", "is_exporting_or_tracing"]


def is_exporting_or_tracing() -> str | None:
    """Return ``"onnx"``, ``"export"`` or ``"trace"`` while Python itself runs under that capture, else None."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):  # another thread may be importing it right now
        return None
    if torch.jit.is_tracing():
        return _onnx_or("trace")
    return _onnx_or("export") if getattr(torch.compiler, "_is_exporting_flag", False) else None


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
