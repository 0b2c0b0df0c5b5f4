# SPDX-License-Identifier: Apache-2.0
"""Record which kernels implement which ops, and who brought them: plain data, no ranking and no device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from tokenspeed_kernel import epoch
from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.platform import CapabilityRequirement, PlatformInfo
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.spec import PRIORITY_LIMIT, KernelSpec, Priority, check_callable

__all__ = [
    "PRIORITY_LIMIT",
    "KernelRegistry",
    "KernelSpec",
    "Priority",
    "Registration",
    "describe_kernel",
    "load_attribute",
    "register_kernel",
    "registering_owner",
]

Implementation = TypeVar("Implementation", bound="Callable[..., Any] | str")


@dataclass(frozen=True, kw_only=True, eq=False)
class Registration:
    """One kernel as somebody brought it. Compared by identity: the same spec may come twice."""

    spec: KernelSpec
    implementation: Callable[..., Any] | str
    """The callable, or ``"module:attribute"``, imported when the kernel is first chosen."""
    owner: str | None
    """The plugin that registered it, or None for the host."""
    order: int
    """Later registrations have larger numbers."""
    module: str | None = None
    """The module whose import made a plugin's registration, or None if a function call made it."""

    def load(self) -> Callable[..., Any]:
        """Return the callable, importing it if it was given by name."""
        return load_attribute(self.implementation)


