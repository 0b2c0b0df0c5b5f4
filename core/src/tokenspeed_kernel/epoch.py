# SPDX-License-Identifier: Apache-2.0
"""One counter that says whether anything a choice of kernel depends on has changed since the choice was made.

Whoever changes such a thing (a registration, a setting, the platform, an oracle, a trip) calls :func:`bump`; whoever
keeps a choice keeps the value with it and compares. A reader therefore needs no lock and no list of listeners.
"""

import threading

__all__ = ["Epoch", "bump", "close_context", "current", "open_context"]

_UNSETTLED = -2  # no plan has it: -1 is that of a plan that was never made


class Epoch:
    """The counter. ``value`` only grows."""

    __slots__ = ("contexts", "settled", "value")

    def __init__(self) -> None:
        self.value = 0
        self.contexts = 0
        """How many override contexts are open, in any thread or task."""
        self.settled = 0
        """``value``, or a number that is nobody's while a context is open: one comparison then tells both."""


current = Epoch()
_lock = threading.Lock()


def bump() -> None:
    """Make every choice made so far stale."""
    _change(values=1)


def open_context() -> None:
    """Let no choice count as settled until :func:`close_context`: one of this thread or task may be another."""
    _change(contexts=1)


def close_context() -> None:
    """Undo one :func:`open_context`."""
    _change(contexts=-1)


def _change(values: int = 0, contexts: int = 0) -> None:
    with _lock:  # `+=` on an attribute is not atomic: two changes at once must not count as one
        current.value += values
        current.contexts += contexts
        current.settled = _UNSETTLED if current.contexts else current.value
