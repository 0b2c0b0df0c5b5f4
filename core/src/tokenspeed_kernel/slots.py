# SPDX-License-Identifier: Apache-2.0
"""The slot table, and the handles that hosts call."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tokenspeed_kernel import settings
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.dispatch import Dispatch, handles
from tokenspeed_kernel.references import BUILT_IN, contracts, declare_contract, registry_with_references
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec

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
        for candidate in plan:
            if candidate.ready or self._prepare(plan, candidate):
                yield candidate.registration.spec.solution, candidate.call

    def __reduce__(self) -> tuple[Callable[[str], Slot], tuple[str]]:
        return slot, (self.name,)

    def __repr__(self) -> str:
        return f"<slot {self.name!r}>"


_lock = threading.RLock()


def slot(name: str) -> Slot:
    """Return the handle of the slot called ``name``, always the same one.

    Raises:
        LookupError: no slot of that name is declared, and nothing is registered for one.
    """
    handle: Slot | None = handles.get(name)
    if handle is None:
        close = difflib.get_close_matches(str(name), handles, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "declare it with declare_slot(SlotContract(...))."
        raise LookupError(f"no slot is called {name!r}; there are {', '.join(sorted(handles))}; {hint}")
    return handle


def declare_slot(contract: SlotContract) -> Slot:
    """Add a slot of the host's own, or declare one again with the same contract, and return its handle.

    Raises:
        ValueError: a slot of that name or operator is declared with another contract.
    """
    declare_contract(contract)
    handle: Slot = handles.setdefault(contract.name, Slot(contract))
    return handle


for _contract in BUILT_IN:
    declare_slot(_contract)


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
        contract = contracts.get(slot) or SlotContract(name=slot, family="slot", mode=slot)
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
        declare_slot(contract)  # after the registration: a refused one must not leave a slot behind


def _free_name(registry: KernelRegistry, wanted: str) -> str:
    """Return ``wanted``, or ``wanted#2`` and so on if kernels have those names: two of one name live side by side."""
    name, number = wanted, 1
    while registry.get_by_name(name) is not None:
        number += 1
        name = f"{wanted}#{number}"
    return name


def unregister(slot: str, name: str) -> None:
    """Withdraw every implementation of ``slot`` whose solution is ``name``; none is no error."""
    contract = contracts.get(slot)
    if contract is not None:
        registry = registry_with_references()
        registry.remove(r for r in registry.registrations(contract.family, contract.mode) if r.spec.solution == name)


def resolve(slot: str) -> Callable[..., Any] | None:
    """Return the implementation of ``slot`` that comes first, or None if there is none (or no such slot)."""
    handle = handles.get(slot)
    return None if handle is None else handle.resolve()


def iter_impls(slot: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield ``(solution, implementation)`` of every eligible kernel of ``slot``, the first choice first."""
    handle = handles.get(slot)
    return iter(()) if handle is None else handle.implementations()


def active() -> dict[str, str]:
    """Return, for every slot, the solution that comes first, or ``"unavailable"``."""
    return {name: next((s for s, _ in slot(name).implementations()), "unavailable") for name in list(handles)}


def refresh() -> None:
    """Read the environment again, and ask every predicate and probe again when it is next needed."""
    KernelRegistry.get().answers.clear()
    settings.refresh()
