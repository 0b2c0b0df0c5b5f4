# SPDX-License-Identifier: Apache-2.0
"""``python -m tokenspeed_kernel.plugins doctor``: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import tokenspeed_kernel
from tokenspeed_kernel.notices import describe
from tokenspeed_kernel.plugins import plugin_records
from tokenspeed_kernel.plugins.metadata import normal

if TYPE_CHECKING:
    from tokenspeed_kernel.plugins.installed import Distribution

__all__ = ["findings"]

_OURS = "tokenspeed-kernel"
_FOLDER = "tokenspeed_kernel/"


def findings() -> Iterator[str]:
    """Yield one sentence for each thing that is wrong. Plugins must have been discovered."""
    import importlib_metadata

    distributions = [(_name(d), d) for d in importlib_metadata.distributions()]
    yield from _identity([d for name, d in distributions if name == _OURS])
    for name, distribution in distributions:
        yield from _rival(name, distribution)
        yield from _pin(name, distribution)
        yield from _unreadable(name, distribution)
    for record in plugin_records():
        if record.state in ("failed", "clashing", "incompatible"):
            yield f"plugin {record.name!r} of {record.package} is {record.state}: {record.reason}"


def _identity(ours: list[Distribution]) -> Iterator[str]:
    """Whether the imported package is the installed distribution."""
    here, version = Path(tokenspeed_kernel.__file__).parent, tokenspeed_kernel.__version__
    if not isinstance(getattr(tokenspeed_kernel, "CONTRACT", None), int):
        yield f"{here} carries no CONTRACT: it is not this host; uninstall {_OURS} and install this host's wheel"
    if others := {_text(d, "version") for d in ours} - {version}:
        found = ", ".join(sorted(others))
        yield f"{here} is version {version}, but {_OURS} {found} is installed: two packages are mixed; reinstall one"


def _rival(name: str, distribution: Distribution) -> Iterator[str]:
    """Whether another distribution brings files of ours."""
    record = _text(distribution, file="RECORD")
    if name != _OURS and any(line.startswith(_FOLDER) for line in record.splitlines()):
        yield f"{name} owns files in {_FOLDER}, too: uninstall both, and reinstall the one that you want"


def _pin(name: str, distribution: Distribution) -> Iterator[str]:
    """Whether an installed requirement would have pip replace this host."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in _text(distribution, file="METADATA").splitlines():
        if not line.lower().startswith("requires-dist:") or _OURS not in normal(line):
            continue
        try:
            required = Requirement(line.partition(":")[2])
        except InvalidRequirement:
            continue  # discovery says so
        if normal(required.name) == _OURS and not required.specifier.contains(
            tokenspeed_kernel.__version__, prereleases=True
        ):
            yield (
                f"{name} requires {required}, and this is {tokenspeed_kernel.__version__}: installing it by name "
                f"would replace this host; use pip install --no-deps {name}"
            )


def _unreadable(name: str, distribution: Distribution) -> Iterator[str]:
    """Whether a distribution's entry points would stop who reads all of them, as torch does on import."""
    try:
        distribution.read_text("entry_points.txt")
    except UnicodeDecodeError as error:
        advice = (
            ""
            if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
            else ("; until then torch can be imported with TORCH_DEVICE_BACKEND_AUTOLOAD=0 only")
        )
        yield f"the entry points of {name} are not UTF-8 ({describe(error)}): reinstall or uninstall it{advice}"
    except OSError as error:
        yield f"the entry points of {name} cannot be read: {describe(error)}"


def _name(distribution: Distribution) -> str:
    return normal(getattr(distribution, "_normalized_name", None) or _text(distribution, "name") or "unknown")


def _text(distribution: Distribution, attribute: str = "", *, file: str = "") -> str:
    try:
        return str((distribution.read_text(file) if file else getattr(distribution, attribute)) or "")
    except Exception:  # noqa: BLE001 -- broken metadata is what _unreadable and discovery report
        return ""
