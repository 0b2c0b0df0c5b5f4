# SPDX-License-Identifier: Apache-2.0
"""Load one plugin as a transaction: all that it registers, or nothing."""

from __future__ import annotations

import contextvars
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tokenspeed_kernel import CONTRACT, __version__, references, selection
from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.plugins.gates import how_to_force
from tokenspeed_kernel.plugins.metadata import InstalledPlugin
from tokenspeed_kernel.plugins.records import PluginRecord
from tokenspeed_kernel.plugins.requirement import is_met
from tokenspeed_kernel.plugins.watching import Watch
from tokenspeed_kernel.registry import KernelRegistry, Registration, registering_owner

__all__ = ["Loader", "record_of", "unload"]

_SLOW = 1.0
"""Seconds from which on it is said that a plugin takes long to load."""

_VALUE = re.compile(r"(?P<module>[\w.]+)\s*(?::\s*(?P<attribute>[\w.]+)\s*)?(?:\[.*\]\s*)?")  # extras change nothing


class IncompatibleError(Exception):
    """The plugin declares a contract that this core does not have."""


@dataclass
class _Attempt:
    """One try to load a plugin, as far as it got."""

    plugin: InstalledPlugin
    insisted: bool
    phase: str = "import"
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


def record_of(plugin: InstalledPlugin, state: str, reason: str = "", **facts: Any) -> PluginRecord:
    """Return the record of a plugin."""
    return PluginRecord(plugin.name, plugin.package, plugin.version, plugin.value, state, reason, **facts)


def unload(owner: str) -> None:
    """Withdraw everything that the plugin ``owner`` registered."""
    registry = KernelRegistry.get()
    registry.remove(registry.owned_by(owner))
    selection.withdraw_oracles(owner)


class Loader:
    """Loads plugins, and remembers what their modules registered while they were imported.

    A module is imported once a process. What it registered then belongs to its plugin, and is registered for it again
    whenever the plugin is loaded again, be it after a failure, by force or in a new registry.
    """

    def __init__(self) -> None:
        self._from_imports: dict[str, dict[str, Registration]] = {}  # by owner and kernel name

    def load(self, plugin: InstalledPlugin, *, insisted: bool = False) -> tuple[PluginRecord, BaseException | None]:
        """Return the plugin's record, and its error if it failed.

        Args:
            plugin: what to load; nothing that it registered before is there any more.
            insisted: the user named this very plugin, so that it loads although it was made for another core.

        Raises:
            KeyboardInterrupt: the user's wish to stop, after undoing what the plugin registered.
        """
        attempt = _Attempt(plugin, insisted)
        if plugin.fault:
            attempt.phase = "metadata"
            return _failure(attempt, ValueError(plugin.fault))
        if insisted and not is_met(plugin.requires):
            attempt.notes.append(f"it requires {' and '.join(plugin.requires)}, and this is {__version__}")
        slots, watch = len(references.contracts), Watch(KernelRegistry.get())
        error: BaseException | None = None
        try:
            # In a context of its own: an override that it opens and never closes ends with it.
            contextvars.copy_context().run(self._register, attempt)
        except BaseException as caught:  # noqa: BLE001 -- SystemExit too: a plugin must not end the host
            error = caught
        damage = watch.mend_attributes()
        self._remember(plugin.owner)
        damage += watch.mend_kernels(plugin.owner)
        attempt.notes += watch.changes()
        if (seconds := _milliseconds(attempt) / 1e3) >= _SLOW:
            attempt.notes.append(f"it took {seconds:.1f} s to load")
        if isinstance(error, KeyboardInterrupt):
            unload(plugin.owner)
            raise error
        if damage and error is None:
            error = RuntimeError(f"it may only add kernels, but {', '.join(damage)}; that was undone")
        elif damage:
            attempt.notes += [f"{what}; that was undone" for what in damage]
        if error is not None:
            unload(plugin.owner)
            return _failure(attempt, error)
        return _success(attempt, len(references.contracts) > slots), None

    def _register(self, attempt: _Attempt) -> None:
        plugin = attempt.plugin
        registering_owner.set(plugin.owner)
        registry = KernelRegistry.get()
        for earlier in self._from_imports.get(plugin.owner, {}).values():
            if earlier.module in sys.modules:
                registry.restore(earlier)
        register = _import(attempt)
        attempt.phase = "register"
        _call(register, plugin.value)

    def _remember(self, owner: str) -> None:
        found = (r for r in KernelRegistry.get().owned_by(owner) if r.module is not None)
        self._from_imports.setdefault(owner, {}).update({r.spec.name: r for r in found})


