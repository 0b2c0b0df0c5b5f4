# SPDX-License-Identifier: Apache-2.0
"""Find and load installed plugins: distributions with an entry point in the group ``tokenspeed_kernel.plugins``.

Loading is explicit: nothing here runs before a host calls :func:`discover_plugins`.
"""

ENTRY_POINT_GROUP = "tokenspeed_kernel.plugins"
DISABLE_ENV_VAR = "TOKENSPEED_KERNEL_DISABLE_PLUGINS"

_MODULE_OF = {
    "PluginInfo": "records",
    "PluginRecord": "records",
    "disable_plugin": "discovery",
    "discover_plugins": "discovery",
    "enable_plugin": "discovery",
    "list_plugins": "discovery",
    "plugin_records": "discovery",
    "reset_plugins": "discovery",
}

TYPE_CHECKING = False  # type checkers know the name; importing it from typing would cost 9 ms
if TYPE_CHECKING:
    from tokenspeed_kernel.plugins.discovery import disable_plugin as disable_plugin
    from tokenspeed_kernel.plugins.discovery import discover_plugins as discover_plugins
    from tokenspeed_kernel.plugins.discovery import enable_plugin as enable_plugin
    from tokenspeed_kernel.plugins.discovery import list_plugins as list_plugins
    from tokenspeed_kernel.plugins.discovery import plugin_records as plugin_records
    from tokenspeed_kernel.plugins.discovery import reset_plugins as reset_plugins
    from tokenspeed_kernel.plugins.records import PluginInfo as PluginInfo
    from tokenspeed_kernel.plugins.records import PluginRecord as PluginRecord

__all__ = ["DISABLE_ENV_VAR", "ENTRY_POINT_GROUP", *_MODULE_OF]  # noqa: PLE0604 -- the table above holds the names


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
