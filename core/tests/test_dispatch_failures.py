# SPDX-License-Identifier: Apache-2.0
"""dispatch: what happens to a slot call, and to a kernel, when that kernel fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_kernel.selection import kernel_override
from tokenspeed_kernel.slots import Slot

Kernel = Callable[..., Any]
Declare = Callable[..., Slot]
States = Callable[..., dict[str, str]]
Said = Callable[..., list[str]]


def _raiser(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


def test_kernel_that_raises_falls_back_and_is_tripped(
    kernel: Kernel, said: Said, declare: Declare, states: States
) -> None:
    """The next kernel serves the same inputs; the first is off from then on, with one warning that has the cause."""
    calls: list[int] = []

    def broken(x: int) -> int:
        calls.append(x)
        raise ValueError("bad launch")

    kernel("a", broken)
    handle = declare()
    assert [handle(n) for n in range(3)] == ["reference"] * 3
    assert calls == [0]
    assert len(said()) == 1
    assert all(part in said()[0] for part in ("'a'", "quant.op", "ValueError: bad launch"))
    assert states(handle, 1) == {"a": "enabled tripped", "op:reference": "chosen"}
    assert handle.stats()["a"]["failed"] == 1


def test_trip_is_a_runtime_warning(kernel: Kernel, declare: Declare) -> None:
    """The category is RuntimeWarning."""
    kernel("a", _raiser(ValueError))
    with pytest.warns(RuntimeWarning, match="off for the rest of the process"):
        declare()(1)


def test_trip_counts_for_selections(kernel: Kernel, said: Said, declare: Declare) -> None:
    """A tripped kernel is not selected for its operator either."""
    from tokenspeed_kernel import select_kernel

    kernel("a", _raiser(ValueError))
    assert select_kernel("quant", "op", None).name == "a"
    declare()(1)
    assert select_kernel("quant", "op", None).name == "op:reference"
    assert len(said("failed")) == 1


def test_registering_again_is_a_new_chance(kernel: Kernel, said: Said, declare: Declare) -> None:
    """A trip concerns a registration, not a name."""
    kernel("a", _raiser(ValueError))
    handle = declare()
    handle(1)
    kernel("a")
    assert handle(1) == "a"
    assert len(said()) == 1


@pytest.mark.filterwarnings("ignore:kernel 'a'")
def test_error_without_a_text_falls_back_too(kernel: Kernel, declare: Declare) -> None:
    """An exception whose str() raises does not break the fallback."""

    class Mute(Exception):  # noqa: N818 -- only its silence matters
        """An error that cannot be shown."""

        def __str__(self) -> str:
            raise RuntimeError("mute")

        __repr__ = __str__

    kernel("b", supports=_raiser(Mute()), priority=12)
    kernel("a", _raiser(Mute()))
    assert declare()(1) == "reference"


def test_all_raise(kernel: Kernel, said: Said, declare: Declare, states: States) -> None:
    """If every kernel raises, the reference's error is raised, and nobody is tripped."""
    kernel("a", _raiser(KeyError("a")))
    handle = declare(_raiser(ValueError("wrong shape")))
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong shape"):
            handle(1)
    assert said() == []
    assert states(handle, 1) == {"a": "chosen", "op:reference": "rank outranked"}


def test_slot_without_reference_trips_and_gives_none(kernel: Kernel, said: Said, declare: Declare) -> None:
    """Where no other kernel is left the caller runs its own code, and the failed kernel is off."""
    kernel("a", _raiser(ValueError("bad")))
    handle = declare(None)
    assert [handle(1), handle(1)] == [None, None]
    assert len(said("'a'")) == 1
    assert handle.resolve() is None


def test_several_failures_are_each_warned_about(kernel: Kernel, said: Said, declare: Declare) -> None:
    """Each kernel that failed on the way is tripped with its own warning."""
    kernel("a", _raiser(ValueError("first")), priority=12)
    kernel("b", _raiser(ValueError("second")), priority=8)
    assert declare()(1) == "reference"
    assert [len(said("first")), len(said("second")), len(said())] == [1, 1, 2]


def test_trip_with_warnings_as_errors_still_serves(
    kernel: Kernel, log: Callable[[], list[str]], declare: Declare
) -> None:
    """A host that turns warnings into errors gets its result; the message is logged."""
    kernel("a", _raiser(ValueError("bad")))
    assert declare()(1) == "reference"
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
def test_error_that_is_no_kernel_s_fault_passes_through(
    kernel: Kernel, said: Said, error: BaseException, declare: Declare, states: States
) -> None:
    """Out of memory, a poisoned device context and a wish to stop reach the caller, and nobody is tripped."""
    kernel("a", _raiser(error))
    handle = declare()
    with pytest.raises(type(error)) as caught:
        handle(1)
    assert caught.value is error
    assert said() == []
    assert states(handle)["a"] == "chosen"


