# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: the whole examination of every kernel that a plugin registers.

One line in a provider's tests, ``test_conformance = examine("my_plugin")``, or ``python -m tokenspeed_kernel.testing
verify my_plugin`` on an installed one. ``-p tokenspeed_kernel.testing`` adds the report to a run of pytest; nothing
loads it by itself. Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_kernel.testing.examination import examine_kernel as examine_kernel
    from tokenspeed_kernel.testing.examination import examine_plugin as examine_plugin
    from tokenspeed_kernel.testing.plugin import examine as examine
    from tokenspeed_kernel.testing.report import Report as Report
    from tokenspeed_kernel.testing.report import Result as Result

pytest_plugins = ("tokenspeed_kernel.testing.plugin",)  # what `-p tokenspeed_kernel.testing` loads

_MODULE_OF = {
    "Report": "report",
    "Result": "report",
    "examine": "plugin",
    "examine_kernel": "examination",
    "examine_plugin": "examination",
}

__all__ = ["Report", "Result", "examine", "examine_kernel", "examine_plugin"]


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
