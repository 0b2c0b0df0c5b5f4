# SPDX-License-Identifier: Apache-2.0
"""Read what one distribution's metadata says of plugins, however broken it is: each fault becomes a value too."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenspeed_kernel.notices import describe
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP

__all__ = ["InstalledPlugin", "Reader", "normal", "offers_plugins", "plugins_of"]

Reader = Callable[[str], "bytes | None"]
"""Returns a metadata file's content, None if there is no such file. Raises OSError if it cannot be read."""

_GROUP = ENTRY_POINT_GROUP.encode()
_SEPARATORS = re.compile(r"[-_.]+")
_NAME = re.compile(r"\s*([A-Za-z0-9._-]+)")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_FIELD = re.compile(r"^(name|version|requires-dist)[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, order=True)
class InstalledPlugin:
    """One entry point of the group, unique by its fields, or one that cannot be read."""

    name: str
    package: str
    """The distribution's name in its normalised form, ``"unknown"`` if it has none."""
    value: str
    version: str
    requires: tuple[str, ...] = ()
    """What its distribution requires of ``tokenspeed-kernel``, as it is written there."""
    fault: str = ""
    """Why the metadata names no function, if it does not."""

    @functools.cached_property
    def owner(self) -> str:
        """What its kernels are credited to; lists in the environment may call it so, too."""
        return f"{self.name}@{self.package}"

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """What lists may call it, as names compare: with its distribution or without."""
        return frozenset((normal(self.name), self.key))

    @functools.cached_property
    def key(self) -> str:
        """:attr:`owner` as names compare."""
        return normal(self.owner)


def normal(name: str) -> str:
    """Return a plugin's name, or ``name@distribution``, as lists compare it: as PEP 503 does distribution names."""
    return _SEPARATORS.sub("-", name).lower()


def offers_plugins(read: Reader) -> bool:
    """Return whether a distribution's entry points mention the group."""
    try:
        return _GROUP in (read("entry_points.txt") or b"")
    except OSError:  # said where it matters
        return False


def plugins_of(package: str, version: str, read: Reader) -> list[InstalledPlugin]:
    """Return the plugins of a distribution.

    ``package`` and ``version`` are those of its folder's name, ``""`` where that has none: METADATA is opened only if
    there are plugins.

    Raises:
        PermissionError: its entry points may not be read, so that nobody knows whether it has plugins.
    """
    fault = ""
    data = b""
    try:
        data = read("entry_points.txt") or b""
    except PermissionError:
        raise
    except OSError as error:
        fault = f"its entry_points.txt cannot be read: {describe(error)}"
    if _GROUP not in data and not fault and not _without_header(data):
        return []
    headers = _headers(read)
    requires = tuple(_requirements(headers, read))
    if _GROUP not in data and not fault and not requires:
        return []  # a broken file of somebody who has nothing to do with us
    known = dict(reversed(headers))  # of a field that comes twice the first counts
    package = package or normal(known.get("name", "")) or "unknown"
    version = known.get("version") or version or "unknown"
    text = ""
    try:
        text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        fault = f"its entry_points.txt is not UTF-8: {error.reason} at byte {error.start}"
    if fault:
        return [InstalledPlugin(package, package, "", version, requires, fault)]
    return list(_parse(text, package, version, requires))


def _parse(text: str, package: str, version: str, requires: tuple[str, ...]) -> Iterator[InstalledPlugin]:
    group: str | None = None
    values: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif line and not line.startswith(("#", ";")) and group in (None, ENTRY_POINT_GROUP):
            name, equals, value = map(str.strip, line.partition("="))
            fault = ""
            if group is None:
                fault = f"the line {line!r} stands before any section; it belongs below [{ENTRY_POINT_GROUP}]"
            elif not (equals and name):
                fault = f"the line {line!r} is no entry point: it must be 'name = module:function'"
            elif values.setdefault(normal(name), value) != value:
                fault = f"the distribution offers that name twice; {values[normal(name)]!r} counts"
            yield InstalledPlugin(name or package, package, value, version, requires, fault)


def _without_header(data: bytes) -> bool:
    """Return whether a file that does not mention the group may have been meant for it all the same."""
    for line in map(bytes.strip, data.removeprefix(_BOM).splitlines()):
        if line and not line.startswith((b"#", b";")):
            return not line.startswith(b"[")
    return False


def _headers(read: Reader) -> list[tuple[str, str]]:
    """Return the fields of METADATA that matter here, in lower case. Bytes that are no UTF-8 spoil only their value."""
    try:
        data = read("METADATA") or read("PKG-INFO") or b""
    except OSError:
        return []
    head = _BLANK_LINE.split(data.removeprefix(_BOM), maxsplit=1)[0]  # the description follows
    fields = _FIELD.findall(head.decode("utf-8", "replace"))
    return [(field.lower(), value.strip()) for field, value in fields]


def _requirements(headers: list[tuple[str, str]], read: Reader) -> Iterator[str]:
    wanted = [value for field, value in headers if field == "requires-dist"]
    yield from filter(_is_on_core, wanted)
    if wanted:
        return
    try:
        old_style = (read("requires.txt") or b"").decode("utf-8", "replace")
    except OSError:
        return
    section = ""
    for line in map(str.strip, old_style.splitlines()):  # an egg-info: [extra], [:marker] or [extra:marker], then lines
        extra, _, marker = section.partition(":")
        if line.startswith("["):
            section = line.strip("[]")
        elif _is_on_core(line) and not extra:
            yield f"{line}; {marker}" if marker else line


def _is_on_core(requirement: str) -> bool:
    name = _NAME.match(requirement)
    return name is not None and normal(name[1]) == "tokenspeed-kernel"
