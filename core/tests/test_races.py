# SPDX-License-Identifier: Apache-2.0
"""Threads that call, register, trip, override, freeze and discover at once: nothing is lost and nothing breaks."""

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tokenspeed_kernel import discover_plugins, freeze, register, report, thaw, unregister
from tokenspeed_kernel.registry import KernelRegistry
from tokenspeed_kernel.selection import kernel_override, select_kernel

Kernel = Callable[..., Any]
Declare = Callable[..., Any]


def _run_together(jobs: list[Callable[[int], None]], rounds: int) -> list[BaseException]:
    """Run every job ``rounds`` times in a thread of its own, started together, and return what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[int], None]) -> None:
        start.wait()
        try:
            for index in range(rounds):
                job(index)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the test shows it
            raised.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_eight_threads_leave_a_consistent_registry(
    kernel: Kernel, declare: Declare, plugins: Any, said: Callable[..., list[str]]
) -> None:
    """Four threads call while others register, withdraw, trip, override, freeze and discover; every call is counted."""
    plugins.add("mine", plugins.kernel("from_plugin", 3))
    kernel("base", priority=4)
    handle = declare()
    rounds, flaky = 400, itertools.count()

    def failing(x: int) -> str:
        raise ValueError(f"fails {next(flaky)}")

    def call(index: int) -> None:
        assert isinstance(handle(index), str)

    def change(index: int) -> None:
        with suppress(RuntimeError):  # the plan may be frozen at this moment
            if index % 3 == 0:
                register("op", lambda x: "temporary", name="temporary", priority=6)
            elif index % 3 == 1:
                kernel("flaky", failing, priority=7)
            else:
                unregister("op", "temporary")

    def override(index: int) -> None:
        with kernel_override("quant", "op", "base"):
            assert handle(index) == "base" or KernelRegistry.get().frozen is not None

    def plan(index: int) -> None:
        if index % 20 == 0:
            freeze()
            select_kernel("quant", "op", None)
            thaw()
            discover_plugins()

    assert _run_together([call, call, call, call, change, override, override, plan], rounds) == []
    thaw()
    handle(0)  # the other threads may have been done before the kernel that fails was first registered
    assert len(said("fails")) >= 1
    served = sum(counts["served"] for counts in handle.stats().values())
    assert served == 6 * rounds + 1
    assert report().to_dict()["slots"]["op"]["unserved"] == 0
    unregister("op", "temporary")
    names = [spec.name for spec in KernelRegistry.get().list_kernels("quant", "op")]
    assert set(names) <= {"base", "flaky", "from_plugin", "op:reference"}
    assert len(names) == len(set(names))


@pytest.mark.parametrize("failing", [{"a"}, {"b"}, {"a", "b"}, {"a", "b", "c"}], ids=lambda f: "".join(sorted(f)))
def test_each_candidate_fails_in_turn_while_another_thread_registers(
    kernel: Kernel, declare: Declare, said: Callable[..., list[str]], failing: set[str]
) -> None:
    """Whoever fails, the next one serves every call, and only those that failed are off."""

    def implementation(name: str) -> Callable[[int], str]:
        def run(x: int) -> str:
            if name in failing:
                raise ValueError(f"{name} fails")
            return name

        return run

    for priority, name in ((12, "a"), (11, "b"), (10, "c")):
        kernel(name, implementation(name), priority=priority)
    handle = declare()
    expected = next((name for name in "abc" if name not in failing), "reference")
    answers: list[str] = []

    def call(index: int) -> None:
        answers.append(handle(index))

    def change(index: int) -> None:
        kernel(f"other{index % 2}", mode="other")

    assert _run_together([call, call, change], 100) == []
    assert set(answers) == {expected}
    first_ones = {name for name in failing if name < expected or expected == "reference"}
    tripped = {registration.spec.name for registration in KernelRegistry.get().tripped}
    assert tripped == first_ones
    assert len(said("is off for the rest")) == len(first_ones)
