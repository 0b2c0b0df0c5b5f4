# SPDX-License-Identifier: Apache-2.0
"""Load the compiled kernel through the ``kernels`` package: once a process, at one pinned commit, on first use.

Nothing here deletes, repairs or writes a cache, and nothing asks for a branch or a version: a commit that cannot be
had means that the portable path runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.settings import hub_enabled

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFORMABLE_DETR",
    "REPOSITORY",
    "REVISION",
    "HubKernel",
    "KernelModule",
    "availability",
    "switched_off_reason",
]

REPOSITORY = "kernels-community/deformable-detr"
REVISION = "4d2393e5d7879f7cf68db04cc7c9c7342272bc05"
"""The audited commit. Another one needs a parity run on a GPU first."""

_logger = logging.getLogger(__name__)


class KernelModule(Protocol):
    """What the compiled module offers. All tensors are contiguous and on one CUDA device, the indices int64."""

    def ms_deform_attn_forward(
        self,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor,
        level_start_index: torch.Tensor,
        sampling_loc: torch.Tensor,
        attn_weight: torch.Tensor,
        im2col_step: int,
    ) -> torch.Tensor:
        """Return the output, (N, Q, M*D). ``im2col_step`` images a launch; it must divide N, or exceed it."""

    def ms_deform_attn_backward(
        self,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor,
        level_start_index: torch.Tensor,
        sampling_loc: torch.Tensor,
        attn_weight: torch.Tensor,
        grad_output: torch.Tensor,
        im2col_step: int,
    ) -> list[torch.Tensor]:
        """Return the gradients of value, sampling_loc and attn_weight."""


def switched_off_reason() -> str | None:
    """Return that the settings forbid the Hub, with what to change, or None. Cheap enough for every call."""
    if hub_enabled():
        return None
    return "Hub kernels are switched off: unset TOKENSPEED_KERNEL_HUB and LIBREYOLO_HUB_KERNELS"


def availability() -> Literal[True] | str:
    """Return True, or why this process must not try the Hub, with what to change. Imports and requests nothing."""
    off = switched_off_reason()
    if off is not None:
        return off
    if importlib.util.find_spec("kernels") is None:
        return "the kernels package is not installed: pip install kernels"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Importing such a kernel there ends the process, which no handler can catch.
        return "this Python runs without the GIL, for which the compiled kernel is not built: use a build with the GIL"
    return True


class HubKernel:
    """One kernel repository at one commit, loaded at most once: a failure is remembered, with one warning."""

    def __init__(self, repository: str, revision: str) -> None:
        """Remember what to load: ``repository`` as ``owner/name``, ``revision`` as a full commit hash."""
        self.repository = repository
        self.revision = revision
        self._lock = threading.Lock()
        self._module: KernelModule | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why loading failed in this process, or None."""
        return self._failure

    @property
    def is_loaded(self) -> bool:
        """Whether the module is in memory, so that a call loads nothing."""
        return self._module is not None

    def load(self) -> KernelModule | None:
        """Return the module, or None where it may not or could not be loaded.

        The first call does the work, and threads that come meanwhile wait for it. No exception leaves but
        ``KeyboardInterrupt``, after which the next call tries again.

        Warns:
            RuntimeWarning: once, when loading fails, with repository, commit, cause and cache.
        """
        if self._is_decided():
            return self._module
        if availability() is not True:
            return None
        with self._lock:
            if self._is_decided():
                return self._module
            try:
                self._module = self._fetch()
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- foreign code must not stop the host
                self._failure = self._describe(error)
        if self._failure is not None:
            warn(f"{self._failure}. The portable path runs instead.", RuntimeWarning)
        return self._module

    def _is_decided(self) -> bool:
        return self._module is not None or self._failure is not None

    def _fetch(self) -> KernelModule:
        get_kernel = importlib.import_module("kernels").get_kernel
        if any(entry.startswith(f"{self.repository}=") for entry in os.environ.get("LOCAL_KERNELS", "").split(":")):
            _logger.warning("LOCAL_KERNELS replaces %s at the audited commit %s", self.repository, self.revision)
        with _offline_if_the_environment_says_so():
            # Exactly one of revision and version; trust_remote_code is left at its default, which is to refuse.
            module = get_kernel(self.repository, revision=self.revision)
        parts = Path(getattr(module, "__file__", None) or "").parts
        commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else self.revision
        if commit != self.revision:
            raise ImportError(f"commit {commit} came instead of the pinned one")
        for name in ("ms_deform_attn_forward", "ms_deform_attn_backward"):
            if not callable(getattr(module, name, None)):
                raise ImportError(f"{getattr(module, '__file__', module)} has no function {name}")
        return cast(KernelModule, module)

    def _describe(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        file = error.filename if isinstance(error, SyntaxError) else frames[-1].filename
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return (
            f"{self.repository} at commit {self.revision} could not be loaded from the Hub or its cache "
            f"({_snapshot(self.repository, self.revision)}): {cause} [raised in {file}]"
        )


DEFORMABLE_DETR = HubKernel(REPOSITORY, REVISION)


@contextmanager
def _offline_if_the_environment_says_so() -> Iterator[None]:
    """Honour ``HF_HUB_OFFLINE`` set after huggingface_hub was imported, which reads it only then."""
    constants = sys.modules.get("huggingface_hub.constants")
    is_asked = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if constants is None or constants.HF_HUB_OFFLINE or not is_asked:
        yield
        return
    constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # a module found by name
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]


def _snapshot(repository: str, revision: str) -> str:
    """Return where the cache keeps the commit, for a message; nothing is touched."""
    hub = getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_CACHE", "the Hugging Face cache")
    folder = "--".join(["kernels", *repository.split("/")])
    return str(Path(os.environ.get("KERNELS_CACHE") or hub) / folder / "snapshots" / revision)
