# SPDX-License-Identifier: Apache-2.0
"""Which installed plugins may load: the environment's lists, the host's, and names that two distributions claim."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenspeed_kernel import settings
from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.plugins.installed import InstalledPlugin, normal

__all__ = ["Gates"]


class Gates:
    """The answer for each of ``found``, given what the host ``disabled``."""

    def __init__(self, found: Sequence[InstalledPlugin], disabled: Collection[str]) -> None:
        self._settings = settings.current()
        self._found = found
        self._disabled = {normal(name) for name in (*self._settings.disabled, *disabled)}
        self._allowed = None if self._settings.allowed is None else {normal(name) for name in self._settings.allowed}

    def refusal(self, plugin: InstalledPlugin) -> tuple[str, str] | None:
        """Return (state, reason) if ``plugin`` must not load."""
        names = {normal(plugin.name), plugin.key}
        if self._settings.selection == "reference":
            return "off", "the selection setting asks for references only, so no provider is imported"
        if names & self._disabled:
            return "disabled", f"remove {plugin.name!r} from TOKENSPEED_KERNEL_DISABLE_PLUGINS, or call enable_plugin()"
        if self._allowed is not None and not names & self._allowed:
            return "not allowed", f"TOKENSPEED_KERNEL_PLUGINS does not list {plugin.name!r}; add it"
        rivals = self._rivals(plugin)
        if rivals and plugin.key not in (self._allowed or ()):
            both = " and ".join(sorted({plugin.package, *(rival.package for rival in rivals)}))
            which = " or ".join(sorted({plugin.owner, *(rival.owner for rival in rivals)}))
            return "clashing", f"{both} both offer it: set TOKENSPEED_KERNEL_PLUGINS to {which}"
        return None

    def _rivals(self, plugin: InstalledPlugin) -> list[InstalledPlugin]:
        """Return the other plugins of that name that are not disabled by their distribution."""
        same_name = (other for other in self._found if normal(other.name) == normal(plugin.name) and other != plugin)
        return [other for other in same_name if other.key not in self._disabled]

    def warn_about_names(self) -> None:
        """Say which names in the environment's lists match no plugin, and which plugin was probably meant."""
        known = {name for plugin in self._found for name in (normal(plugin.name), plugin.key)}
        lists = (("DISABLE_PLUGINS", self._settings.disabled), ("PLUGINS", self._settings.allowed or ()))
        for variable, names in lists:
            for name in names:
                if normal(name) not in known:
                    meant = sorted(plugin.name for plugin in self._found if plugin.package == normal(name))
                    there = ", ".join(sorted({plugin.name for plugin in self._found})) or "none"
                    hint = f"that distribution's plugin is {meant[0]!r}" if meant else f"there are: {there}"
                    warn(f"TOKENSPEED_KERNEL_{variable} names {name!r}, which no installed plugin is called; {hint}.")

    def warn_about_clashes(self) -> None:
        """Say, once for each name, that several distributions offer it and none of them is loaded."""
        said: set[str] = set()
        for plugin in self._found:
            refusal = self.refusal(plugin)
            if refusal is not None and refusal[0] == "clashing" and normal(plugin.name) not in said:
                said.add(normal(plugin.name))
                warn(f"plugin {plugin.name!r} is not loaded: {refusal[1]}.")
