# SPDX-License-Identifier: Apache-2.0
"""Run checks, and make results of what they find."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch

from tokenspeed_kernel.registry import Registration
from tokenspeed_kernel.testing import captures, checks, cuda, elsewhere, installed, interpreted, mutants
from tokenspeed_kernel.testing.checks import Check
from tokenspeed_kernel.testing.grid import grid_of
from tokenspeed_kernel.testing.report import NotExamined, Outcome, Report, Result
from tokenspeed_kernel.testing.subject import Declined, Subject

__all__ = ["CHECKS", "checks_for", "device_name", "examine", "examine_kernel", "examine_plugin", "plugin_results"]

CHECKS: dict[str, Check] = {
    **checks.CHECKS,
    **mutants.CHECKS,
    **captures.CHECKS,
    **elsewhere.CHECKS,
    **interpreted.CHECKS,
    **cuda.CHECKS,
}
"""Every check of a kernel by name, in the order in which they run."""


def checks_for(subject: Subject) -> list[str]:
    """Return the names of the checks that have a meaning for a kernel's slot."""
    groups = {case.group for case in grid_of(subject.slot_name)}
    return [name for name in CHECKS if not name.startswith("parity_") or name.removeprefix("parity_") in groups]


def examine(subject: Subject, check: str) -> Result:
    """Make one check of one kernel."""

    def made() -> tuple[list[str], list[str]]:
        subject.grid  # noqa: B018 -- raises NotExamined for a slot that the kit does not know
        subject.notes.clear()
        subject.hidden.clear()
        findings = CHECKS[check](subject)
        return [*findings, *dict.fromkeys(subject.hidden)], list(dict.fromkeys(subject.notes))

    return _result(check, subject.name, subject.slot_name, made)


def _result(check: str, kernel: str, slot: str, made: Callable[[], tuple[list[str], list[str]]]) -> Result:
    started = time.perf_counter()
    notes: list[str] = []
    outcome: Outcome
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own tracers and fallbacks
            findings, notes = made()
        outcome = "failed" if findings else "passed"
    except NotExamined as reason:
        outcome, findings = "not examined", [str(reason)]
    except Declined:
        outcome, findings = "not examined", ["declines late: returned NotImplemented"]
    except Exception:  # noqa: BLE001 -- a check must not hide the others, whatever a third party's code raises
        outcome, findings = "failed", [f"the check itself raised: {traceback.format_exc(limit=-3).strip()}"]
    return Result(
        check=check,
        kernel=kernel,
        slot=slot,
        outcome=outcome,
        findings=tuple(findings),
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


def examine_kernel(
    registration: Registration, *, checks: Iterable[str] | None = None, tolerance: float | None = None
) -> list[Result]:
    """Return what each check (or those named) says of one kernel.

    Args:
        registration: the kernel, as ``KernelRegistry.get().registration(name)`` has it.
        checks: names of :data:`CHECKS`; all that the slot has a meaning for, if not given.
        tolerance: relative to the largest value; it replaces the contract's where it is smaller, never where larger.

    Raises:
        KeyError: a check is not known.
    """
    subject = Subject(registration, tolerance=tolerance)
    return [examine(subject, check) for check in (checks_for(subject) if checks is None else checks)]


def plugin_results(plugin: str, checks: Iterable[str] = tuple(installed.CHECKS)) -> Iterator[Result]:
    """Yield what the checks of the plugin as a whole, or those named, say."""
    record = installed.record_of(plugin)
    for name in checks:
        yield _result(name, "plugin", "", lambda name=name: installed.CHECKS[name](record))  # type: ignore[misc]  # mypy infers no lambda with a default


def device_name() -> str:
    """Return what kernels are examined on here."""
    if not torch.cuda.is_available():
        return f"CPU, no CUDA device; torch {torch.__version__}"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}; torch {torch.__version__}"


def examine_plugin(plugin: str) -> Report:
    """Examine an installed plugin, by its entry point's name or ``name@distribution``, and every kernel of it."""
    results = list(plugin_results(plugin))
    record = installed.record_of(plugin)
    for registration in () if record is None else installed.kernels_of(record):
        results += examine_kernel(registration)
    return Report(
        plugin=plugin,
        package="" if record is None else record.package,
        version="" if record is None else record.version,
        device=device_name(),
        results=tuple(results),
    )
