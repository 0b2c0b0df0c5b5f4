# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that this package reads, in one table, parsed in one place.

They are read on first use and again at :func:`refresh`, never on import and never in a slot call. An empty variable
counts as unset. For each row the first name that is set wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed_kernel import epoch

__all__ = [
    "OVERRIDE_PREFIX",
    "VARIABLES",
    "Settings",
    "current",
    "environment_key",
    "hub_enabled",
    "is_set",
    "override_variable",
    "pin",
    "refresh",
]

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "selection": ("TOKENSPEED_KERNEL_SELECTION", "LIBREYOLO_KERNELS", "LIBREYOLO_QUANT_KERNELS"),
    "hub": ("TOKENSPEED_KERNEL_HUB", "LIBREYOLO_HUB_KERNELS"),
    "disabled": ("TOKENSPEED_KERNEL_DISABLE_PLUGINS",),
    "allowed": ("TOKENSPEED_KERNEL_PLUGINS",),
    "verbose": ("TOKENSPEED_KERNEL_VERBOSE",),
}
OVERRIDE_PREFIX = "TOKENSPEED_KERNEL_OVERRIDE_"

_NO = frozenset({"0", "false", "off", "no"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for."""

    selection: str | None
    """``"reference"``, the one solution to use besides the references, or None for the normal order."""
    hub: bool
    """Whether kernels may be fetched from the Hugging Face Hub."""
    disabled: tuple[str, ...]
    """Plugins to skip: entry-point names, or ``name@distribution``."""
    allowed: tuple[str, ...] | None
    """The only plugins to load, or None for all."""
    overrides: Mapping[str, str]
    """Full variable name -> kernel or solution name, for every override variable that is set."""
    verbose: bool
    """Whether each choice is logged."""


_current: Settings | None = None
_pinned: dict[str, Any] = {}  # fields that a frozen plan of another process fixes, whatever the environment says


def pin(**fields: Any) -> None:
    """Fix fields of the settings against the environment; none given, fix nothing any more."""
    _pinned.clear()
    _pinned.update(fields)
    refresh()


def current() -> Settings:
    """Return the settings as last read; the first call reads them."""
    global _current  # noqa: PLW0603 -- one process has one environment
    if _current is None:
        _current = replace(_read(os.environ), **_pinned)
    return _current


def refresh() -> None:
    """Forget what was read, so that the next use reads the environment again, and make every choice stale."""
    global _current  # noqa: PLW0603 -- as above
    _current = None
    epoch.bump()


def hub_enabled() -> bool:
    """Return whether kernels may be fetched from the Hugging Face Hub."""
    return current().hub


def override_variable(family: str, mode: str) -> str:
    """Return the name of the variable that forces a kernel for ``(family, mode)``.

    >>> override_variable("quant", "fake_quant_fp8")
    'TOKENSPEED_KERNEL_OVERRIDE_QUANT_FAKE_QUANT_FP8'
    """
    return OVERRIDE_PREFIX + "".join(c if c.isalnum() else "_" for c in f"{family}_{mode}").upper()


# os.environ encodes the name at every look-up, which takes longer than the whole rest of a cached selection. Its own
# table does not; where an implementation of Python has none, the slow way is as right.
_raw_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)


def environment_key(variable: str) -> object:
    """Return ``variable`` as :func:`is_set` takes it."""
    return os.environ.encodekey(variable) if _raw_environment is not os.environ else variable


def is_set(key: object) -> bool:
    """Return whether the environment has a variable now, be it empty; ``key`` is from :func:`environment_key`."""
    return key in _raw_environment


def _read(environ: Mapping[str, str]) -> Settings:
    def value(row: str) -> str:
        return next((text for name in VARIABLES[row] if (text := environ.get(name, "").strip())), "")

    def names(row: str) -> tuple[str, ...]:
        return tuple(item for part in value(row).split(",") if (item := part.strip()))

    return Settings(
        selection=_selection(value("selection")),
        hub=value("hub").lower() not in _NO,
        disabled=names("disabled"),
        allowed=names("allowed") or None,
        overrides={k: v.strip() for k, v in environ.items() if k.startswith(OVERRIDE_PREFIX) and v.strip()},
        verbose=value("verbose").lower() not in {"", *_NO},
    )


def _selection(text: str) -> str | None:
    word = text.lower()
    if word in ("", "auto"):
        return None
    return "reference" if word in ("off", "reference") else text
