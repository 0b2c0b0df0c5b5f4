# SPDX-License-Identifier: Apache-2.0
"""One counter that says whether anything a choice of kernel depends on has changed since the choice was made.

Whoever changes such a thing (a registration, a setting, the platform, an oracle, a trip) calls :func:`bump`; whoever
keeps a choice keeps the value with it and compares. A reader therefore needs no lock and no list of listeners.
"""

import threading

__all__ = ["Epoch", "bump", "current"]


class Epoch:
    """The counter. ``value`` only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


current = Epoch()
_lock = threading.Lock()


def bump() -> None:
    """Make every choice made so far stale."""
    with _lock:  # `+=` on an attribute is not atomic: two changes at once must not count as one
        current.value += 1
