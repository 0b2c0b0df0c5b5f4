# SPDX-License-Identifier: Apache-2.0
"""Find the installed plugins: look through ``sys.path`` for distributions that have an entry point in the group.

In plain directories only each distribution's ``entry_points.txt`` is opened. What is no plain directory, a zip or the
world of a custom finder, is left to ``importlib_metadata``, which is imported only where there is such a thing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.plugins.metadata import InstalledPlugin, Reader, normal, offers_plugins, plugins_of

if TYPE_CHECKING:
    from typing import Protocol

    class Distribution(Protocol):
        """What is read of a distribution that ``importlib_metadata`` or a custom finder knows."""

        @property
        def name(self) -> str: ...
        def read_text(self, filename: str) -> str | None: ...


__all__ = ["Scan", "Scanner", "search_path"]

_SETTLED = 2_000_000_000
"""Nanoseconds after which a directory's time tells every change: the coarsest file system counts in steps of 2 s."""

_PLAIN_FINDERS = ("_frozen_importlib_external", "importlib_metadata", "importlib.metadata")
"""Modules whose finders look through ``sys.path``, as the scan does."""

_FOLDER = re.compile(r"(?P<name>.*?)(-(?P<version>[0-9][^-]*)(-py[^-]*)?)?\.(dist-info|egg-info|egg)", re.DOTALL)

_Found = tuple[str, str, Reader]  # normalised name and version in the folder's name, "" if there is none; its files


@dataclass(frozen=True)
class Scan:
    """What one look through the path found."""

    plugins: tuple[InstalledPlugin, ...]
    """In alphabetical order."""
    distributions: frozenset[str]
    """The normalised name of every installed distribution, with plugins or without."""
    error: Exception | None = None
    """Why part of the path could not be searched: what is missing here may be installed all the same."""


class Scanner:
    """Scans, and answers from memory while neither the path nor any directory on it has changed."""

    def __init__(self) -> None:
        self._last: Scan | None = None
        self._stamp: object = None

    def scan(self, force: bool = False) -> Scan:
        """Return what is installed now. A file edited in place, in a distribution's own folder, is seen by force."""
        stamp, newest = _stamp()  # before the scan: what changes while it runs must be seen by the next one
        if self._last is None or force or stamp is None or stamp != self._stamp:
            if self._last is not None:
                with contextlib.suppress(Exception):  # a finder may raise
                    importlib.invalidate_caches()  # modules may have come with the metadata
            # A second change within a clock tick of the first leaves the time as it is: trust only what is older.
            settled = newest < time.time_ns() - _SETTLED
            self._last = _scan()
            self._stamp = stamp if settled and self._last.error is None else None
        return self._last