def _import(attempt: _Attempt) -> Callable[[], object]:
    value = attempt.plugin.value
    parts = _VALUE.fullmatch(value)
    if parts is None:
        raise ValueError(f"the entry point must be 'module:function', got {value!r}")
    register: Any = import_module(parts["module"])
    _check_contract(attempt, vars(register).get("TOKENSPEED_KERNEL_CONTRACT", 0))
    for name in (parts["attribute"] or "").split("."):
        register = getattr(register, name) if name else register
    if not callable(register) or isinstance(register, type):
        raise TypeError(f"{value} must be a function register(), got {register!r}")
    return register  # type: ignore[no-any-return]  # an entry point may name anything; it is callable


def _check_contract(attempt: _Attempt, needed: object) -> None:
    if type(needed) is not int:
        raise TypeError(f"TOKENSPEED_KERNEL_CONTRACT must be an int, got {needed!r}")
    if needed > CONTRACT and attempt.insisted:
        attempt.notes.append(f"it needs contract {needed}, and is loaded with {CONTRACT} because the user insists")
    elif needed > CONTRACT:
        raise IncompatibleError(f"it needs contract {needed}, but this is {CONTRACT}; {how_to_force(attempt.plugin)}")


def _call(register: Callable[[], object], value: str) -> None:
    try:
        result: Any = register()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
            raise TypeError(f"{value} must take no arguments: {describe(error)}") from error
        raise
    if isinstance(result, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)):
        if isinstance(result, types.CoroutineType):
            result.close()  # or Python would warn, somewhere later, that it was never awaited
        raise TypeError(f"{value} must be a plain function: it returned {result!r}, and has done nothing yet")


def _failure(attempt: _Attempt, error: BaseException) -> tuple[PluginRecord, BaseException | None]:
    plugin = attempt.plugin
    incompatible = isinstance(error, IncompatibleError)
    cause = str(error) if incompatible else describe(error)
    what = "" if incompatible else f"failed in {attempt.phase} and "
    notes = "".join(f" Besides, {note}." for note in attempt.notes)
    skip = f"To skip it: TOKENSPEED_KERNEL_DISABLE_PLUGINS={plugin.name}"
    warn(f"plugin {plugin.name!r} of {plugin.package} {what}is not loaded: {cause}.{notes} {skip}")
    record = record_of(
        plugin,
        "incompatible" if incompatible else "failed",
        cause,
        phase=attempt.phase,
        traceback=_traceback(error),
        milliseconds=_milliseconds(attempt),
        notes=tuple(attempt.notes),
    )
    return record, None if incompatible else error


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 -- printing an exception runs code of its class
        return f"{type(error).__name__}, whose traceback cannot be shown\n"


def _milliseconds(attempt: _Attempt) -> float:
    return (time.perf_counter() - attempt.started) * 1e3


def _success(attempt: _Attempt, declared_slots: bool) -> PluginRecord:
    plugin, registry = attempt.plugin, KernelRegistry.get()
    milliseconds = _milliseconds(attempt)
    owned = registry.owned_by(plugin.owner)
    scores = any(owner == plugin.owner for entries in selection._oracles.values() for owner, _ in entries)
    if not (owned or scores or declared_slots):
        attempt.notes.append("it registered nothing")
    if attempt.notes:
        warn(f"plugin {plugin.name!r} of {plugin.package} is loaded, but {'; '.join(attempt.notes)}.")
    _warn_about_ties(owned)
    taken = [f"its kernel {r.spec.name!r} replaces that of {old.owner or 'the host'}" for r, old in _replaced(owned)]
    return record_of(
        plugin,
        "loaded",
        milliseconds=milliseconds,
        kernel_names=tuple(registration.spec.name for registration in owned),
        notes=(*attempt.notes, *taken),
    )


def _replaced(owned: Iterable[Registration]) -> Iterable[tuple[Registration, Registration]]:
    """Yield each registration that took somebody's name, and the one that had it before."""
    for new in owned:
        stack = KernelRegistry.get().registered_as(new.spec.name)
        place = stack.index(new)
        if place:
            yield new, stack[place - 1]


def _warn_about_ties(owned: Iterable[Registration]) -> None:
    """Warn where a new kernel shares its priority with another owner's on the same operator."""
    for new in owned:
        for other in KernelRegistry.get().registrations(new.spec.family, new.spec.mode):
            if other.owner != new.owner and other.spec.priority == new.spec.priority:
                both = f"{new.spec.name!r} ({new.owner}) and {other.spec.name!r} ({other.owner or 'the host'})"
                where = f"priority {new.spec.priority} for {new.spec.family}.{new.spec.mode}"
                warn(f"kernels {both} share {where}: {new.spec.name!r} is newer and wins.")
