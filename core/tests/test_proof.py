# SPDX-License-Identifier: Apache-2.0
"""report, expect and bind: knowing what really ran."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import discover_plugins, expect, report, slot
from tokenspeed_kernel.proof import KernelNotUsedError

Kernel = Callable[..., Any]
Declare = Callable[..., Any]


def test_a_report_has_every_slot_that_was_used(kernel: Kernel, declare: Declare) -> None:
    """Counts by kernel, what was declined and why, what was bound, and calls left to the caller."""
    kernel("a", supports=lambda x: True if x > 0 else "not positive")
    handle = declare()
    for x in (1, 2, -1):
        handle(x)
    handle.bind(1)
    slot("sdpa")(1)
    facts = report().to_dict()
    assert set(facts["slots"]) == {"op", "sdpa"}
    assert facts["slots"]["sdpa"]["unserved"] == 1
    kernels = facts["slots"]["op"]["kernels"]
    assert (kernels["a"]["served"], kernels["a"]["bound"], kernels["a"]["declined"]) == (2, 1, {"not positive": 1})
    assert kernels["op:reference"]["served"] == 1
    assert json.loads(json.dumps(facts)) == facts
    text = str(report())
    assert all(part in text for part in ("2 served", "1 bound", "1 declined (not positive)", "sdpa: 1 calls left"))


def test_a_report_shows_failures(kernel: Kernel, declare: Declare, plugins: Any) -> None:
    """A kernel that was switched off, and a plugin that failed, stay visible with their causes."""

    def broken(x: int) -> int:
        raise ValueError("bad launch")

    kernel("a", broken)
    plugins.add("bad", "raise RuntimeError('boom')")
    with pytest.warns(UserWarning, match="boom"):
        discover_plugins()
    with pytest.warns(RuntimeWarning, match="bad launch"):
        declare()(1)
    found = report()
    assert found.slots["op"]["kernels"]["a"]["off"] == "ValueError: bad launch"
    assert [(p["name"], p["state"]) for p in found.plugins] == [("bad", "failed")]
    assert "boom" in str(found)


def test_a_report_of_nothing() -> None:
    """A process that used no slot says so."""
    assert report().to_dict() == {"slots": {}, "plugins": []}
    assert "none used" in str(report())


def test_expect_passes_if_the_solution_served_every_call(kernel: Kernel, declare: Declare) -> None:
    """Calls before it do not count, and those of other threads do."""
    kernel("a", solution="fast", supports=lambda x: x > 0 or "not positive")
    handle = declare()
    handle(-1)
    with expect("op", solution="fast") as same:
        thread = threading.Thread(target=handle, args=(1,))
        thread.start()
        thread.join()
        handle(2)
    assert same is handle


@pytest.mark.parametrize("calls", [(), (-1,), (1, -1)])
def test_expect_raises_with_the_reasons(kernel: Kernel, declare: Declare, calls: tuple[int, ...]) -> None:
    """No call at all, a call that another kernel served, and a mixture are errors that name who and why."""
    kernel("a", solution="fast", supports=lambda x: x > 0 or "not positive")
    handle = declare()

    def run() -> None:
        with expect("op", solution="fast"):
            for x in calls:
                handle(x)

    with pytest.raises(KernelNotUsedError) as caught:
        run()
    text = str(caught.value)
    assert f"'fast' served {sum(x > 0 for x in calls)} calls" in text
    assert ("op:reference served 1" in text) == (-1 in calls)
    assert ("a declined: not positive" in text) == (-1 in calls)


def test_expect_counts_what_was_left_to_the_caller() -> None:
    """A slot without a reference that returned None was not served by the solution."""
    with pytest.raises(KernelNotUsedError, match="the caller itself 1"), expect("sdpa", solution="sdpa"):
        slot("sdpa")(1)


def test_expect_lets_an_error_through(declare: Declare) -> None:
    """An error inside the context is the one that is raised."""
    declare()
    with pytest.raises(LookupError, match="mine"), expect("op", solution="fast"):
        raise LookupError("mine")


def test_bind_gives_the_implementation_itself(kernel: Kernel, declare: Declare) -> None:
    """The function that serves such arguments: its calls are not counted, and a trip does not withdraw it."""

    def fast(x: int) -> str:
        return "fast"

    kernel("a", fast, supports=lambda x: x > 0 or "not positive")
    handle = declare()
    bound = handle.bind(1)
    assert bound is fast
    assert handle.bind(-1)(-1) == "reference"
    bound(5)
    assert handle.stats()["a"]["served"] == 0
    assert slot("sdpa").bind(1) is None
