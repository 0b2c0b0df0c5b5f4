# SPDX-License-Identifier: Apache-2.0
"""Which installed plugins may load: the lists of the environment and the host, clashing names, unmet requirements."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tokenspeed_kernel import COMPATIBLE_VERSIONS, __version__, settings
from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP
from tokenspeed_kernel.plugins.installed import Scan
from tokenspeed_kernel.plugins.metadata import InstalledPlugin, normal
from tokenspeed_kernel.plugins.requirement import is_met

__all__ = ["Gates", "how_to_force"]


def how_to_force(plugin: InstalledPlugin) -> str:
    """Return what a user does to load an incompatible plugin all the same."""
    return f"to load it all the same, set TOKENSPEED_KERNEL_PLUGINS to {plugin.owner}, and the others that shall load"


class Gates:
    """The answer for each plugin of ``scan``. ``disabled`` are the host's, normalised, as they are at each question."""

    def __init__(self, scan: Scan, disabled: AbstractSet[str]) -> None:
        self._settings = settings.current()
        self._scan = scan
        self._by_host = disabled
        self._by_environment = {normal(name) for name in self._settings.disabled}
        self._allowed = None if self._settings.allowed is None else {normal(name) for name in self._settings.allowed}
        self._said: set[str] = set()
        self._by_name: dict[str, list[InstalledPlugin]] = {}  # those that can be read
        for plugin in scan.plugins:
            if not plugin.fault:
                self._by_name.setdefault(normal(plugin.name), []).append(plugin)

    def refusal(self, plugin: InstalledPlugin) -> tuple[str, str] | None:
        """Return (state, reason) if ``plugin`` must not load; what its user has not asked for is said."""
        if self._settings.selection == "reference":
            return "off", "the selection setting asks for references only, so no provider is imported"
        if not plugin.names.isdisjoint(self._by_environment) or not plugin.names.isdisjoint(self._by_host):
            return "disabled", f"remove {plugin.name!r} from TOKENSPEED_KERNEL_DISABLE_PLUGINS, or call enable_plugin()"
        if self._allowed is not None and plugin.names.isdisjoint(self._allowed):
            return "not allowed", f"TOKENSPEED_KERNEL_PLUGINS does not list {plugin.name!r}; add it"
        if plugin.fault or self.insists_on(plugin):
            return None
        if rivals := self._rivals(plugin):
            both = " and ".join(sorted({plugin.package, *(rival.package for rival in rivals)}))
            which = " or ".join(sorted({plugin.owner, *(rival.owner for rival in rivals)}))
            reason = f"{both} both offer it: set TOKENSPEED_KERNEL_PLUGINS to {which}"
            return "clashing", self._once(normal(plugin.name), plugin, reason)
        if not is_met(plugin.requires):
            wanted = " and ".join(plugin.requires)
            stands = f"{__version__}, which stands for {', '.join(COMPATIBLE_VERSIONS)} too"
            reason = f"{plugin.package} requires {wanted}, but this is {stands}; {how_to_force(plugin)}"
            return "incompatible", self._once(plugin.key, plugin, reason)
        return None

    def insists_on(self, plugin: InstalledPlugin) -> bool:
        """Return whether the allow-list names the plugin with its distribution: this very one, come what may."""
        return plugin.key in (self._allowed or ())

    def _rivals(self, plugin: InstalledPlugin) -> list[InstalledPlugin]:
        """Return the other plugins of that name that are not disabled by their distribution."""
        return [
            other
            for other in self._by_name[normal(plugin.name)]
            if other is not plugin and other.key not in self._by_environment and other.key not in self._by_host
        ]

    def _once(self, key: str, plugin: InstalledPlugin, reason: str) -> str:
        if key not in self._said:
            self._said.add(key)
            warn(f"plugin {plugin.name!r} is not loaded: {reason}.")
        return reason

    def warn_about_names(self) -> None:
        """Say which names in the environment's lists match no plugin, and which plugin was probably meant."""
        known = frozenset[str]().union(*(plugin.names for plugin in self._scan.plugins))
        lists = (("DISABLE_PLUGINS", self._settings.disabled), ("PLUGINS", self._settings.allowed or ()))
        for variable, names in lists:
            for name in names:
                if normal(name) not in known:
                    hint = self._hint(name)
                    warn(f"TOKENSPEED_KERNEL_{variable} names {name!r}, which no installed plugin is called; {hint}.")

    def _hint(self, name: str) -> str:
        meant = sorted(plugin.name for plugin in self._scan.plugins if plugin.package == normal(name))
        if meant:
            return f"that distribution's plugin is {meant[0]!r}"
        there = f"there are: {', '.join(sorted({plugin.name for plugin in self._scan.plugins})) or 'none'}"
        distribution = normal(name).rpartition("@")[2]
        if distribution in self._scan.distributions:
            return f"the distribution {distribution} has 0 entry points in the group {ENTRY_POINT_GROUP}; {there}"
        return there
