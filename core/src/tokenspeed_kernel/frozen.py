# SPDX-License-Identifier: Apache-2.0
"""A plan that no longer changes: the kernels that each operator tries, in order, for this process or another."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokenspeed_kernel import CONTRACT, __version__, epoch, settings
from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.overrides import forced_kernel
from tokenspeed_kernel.platform import Platform
from tokenspeed_kernel.references import registry_with_references
from tokenspeed_kernel.registry import KernelRegistry, Registration
from tokenspeed_kernel.rules import Request, buildable, load_or_trip
from tokenspeed_kernel.selection import decide

__all__ = ["FrozenKernel", "FrozenPlan", "adopt", "freeze", "thaw"]


@dataclass(frozen=True)
class FrozenKernel:
    """One candidate of a plan."""

    name: str
    solution: str
    priority: int
    owner: str | None
    """The plugin as ``name@distribution``, or None for the host."""
    version: str
    """The distribution's version; the core's for what the host registered."""


@dataclass(frozen=True)
class FrozenPlan(Mapping[str, tuple[FrozenKernel, ...]]):
    """``family.mode`` -> its candidates, the first choice first. Another process can :func:`adopt` its pickle."""

    operators: tuple[tuple[str, tuple[FrozenKernel, ...]], ...]
    settings: tuple[tuple[str, Any], ...]
    """The settings that decide: selection, hub, overrides."""
    platform: tuple[str, str]
    """Vendor and architecture."""

    def __getitem__(self, operator: str) -> tuple[FrozenKernel, ...]:
        return dict(self.operators)[operator]

    def __iter__(self) -> Iterator[str]:
        return (operator for operator, _ in self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides, in hexadecimal: equal on two machines that would run the same kernels."""
        facts = [CONTRACT, __version__, [[name, [asdict(k) for k in kernels]] for name, kernels in self.operators]]
        text = json.dumps([*facts, self.settings, self.platform], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: FrozenPlan) -> list[str]:
        """Return, as sentences, where ``other`` would run something else than this plan."""
        found = []
        if self.platform != other.platform:
            found.append(f"platform: {' '.join(self.platform)} there, {' '.join(other.platform)} here")
        mine, theirs = dict(self.settings), dict(other.settings)
        found += [
            f"setting {key}: {mine[key]!r} there, {theirs[key]!r} here" for key in mine if mine[key] != theirs[key]
        ]
        for operator in sorted({*self, *other}):
            there, here = (", ".join(map(_text, plan.get(operator, ()))) for plan in (self, other))
            if there != here:
                found.append(f"{operator}: {there or 'nothing'} there, {here or 'nothing'} here")
        return found

    def adopt_in_worker(self, worker: int = 0) -> None:
        """Adopt the plan; what ``worker_init_fn`` of a data loader, or the initializer of a pool, takes."""
        adopt(self)


def _text(kernel: FrozenKernel) -> str:
    return f"{kernel.name} {kernel.version}"


def freeze(*, on_error: Literal["raise", "fallback"] = "fallback") -> FrozenPlan:
    """Fix which kernels every operator tries, import and probe them, and return the plan.

    From now on a registration raises, and settings, overrides and oracles that change have no effect on slots. What a
    kernel that fails means is the caller's choice.

    Args:
        on_error: ``"fallback"`` runs the next kernel and switches the failed one off, as without a plan; ``"raise"``
            raises the kernel's error.

    Raises:
        ValueError: ``on_error`` is neither.
    """
    if on_error not in ("raise", "fallback"):
        raise ValueError(f"on_error must be 'raise' or 'fallback', got {on_error!r}")
    registry = registry_with_references()
    platform = Platform.get()
    versions = _versions()
    operators = []
    for family, mode in sorted(registry.list_operators()):  # not as they came: the digest depends on it
        ranked = [r for r in _ranked(registry, family, mode) if _usable(registry, r)]
        kernels = tuple(
            FrozenKernel(
                r.spec.name, r.spec.solution, int(r.spec.priority), r.owner, versions.get(r.owner or "", __version__)
            )
            for r in ranked
        )
        operators.append((f"{family}.{mode}", kernels))
    now = settings.current()
    deciding = (
        ("selection", now.selection),
        ("hub", now.hub),
        ("overrides", tuple(sorted(now.overrides.items()))),
    )
    plan = FrozenPlan(tuple(operators), deciding, (platform.vendor, platform.arch))
    registry.frozen = {operator: tuple(k.name for k in kernels) for operator, kernels in operators}
    registry.raises_when_frozen = on_error == "raise"
    epoch.bump()
    return plan


def _ranked(registry: KernelRegistry, family: str, mode: str) -> tuple[Registration, ...]:
    forced = forced_kernel(registry, family, mode, settings.current().overrides, None)
    return decide(registry, Request(family=family, mode=mode, platform=Platform.get(), forced=forced)).ranked


def _usable(registry: KernelRegistry, registration: Registration) -> bool:
    return buildable(registry, registration) is None and load_or_trip(registry, registration) is not None


def _versions() -> dict[str, str]:
    if "tokenspeed_kernel.plugins.discovery" not in sys.modules:
        return {}
    from tokenspeed_kernel.plugins import plugin_records

    return {f"{record.name}@{record.package}": record.version for record in plugin_records()}


def thaw() -> None:
    """Undo :func:`freeze` and :func:`adopt`: kernels may be registered, and choices follow the settings again."""
    KernelRegistry.get().frozen = None
    settings.pin()


def adopt(plan: FrozenPlan) -> list[str]:
    """Load exactly the plugins of another process's plan, freeze, and return what differs, after a warning for each.

    A child process calls it (with the spawn method, or in a worker of a data loader) instead of ``discover_plugins()``,
    once its host has registered what the parent's had.
    """
    from tokenspeed_kernel.plugins import discover_plugins

    thaw()
    owners = tuple(sorted({k.owner for kernels in plan.values() for k in kernels if k.owner is not None}))
    fixed = dict(plan.settings)
    fixed["overrides"] = dict(fixed["overrides"])
    settings.pin(**fixed, allowed=owners, disabled=())
    discover_plugins()
    found = plan.differences(freeze())
    for difference in found:
        warn(f"this process does not run the plan that it was given: {difference}")
    return found
