# SPDX-License-Identifier: Apache-2.0
"""dispatch: one slot call, who is asked, who declines, who serves, and what is counted and explained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel.selection import NoKernelFoundError, kernel_override
from tokenspeed_kernel.slots import Slot

Kernel = Callable[..., Any]
Declare = Callable[..., Slot]
States = Callable[..., dict[str, str]]

NOTHING: dict[str, Any] = {"served": 0, "failed": 0, "traced": 0, "bound": 0, "declined": {}}


def test_call_passes_arguments_and_result_through(kernel: Kernel, declare: Declare) -> None:
    """Positional and keyword arguments reach ``supports`` and the kernel unchanged."""
    seen: list[Any] = []

    def supports(*args: Any, **kwargs: Any) -> bool:
        seen.append((args, kwargs))
        return True

    kernel("a", lambda *args, **kwargs: (args, kwargs), supports=supports)
    call = ((1, "two"), {"self": 3, "plan": 4})
    assert declare()(*call[0], **call[1]) == call
    assert seen == [call]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (False, "without a reason"),
        (None, "without a reason"),
        ("needs float32", "needs float32"),
        ("", ""),
        (1, "answered 1"),
        (["yes"], "answered ['yes']"),
    ],
)
def test_anything_but_true_declines(
    kernel: Kernel, verdict: object, reason: str, declare: Declare, states: States
) -> None:
    """The next kernel serves, and the reason is counted and explained; only True accepts."""
    kernel("a", supports=lambda x: verdict)
    handle = declare()
    assert handle(1) == "reference"
    (counted,) = handle.stats()["a"]["declined"]
    assert reason in counted
    assert states(handle, 1) == {"a": "accepting declined", "op:reference": "chosen"}


def test_supports_that_raises_declines(kernel: Kernel, declare: Declare, states: States) -> None:
    """A fault of the check is not one of the call: the next kernel serves, and nobody is tripped."""
    kernel("a", supports=lambda x: x.dtype)
    handle = declare()
    assert [handle(1), handle(1)] == ["reference"] * 2
    assert "AttributeError" in next(iter(handle.stats()["a"]["declined"]))
    assert states(handle, 1)["a"] == "accepting supports_raised"
    assert states(handle)["a"] == "chosen"


@pytest.mark.parametrize("result", [NotImplemented, None])
def test_kernel_may_decline_late(kernel: Kernel, result: object, declare: Declare) -> None:
    """NotImplemented, and None where a value is promised, decline."""
    kernel("a", lambda x: result)
    handle = declare()
    assert handle(1) == "reference"
    assert handle.stats()["a"] == {**NOTHING, "declined": {f"returned {result!r}": 1}}


@pytest.mark.parametrize("result", [0, False, "", []])
def test_falsy_result_is_a_result(kernel: Kernel, result: object, declare: Declare) -> None:
    """Only None and NotImplemented decline."""
    kernel("a", lambda x: result)
    assert declare()(1) == result


def test_string_supports_is_imported_at_its_first_turn(kernel: Kernel, declare: Declare) -> None:
    """``supports`` may be given by name."""
    kernel("a", supports="builtins:callable")
    handle = declare()
    assert [handle(len), handle(1)] == ["a", "reference"]


def test_forced_kernel_that_declines_is_an_error(kernel: Kernel, declare: Declare) -> None:
    """Forcing a kernel that does not take the inputs says so, with its reason; the reference does not step in."""
    kernel("a", supports=lambda x: "needs float32")
    handle = declare()
    with (
        kernel_override("quant", "op", "a"),
        pytest.raises(NoKernelFoundError, match=r"(?s)'a' is forced.*needs float32"),
    ):
        handle(1)
    assert handle(1) == "reference"


def test_stats_are_exact_under_threads(kernel: Kernel, declare: Declare) -> None:
    """Eight threads lose no count."""
    kernel("a", supports=lambda n: True if n % 2 else "even")
    handle = declare()
    start = threading.Barrier(8)

    def run() -> None:
        start.wait(10)
        for n in range(500):
            handle(n)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handle.stats() == {
        "a": {**NOTHING, "served": 2000, "declined": {"even": 2000}},
        "op:reference": {**NOTHING, "served": 2000},
    }


@pytest.mark.parametrize("x", [0, 1, 5, 9])
def test_explanation_is_what_then_happens(kernel: Kernel, x: int, declare: Declare) -> None:
    """Whom ``explain`` names for these inputs is who serves them."""
    kernel("small", supports=lambda x: True if x < 1 else "too large", priority=12)
    kernel("medium", supports=lambda x: True if x < 5 else "too large", priority=8)
    kernel("never", predicate=lambda: False, priority=15)
    kernel("odd", supports=lambda x: x % 2 == 1 and x > 5, priority=4)
    handle = declare(lambda x: "op:reference")
    explanation = handle.explain(x)
    assert handle(x) == explanation.chosen
    assert str(explanation).splitlines()[0].endswith(f": {explanation.chosen}")


def test_explanation_is_data(kernel: Kernel, declare: Declare) -> None:
    """The explanation has the documented keys and goes through JSON."""
    import json

    kernel("a", solution="s", supports=lambda x: "no")
    data = json.loads(json.dumps(declare().explain(1).to_dict()))
    assert (data["slot"], data["platform"], data["chosen"]) == ("op", "nvidia device (nvidia 9.0)", "op:reference")
    assert data["candidates"][0] == {
        "kernel": "a",
        "solution": "s",
        "priority": 10,
        "owner": None,
        "chosen": False,
        "stage": "accepting",
        "code": "declined",
        "detail": "no",
        "remedy": "change the arguments to fit, or leave them to the kernel that is chosen",
    }


def test_explaining_counts_nothing(kernel: Kernel, declare: Declare) -> None:
    """``explain`` is no call."""
    kernel("a", supports=lambda x: "no")
    handle = declare()
    handle.explain(1)
    assert all(not any((s["served"], s["failed"], s["declined"])) for s in handle.stats().values())


def test_a_kernel_may_call_its_own_slot(kernel: Kernel, declare: Declare) -> None:
    """Calls may nest: each is chosen, counted and answered by itself."""
    handle = declare(lambda x: 1)
    kernel("halves", lambda x: 1 + handle(x // 2), supports=lambda x: x > 1 or "small enough")
    assert handle(8) == 4
    assert handle.stats()["halves"]["served"] == 3
    assert handle.stats()["op:reference"]["served"] == 1


def test_a_nested_failure_blames_the_inner_kernel(kernel: Kernel, declare: Declare) -> None:
    """A kernel whose inner call falls back is served by it, and stays on."""
    handle = declare(lambda x: "reference")

    def broken(x: int) -> str:
        raise ValueError("bad launch")

    kernel("outer", lambda x: f"outer of {handle(0)}", supports=lambda x: x > 0, priority=12)
    kernel("inner", broken, priority=11)
    with pytest.warns(RuntimeWarning, match="'inner'"):
        assert handle(1) == "outer of reference"
    assert handle.explain(1).chosen == "outer"


def test_supports_may_ask_the_slot(kernel: Kernel, declare: Declare) -> None:
    """A check may explain or call another slot without disturbing the call that it is asked for."""
    handle = declare(lambda x: "reference")
    kernel("asks", supports=lambda x: handle.resolve() is not None and "always declines")
    assert handle(1) == "reference"
