# SPDX-License-Identifier: Apache-2.0
"""Who a slot asks, in order: the outcome of one choice, with what each candidate needs to be called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenspeed_kernel.counts import Counts
from tokenspeed_kernel.registry import Registration

__all__ = ["NEVER", "Candidate", "Plan"]

NEVER = -1
"""An epoch that never is."""


class Candidate:
    """A registration as a plan holds it; ``supports`` and ``call`` are imported when its turn first comes."""

    __slots__ = ("call", "counts", "next", "ready", "registration", "served", "supports")

    call: Callable[..., Any]
    supports: Callable[..., object] | None

    def __init__(self, registration: Registration, counts: Counts) -> None:
        self.registration = registration
        self.counts = counts
        self.served = counts.served
        self.ready = False
        self.next: Candidate | None = None


class Plan:
    """Who to ask, in order, as of one epoch. A chain: its first link is reached sooner than a tuple's first item."""

    __slots__ = ("epoch", "first", "forced", "hot")

    def __init__(self, epoch: int, candidates: Sequence[Candidate], forced: str | None) -> None:
        self.epoch = epoch
        self.hot = NEVER
        """``epoch`` once the first candidate is ready, which it then stays."""
        self.forced = forced
        self.first = candidates[0] if candidates else None
        for candidate, follower in itertools.pairwise(candidates):
            candidate.next = follower

    def __iter__(self) -> Iterator[Candidate]:
        candidate = self.first
        while candidate is not None:
            yield candidate
            candidate = candidate.next

    def drop(self, gone: Candidate) -> None:
        """Take a candidate out of the chain; a call that stands on it goes on from there."""
        if self.first is gone:
            self.first = gone.next
        for candidate in self:
            if candidate.next is gone:
                candidate.next = gone.next
