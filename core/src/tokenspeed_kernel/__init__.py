# SPDX-License-Identifier: Apache-2.0
"""A host for accelerated PyTorch kernels: op slots, their contracts, and a choice among implementations.

Importing this package imports nothing else: every public name is loaded on first use, and torch and Triton only when a
kernel needs them. Nothing is discovered on import; a host calls :func:`discover_plugins` once at start-up.
"""

__version__ = "1.0.0"

CONTRACT = 1
"""The version of the plugin contract: raised when a plugin written for the one before could stop working."""

COMPATIBLE_VERSIONS = ("0.1.4",)
"""Published versions of ``tokenspeed-kernel`` whose plugin surface this core matches."""

TYPE_CHECKING = False  # type checkers know the name; importing it from typing would cost 9 ms
if TYPE_CHECKING:
    from tokenspeed_kernel.contract import SlotContract as SlotContract
    from tokenspeed_kernel.frozen import FrozenPlan as FrozenPlan
    from tokenspeed_kernel.frozen import adopt as adopt
    from tokenspeed_kernel.frozen import freeze as freeze
    from tokenspeed_kernel.frozen import thaw as thaw
    from tokenspeed_kernel.plugins import disable_plugin as disable_plugin
    from tokenspeed_kernel.plugins import discover_plugins as discover_plugins
    from tokenspeed_kernel.plugins import enable_plugin as enable_plugin
    from tokenspeed_kernel.plugins import list_plugins as list_plugins
    from tokenspeed_kernel.proof import expect as expect
    from tokenspeed_kernel.proof import report as report
    from tokenspeed_kernel.registry import register_kernel as register_kernel
    from tokenspeed_kernel.selection import select_kernel as select_kernel
    from tokenspeed_kernel.slots import Slot as Slot
    from tokenspeed_kernel.slots import active as active
    from tokenspeed_kernel.slots import declare_slot as declare_slot
    from tokenspeed_kernel.slots import iter_impls as iter_impls
    from tokenspeed_kernel.slots import refresh as refresh
    from tokenspeed_kernel.slots import register as register
    from tokenspeed_kernel.slots import resolve as resolve
    from tokenspeed_kernel.slots import slot as slot
    from tokenspeed_kernel.slots import unregister as unregister

_MODULE_OF = {
    "FrozenPlan": "frozen",
    "Slot": "slots",
    "SlotContract": "contract",
    "active": "slots",
    "adopt": "frozen",
    "declare_slot": "slots",
    "disable_plugin": "plugins",
    "discover_plugins": "plugins",
    "enable_plugin": "plugins",
    "expect": "proof",
    "freeze": "frozen",
    "iter_impls": "slots",
    "list_plugins": "plugins",
    "refresh": "slots",
    "register": "slots",
    "register_kernel": "registry",
    "report": "proof",
    "resolve": "slots",
    "select_kernel": "selection",
    "slot": "slots",
    "thaw": "frozen",
    "unregister": "slots",
}

__all__ = ["COMPATIBLE_VERSIONS", "CONTRACT", "__version__", *_MODULE_OF]  # noqa: PLE0604 -- the table above holds the names


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
