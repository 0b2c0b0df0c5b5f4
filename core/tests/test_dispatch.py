# SPDX-License-Identifier: Apache-2.0
"""dispatch: one slot call, from the kernel that declines to the one that fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.selection import NoKernelFoundError, kernel_override
from tokenspeed_kernel.slots import Slot, declare_slot

Kernel = Callable[..., Any]
Said = Callable[..., list[str]]


def _declare(reference: Any = lambda *args, **kwargs: "reference", **contract: Any) -> Slot:
    return declare_slot(SlotContract(name="op", family="quant", mode="op", reference=reference, **contract))


def _raiser(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


def _states(handle: Slot, *args: Any) -> dict[str, str]:
    """Return for every kernel "chosen", or the stage and code that refused it."""
    candidates = handle.explain(*args).to_dict()["candidates"]
    return {c["kernel"]: "chosen" if c["chosen"] else f"{c['stage']} {c['code']}" for c in candidates}


def test_call_passes_arguments_and_result_through(kernel: Kernel) -> None:
    """Positional and keyword arguments reach ``supports`` and the kernel unchanged."""
    seen: list[Any] = []
    kernel("a", lambda *args, **kwargs: (args, kwargs), supports=lambda *args, **kwargs: seen.append((args, kwargs)) is None)
    call = ((1, "two"), {"self": 3, "plan": 4})
    assert _declare()(*call[0], **call[1]) == call
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
def test_anything_but_true_declines(kernel: Kernel, verdict: object, reason: str) -> None:
    """The next kernel serves, and the reason is counted and explained; only True accepts."""
    kernel("a", supports=lambda x: verdict)
    handle = _declare()
    assert handle(1) == "reference"
    (counted,) = handle.stats()["a"]["declined"]
    assert reason in counted
    assert _states(handle, 1) == {"a": "accepting declined", "op:reference": "chosen"}


def test_supports_that_raises_declines(kernel: Kernel) -> None:
    """A fault of the check is not one of the call: the next kernel serves, and nobody is tripped."""
    kernel("a", supports=lambda x: x.dtype)
    handle = _declare()
    assert [handle(1), handle(1)] == ["reference"] * 2
    assert "AttributeError" in next(iter(handle.stats()["a"]["declined"]))
    assert _states(handle, 1)["a"] == "accepting supports_raised"
    assert _states(handle)["a"] == "chosen"


@pytest.mark.parametrize("result", [NotImplemented, None])
def test_kernel_may_decline_late(kernel: Kernel, result: object) -> None:
    """NotImplemented, and None where a value is promised, decline."""
    kernel("a", lambda x: result)
    handle = _declare()
    assert handle(1) == "reference"
    assert handle.stats()["a"] == {"served": 0, "failed": 0, "declined": {f"returned {result!r}": 1}}


@pytest.mark.parametrize("result", [0, False, "", []])
def test_falsy_result_is_a_result(kernel: Kernel, result: object) -> None:
    """Only None and NotImplemented decline."""
    kernel("a", lambda x: result)
    assert _declare()(1) == result


def test_string_supports_is_imported_at_its_first_turn(kernel: Kernel) -> None:
    """``supports`` may be given by name."""
    kernel("a", supports="builtins:callable")
    handle = _declare()
    assert [handle(len), handle(1)] == ["a", "reference"]


def test_kernel_that_raises_falls_back_and_is_tripped(kernel: Kernel, said: Said) -> None:
    """The next kernel serves the same inputs; the first is off from then on, with one warning that has the cause."""
    calls: list[int] = []

    def broken(x: int) -> int:
        calls.append(x)
        raise ValueError("bad launch")

    kernel("a", broken)
    handle = _declare()
    assert [handle(n) for n in range(3)] == ["reference"] * 3
    assert calls == [0]
    assert len(said()) == 1
    assert all(part in said()[0] for part in ("'a'", "'op'", "ValueError: bad launch"))
    assert _states(handle, 1) == {"a": "enabled tripped", "op:reference": "chosen"}
    assert handle.stats()["a"]["failed"] == 1


def test_trip_is_a_runtime_warning(kernel: Kernel) -> None:
    """The category is RuntimeWarning."""
    kernel("a", _raiser(ValueError))
    with pytest.warns(RuntimeWarning, match="off for the rest of the process"):
        _declare()(1)


def test_trip_counts_for_selections(kernel: Kernel, said: Said) -> None:
    """A tripped kernel is not selected for its operator either."""
    from tokenspeed_kernel import select_kernel

    kernel("a", _raiser(ValueError))
    assert select_kernel("quant", "op", None).name == "a"
    _declare()(1)
    assert select_kernel("quant", "op", None).name == "op:reference"
    assert len(said("failed")) == 1


def test_registering_again_is_a_new_chance(kernel: Kernel, said: Said) -> None:
    """A trip concerns a registration, not a name."""
    kernel("a", _raiser(ValueError))
    handle = _declare()
    handle(1)
    kernel("a")
    assert handle(1) == "a"
    assert len(said()) == 1


@pytest.mark.filterwarnings("ignore:kernel 'a'")
def test_error_without_a_text_falls_back_too(kernel: Kernel) -> None:
    """An exception whose str() raises does not break the fallback."""

    class Mute(Exception):  # noqa: N818 -- only its silence matters
        """An error that cannot be shown."""

        def __str__(self) -> str:
            raise RuntimeError("mute")

        __repr__ = __str__

    kernel("b", supports=_raiser(Mute()), priority=12)
    kernel("a", _raiser(Mute()))
    assert _declare()(1) == "reference"


def test_all_raise(kernel: Kernel, said: Said) -> None:
    """If every kernel raises, the reference's error is raised, and nobody is tripped."""
    kernel("a", _raiser(KeyError("a")))
    handle = _declare(_raiser(ValueError("wrong shape")))
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong shape"):
            handle(1)
    assert said() == []
    assert _states(handle, 1) == {"a": "chosen", "op:reference": "rank outranked"}


