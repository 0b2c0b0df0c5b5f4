# SPDX-License-Identifier: Apache-2.0
"""Find the installed plugins: what the metadata of every distribution says, however broken some of it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from typing import Protocol

    class Distribution(Protocol):
        """What is read of an installed distribution."""

        @property
        def name(self) -> str: ...
        @property
        def version(self) -> str: ...
        def read_text(self, filename: str) -> str | None: ...


__all__ = ["InstalledPlugin", "installed_plugins", "normal"]


@dataclass(frozen=True, order=True)
class InstalledPlugin:
    """One entry point of the group, unique by its fields."""

    name: str
    package: str
    """The distribution's name in its normalised form."""
    value: str
    version: str

    @property
    def owner(self) -> str:
        """What its kernels are credited to; lists in the environment may call it so, too."""
        return f"{self.name}@{self.package}"

    @property
    def key(self) -> str:
        """:attr:`owner` as names compare."""
        return normal(self.owner)


def normal(name: str) -> str:
    """Return a plugin's name, or ``name@distribution``, as lists compare it: as PEP 503 does distribution names."""
    from packaging.utils import canonicalize_name

    return "@".join(canonicalize_name(part) for part in name.split("@"))


def installed_plugins() -> list[InstalledPlugin]:
    """Return the installed plugins in alphabetical order.

    Of two installations of one distribution the first on the path counts, as for imports. A distribution whose metadata
    cannot be read costs one warning, and hides no other.
    """
    import importlib_metadata

    found: set[InstalledPlugin] = set()
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        package = _package(distribution)
        if package in seen:
            continue
        if package != "unknown":
            seen.add(package)
        version = None
        for name, value in _entry_points(distribution, package):
            version = version or _version(distribution)
            found.add(InstalledPlugin(name, package, value, version))
    return sorted(found)


def _entry_points(distribution: Distribution, package: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each entry point of the group; warn about a line that is none."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except Exception as error:  # noqa: BLE001 -- not UTF-8, not readable, ...: it must not hide the others
        warn(f"the entry points of {package} cannot be read, so it brings no plugin: {describe(error)}")
        return
    if ENTRY_POINT_GROUP not in text:
        return
    group = ""
    for line in map(str.strip, text.lstrip("\ufeff").splitlines()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif group == ENTRY_POINT_GROUP and line and not line.startswith(("#", ";")):
            name, equals, value = map(str.strip, line.partition("="))
            if equals:
                yield name, value
            else:
                warn(f"{package} has a line that is no entry point in its group {ENTRY_POINT_GROUP}: {line!r}")


def _package(distribution: Distribution) -> str:
    from packaging.utils import canonicalize_name

    try:  # its folder's name, where there is one: reading METADATA for each distribution would take most of the time
        name = getattr(distribution, "_normalized_name", None) or distribution.name
    except Exception:  # noqa: BLE001 -- METADATA is absent or broken
        name = None
    return canonicalize_name(name) if name else "unknown"


def _version(distribution: Distribution) -> str:
    try:
        return distribution.version or "unknown"
    except Exception:  # noqa: BLE001 -- METADATA is absent or broken
        return "unknown"
