# SPDX-License-Identifier: Apache-2.0
"""The kernel under examination: how to call it bare, and how to call it through its slot and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from tokenspeed_kernel import epoch
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.references import contracts
from tokenspeed_kernel.registry import KernelRegistry, Registration, load_attribute
from tokenspeed_kernel.slots import Slot, slot
from tokenspeed_kernel.testing.grid import Call, Case, grid_of
from tokenspeed_kernel.testing.parity import YARDSTICKS, Yardstick
from tokenspeed_kernel.testing.report import NotExamined

__all__ = ["Declined", "Subject", "contract_of"]


class Declined(Exception):  # noqa: N818 -- an answer, no error
    """The kernel returned NotImplemented: it declines late, which is its right."""


def contract_of(registration: Registration) -> SlotContract | None:
    """Return the contract of the slot that a kernel is for, or None if no slot of that operator is declared."""
    operator = (registration.spec.family, registration.spec.mode)
    return next((c for c in contracts.values() if (c.family, c.mode) == operator), None)


class Subject:
    """One registered kernel.

    Args:
        registration: the kernel as its plugin registered it.
        tolerance: relative to the largest value; replaces the contract's tolerances where it is smaller.
    """

    def __init__(self, registration: Registration, *, tolerance: float | None = None) -> None:
        self.registration = registration
        self.tolerance = tolerance
        self.contract = contract_of(registration)
        self.notes: list[str] = []
        """What the present check saw that is no fault."""
        self.hidden: list[str] = []
        """Failures of the kernel that its slot answered with another's result, so that the check did not see them."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.registration.spec.name

    @property
    def slot_name(self) -> str:
        """The slot's name, or the operator where no slot is declared."""
        spec = self.registration.spec
        return self.contract.name if self.contract is not None else f"{spec.family}.{spec.mode}"

    @cached_property
    def grid(self) -> tuple[Case, ...]:
        """The calls that its slot is examined with."""
        cases = grid_of(self.slot_name)
        if not cases:
            raise NotExamined(f"the kit has no calls for {self.slot_name!r}")
        return cases

    @property
    def yardstick(self) -> Yardstick:
        """What its results are held against."""
        return YARDSTICKS[self.slot_name]

    @cached_property
    def _refused(self) -> str:
        """Why selection refuses the kernel on this machine, before any call; empty if it does not."""
        if self.contract is None:
            return ""
        with self.alone() as handle:
            for verdict in handle.explain().to_dict()["candidates"]:
                if verdict["kernel"] == self.name and not verdict["chosen"]:
                    return f"not eligible here ({verdict['stage']}): {verdict['detail'] or verdict['code']}"
        return ""

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The implementation.

        Raises:
            NotExamined: it cannot be used on this machine.
        """
        if self._refused:
            raise NotExamined(self._refused)
        return self.registration.load()

    @cached_property
    def supports(self) -> Callable[..., object]:
        """What is asked before each call; accepts everything if the kernel has no such function."""
        supports = self.registration.spec.supports
        if supports is None:
            return lambda *args, **kwargs: self._refused or True
        try:  # asked on any machine: a refusal needs no device
            return load_attribute(supports)
        except ImportError as error:
            raise NotExamined(f"supports() cannot be imported: {error}") from error

    @cached_property
    def device(self) -> str:
        """``"cuda"`` where that is available and the kernel serves anything on it, else ``"cpu"``."""
        if torch.cuda.is_available():
            for case in self.grid:
                if not case.malformed and self.verdict(case.build("cuda")) is True:
                    return "cuda"
        return "cpu"

    def verdict(self, call: Call) -> object:
        """Return what the kernel's ``supports`` answers, or the error that it raised."""
        try:
            return self.supports(*call.args, **call.kwargs)
        except NotExamined:
            raise
        except Exception as error:  # noqa: BLE001 -- a third party's code
            return error

    def accepted(self, *groups: str, differentiable: bool = False) -> list[tuple[Case, Call]]:
        """Return the calls of these groups (all, if none is named) that the kernel serves.

        Raises:
            NotExamined: it serves none of them.
        """
        if self._refused:
            raise NotExamined(self._refused)
        asked = [
            case
            for case in self.grid
            if not case.malformed and (not groups or case.group in groups) and (case.gradients or not differentiable)
        ]
        if not asked:
            raise NotExamined("the slot has no such calls")
        calls = [(case, case.build(self.device)) for case in asked]
        verdicts = [(case, call, self.verdict(call)) for case, call in calls]
        served = [(case, call) for case, call, verdict in verdicts if verdict is True]
        if not served:
            raise NotExamined(f"declines each of {len(asked)} calls, the first because {verdicts[0][2]}")
        if len(served) < len(asked):
            self.notes.append(f"serves {len(served)} of {len(asked)} calls")
        return served

    def run(self, call: Call) -> Any:
        """Call the implementation.

        Raises:
            Declined: it returned NotImplemented.
        """
        result = self.call(*call.args, **call.kwargs)
        if result is NotImplemented:
            raise Declined
        return result

    def expected(self, call: Call) -> torch.Tensor:
        """Return what is right for a call."""
        return self.yardstick.oracle(*call.args, **call.kwargs)

    def fault(self, actual: object, call: Call, expected: torch.Tensor | None = None) -> str | None:
        """Return what is wrong with the result of a call, or None."""
        right = self.expected(call) if expected is None else expected
        return self.yardstick.check(actual, right, call, self.tolerance)

    @contextmanager
    def alone(self) -> Iterator[Slot]:
        """Give the slot with this kernel, the references, and nobody else in it; what was registered comes back."""
        before = KernelRegistry._instance
        KernelRegistry.reset()
        try:
            registry = KernelRegistry.get()
            registry.restore(self.registration)
            yield slot(self.slot_name)
            self.hidden += [f"failed, and another answered: {why}" for why in registry.tripped.values()]
        finally:
            KernelRegistry._instance = before
            epoch.bump()

    @contextmanager
    def hosted(self) -> Iterator[Callable[..., torch.Tensor]]:
        """Give what a host calls: the slot with this kernel alone, and the portable path where that returns None.

        Raises:
            NotExamined: the kernel cannot be used on this machine.
        """
        if self._refused:
            raise NotExamined(self._refused)
        portable = self.yardstick.host
        with self.alone() as handle:
            if self.contract is not None and self.contract.reference is not None:
                yield handle
                return

            def host(*args: Any, **kwargs: Any) -> torch.Tensor:
                result: torch.Tensor | None = handle(*args, **kwargs)
                return portable(*args, **kwargs) if result is None else result

            yield host

    def note_who_was_recorded(self, traced_before: int) -> None:
        """Note whether captures since a count of ``traced`` hold the kernel or the portable path."""
        is_kernel = self.counts("traced") > traced_before
        self.notes.append("records the kernel" if is_kernel else "records the portable path")

    def counts(self, what: str) -> int:
        """Return how many calls of the slot the kernel ``served``, ``failed`` or was ``traced`` in, so far."""
        return int(slot(self.slot_name).stats().get(self.name, {}).get(what, 0))