def _positive(x: int) -> None:
    if x < 0:
        raise ValueError("x must be positive")


def test_validate_blames_the_inputs(kernel: Kernel, said: Said, declare: Declare, states: States) -> None:
    """After a failure ``validate`` runs; if it raises, that is the error, and nobody is tripped."""
    kernel("a", _raiser(KeyError("cryptic")))
    handle = declare(validate=_positive)
    with pytest.raises(ValueError, match="x must be positive"):
        handle(-1)
    assert said() == []
    assert states(handle)["a"] == "chosen"


def test_validate_that_passes_blames_the_kernel(kernel: Kernel, said: Said, declare: Declare) -> None:
    """If the inputs are right the kernel is at fault."""
    kernel("a", _raiser(KeyError("cryptic")))
    assert declare(validate=_positive)(1) == "reference"
    assert len(said("cryptic")) == 1


def test_validate_is_not_asked_without_a_failure(kernel: Kernel, declare: Declare) -> None:
    """A call that succeeds pays for no validation."""
    kernel("a")
    assert declare(validate=_raiser(AssertionError("asked")))(-1) == "a"


def test_mutating_slot_is_never_replayed(kernel: Kernel, said: Said, declare: Declare) -> None:
    """A failure of a kernel that writes to its arguments is raised with the kernel named; no other runs."""
    error = ValueError("half written")
    kernel("a", _raiser(error))
    reference: list[int] = []
    handle = declare(reference.append, mutates=True)
    with pytest.raises(RuntimeError, match="kernel 'a' of slot 'op' failed") as caught:
        handle(1)
    assert caught.value.__cause__ is error
    assert (reference, said()) == ([], [])


def test_mutating_slot_may_return_none(kernel: Kernel, declare: Declare) -> None:
    """Where a call writes to its arguments None is a result."""
    kernel("a", lambda x: x.append("a"))
    written: list[str] = []
    handle = declare(mutates=True)
    assert handle(written) is None
    assert (written, handle.stats()["a"]["served"]) == (["a"], 1)


def test_captured_call_is_never_replayed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, said: Said, declare: Declare
) -> None:
    """Under CUDA-graph capture a failure is raised with the kernel named."""
    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    kernel("a", _raiser(ValueError("not capturable")))
    with pytest.raises(RuntimeError, match=r"kernel 'a'.*CUDA graph"):
        declare()(1)
    assert said() == []


@pytest.mark.parametrize("target", ["tsk_absent:f", "sys:absent", "sys:path"])
def test_implementation_that_cannot_be_imported_is_tripped(
    kernel: Kernel, said: Said, target: str, declare: Declare, states: States
) -> None:
    """The next kernel serves, and one warning has the cause."""
    kernel("a", target)
    handle = declare()
    assert [handle(1), handle(1)] == ["reference"] * 2
    assert len(said("'a'")) == len(said()) == 1
    assert any(part in said()[0] for part in target.split(":"))
    assert states(handle)["a"] == "enabled tripped"


def test_supports_that_cannot_be_imported_is_tripped(kernel: Kernel, said: Said, declare: Declare) -> None:
    """A kernel whose check is missing is off, as one whose implementation is."""
    kernel("a", supports="tsk_absent:supports")
    assert declare()(1) == "reference"
    assert len(said("tsk_absent")) == 1


def test_probe_that_says_no_leaves_the_next(kernel: Kernel, declare: Declare, states: States) -> None:
    """A kernel that cannot be built here is passed over without a warning, and the explanation says why."""
    kernel("a", probe=lambda: "no C compiler")
    handle = declare()
    assert handle(1) == "reference"
    assert states(handle, 1)["a"] == "buildable probe"
    assert "no C compiler" in str(handle.explain(1))


def test_forced_kernel_that_raises_raises(kernel: Kernel, said: Said, declare: Declare, states: States) -> None:
    """Its own error reaches the caller, and it is not tripped."""
    kernel("a", _raiser(ValueError("bad launch")), priority=1)
    handle = declare()
    with kernel_override("quant", "op", "a"), pytest.raises(ValueError, match="bad launch"):
        handle(1)
    assert said() == []
    assert states(handle)["a"] == "chosen"


def test_one_trip_under_threads(kernel: Kernel, said: Said, declare: Declare) -> None:
    """Threads whose calls fail together all get the reference's answer, and one warning is issued."""
    together = threading.Barrier(4)

    def broken(x: int) -> int:
        together.wait(10)
        raise ValueError("bad")

    kernel("a", broken)
    handle = declare()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(handle(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["reference"] * 4
    assert len(said()) == 1
