# SPDX-License-Identifier: Apache-2.0
"""Load one plugin as a transaction: all that it registers, or nothing."""

from __future__ import annotations

import contextvars
import sys
import time
import traceback
from collections.abc import Callable, Iterable

from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP
from tokenspeed_kernel.plugins.installed import InstalledPlugin
from tokenspeed_kernel.plugins.records import PluginRecord
from tokenspeed_kernel.registry import KernelRegistry, Registration, registering_owner
from tokenspeed_kernel.selection import withdraw_oracles

__all__ = ["Loader", "record_of", "unload"]


def record_of(plugin: InstalledPlugin, state: str, reason: str = "") -> PluginRecord:
    """Return the record of a plugin that is not loaded."""
    return PluginRecord(plugin.name, plugin.package, plugin.version, plugin.value, state, reason)


def unload(owner: str) -> None:
    """Withdraw everything that the plugin ``owner`` registered."""
    registry = KernelRegistry.get()
    registry.remove(registry.owned_by(owner))
    withdraw_oracles(owner)


class Loader:
    """Loads plugins, and remembers what their modules registered while they were imported.

    A module is imported once a process. What it registered then belongs to its plugin, and is registered for it again
    whenever the plugin is loaded again, be it after a failure, by force or in a new registry.
    """

    def __init__(self) -> None:
        self._from_imports: dict[str, dict[str, Registration]] = {}  # by owner and kernel name

    def load(self, plugin: InstalledPlugin) -> tuple[PluginRecord, BaseException | None]:
        """Return the plugin's record, and its error if it failed.

        Raises:
            KeyboardInterrupt: the user's wish to stop, after undoing what the plugin registered.
        """
        started = time.perf_counter()
        unload(plugin.owner)
        phase = ["import"]
        try:
            # In a context of its own: an override that it opens and never closes ends with it.
            contextvars.copy_context().run(self._register, plugin, phase)
        except BaseException as error:  # SystemExit and exceptions of its own included: a plugin must not end the host
            self._remember(plugin.owner)
            unload(plugin.owner)
            if isinstance(error, KeyboardInterrupt):
                raise
            return _failure(plugin, phase[0], error, (time.perf_counter() - started) * 1e3), error
        self._remember(plugin.owner)
        owned = KernelRegistry.get().owned_by(plugin.owner)
        _warn_about_ties(owned)
        names = tuple(registration.spec.name for registration in owned)
        milliseconds = (time.perf_counter() - started) * 1e3
        facts = (plugin.name, plugin.package, plugin.version, plugin.value)
        return PluginRecord(*facts, "loaded", milliseconds=milliseconds, kernel_names=names), None

    def _register(self, plugin: InstalledPlugin, phase: list[str]) -> None:
        registering_owner.set(plugin.owner)
        registry = KernelRegistry.get()
        for earlier in self._from_imports.get(plugin.owner, {}).values():
            if earlier.module in sys.modules:
                registry.restore(earlier)
        register = _import(plugin)
        phase[0] = "register"
        register()

    def _remember(self, owner: str) -> None:
        found = (r for r in KernelRegistry.get().owned_by(owner) if r.module is not None)
        self._from_imports.setdefault(owner, {}).update({r.spec.name: r for r in found})


def _import(plugin: InstalledPlugin) -> Callable[[], object]:
    import importlib_metadata

    register = importlib_metadata.EntryPoint(plugin.name, plugin.value, ENTRY_POINT_GROUP).load()
    if not callable(register):
        raise TypeError(f"{plugin.value} must be a function register(), got {register!r}")
    return register  # type: ignore[no-any-return]  # an entry point may name anything; it is callable


def _failure(plugin: InstalledPlugin, phase: str, error: BaseException, milliseconds: float) -> PluginRecord:
    cause = describe(error)
    skip = f"TOKENSPEED_KERNEL_DISABLE_PLUGINS={plugin.name}"
    who = f"plugin {plugin.name!r} of {plugin.package}"
    warn(f"{who} failed in {phase} and is not loaded: {cause}. To skip it: {skip}")
    return PluginRecord(
        plugin.name,
        plugin.package,
        plugin.version,
        plugin.value,
        state="failed",
        reason=cause,
        phase=phase,
        traceback="".join(traceback.format_exception(error)),
        milliseconds=milliseconds,
    )


def _warn_about_ties(owned: Iterable[Registration]) -> None:
    """Warn where a new kernel shares its priority with another owner's on the same operator."""
    for new in owned:
        for other in KernelRegistry.get().registrations(new.spec.family, new.spec.mode):
            if other.owner != new.owner and other.spec.priority == new.spec.priority:
                both = f"{new.spec.name!r} ({new.owner}) and {other.spec.name!r} ({other.owner or 'the host'})"
                where = f"priority {new.spec.priority} for {new.spec.family}.{new.spec.mode}"
                warn(f"kernels {both} share {where}: {new.spec.name!r} is newer and wins.")
