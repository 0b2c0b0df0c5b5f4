# SPDX-License-Identifier: Apache-2.0
"""What an examination found, as values, as a table and as JSON. Knows nothing of torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

__all__ = ["NotExamined", "Outcome", "Report", "Result"]

SCHEMA = 1
"""The version of the JSON document: raised when a field goes or changes its meaning."""

Outcome = Literal["passed", "failed", "not examined"]


class NotExamined(Exception):  # noqa: N818 -- no error: it says why a check has no answer here
    """Raised by a check that cannot be made here; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check said of one kernel, or of the plugin as a whole."""

    check: str
    kernel: str
    """The kernel's name, or ``"plugin"``."""
    slot: str = ""
    outcome: Outcome
    findings: tuple[str, ...] = ()
    """What is wrong, or the reason why it was not examined."""
    notes: tuple[str, ...] = ()
    """What was seen besides, and is no fault: times, declined calls."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The examination of one plugin."""

    plugin: str
    package: str = ""
    version: str = ""
    device: str = ""
    """What it ran on."""
    results: tuple[Result, ...] = field(default=())

    def count(self, outcome: Outcome) -> int:
        """Return how many checks ended so."""
        return sum(result.outcome == outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        """1 if anything failed; else 3 if some kernel itself could run no call here; else 0."""
        if not self.results or self.count("failed"):
            return 1
        kernels = {result.kernel for result in self.results}
        # A kernel that only ever refused has shown nothing of what it computes, and an interpreter is not the kernel.
        without = ("refusals", "interpreted")
        seen = {r.kernel for r in self.results if r.outcome == "passed" and r.check not in without}
        return 0 if kernels == seen else 3

    def to_json(self) -> str:
        """Return the report as a JSON document."""
        head = {"schema": SCHEMA, **asdict(self), "exit_code": self.exit_code}
        return json.dumps(head, indent=1)

    def table(self) -> str:
        """Return the report as text: a line for each check, and below it what it found."""
        source = f"{self.package} {self.version}" if self.package else "not installed"
        lines = [f"{self.plugin} ({source}) on {self.device or 'no device'}"]
        width = max((len(result.check) for result in self.results), default=0)
        kernel = ""
        for result in self.results:
            if result.kernel != kernel:
                kernel = result.kernel
                lines += ["", f"{kernel}: {result.slot}" if result.slot else kernel]
            said = "; ".join(result.notes) if result.outcome == "passed" else ""
            if result.outcome == "not examined":
                said = "; ".join(result.findings)
            lines.append(f"  {result.check:<{width}}  {result.outcome:<12}  {result.seconds:6.2f} s  {said}".rstrip())
            if result.outcome == "failed":
                lines += [f"      {finding}" for finding in result.findings]
        counts = ", ".join(f"{self.count(o)} {o}" for o in ("passed", "failed", "not examined"))
        return "\n".join([*lines, "", counts])
