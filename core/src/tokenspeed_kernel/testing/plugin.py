# SPDX-License-Identifier: Apache-2.0
"""pytest's side: the examination as one parametrized test, and the report at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tokenspeed_kernel.testing.report import Report, Result

if TYPE_CHECKING:
    from tokenspeed_kernel.testing.subject import Subject

__all__ = ["examine", "pytest_addoption", "pytest_terminal_summary"]

_results: dict[str, list[Result]] = {}  # of this process's run, by plugin: what the summary prints


def examine(plugin: str, *, tolerance: float | None = None) -> Callable[..., None]:
    """Return a test of an installed plugin: each kernel that it registers, by each check, under an id of its own.

    ``test_conformance = examine("my_plugin")`` is all that a test file needs. Discovery runs when the file is
    collected. What cannot be examined on this machine is skipped with its reason.

    Args:
        plugin: the entry point's name, or ``name@distribution``.
        tolerance: relative to the largest value; it replaces the contract's where it is smaller, never where larger.
    """
    from tokenspeed_kernel.testing import examination, installed
    from tokenspeed_kernel.testing.subject import Subject

    record = installed.record_of(plugin)
    subjects = [] if record is None else [Subject(r, tolerance=tolerance) for r in installed.kernels_of(record)]
    rows = [pytest.param(None, name, id=f"plugin-{name}") for name in installed.CHECKS]
    for subject in subjects:
        rows += [pytest.param(subject, name, id=f"{subject.name}-{name}") for name in examination.checks_for(subject)]

    @pytest.mark.parametrize(("subject", "check"), rows)
    def test_conformance(subject: Subject | None, check: str) -> None:
        """The kernel passes this check of the conformance kit."""
        if subject is None:
            result = next(r for r in examination.plugin_results(plugin, (check,)))
        else:
            result = examination.examine(subject, check)
        _results.setdefault(plugin, []).append(result)
        _conclude(result)

    return test_conformance


def _conclude(result: Result) -> None:
    text = "\n".join(result.findings)
    if result.outcome == "failed":
        pytest.fail(f"{result.check} of {result.kernel}:\n{text}", pytrace=False)
    if result.outcome == "not examined":
        pytest.skip(f"not examined: {text}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance-json``."""
    group = parser.getgroup("tokenspeed_kernel")
    group.addoption("--conformance-json", metavar="FOLDER", help="write each plugin's examination there, as JSON")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of every plugin that was examined in this run."""
    for report in _reports(_results):
        terminalreporter.section(f"conformance of {report.plugin}")
        terminalreporter.write_line(report.table())
        if folder := config.getoption("conformance_json"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{report.plugin}.json").write_text(report.to_json() + "\n", encoding="utf-8")
    _results.clear()


def _reports(results: dict[str, list[Result]]) -> Iterable[Report]:
    if not results:
        return
    from tokenspeed_kernel.testing import examination, installed

    for plugin, found in sorted(results.items()):
        record = installed.record_of(plugin)
        yield Report(
            plugin=plugin,
            package="" if record is None else record.package,
            version="" if record is None else record.version,
            device=examination.device_name(),
            results=tuple(found),
        )
