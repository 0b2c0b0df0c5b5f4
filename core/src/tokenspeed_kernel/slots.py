# SPDX-License-Identifier: Apache-2.0
"""The slot table, and the handles that hosts call."""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tokenspeed_kernel import settings
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.dispatch import Dispatch
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, registering_owner

__all__ = [
    "Slot",
    "SlotContract",
    "active",
    "declare_slot",
    "iter_impls",
    "refresh",
    "register",
    "resolve",
    "slot",
    "unregister",
]

_CALLER_PRIORITY = 19  # what `register` gives without priority=: the newest such registration wins

_BUILT_IN = (
    SlotContract(
        name="fake_quant_fp8",
        family="quant",
        mode="fake_quant_fp8",
        summary="fake_quant_fp8(x, scale): x on the E4M3 grid of scale",
        reference="tokenspeed_kernel.reference.quant:fake_quant_fp8",
    ),
    SlotContract(
        name="ms_deform_attn",
        family="attention",
        mode="ms_deform_attn",
        summary="ms_deform_attn(value, spatial_shapes, sampling_locations, attention_weights): deformable attention",
    ),
    SlotContract(
        name="sdpa",
        family="attention",
        mode="sdpa",
        summary="sdpa(q, k, v, *, attn_mask, dropout_p, is_causal, scale, enable_gqa): scaled dot-product attention",
        validate="tokenspeed_kernel.reference.attention:validate_sdpa",
    ),
)


