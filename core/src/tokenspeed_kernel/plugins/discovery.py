# SPDX-License-Identifier: Apache-2.0
"""Discover plugins, and keep what this process knows of them.

Only functions import here: importing this module must cost a host next to nothing.
"""

from __future__ import annotations

import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tokenspeed_kernel.plugins.gates import Gates
    from tokenspeed_kernel.plugins.installed import Scanner
    from tokenspeed_kernel.plugins.loading import Loader
    from tokenspeed_kernel.plugins.metadata import InstalledPlugin
    from tokenspeed_kernel.plugins.records import PluginInfo, PluginRecord
    from tokenspeed_kernel.registry import KernelRegistry

__all__ = ["disable_plugin", "discover_plugins", "enable_plugin", "list_plugins", "plugin_records", "reset_plugins"]

_PATIENCE = 60.0
"""Seconds to wait for another thread's discovery. It may be waiting, in turn, for a module that this thread imports."""


class _State:
    """What this process knows of plugins."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.discovering = False
        self.disabled: set[str] = set()  # by disable_plugin, normalised; the environment's are read at each discovery
        self.records: dict[InstalledPlugin, PluginRecord] = {}
        self.registry: KernelRegistry | None = None  # the one that the loaded plugins registered in
        self.scanner: Scanner | None = None
        self.loader: Loader | None = None


_state = _State()


def _renew_lock() -> None:
    """Drop, in a forked child, a lock whose holder is a thread that the child does not have."""
    if _state.lock.acquire(blocking=False):
        _state.lock.release()
    else:
        _state.lock, _state.discovering = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def discover_plugins(*, force: bool = False, strict: bool = False) -> list[PluginInfo]:
    """Load every installed plugin that is not loaded yet, in alphabetical order, and return the loaded ones.

    A plugin that fails is recorded and warned about, and the others load. Calling again loads only what was not loaded:
    plugins that failed are tried again. Safe from several threads; a plugin that calls it gets what is loaded so far.
    While the plan is frozen it changes nothing.

    Args:
        force: look through the path again even if no directory on it has changed, and run the ``register()`` of loaded
            plugins again.
        strict: raise the first failure, after undoing what that plugin registered.

    Raises:
        RuntimeError: with ``strict``, a plugin failed, or the metadata could not be read; the error is the cause. With
            ``force``, the plan is frozen.
    """
    state = _state
    if not state.lock.acquire(timeout=_PATIENCE):
        from tokenspeed_kernel.notices import warn

        warn(f"another thread has been discovering plugins for {_PATIENCE:g} s: this one goes on with what is loaded")
        return list_plugins()
    try:
        if not state.discovering:
            state.discovering = True
            try:
                _discover(force, strict)
            finally:
                state.discovering = False
        return list_plugins()
    finally:
        state.lock.release()


def _discover(force: bool, strict: bool) -> None:
    from tokenspeed_kernel import settings
    from tokenspeed_kernel.plugins.gates import Gates
    from tokenspeed_kernel.plugins.installed import Scanner
    from tokenspeed_kernel.references import registry_with_references
    from tokenspeed_kernel.registry import KernelRegistry

    if KernelRegistry.get().frozen is not None and not force:
        return  # nothing may come or go before thaw(); with force, the registry says so
    settings.refresh()
    registry = registry_with_references()
    if registry is not _state.registry:  # what was loaded registered in another one
        _state.registry = registry
        _state.records.clear()
    _state.scanner = _state.scanner or Scanner()
    scan = _state.scanner.scan(force)
    if scan.error is None:
        for gone in set(_state.records) - set(scan.plugins):
            _forget(gone)
    gates = Gates(scan, _state.disabled)
    gates.warn_about_names()
    for plugin in scan.plugins:
        _discover_one(plugin, gates, force, strict)
    if strict and scan.error is not None:
        raise RuntimeError("part of the path could not be searched for plugins") from scan.error


def _discover_one(plugin: InstalledPlugin, gates: Gates, force: bool, strict: bool) -> None:
    from tokenspeed_kernel.plugins.loading import Loader, record_of, unload

    before = _state.records.get(plugin)
    if refusal := gates.refusal(plugin):
        _forget(plugin)
        _state.records[plugin] = record_of(plugin, *refusal)
    elif force or before is None or before.state != "loaded":
        _state.loader = _state.loader or Loader()
        unload(plugin.owner)  # first: under a frozen plan it raises, and everything must be as it was
        _state.records.pop(plugin, None)
        record, error = _state.loader.load(plugin, insisted=gates.insists_on(plugin))
        _state.records[plugin] = record
        if strict and error is not None:
            raise RuntimeError(f"plugin {plugin.name!r}: {record.reason}") from error
        if refusal := gates.refusal(plugin):  # it, or what it called, disabled it meanwhile
            _forget(plugin)
            _state.records[plugin] = record_of(plugin, *refusal)


def _forget(plugin: InstalledPlugin) -> None:
    """Drop a plugin's record, and what it registered if it was loaded."""
    from tokenspeed_kernel.plugins.loading import unload

    record = _state.records.get(plugin)
    if record is not None and record.state == "loaded":
        unload(plugin.owner)
    _state.records.pop(plugin, None)


def disable_plugin(name: str) -> None:
    """Skip the plugin called ``name`` (or ``name@distribution``) from now on; what it registered is withdrawn."""
    from tokenspeed_kernel.plugins.loading import record_of
    from tokenspeed_kernel.plugins.metadata import normal

    with _state.lock:
        _state.disabled.add(normal(name))
        for plugin, record in list(_state.records.items()):
            if record.state == "loaded" and normal(name) in plugin.names:
                _forget(plugin)
                why = "disable_plugin() was called; enable_plugin() and discover_plugins() bring it back"
                _state.records[plugin] = record_of(plugin, "disabled", why)


def enable_plugin(name: str) -> None:
    """Take back :func:`disable_plugin`; the next :func:`discover_plugins` loads the plugin."""
    from tokenspeed_kernel.plugins.metadata import normal

    with _state.lock:
        _state.disabled.discard(normal(name))


def reset_plugins() -> None:
    """Withdraw every plugin's kernels and forget all records. Which plugins are disabled is kept.

    Raises:
        RuntimeError: a plugin called this while it was being loaded.
    """
    with _state.lock:
        if _state.discovering:
            raise RuntimeError("a plugin cannot reset the plugins while it is being loaded")
        for plugin in list(_state.records):
            _forget(plugin)
        _state.scanner = None


def list_plugins() -> list[PluginInfo]:
    """Return the loaded plugins, in alphabetical order."""
    from tokenspeed_kernel.plugins.records import PluginInfo

    loaded = (record for record in plugin_records() if record.state == "loaded")
    return [PluginInfo(r.name, r.package, r.version, len(r.kernel_names), r.kernel_names) for r in loaded]


def plugin_records() -> list[PluginRecord]:
    """Return what became of every installed plugin at the last discovery, in alphabetical order."""
    records = dict(_state.records)  # no lock: a plugin that is loading may ask in a thread that it waits for
    return [records[plugin] for plugin in sorted(records)]