def load_attribute(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return ``target``, importing it if it is ``"module:attribute"``.

    Raises:
        ImportError: the module cannot be imported (or whatever else its import raises).
        AttributeError: the module has no such attribute.
        TypeError: the attribute is not callable.
    """
    if not isinstance(target, str):
        return target
    module, _, path = target.partition(":")
    value: Any = import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    if not callable(value):
        raise TypeError(f"{target!r} is not callable: {value!r}")
    return value  # type: ignore[no-any-return]  # callable() narrows Any to nothing better


registering_owner: ContextVar[str | None] = ContextVar("tokenspeed_kernel_registering_owner", default=None)
"""The plugin whose registrations are being made in this context, or None: set by discovery."""


class KernelRegistry:
    """Kernels by name and by operator. A host keeps one, :meth:`get`; a test may make its own.

    Readers take no lock: each index entry is an immutable tuple that a writer replaces whole.
    """

    _instance: KernelRegistry | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._order = 0
        self._by_name: dict[str, tuple[Registration, ...]] = {}  # last = active; the others wait for it to be withdrawn
        self._by_operator: dict[tuple[str, str], tuple[Registration, ...]] = {}  # active ones, oldest first
        self.tripped: dict[Registration, str] = {}
        """Registrations that are off for the rest of the process, with the cause."""
        self.frozen: dict[str, tuple[str, ...]] | None = None
        """While the plan is frozen, ``family.mode`` -> the kernels to try; nothing is registered or removed then."""
        self.raises_when_frozen = False
        """Whether a kernel of a frozen plan that fails raises, rather than leaving the call to the next."""
        self.answers: dict[tuple[Registration, str], tuple[str, str] | None] = {}
        """What each predicate and probe said: None for yes, else (code, detail). Emptied by every registration."""

    @classmethod
    def get(cls) -> KernelRegistry:
        """Return the process's registry; the first call makes it."""
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @classmethod
    def reset(cls) -> None:
        """Drop the process's registry with everything in it; the next :meth:`get` makes an empty one."""
        with cls._instance_lock:
            cls._instance = None
        epoch.bump()

    def register(self, spec: KernelSpec, impl: Callable[..., Any] | str) -> None:
        """Add a kernel. It replaces one of the same name, with a warning if that belongs to somebody else.

        A kernel that the host registers under a name which a plugin took does not displace the plugin's: it is kept
        aside until the plugin's is withdrawn.

        Raises:
            TypeError: ``spec`` is not a :class:`KernelSpec`, or ``impl`` is neither callable nor a str.
            ValueError: ``impl`` is a str but not ``"module:attribute"``.
        """
        if not isinstance(spec, KernelSpec):
            raise TypeError(f"spec must be a KernelSpec, got {spec!r}")
        check_callable(f"kernel {spec.name!r}", "implementation", impl)
        owner = registering_owner.get()
        module = None if owner is None else _importing_module()
        self.restore(Registration(spec=spec, implementation=impl, owner=owner, order=0, module=module))

    def restore(self, registration: Registration) -> None:
        """Add a registration as the newest one; see :meth:`register`."""
        with self._lock:
            self.require_thawed(f"kernel {registration.spec.name!r} cannot be registered")
            self._order += 1
            new = replace(registration, order=self._order)
            stack = self._by_name.get(new.spec.name, ())
            others = tuple(old for old in stack if old.owner != new.owner)
            shelved = new.owner is None and bool(others)
            self._replace(new.spec.name, (new, *others) if shelved else (*others, new))
        if others:
            _warn_about_name(new, others[-1], shelved)

    def remove(self, gone: Iterable[Registration]) -> None:
        """Withdraw registrations; whatever each had displaced is active again. Unknown ones are ignored."""
        gone = set(gone)
        with self._lock:
            if gone:
                self.require_thawed("no kernel can be withdrawn")
            for name in {registration.spec.name for registration in gone}:
                self._replace(name, tuple(r for r in self._by_name.get(name, ()) if r not in gone))

    def require_thawed(self, what: str) -> None:
        """Raise RuntimeError, which says ``what`` cannot be done, while the plan is frozen."""
        if self.frozen is not None:
            raise RuntimeError(f"{what}: the plan is frozen; call thaw() first, and freeze() again afterwards")

    def owned_by(self, owner: str | None) -> tuple[Registration, ...]:
        """Return what ``owner`` registered and has not lost, active or displaced, oldest first."""
        with self._lock:
            found = [r for stack in self._by_name.values() for r in stack if r.owner == owner]
        return tuple(sorted(found, key=lambda r: r.order))

    def _replace(self, name: str, stack: tuple[Registration, ...]) -> None:
        """Make ``stack`` what is registered under ``name``, and every choice stale. The lock is held."""
        for old in self._by_name.pop(name, ())[-1:]:
            key = (old.spec.family, old.spec.mode)
            if rest := tuple(r for r in self._by_operator[key] if r is not old):
                self._by_operator[key] = rest
            else:
                del self._by_operator[key]
        if stack:
            self._by_name[name] = stack
            key = (stack[-1].spec.family, stack[-1].spec.mode)
            active = (*self._by_operator.get(key, ()), stack[-1])
            self._by_operator[key] = tuple(sorted(active, key=lambda r: r.order))
        self.answers.clear()
        epoch.bump()

    def registered_as(self, name: str) -> tuple[Registration, ...]:
        """Return everything that is registered under a kernel's name: the last is active, the others wait behind it."""
        return self._by_name.get(name, ())

    def registrations(self, family: str, mode: str) -> tuple[Registration, ...]:
        """Return the active registrations for an operator, oldest first."""
        return self._by_operator.get((family, mode), ())

    def registration(self, name: str) -> Registration | None:
        """Return the active registration of the kernel called ``name``, or None."""
        stack = self._by_name.get(name)
        return stack[-1] if stack else None

    def get_by_name(self, name: str) -> KernelSpec | None:
        """Return the spec of the kernel called ``name``, or None."""
        found = self.registration(name)
        return None if found is None else found.spec

    def get_impl(self, name: str) -> Callable[..., Any] | None:
        """Return the implementation of the kernel called ``name``, importing it if need be, or None."""
        found = self.registration(name)
        return None if found is None else found.load()

    def get_for_operator(
        self,
        family: str,
        mode: str,
        *,
        features: frozenset[str] | None = None,
        platform: PlatformInfo | None = None,
        format_signature: FormatSignature | None = None,
        solution: str | None = None,
    ) -> list[KernelSpec]:
        """Return the specs for an operator that meet every condition: the highest priority first, then the oldest."""
        return [
            spec
            for spec in (r.spec for r in sorted(self.registrations(family, mode), key=_by_priority))
            if (not features or features <= spec.features)
            and (platform is None or spec.capability.satisfied_by(platform))
            and (format_signature is None or spec.supports_format_signature(format_signature))
            and (solution is None or spec.solution == solution)
        ]

    def list_operators(self) -> list[tuple[str, str]]:
        """Return every ``(family, mode)`` that has a kernel, in the order in which they came."""
        return list(self._by_operator)

    def list_kernels(self, family: str | None = None, mode: str | None = None) -> list[KernelSpec]:
        """Return every spec, or a family's or mode's, oldest first; an operator's as :meth:`get_for_operator` does."""
        if family is not None and mode is not None:
            return self.get_for_operator(family, mode)
        with self._lock:
            active = [r for registrations in self._by_operator.values() for r in registrations]
        return [
            r.spec
            for r in sorted(active, key=lambda r: r.order)
            if family in (None, r.spec.family) and mode in (None, r.spec.mode)
        ]

    def list_solutions(self, family: str, mode: str) -> list[str]:
        """Return the solutions that an operator has, in alphabetical order."""
        return sorted({r.spec.solution for r in self.registrations(family, mode)})


def _by_priority(registration: Registration) -> tuple[int, int]:
    return -registration.spec.priority, registration.order


def _importing_module() -> str | None:
    """Return the module whose import is registering a kernel, or None if a plugin's ``register()`` itself does."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "tokenspeed_kernel.plugins.loading":
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return None


def _warn_about_name(new: Registration, old: Registration, shelved: bool) -> None:
    name, newer, older = new.spec.name, new.owner or "the host", old.owner or "the host"
    if shelved:
        warn(
            f"kernel {name!r} from {newer} is kept aside: {older} has taken that name. Register it under another name."
        )
    else:
        warn(f"kernel {name!r} from {older} is replaced by the one of that name from {newer}.")


def register_kernel(
    family: str,
    mode: str,
    *,
    name: str | None = None,
    features: Iterable[str] | None = None,
    solution: str,
    capability: CapabilityRequirement | None = None,
    signatures: Iterable[FormatSignature],
    traits: Mapping[str, frozenset[Any]] | None = None,
    priority: Priority | int = Priority.PERFORMANT + 2,
    weight_preprocessor: Callable[..., Any] | None = None,
    predicate: Callable[[], object] | str | None = None,
    probe: Callable[[], object] | str | None = None,
    supports: Callable[..., object] | str | None = None,
) -> Callable[[Implementation], Implementation]:
    """Return a decorator that registers an implementation of ``(family, mode)`` and gives it back unchanged.

    Call it on a function or class, or on a str ``"module:attribute"`` that is imported when the kernel is first chosen.
    Without ``name`` the kernel is called ``<solution>_<family>_<mode>``. The other arguments are the fields of
    :class:`KernelSpec`; an empty ``signatures`` takes every format.

    Raises:
        ValueError, TypeError: an argument is not what :class:`KernelSpec` documents; nothing is registered then.
    """
    spec = KernelSpec(
        name=name if name is not None else f"{solution}_{family}_{mode}",
        family=family,
        mode=mode,
        features=features or (),  # type: ignore[arg-type]  # KernelSpec freezes what it checks
        solution=solution,
        capability=capability if capability is not None else CapabilityRequirement(),
        format_signatures=signatures,  # type: ignore[arg-type]  # likewise
        traits=traits or {},
        priority=priority,
        weight_preprocessor=weight_preprocessor,
        predicate=predicate,
        probe=probe,
        supports=supports,
    )

    def decorate(implementation: Implementation) -> Implementation:
        KernelRegistry.get().register(spec, implementation)
        return implementation

    return decorate


def describe_kernel(name: str) -> str:
    """Return what is known of the kernel called ``name``, one fact a line."""
    found = KernelRegistry.get().registration(name)
    if found is None:
        return f"Kernel {name!r} not found"
    spec = found.spec
    band = max(b for b in Priority if b <= spec.priority)
    offset = f"+{spec.priority - band}" if spec.priority > band else ""
    preprocessor = getattr(spec.weight_preprocessor, "__qualname__", spec.weight_preprocessor)
    signatures = "; ".join(sorted(map(str, spec.format_signatures))) or "any"
    return "\n".join(
        (
            f"Kernel: {spec.name}",
            f"  Operator: {spec.family}.{spec.mode}",
            f"  Solution: {spec.solution}",
            f"  Registered by: {found.owner or 'the host'}",
            f"  Priority: {int(spec.priority)} ({band.name}{offset})",
            f"  Format signatures: {signatures}",
            f"  Features: {', '.join(sorted(spec.features)) or 'none'}",
            f"  Traits: {', '.join(f'{k}={sorted(map(str, v))}' for k, v in sorted(spec.traits.items())) or 'none'}",
            f"  Platform: {spec.capability}",
            f"  Weight preprocessor: {preprocessor or 'none'}",
        )
    )
