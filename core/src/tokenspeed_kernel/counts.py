# SPDX-License-Identifier: Apache-2.0
"""What one kernel did for one slot, counted so that no call is lost between threads and none waits for a lock."""

from __future__ import annotations

import itertools
from typing import Any

__all__ = ["Counts", "value_of"]

_REASONS_KEPT = 64  # a reason may name sizes; what is counted must not grow with them for ever


class Counts:
    """What one kernel did for one slot. ``next`` on a count is one atomic step, so no call is lost between threads."""

    __slots__ = ("bound", "declined", "failed", "served", "traced")

    def __init__(self) -> None:
        self.served = itertools.count()
        self.failed = itertools.count()
        self.traced = itertools.count()
        self.bound = itertools.count()
        self.declined: dict[str, itertools.count[int]] = {}

    def decline(self, reason: str) -> None:
        """Count one call that the kernel declined."""
        if reason not in self.declined and len(self.declined) >= _REASONS_KEPT:
            reason = "other reasons"
        next(self.declined.setdefault(reason, itertools.count()))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-able data."""
        declined = {reason: value_of(count) for reason, count in list(self.declined.items())}
        counts = {name: value_of(getattr(self, name)) for name in ("served", "failed", "traced", "bound")}
        return {**counts, "declined": declined}


def value_of(count: itertools.count[int]) -> int:
    """Return where a count stands: the one way to read it without advancing it."""
    return int(repr(count)[len("count(") : -1])
