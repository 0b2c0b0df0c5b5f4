# SPDX-License-Identifier: Apache-2.0
"""Discover plugins, and keep what this process knows of them.

Only functions import here: importing this module must cost a host next to nothing.
"""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tokenspeed_kernel.plugins.installed import InstalledPlugin
    from tokenspeed_kernel.plugins.loading import Loader
    from tokenspeed_kernel.plugins.records import PluginInfo, PluginRecord
    from tokenspeed_kernel.registry import KernelRegistry

__all__ = ["disable_plugin", "discover_plugins", "enable_plugin", "list_plugins", "plugin_records", "reset_plugins"]


class _State:
    """What this process knows of plugins."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.discovering = False
        self.disabled: set[str] = set()  # by disable_plugin; the environment's are read at each discovery
        self.records: dict[InstalledPlugin, PluginRecord] = {}
        self.registry: KernelRegistry | None = None  # the one that the loaded plugins registered in
        self.loader: Loader | None = None


_state = _State()


def discover_plugins(*, force: bool = False, strict: bool = False) -> list[PluginInfo]:
    """Load every installed plugin that is not loaded yet, in alphabetical order, and return the loaded ones.

    A plugin that fails is recorded and warned about, and the others load. Calling again loads only what was not loaded:
    plugins that failed are tried again. Safe from several threads; a plugin that calls it gets what is loaded so far.

    Args:
        force: run the ``register()`` of loaded plugins again.
        strict: raise the first failure, after undoing what that plugin registered.

    Raises:
        RuntimeError: with ``strict``, a plugin failed, or the metadata could not be read; the error is the cause.
    """
    with _state.lock:
        if not _state.discovering:
            _state.discovering = True
            try:
                _discover(force, strict)
            finally:
                _state.discovering = False
        return list_plugins()


def _discover(force: bool, strict: bool) -> None:
    from tokenspeed_kernel import settings
    from tokenspeed_kernel.notices import describe, warn
    from tokenspeed_kernel.plugins.gates import Gates
    from tokenspeed_kernel.plugins.installed import installed_plugins
    from tokenspeed_kernel.references import registry_with_references

    settings.refresh()
    registry = registry_with_references()
    if registry is not _state.registry:  # what was loaded registered in another one
        _state.registry = registry
        _state.records.clear()
    try:
        found = installed_plugins()
    except Exception as error:
        message = f"no plugin can be discovered, reading the installed metadata failed: {describe(error)}"
        if strict:
            raise RuntimeError(message) from error
        warn(message)
        return
    for gone in set(_state.records) - set(found):
        _forget(gone)
    gates = Gates(found, _state.disabled)
    gates.warn_about_names()
    gates.warn_about_clashes()
    for plugin in found:
        _discover_one(plugin, gates.refusal(plugin), force, strict)


def _discover_one(plugin: InstalledPlugin, refusal: tuple[str, str] | None, force: bool, strict: bool) -> None:
    from tokenspeed_kernel.plugins.loading import Loader, record_of

    before = _state.records.get(plugin)
    if refusal is not None:
        _forget(plugin)
        _state.records[plugin] = record_of(plugin, *refusal)
    elif force or before is None or before.state != "loaded":
        _state.loader = _state.loader or Loader()
        _state.records.pop(plugin, None)
        _state.records[plugin], error = _state.loader.load(plugin)
        if strict and error is not None:
            raise RuntimeError(f"plugin {plugin.name!r}: {_state.records[plugin].reason}") from error


def _forget(plugin: InstalledPlugin) -> None:
    """Drop a plugin's record, and what it registered if it was loaded."""
    from tokenspeed_kernel.plugins.loading import unload

    record = _state.records.pop(plugin, None)
    if record is not None and record.state == "loaded":
        unload(plugin.owner)


def disable_plugin(name: str) -> None:
    """Skip the plugin called ``name`` (or ``name@distribution``) from now on; what it registered is withdrawn."""
    from tokenspeed_kernel.plugins.installed import normal
    from tokenspeed_kernel.plugins.loading import record_of

    with _state.lock:
        _state.disabled.add(name)
        for plugin, record in list(_state.records.items()):
            if record.state == "loaded" and normal(name) in (normal(plugin.name), plugin.key):
                _forget(plugin)
                why = "disable_plugin() was called; enable_plugin() and discover_plugins() bring it back"
                _state.records[plugin] = record_of(plugin, "disabled", why)


def enable_plugin(name: str) -> None:
    """Take back :func:`disable_plugin`; the next :func:`discover_plugins` loads the plugin."""
    from tokenspeed_kernel.plugins.installed import normal

    with _state.lock:
        _state.disabled = {other for other in _state.disabled if normal(other) != normal(name)}


def reset_plugins() -> None:
    """Withdraw every plugin's kernels and forget all records. Which plugins are disabled is kept."""
    with _state.lock:
        for plugin in list(_state.records):
            _forget(plugin)


def list_plugins() -> list[PluginInfo]:
    """Return the loaded plugins, in alphabetical order."""
    from tokenspeed_kernel.plugins.records import PluginInfo

    loaded = (record for record in plugin_records() if record.state == "loaded")
    return [PluginInfo(r.name, r.package, r.version, len(r.kernel_names), r.kernel_names) for r in loaded]


def plugin_records() -> list[PluginRecord]:
    """Return what became of every installed plugin at the last discovery, in alphabetical order."""
    with _state.lock:
        return [_state.records[plugin] for plugin in sorted(_state.records)]
