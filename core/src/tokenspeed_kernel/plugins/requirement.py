# SPDX-License-Identifier: Apache-2.0
"""Whether a plugin's distribution may be used with this core, by what it requires of ``tokenspeed-kernel``."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from tokenspeed_kernel import COMPATIBLE_VERSIONS, __version__
from tokenspeed_kernel.notices import describe, warn

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["is_met"]

_PARTS = re.compile(r"[\w.-]+\s*(?:\[[^]]*\])?\s*\(?(?P<versions>[^;()]*)\)?\s*(?:;(?P<marker>.*))?", re.DOTALL)


@functools.cache
def is_met(requirements: tuple[str, ...]) -> bool:
    """Return whether one version that this core stands for satisfies all requirements whose marker applies.

    A pre-release counts like any version, and a direct reference (``name @ url``) is met by whatever is installed. A
    requirement that cannot be read is said, and counts as met.
    """
    if not requirements:
        return True
    specifiers = [specifier for text in requirements if (specifier := _specifier(text)) is not None]
    versions = (__version__, *COMPATIBLE_VERSIONS)
    return any(all(specifier.contains(v, prereleases=True) for specifier in specifiers) for v in versions)


def _specifier(requirement: str) -> SpecifierSet | None:
    """Return which versions a requirement allows, None if its marker does not apply or it allows any."""
    parts = _PARTS.fullmatch(requirement)
    try:
        if parts is None:
            raise ValueError("it is no requirement")
        if parts["marker"]:
            from packaging.markers import Marker

            if not Marker(parts["marker"]).evaluate({"extra": ""}):
                return None
        versions = parts["versions"].strip()
        if not versions or versions.startswith("@"):
            return None
        from packaging.specifiers import SpecifierSet  # packaging.requirements would take twice as long to import

        return SpecifierSet(versions)
    except Exception as error:  # noqa: BLE001 -- whatever packaging raises, the metadata is at fault
        warn(f"the requirement {requirement!r} of a plugin cannot be read and is ignored: {describe(error)}")
        return None