def test_slot_without_reference_trips_and_gives_none(kernel: Kernel, said: Said) -> None:
    """Where no other kernel is left the caller runs its own code, and the failed kernel is off."""
    kernel("a", _raiser(ValueError("bad")))
    handle = _declare(None)
    assert [handle(1), handle(1)] == [None, None]
    assert len(said("'a'")) == 1
    assert handle.resolve() is None


def test_several_failures_are_each_warned_about(kernel: Kernel, said: Said) -> None:
    """Each kernel that failed on the way is tripped with its own warning."""
    kernel("a", _raiser(ValueError("first")), priority=12)
    kernel("b", _raiser(ValueError("second")), priority=8)
    assert _declare()(1) == "reference"
    assert [len(said("first")), len(said("second")), len(said())] == [1, 1, 2]


def test_trip_with_warnings_as_errors_still_serves(kernel: Kernel, log: Callable[[], list[str]]) -> None:
    """A host that turns warnings into errors gets its result; the message is logged."""
    kernel("a", _raiser(ValueError("bad")))
    assert _declare()(1) == "reference"
    assert len([line for line in log() if "bad" in line]) == 1


class OutOfMemoryError(RuntimeError):
    """Called as torch's is."""


class AcceleratorError(RuntimeError):
    """Called as torch's is."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("full"),
        OutOfMemoryError("CUDA out of memory"),
        AcceleratorError("device-side assert"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=repr,
)
def test_error_that_is_no_kernel_s_fault_passes_through(kernel: Kernel, said: Said, error: BaseException) -> None:
    """Out of memory, a poisoned device context and a wish to stop reach the caller, and nobody is tripped."""
    kernel("a", _raiser(error))
    handle = _declare()
    with pytest.raises(type(error)) as caught:
        handle(1)
    assert caught.value is error
    assert said() == []
    assert _states(handle)["a"] == "chosen"


def _positive(x: int) -> None:
    if x < 0:
        raise ValueError("x must be positive")


def test_validate_blames_the_inputs(kernel: Kernel, said: Said) -> None:
    """After a failure ``validate`` runs; if it raises, that is the error, and nobody is tripped."""
    kernel("a", _raiser(KeyError("cryptic")))
    handle = _declare(validate=_positive)
    with pytest.raises(ValueError, match="x must be positive"):
        handle(-1)
    assert said() == []
    assert _states(handle)["a"] == "chosen"


def test_validate_that_passes_blames_the_kernel(kernel: Kernel, said: Said) -> None:
    """If the inputs are right the kernel is at fault."""
    kernel("a", _raiser(KeyError("cryptic")))
    assert _declare(validate=_positive)(1) == "reference"
    assert len(said("cryptic")) == 1


def test_validate_is_not_asked_without_a_failure(kernel: Kernel) -> None:
    """A call that succeeds pays for no validation."""
    kernel("a")
    assert _declare(validate=_raiser(AssertionError("asked")))(-1) == "a"


def test_mutating_slot_is_never_replayed(kernel: Kernel, said: Said) -> None:
    """A failure of a kernel that writes to its arguments is raised with the kernel named; no other runs."""
    error = ValueError("half written")
    kernel("a", _raiser(error))
    reference: list[int] = []
    handle = _declare(reference.append, mutates=True)
    with pytest.raises(RuntimeError, match="kernel 'a' of slot 'op' failed") as caught:
        handle(1)
    assert caught.value.__cause__ is error
    assert (reference, said()) == ([], [])


def test_mutating_slot_may_return_none(kernel: Kernel) -> None:
    """Where a call writes to its arguments None is a result."""
    kernel("a", lambda x: x.append("a"))
    written: list[str] = []
    handle = _declare(mutates=True)
    assert handle(written) is None
    assert (written, handle.stats()["a"]["served"]) == (["a"], 1)


def test_captured_call_is_never_replayed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Under CUDA-graph capture a failure is raised with the kernel named."""
    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    kernel("a", _raiser(ValueError("not capturable")))
    with pytest.raises(RuntimeError, match=r"kernel 'a'.*CUDA graph"):
        _declare()(1)
    assert said() == []


