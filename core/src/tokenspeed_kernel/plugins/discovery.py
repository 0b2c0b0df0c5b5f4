# SPDX-License-Identifier: Apache-2.0
"""Load plugins, each in isolation: one that fails is recorded, said once, and leaves nothing behind.

The heavy imports of this module stand inside its functions: importing it must cost a host next to nothing.
"""

from __future__ import annotations

import threading

from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from importlib_metadata import EntryPoint

    from tokenspeed_kernel.plugins.records import PluginInfo, PluginRecord
    from tokenspeed_kernel.registry import KernelRegistry, Registration

__all__ = ["disable_plugin", "discover_plugins", "enable_plugin", "list_plugins", "plugin_records", "reset_plugins"]


class _State:
    """What this process knows of plugins."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.discovering = False
        self.disabled: set[str] = set()  # by disable_plugin; the environment's are read at each discovery
        self.records: dict[tuple[str, str], PluginRecord] = {}  # by entry-point name and distribution
        self.registry: KernelRegistry | None = None  # the one that the loaded plugins registered in
        # What a plugin registered while its modules were imported. That happens once a process, so it is registered for
        # the plugin whenever it is loaded again.
        self.at_import: dict[str, tuple[Registration, ...]] = {}


_state = _State()


def discover_plugins(*, force: bool = False, strict: bool = False) -> list[PluginInfo]:
    """Load every installed plugin that is not loaded yet, in alphabetical order, and return the loaded ones.

    A plugin that fails is recorded and warned about, and the others load. Calling again loads only what was not loaded:
    plugins that failed are tried again. Safe from several threads; a plugin that calls it gets what is loaded so far.

    Args:
        force: run the ``register()`` of loaded plugins again.
        strict: raise the first failure, after undoing what that plugin registered.

    Raises:
        RuntimeError: with ``strict``, a plugin failed; its own error is the cause.
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
    from dataclasses import replace

    from tokenspeed_kernel import settings
    from tokenspeed_kernel.notices import warn
    from tokenspeed_kernel.slots import registry_with_references

    settings.refresh()
    registry = registry_with_references()
    if registry is not _state.registry:
        _state.registry = registry
        _state.records = {key: replace(record, kernel_names=()) for key, record in _state.records.items()}
        force = True
    try:
        found = _entry_points()
    except Exception as error:
        if strict:
            raise
        warn(f"no plugin can be discovered: reading the metadata of the installed distributions failed: {error!r}")
        return
    before = _state.records
    _state.records = {}
    gates = _Gates(found)
    for entry in found:
        key = _key(entry)
        refusal = gates.refusal(entry)
        if refusal is not None:
            _withdraw(entry.name)
            _state.records[key] = _record(entry, *refusal)
        elif not force and key in before and before[key].state == "loaded":
            _state.records[key] = before[key]
        else:
            _state.records[key] = _load(entry, registry, strict)
    gates.warn_about_unknown_names()