class Slot(Dispatch):
    """A named operation. Call it; keep it for as long as you like; copies and pickles hold only its name."""

    @property
    def name(self) -> str:
        """The slot's name."""
        return self.contract.name

    def resolve(self) -> Callable[..., Any] | None:
        """Return the implementation that comes first before any call, or None if there is none.

        It is the bare function: it declines nothing, falls back to nothing and is not counted. Prefer calling the slot.
        """
        return next((call for _, call in self.implementations()), None)

    def implementations(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield ``(solution, implementation)`` of every eligible kernel, the first choice first."""
        plan = self._current_plan()
        for candidate in plan.candidates:
            if candidate.ready or self._prepare(plan, candidate):
                yield candidate.registration.spec.solution, candidate.call

    def _registry(self) -> KernelRegistry:
        _log_if_undiscovered()
        return registry_with_references()

    def __reduce__(self) -> tuple[Callable[[str], Slot], tuple[str]]:
        return slot, (self.name,)

    def __repr__(self) -> str:
        return f"<slot {self.name!r}>"


_lock = threading.RLock()
_handles: dict[str, Slot] = {contract.name: Slot(contract) for contract in _BUILT_IN}
_with_references: KernelRegistry | None = None
_told = False


def registry_with_references() -> KernelRegistry:
    """Return the process's registry, after registering the references of all declared slots in it."""
    global _with_references  # noqa: PLW0603 -- which registry has them is a fact of the process
    registry = KernelRegistry.get()
    if _with_references is not registry:
        with _lock:
            _with_references = registry
            for handle in _handles.values():
                _register_reference(registry, handle.contract)
    return registry


def _register_reference(registry: KernelRegistry, contract: SlotContract) -> None:
    name = f"{contract.name}:reference"
    if contract.reference is None or registry.get_by_name(name) is not None:
        return
    spec = KernelSpec(name=name, family=contract.family, mode=contract.mode, solution="reference", priority=0)
    token = registering_owner.set(None)  # a plugin that calls a slot while it registers does not own the references
    try:
        registry.register(spec, contract.reference)
    finally:
        registering_owner.reset(token)


def _log_if_undiscovered() -> None:
    global _told  # noqa: PLW0603 -- said once a process
    if not _told and "tokenspeed_kernel.plugins.discovery" not in sys.modules:
        import logging

        logging.getLogger("tokenspeed_kernel").warning(
            "no plugin is loaded: discover_plugins() was never called; slots use what the host registered"
        )
    _told = True


def slot(name: str) -> Slot:
    """Return the handle of the slot called ``name``, always the same one.

    Raises:
        LookupError: no slot of that name is declared, and nothing is registered for one.
    """
    handle = _handles.get(name)
    if handle is None:
        close = difflib.get_close_matches(str(name), _handles, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "declare it with declare_slot(SlotContract(...))."
        raise LookupError(f"no slot is called {name!r}; there are {', '.join(sorted(_handles))}; {hint}")
    return handle


def declare_slot(contract: SlotContract) -> Slot:
    """Add a slot of the host's own, or declare one again with the same contract, and return its handle.

    Raises:
        ValueError: a slot of that name or operator is declared with another contract.
    """
    with _lock:
        for handle in _handles.values():
            other = handle.contract
            same_operator = (other.family, other.mode) == (contract.family, contract.mode)
            if (other.name == contract.name or same_operator) and other != contract:
                raise ValueError(f"slot {contract.name!r} cannot be declared: it is at odds with {other!r}")
        if contract.name not in _handles:
            _handles[contract.name] = Slot(contract)
            if _with_references is not None:
                _register_reference(_with_references, contract)
        return _handles[contract.name]


def register(
    slot: str,
    impl: Callable[..., Any] | str,
    *,
    name: str,
    predicate: Callable[[], object] | str | None = None,
    priority: int | None = None,
) -> None:
    """Add an implementation to a slot; at equal priority the newest wins.

    Args:
        slot: the slot's name. One that nobody declared becomes a slot without a reference.
        impl: the callable, or ``"module:attribute"``.
        name: the solution, which ``TOKENSPEED_KERNEL_SELECTION`` and overrides name. Several may share it.
        predicate: asked once: True if the implementation can be used here. One that raises means no.
        priority: 0 to 19; 19 if not given, or 0 if ``name`` is ``"reference"``.

    Raises:
        ValueError, TypeError: an argument is not as documented; nothing is registered then.
    """
    with _lock:
        if slot not in _handles:
            declare_slot(SlotContract(name=slot, family="slot", mode=slot))
        contract = _handles[slot].contract
        registry = registry_with_references()
        if priority is None:
            priority = 0 if name == "reference" else _CALLER_PRIORITY
        spec = KernelSpec(
            name=_free_name(registry, f"{slot}:{name}"),
            family=contract.family,
            mode=contract.mode,
            solution=name,
            priority=priority,
            predicate=predicate,
        )
        registry.register(spec, impl)


def _free_name(registry: KernelRegistry, wanted: str) -> str:
    """Return ``wanted``, or ``wanted#2`` and so on if kernels have those names: two of one name live side by side."""
    name, number = wanted, 1
    while registry.get_by_name(name) is not None:
        number += 1
        name = f"{wanted}#{number}"
    return name


def unregister(slot: str, name: str) -> None:
    """Withdraw every implementation of ``slot`` whose solution is ``name``; none is no error."""
    handle = _handles.get(slot)
    if handle is not None:
        registry, contract = registry_with_references(), handle.contract
        registry.remove(r for r in registry.registrations(contract.family, contract.mode) if r.spec.solution == name)


def resolve(slot: str) -> Callable[..., Any] | None:
    """Return the implementation of ``slot`` that comes first, or None if there is none (or no such slot)."""
    handle = _handles.get(slot)
    return None if handle is None else handle.resolve()


def iter_impls(slot: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield ``(solution, implementation)`` of every eligible kernel of ``slot``, the first choice first."""
    handle = _handles.get(slot)
    return iter(()) if handle is None else handle.implementations()


def active() -> dict[str, str]:
    """Return, for every slot, the solution that comes first, or ``"unavailable"``."""
    return {
        name: next((s for s, _ in handle.implementations()), "unavailable") for name, handle in list(_handles.items())
    }


def refresh() -> None:
    """Read the environment again, and ask every predicate and probe again when it is next needed."""
    KernelRegistry.get().answers.clear()
    settings.refresh()