@pytest.mark.parametrize("target", ["tsk_absent:f", "sys:absent", "sys:path"])
def test_implementation_that_cannot_be_imported_is_tripped(kernel: Kernel, said: Said, target: str) -> None:
    """The next kernel serves, and one warning has the cause."""
    kernel("a", target)
    handle = _declare()
    assert [handle(1), handle(1)] == ["reference"] * 2
    assert len(said("'a'")) == len(said()) == 1
    assert target.split(":")[0] in said()[0] or target.split(":")[1] in said()[0]
    assert _states(handle)["a"] == "enabled tripped"


def test_supports_that_cannot_be_imported_is_tripped(kernel: Kernel, said: Said) -> None:
    """A kernel whose check is missing is off, as one whose implementation is."""
    kernel("a", supports="tsk_absent:supports")
    assert _declare()(1) == "reference"
    assert len(said("tsk_absent")) == 1


def test_probe_that_says_no_leaves_the_next(kernel: Kernel) -> None:
    """A kernel that cannot be built here is passed over without a warning, and the explanation says why."""
    kernel("a", probe=lambda: "no C compiler")
    handle = _declare()
    assert handle(1) == "reference"
    assert _states(handle, 1)["a"] == "buildable probe"
    assert "no C compiler" in str(handle.explain(1))


def test_forced_kernel_that_declines_is_an_error(kernel: Kernel) -> None:
    """Forcing a kernel that does not take the inputs says so, with its reason; the reference does not step in."""
    kernel("a", supports=lambda x: "needs float32")
    handle = _declare()
    with kernel_override("quant", "op", "a"), pytest.raises(NoKernelFoundError, match="(?s)'a' is forced.*needs float32"):
        handle(1)
    assert handle(1) == "reference"


def test_forced_kernel_that_raises_raises(kernel: Kernel, said: Said) -> None:
    """Its own error reaches the caller, and it is not tripped."""
    kernel("a", _raiser(ValueError("bad launch")), priority=1)
    handle = _declare()
    with kernel_override("quant", "op", "a"), pytest.raises(ValueError, match="bad launch"):
        handle(1)
    assert said() == []
    assert _states(handle)["a"] == "chosen"


def test_stats_are_exact_under_threads(kernel: Kernel) -> None:
    """Eight threads lose no count."""
    kernel("a", supports=lambda n: True if n % 2 else "even")
    handle = _declare()
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
        "a": {"served": 2000, "failed": 0, "declined": {"even": 2000}},
        "op:reference": {"served": 2000, "failed": 0, "declined": {}},
    }


def test_one_trip_under_threads(kernel: Kernel, said: Said) -> None:
    """Threads whose calls fail together all get the reference's answer, and one warning is issued."""
    together = threading.Barrier(4)

    def broken(x: int) -> int:
        together.wait(10)
        raise ValueError("bad")

    kernel("a", broken)
    handle = _declare()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(handle(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["reference"] * 4
    assert len(said()) == 1


@pytest.mark.parametrize("x", [0, 1, 5, 9])
def test_explanation_is_what_then_happens(kernel: Kernel, x: int) -> None:
    """Whom ``explain`` names for these inputs is who serves them."""
    kernel("small", supports=lambda x: True if x < 1 else "too large", priority=12)
    kernel("medium", supports=lambda x: True if x < 5 else "too large", priority=8)
    kernel("never", predicate=lambda: False, priority=15)
    kernel("odd", supports=lambda x: x % 2 == 1 and x > 5, priority=4)
    handle = _declare(lambda x: "op:reference")
    explanation = handle.explain(x)
    assert handle(x) == explanation.chosen
    assert str(explanation).splitlines()[0].endswith(f": {explanation.chosen}")


def test_explanation_is_data(kernel: Kernel) -> None:
    """The explanation has the documented keys and goes through JSON."""
    import json

    kernel("a", solution="s", supports=lambda x: "no")
    data = json.loads(json.dumps(_declare().explain(1).to_dict()))
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
        "remedy": "",
    }


def test_explaining_counts_nothing(kernel: Kernel) -> None:
    """``explain`` is no call."""
    kernel("a", supports=lambda x: "no")
    handle = _declare()
    handle.explain(1)
    assert all(not any((s["served"], s["failed"], s["declined"])) for s in handle.stats().values())
