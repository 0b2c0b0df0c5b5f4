# SPDX-License-Identifier: Apache-2.0
"""The trace of one choice as a value: every candidate, who was chosen, and why each other was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.registry import Registration
from tokenspeed_kernel.rules import Reason

__all__ = ["Explanation", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one candidate. ``reason`` is None for the chosen one alone."""

    registration: Registration
    reason: Reason | None

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON-able data."""
        spec = self.registration.spec
        no = self.reason
        return {
            "kernel": spec.name,
            "solution": spec.solution,
            "priority": int(spec.priority),
            "owner": self.registration.owner,
            "chosen": no is None,
            "stage": None if no is None else no.stage,
            "code": None if no is None else no.code,
            "detail": "" if no is None else no.detail,
            "remedy": "" if no is None else no.remedy,
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Every candidate for a request, in the order in which they would be tried, the refused ones last."""

    subject: str
    """The slot or operator that was asked for."""
    platform: str
    verdicts: tuple[Verdict, ...]

    @classmethod
    def of(
        cls, subject: str, platform: str, candidates: Iterable[Registration], refused: Mapping[str, Reason]
    ) -> Explanation:
        """Return the explanation in which the first candidate that is not ``refused`` (by name) is the chosen one."""
        verdicts: list[Verdict] = []
        winner: Registration | None = None
        for candidate in candidates:
            reason = refused.get(candidate.spec.name)
            if reason is None and winner is None:
                winner = candidate
            elif reason is None and winner is not None:
                reason = _outranked(candidate, winner)
            verdicts.append(Verdict(registration=candidate, reason=reason))
        return cls(subject=subject, platform=platform, verdicts=tuple(verdicts))

    @property
    def chosen(self) -> str | None:
        """The name of the kernel that runs, or None if none may."""
        return next((v.registration.spec.name for v in self.verdicts if v.reason is None), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON-able data."""
        return {
            "slot": self.subject,
            "platform": self.platform,
            "chosen": self.chosen,
            "candidates": [verdict.to_dict() for verdict in self.verdicts],
        }

    def __str__(self) -> str:
        lines = [f"{self.subject} on {self.platform}: {self.chosen or 'no kernel'}"]
        width = max((len(v.registration.spec.name) for v in self.verdicts), default=0)
        for verdict in self.verdicts:
            name, no = verdict.registration.spec.name, verdict.reason
            state = "chosen" if no is None else f"{no.stage}: {no}"
            lines.append(f"  {name:<{width}}  priority {verdict.registration.spec.priority:>2}  {state}")
        if not self.verdicts:
            lines.append("  nothing is registered for it; install a provider and call discover_plugins()")
        return "\n".join(lines)


def _outranked(loser: Registration, winner: Registration) -> Reason:
    if loser.spec.priority < winner.spec.priority:
        why = f"its priority {loser.spec.priority} is below {winner.spec.priority}"
    elif loser.spec.priority == winner.spec.priority and loser.order < winner.order:
        why = f"at the same priority, {winner.spec.priority}, the newer registration wins"
    else:
        why = f"an oracle or override puts {winner.spec.name} first"
    detail = f"eligible, but {winner.spec.name} comes first: {why}"
    return Reason(loser.spec.name, "rank", "outranked", detail, "to run it all the same, use kernel_override(...)")