def _entry_points() -> list[EntryPoint]:
    """Return the group's entry points in alphabetical order, each once however often its metadata lies on the path."""
    import importlib_metadata

    unique = {(*_key(entry), entry.value): entry for entry in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return [unique[key] for key in sorted(unique)]


def _key(entry: EntryPoint) -> tuple[str, str]:
    return entry.name, _distribution(entry)


def _distribution(entry: EntryPoint) -> str:
    """Return the distribution's name in its normalised form."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(entry.dist.name) if entry.dist is not None and entry.dist.name else "unknown"


def _record(entry: EntryPoint, state: str, reason: str = "", **more: object) -> PluginRecord:
    from tokenspeed_kernel.plugins.records import PluginRecord

    version = entry.dist.version if entry.dist is not None else ""
    facts = {"name": entry.name, "package": _distribution(entry), "version": version or "unknown", "value": entry.value}
    return PluginRecord(**facts, state=state, reason=reason, **more)  # type: ignore[arg-type]  # the caller names the fields


class _Gates:
    """Which plugins may load at all: the environment's lists, the host's, and no name that two distributions claim."""

    def __init__(self, found: list[EntryPoint]) -> None:
        from tokenspeed_kernel import settings

        self._settings = settings.current()
        self._found = found
        self._disabled = {_normal(name) for name in (*self._settings.disabled, *_state.disabled)}
        self._allowed = None if self._settings.allowed is None else {_normal(name) for name in self._settings.allowed}

    def refusal(self, entry: EntryPoint) -> tuple[str, str] | None:
        """Return (state, reason) if ``entry`` must not load."""
        names = _names(entry)
        if self._settings.selection == "reference":
            return "off", "the selection setting asks for references only, so no provider is imported"
        if names & self._disabled:
            return "disabled", f"remove {entry.name!r} from TOKENSPEED_KERNEL_DISABLE_PLUGINS, or call enable_plugin()"
        if self._allowed is not None and not names & self._allowed:
            return "not allowed", f"TOKENSPEED_KERNEL_PLUGINS does not list {entry.name!r}; add it"
        rivals = sorted({_distribution(e) for e in self._found if _normal(e.name) == _normal(entry.name)})
        chosen = self._allowed is not None and _normal(f"{entry.name}@{_distribution(entry)}") in self._allowed
        if len(rivals) > 1 and not chosen and not self._is_only_one_left(entry):
            which = " or ".join(f"{entry.name}@{rival}" for rival in rivals)
            return "clashing", f"{' and '.join(rivals)} both offer it: set TOKENSPEED_KERNEL_PLUGINS to {which}"
        return None

    def _is_only_one_left(self, entry: EntryPoint) -> bool:
        """Whether the disable list names every rival of ``entry`` by distribution."""
        rivals = (e for e in self._found if _normal(e.name) == _normal(entry.name) and _key(e) != _key(entry))
        return all(_names(rival) & self._disabled for rival in rivals)

    def warn_about_unknown_names(self) -> None:
        """Say which names in the lists match no plugin, and which plugin was probably meant."""
        from tokenspeed_kernel.notices import warn

        known = {name for entry in self._found for name in _names(entry)}
        lists = (("DISABLE_PLUGINS", self._settings.disabled), ("PLUGINS", self._settings.allowed or ()))
        for variable, names in lists:
            for name in names:
                if _normal(name) not in known:
                    meant = sorted(e.name for e in self._found if _distribution(e) == _normal(name))
                    hint = f"that distribution's plugin is {meant[0]!r}" if meant else f"there are: {self._listing()}"
                    warn(f"TOKENSPEED_KERNEL_{variable} names {name!r}, which no installed plugin is called; {hint}.")

    def _listing(self) -> str:
        return ", ".join(sorted({entry.name for entry in self._found})) or "none"


def _normal(name: str) -> str:
    """Return an entry-point name as lists compare it (PEP 503: case, dots, dashes and underscores do not matter)."""
    from packaging.utils import canonicalize_name

    return "@".join(canonicalize_name(part) for part in name.split("@"))


def _names(entry: EntryPoint) -> set[str]:
    return {_normal(entry.name), _normal(f"{entry.name}@{_distribution(entry)}")}


def _load(entry: EntryPoint, registry: KernelRegistry, strict: bool) -> PluginRecord:
    """Import and register one plugin as a transaction, and return its record."""
    import time

    from tokenspeed_kernel.registry import registering_owner

    started = time.perf_counter()
    token = registering_owner.set(entry.name)
    phase = "import"
    registry.remove(registry.owned_by(entry.name))
    try:
        register = _import(entry, registry)
        phase = "register"
        register()
    except BaseException as error:  # SystemExit and exceptions of its own included: a plugin must not end the host
        registry.remove(registry.owned_by(entry.name))
        if isinstance(error, KeyboardInterrupt):
            raise
        record = _failure(entry, phase, error, (time.perf_counter() - started) * 1e3)
        if strict:
            raise RuntimeError(record.reason) from error
        return record
    finally:
        registering_owner.reset(token)
    owned = registry.owned_by(entry.name)
    _warn_about_ties(registry, owned)
    names = tuple(registration.spec.name for registration in owned)
    return _record(entry, "loaded", kernel_names=names, milliseconds=(time.perf_counter() - started) * 1e3)


def _import(entry: EntryPoint, registry: KernelRegistry) -> Callable[[], object]:
    """Import what the entry point names, registering what its modules register on import."""
    for earlier in _state.at_import.get(entry.name, ()):
        registry.register(earlier.spec, earlier.implementation)
    register = entry.load()
    _state.at_import[entry.name] = registry.owned_by(entry.name)
    if not callable(register):
        raise TypeError(f"{entry.value} must be a function register(), got {register!r}")
    return register  # type: ignore[no-any-return]  # an entry point may name anything; it is callable


def _failure(entry: EntryPoint, phase: str, error: BaseException, milliseconds: float) -> PluginRecord:
    import traceback

    from tokenspeed_kernel.notices import warn

    cause = _text_of(error)
    skip = f"TOKENSPEED_KERNEL_DISABLE_PLUGINS={entry.name}"
    who = f"plugin {entry.name!r} of {_distribution(entry)}"
    warn(f"{who} failed in {phase} and is not loaded: {cause}. To skip it: {skip}")
    text = "".join(traceback.format_exception(error))
    return _record(entry, "failed", cause, phase=phase, traceback=text, milliseconds=milliseconds)


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 -- an exception whose str() raises is still a failure to report
        return type(error).__name__


def _warn_about_ties(registry: KernelRegistry, owned: Iterable[Registration]) -> None:
    """Warn where a new kernel shares its priority with another owner's on the same operator."""
    from tokenspeed_kernel.notices import warn

    for new in owned:
        for other in registry.registrations(new.spec.family, new.spec.mode):
            if other.owner != new.owner and other.spec.priority == new.spec.priority:
                both = f"{new.spec.name!r} ({new.owner}) and {other.spec.name!r} ({other.owner or 'host'})"
                where = f"priority {new.spec.priority} for {new.spec.family}.{new.spec.mode}"
                warn(f"kernels {both} share {where}: {new.spec.name!r} is newer and wins.")


def _withdraw(name: str) -> None:
    """Remove what a plugin registered, if it registered anything."""
    if _state.registry is not None:
        _state.registry.remove(_state.registry.owned_by(name))


def disable_plugin(name: str) -> None:
    """Skip the plugin called ``name`` (or ``name@distribution``) from now on; what it registered is withdrawn."""
    from dataclasses import replace

    with _state.lock:
        _state.disabled.add(name)
        for key, record in _state.records.items():
            if record.state == "loaded" and _normal(name) in (_normal(key[0]), _normal("@".join(key))):
                _withdraw(record.name)
                why = "disable_plugin() was called; enable_plugin() and discover_plugins() bring it back"
                _state.records[key] = replace(record, state="disabled", reason=why, kernel_names=())


def enable_plugin(name: str) -> None:
    """Take back :func:`disable_plugin`; the next :func:`discover_plugins` loads the plugin."""
    with _state.lock:
        _state.disabled = {other for other in _state.disabled if _normal(other) != _normal(name)}


def reset_plugins() -> None:
    """Withdraw every plugin's kernels and forget all records. Which plugins are disabled is kept."""
    with _state.lock:
        for record in _state.records.values():
            _withdraw(record.name)
        _state.records = {}


def list_plugins() -> list[PluginInfo]:
    """Return the loaded plugins, in alphabetical order."""
    from tokenspeed_kernel.plugins.records import PluginInfo

    loaded = (record for record in plugin_records() if record.state == "loaded")
    return [PluginInfo(r.name, r.package, r.version, len(r.kernel_names), r.kernel_names) for r in loaded]


def plugin_records() -> list[PluginRecord]:
    """Return what became of every installed plugin at the last discovery, in alphabetical order."""
    with _state.lock:
        return [_state.records[key] for key in sorted(_state.records)]
