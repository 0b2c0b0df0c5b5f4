# SPDX-License-Identifier: Apache-2.0
"""Who computes what ``fake_quant.py`` measures: our slot, the eager reference, the compiled reference, and the peer."""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_quant_cases import Case

from tokenspeed_kernel import slot
from tokenspeed_kernel.reference import quant
from tokenspeed_kernel.registry import KernelRegistry, load_attribute

Function = Callable[..., torch.Tensor]

WAYS = ("ours", "reference", "compiled", "peer")
_KERNEL = "triton"  # the solution that has to serve
_PATIENCE = {"compiled": 60.0, "peer": 60.0}  # seconds that all first calls of a way may take: it compiles or tunes


class UnusableError(Exception):
    """A way has nothing to measure here; the message is the cause."""


class _NoReference:
    """Stands where the peer's kernels look for their eager reference, so that a fallback is seen and not timed."""

    def __getattr__(self, name: str) -> object:
        raise UnusableError("its kernel declines these arguments and falls back to its eager reference")


class Ways:
    """The four of them.

    Args:
        peer: the folder that libreyolo is unpacked in, or None.
        smoke: everybody's eager reference stands in for their kernels, and torch.compile generates no code.
    """

    def __init__(self, peer: Path | None, *, smoke: bool) -> None:
        self._smoke = smoke
        self._left = dict(_PATIENCE)
        self.provider = _register_ours()
        self.peer = peer
        self._peer: Any = None
        self._peer_cause = "" if peer is not None else "not given"
        if peer is not None:
            try:
                self._peer = _import_peer(peer.resolve(), smoke=smoke)
            except Exception as error:  # noqa: BLE001 -- somebody else's package
                self._peer_cause = f"cannot be imported: {_short(error)}"

    def working(
        self, case: Case, trial: Callable[[Function], object], names: tuple[str, ...] = WAYS
    ) -> tuple[dict[str, Function], dict[str, str]]:
        """Return the ways that survive a trial, and why the others do not."""
        good: dict[str, Function] = {}
        causes: dict[str, str] = {}
        for name in names:
            started = time.perf_counter()
            try:
                if self._left.get(name, 1.0) <= 0:
                    raise UnusableError(f"left out: its first calls had taken {_PATIENCE[name]:.0f} s by then")
                function = self._function(name, case)
                trial(function)
                if not self._smoke:
                    torch.cuda.synchronize()
                good[name] = function
            except UnusableError as error:
                causes[name] = str(error)
            except Exception as error:  # noqa: BLE001 -- a way that fails is a row with its cause
                causes[name] = f"raises {_short(error)}"
            if name in self._left:
                self._left[name] -= time.perf_counter() - started
        return good, causes

    def why_not_ours(self, case: Case, *args: object) -> str:
        """Return why no kernel of ours serves such a call, or nothing if one does."""
        if self._smoke:
            return ""
        verdicts = slot(case.slot).explain(*args).to_dict()["candidates"]
        if any(v["chosen"] and v["solution"] == _KERNEL for v in verdicts):
            return ""
        reasons = [f"{v['stage']}: {v['detail'] or v['code']}" for v in verdicts if v["solution"] == _KERNEL]
        return "; ".join(reasons) or f"no kernel is registered ({self.provider})"

    def asking(self, case: Case) -> Callable[..., object]:
        """Return what answers whether our kernel serves a call."""
        registration = KernelRegistry.get().registration(f"triton_{case.slot}")
        assert registration is not None
        assert registration.spec.supports is not None
        supports: Callable[..., object] = load_attribute(registration.spec.supports)
        return supports

    def _function(self, name: str, case: Case) -> Function:
        reference: Function = getattr(quant, case.slot)
        if name == "ours":
            return slot(case.slot)
        if name == "reference":
            return reference
        if name == "compiled":
            torch._dynamo.reset()  # past a few shapes of one function it would run uncompiled, and not say so
            backend = "aot_eager" if self._smoke else "inductor"
            compiled: Function = torch.compile(reference, dynamic=False, fullgraph=True, backend=backend)
            return compiled
        return self._peer_function(case)

    def _peer_function(self, case: Case) -> Function:
        if self._peer is None:
            raise UnusableError(self._peer_cause)
        if not self._smoke and self._peer.active().get(case.slot, "reference") == "reference":
            raise UnusableError("has no kernel for this slot: its eager reference serves")
        function: Function = getattr(self._peer, case.slot)
        return function


def _register_ours() -> str:
    """Register our provider's kernels. Return what is wrong with it, or its name."""
    try:
        provider = importlib.import_module("tokenspeed_kernel_triton_fake_quant")
        provider.register()
    except Exception as error:  # noqa: BLE001 -- the rows then say that there is no kernel
        return f"the provider cannot be registered: {_short(error)}"
    return provider.__name__


def _import_peer(folder: Path, *, smoke: bool) -> Any:
    """Return the peer's registry of kernels, without importing the rest of its package, which needs much more."""
    for name in ("libreyolo", "libreyolo.quant"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["libreyolo"].quant = sys.modules["libreyolo.quant"]  # type: ignore[attr-defined]
    registry = importlib.import_module("libreyolo.kernels")
    importlib.import_module("libreyolo.kernels.quant.simulate")  # the registry would hide why this fails
    if not smoke:
        for name, module in list(sys.modules.items()):
            if name.startswith("libreyolo.kernels.quant.simulate.") and hasattr(module, "_reference"):
                vars(module)["_reference"] = _NoReference()
    return registry


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