def search_path() -> list[str]:
    """Return the entries of ``sys.path`` that imports look at."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def _stamp() -> tuple[object, int]:
    """Return a value that changes with any directory on the path (None if no value can), and the newest time."""
    if _custom_finders():
        return None, 0
    stamp: list[tuple[object, ...]] = []
    newest = 0
    for entry in search_path():
        state = _state_of(entry or os.curdir)
        stamp.append((entry, *state))
        newest = max(newest, *state[-1:], 0)
    return stamp, newest


def _state_of(folder: str) -> tuple[int, ...]:
    try:
        found = os.stat(folder)
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _scan() -> Scan:
    """Look at each distribution once: of two installations the first on the path counts, as for imports."""
    plugins: set[InstalledPlugin] = set()
    seen: set[str] = set()
    error: Exception | None = None
    forbidden: set[str] = set()

    def look(where: str, distributions: Iterable[_Found]) -> None:
        nonlocal error
        try:
            for package, version, read in distributions:
                if package in seen and package:
                    continue
                seen.add(package)
                try:
                    plugins.update(plugins_of(package, version, read))
                except PermissionError:
                    forbidden.add(package)
        except Exception as caught:  # noqa: BLE001 -- a stale mount, a finder that raises: it must not hide the rest
            error = caught
            warn(f"plugins in {where} cannot be discovered, reading the installed metadata failed: {describe(caught)}")

    for entry in dict.fromkeys(search_path()):
        look(entry or "the current folder", _in_entry(entry or os.curdir))
    for finder in _custom_finders():
        look(f"the world of a {type(finder).__name__}", _in_finder(finder, []))
    if forbidden:  # one message: where an administrator's umask was tight, these are many
        warn(f"this user may not read the entry points of {', '.join(sorted(forbidden))}: plugins there are not found")
    return Scan(tuple(sorted(plugins)), frozenset(seen), error)


def _in_entry(entry: str) -> Iterator[_Found]:
    try:
        names = os.listdir(entry)
    except NotADirectoryError:
        yield from _in_archive(entry)
        return
    except (FileNotFoundError, PermissionError, ValueError):  # as for imports; ValueError: it has a null character
        return
    by_package: dict[str, list[tuple[str, str, str]]] = {}
    for name in sorted(names):
        if name.endswith((".dist-info", ".egg-info")) and name[0] != "~":  # ~: what an interrupted pip leaves
            package, version = _split(name)
            by_package.setdefault(package or name, []).append((name, package, version))
    if entry.endswith(".egg") and "EGG-INFO" in names:
        yield *_split(os.path.basename(entry)), _reader(entry, "EGG-INFO")
    for same in by_package.values():
        name, package, version = same[0] if len(same) == 1 else _latest(entry, same)
        yield package, version, _reader(entry, name)


def _split(name: str) -> tuple[str, str]:
    """Return the normalised distribution and the version that the name of a metadata folder has."""
    parts = _FOLDER.fullmatch(name)
    return ("", "") if parts is None else (normal(parts["name"]), parts["version"] or "")


def _latest(folder: str, same: list[tuple[str, str, str]]) -> tuple[str, str, str]:
    """Return which of several metadata folders of one distribution counts: the highest version, METADATA and all."""
    from packaging.version import InvalidVersion, Version

    def rank(info: tuple[str, str, str]) -> tuple[bool, Version, bool]:
        name = info[0]
        has_metadata = any(os.path.exists(os.path.join(folder, name, file)) for file in ("METADATA", "PKG-INFO"))
        try:
            version = Version(info[2])
        except InvalidVersion:
            version = Version("0.dev0")
        return has_metadata, version, name.endswith(".dist-info")

    best = max(same, key=rank)
    if any(offers_plugins(_reader(folder, name)) for name, _, _ in same):
        others = " and ".join(info[0] for info in same if info != best)
        warn(f"{best[0]} counts, and not {others} beside it in {folder}: remove what is not installed now")
    return best


def _reader(folder: str, name: str) -> Reader:
    def read(filename: str) -> bytes | None:
        try:
            with open(f"{folder}/{name}/{filename}", "rb", 0) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):  # the latter: a distutils egg-info is a file
            return None

    return read


def _in_archive(entry: str) -> Iterator[_Found]:
    if os.path.isfile(entry):
        import importlib_metadata

        yield from _in_finder(importlib_metadata.MetadataPathFinder(), [entry])


def _custom_finders() -> list[Any]:
    """Return the finders that know distributions elsewhere than on ``sys.path``."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_distributions"))
    return [finder for finder in finders if not str(getattr(finder, "__module__", "")).endswith(_PLAIN_FINDERS)]


def _in_finder(finder: Any, path: list[str]) -> Iterator[_Found]:
    import importlib_metadata

    context: Any = importlib_metadata.DistributionFinder.Context
    for distribution in finder.find_distributions(context(path=path) if path else context()):
        yield _package(distribution), "", _text_reader(distribution)


def _package(distribution: Distribution) -> str:
    try:  # the folder's name where there is one, as for plain directories
        return normal(getattr(distribution, "_normalized_name", None) or distribution.name or "")
    except Exception:  # noqa: BLE001 -- METADATA is absent or broken
        return ""


def _text_reader(distribution: Distribution) -> Callable[[str], bytes | None]:
    def read(filename: str) -> bytes | None:
        try:
            text = distribution.read_text(filename)
        except UnicodeDecodeError as error:
            return error.object
        except PermissionError:
            raise
        except Exception as error:
            raise OSError(describe(error)) from error
        return None if text is None else text.encode()

    return read
