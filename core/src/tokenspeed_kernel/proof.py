# SPDX-License-Identifier: Apache-2.0
"""Know what really ran: a report of every slot and plugin, and a check that a solution served every call."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.counts import value_of
from tokenspeed_kernel.dispatch import handles
from tokenspeed_kernel.references import contracts, registry_with_references
from tokenspeed_kernel.slots import Slot, slot

__all__ = ["KernelNotUsedError", "Report", "expect", "report"]


class KernelNotUsedError(AssertionError):
    """The solution that was expected did not serve every call, or there was none; the message says who did, and why."""


@dataclass(frozen=True)
class Report:
    """What every slot that was used did so far, and what became of the plugins, as text or as data."""

    slots: Mapping[str, Mapping[str, Any]]
    """Slot name -> ``"unserved"`` calls, and ``"kernels"``: each one's counts, and why it is off if it was tripped."""
    plugins: tuple[Mapping[str, Any], ...]
    """Each installed plugin as of the last discovery: name, package, version, state, reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        plain: dict[str, Any] = json.loads(json.dumps({"slots": self.slots, "plugins": self.plugins}))
        return plain

    def __str__(self) -> str:
        lines = ["slots: none used" if not self.slots else "slots:"]
        for name, facts in self.slots.items():
            lines.append(f"  {name}: {facts['unserved']} calls left to the caller")
            lines += [f"    {kernel}: {_counts_text(counts)}" for kernel, counts in facts["kernels"].items()]
        lines.append("plugins:" if self.plugins else "plugins: none")
        for plugin in self.plugins:
            why = f" ({plugin['reason']})" if plugin["reason"] else ""
            lines.append(f"  {plugin['name']} of {plugin['package']} {plugin['version']}: {plugin['state']}{why}")
        lines.append("Calls inside a compiled or captured graph are counted once, when it is made: replays cannot be.")
        return "\n".join(lines)


def report() -> Report:
    """Return what ran so far in this process."""
    registry = registry_with_references()
    off = {registration.spec.name: cause for registration, cause in registry.tripped.items()}
    slots: dict[str, dict[str, Any]] = {}
    for name, handle in sorted(handles.items()):
        kernels = {kernel: {**counts, "off": off.get(kernel, "")} for kernel, counts in handle.stats().items()}
        if kernels or value_of(handle.unserved):
            slots[name] = {"unserved": value_of(handle.unserved), "kernels": kernels}
    return Report(slots, tuple(_plugins()))


def _plugins() -> Iterator[dict[str, Any]]:
    if "tokenspeed_kernel.plugins.discovery" in sys.modules:  # without a discovery there is nothing to report
        from tokenspeed_kernel.plugins import plugin_records

        for record in plugin_records():
            yield {field: getattr(record, field) for field in ("name", "package", "version", "state", "reason")}


def _counts_text(counts: Mapping[str, Any]) -> str:
    parts = [f"{counts[name]} {name}" for name in ("served", "failed", "traced", "bound") if counts[name]]
    parts += [f"{count} declined ({reason})" for reason, count in counts["declined"].items()]
    if counts["off"]:
        parts.append(f"off: {counts['off']}")
    return ", ".join(parts) or "nothing"


@contextmanager
def expect(name: str, *, solution: str) -> Iterator[Slot]:
    """Check that ``solution`` serves every call of the slot ``name`` inside the context, and that there is one.

    A call counts when Python makes it: those of all threads do, those inside an earlier compiled graph do not. A call
    that a capture records counts as one of the kernel that it holds.

    Raises:
        KernelNotUsedError: at the end, if another kernel or the caller served a call, or nobody made one.
        LookupError: there is no such slot.
    """
    handle = slot(name)
    before, unserved = handle.stats(), value_of(handle.unserved)
    yield handle
    contract = contracts[name]
    solutions = {
        registration.spec.name: registration.spec.solution
        for registration in registry_with_references().registrations(contract.family, contract.mode)
    }
    after = handle.stats()
    done = {kernel: _difference(before.get(kernel, {}), counts) for kernel, counts in after.items()}
    by_others = sum(n for kernel, (n, _) in done.items() if solutions.get(kernel) != solution)
    by_solution = sum(n for kernel, (n, _) in done.items() if solutions.get(kernel) == solution)
    left = value_of(handle.unserved) - unserved
    if by_solution and not by_others and not left:
        return
    lines = [f"slot {name!r}: {solution!r} served {by_solution} calls, others {by_others}, the caller itself {left}"]
    lines += [f"  {kernel} served {n}" for kernel, (n, _) in done.items() if n]
    lines += [f"  {kernel} declined: {reason}" for kernel, (_, reasons) in done.items() for reason in reasons]
    raise KernelNotUsedError("\n".join([*lines, str(handle.explain())]))


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many calls a kernel served or had traced in between, and the reasons for which it declined some."""
    served = sum(after[name] - before.get(name, 0) for name in ("served", "traced"))
    earlier = before.get("declined", {})
    return served, [reason for reason, count in after["declined"].items() if count > earlier.get(reason, 0)]
