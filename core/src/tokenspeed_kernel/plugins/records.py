# SPDX-License-Identifier: Apache-2.0
"""What is known of each installed plugin, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PluginInfo", "PluginRecord"]


@dataclass(frozen=True)
class PluginInfo:
    """A loaded plugin."""

    name: str
    """Its entry-point name."""
    package: str
    """The distribution that brought it."""
    version: str
    num_kernels: int
    kernel_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class PluginRecord:
    """What became of one installed plugin, loaded or not. ``docs/discovery.md`` documents it as JSON."""

    name: str
    """Its entry-point name; the faulty line, or the distribution's name, if its metadata has no such name."""
    package: str
    """The distribution that brought it."""
    version: str
    value: str
    """What the entry point names, ``"module:register"``."""
    state: str
    """``"loaded"``, ``"disabled"``, ``"not allowed"``, ``"off"``, ``"clashing"``, ``"incompatible"``, ``"failed"``."""
    reason: str = ""
    """Why it is not loaded, and what to do about it."""
    phase: str = ""
    """Where it failed: ``"metadata"``, ``"import"`` or ``"register"``."""
    traceback: str = ""
    milliseconds: float = 0.0
    """How long importing it and running its ``register()`` took."""
    kernel_names: tuple[str, ...] = ()
    """The kernels that it owns."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing: whose names it took, what it changed in the process, that it was slow or idle."""
