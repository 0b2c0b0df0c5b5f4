# SPDX-License-Identifier: Apache-2.0
"""overrides: who may force a kernel, who wins, for how long, and what forcing does not skip."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from tokenspeed_kernel import refresh, slot
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, Platform, PlatformInfo
from tokenspeed_kernel.selection import (
    NoKernelFoundError,
    explain_selection,
    kernel_override,
    register_oracle,
    select_kernel,
)
from tokenspeed_kernel.signature import format_signatures
from tokenspeed_kernel.slots import declare_slot

Kernel = Callable[..., Any]
Said = Callable[..., list[str]]
VARIABLE = "TOKENSPEED_KERNEL_OVERRIDE_QUANT_OP"


@pytest.fixture(autouse=True)
def _kernels(kernel: Kernel) -> None:
    for priority, name in enumerate("abcd"):
        kernel(name, priority=priority, solution=f"solution_{name}")


def _chosen(**arguments: Any) -> str:
    return select_kernel("quant", "op", None, **arguments).name


def test_argument_forces_a_kernel_or_a_solution() -> None:
    """A kernel's own name and its solution's both work."""
    assert [_chosen(), _chosen(override="b"), _chosen(override="solution_c"), _chosen()] == ["d", "b", "c", "d"]


def test_solution_that_several_have_takes_the_best_of_them(kernel: Kernel) -> None:
    """Forcing a solution ranks within it."""
    kernel("b2", priority=1, solution="solution_b")
    assert _chosen(override="solution_b") == "b2"


def test_context_outweighs_the_argument() -> None:
    """Inside a context its kernel runs, whatever the call asks for."""
    with kernel_override("quant", "op", "a"):
        assert [_chosen(), _chosen(override="b")] == ["a", "a"]
    assert _chosen(override="b") == "b"


def test_environment_outweighs_context_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable wins, is read at each call, and an empty one counts as unset."""
    with kernel_override("quant", "op", "a"):
        monkeypatch.setenv(VARIABLE, "solution_c")
        assert _chosen(override="b") == "c"
        monkeypatch.setenv(VARIABLE, "")
        assert _chosen(override="b") == "a"


def test_every_override_outweighs_the_selection_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process-wide setting is the weakest."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", "solution_a")
    refresh()
    assert [_chosen(), _chosen(override="c")] == ["a", "c"]


def test_override_outweighs_oracle_signature_and_traits(kernel: Kernel) -> None:
    """A forced kernel runs though its formats or traits do not match."""
    from tokenspeed_kernel.selection import SelectionOracle

    class Favour(SelectionOracle):
        """Prefers d."""

        def adjust(self, spec: Any, platform: Any, traits: Any) -> int:
            """Return 1 for d."""
            return int(spec.name == "d")

    register_oracle("quant", Favour())
    (floats,) = format_signatures("x", "dense", {"float32"})  # type: ignore[arg-type]
    (halves,) = format_signatures("x", "dense", {"float16"})  # type: ignore[arg-type]
    kernel("picky", signatures={floats}, traits={"n": frozenset({1})})
    assert select_kernel("quant", "op", halves, traits={"n": 2}, override="picky").name == "picky"


def test_override_does_not_skip_features() -> None:
    """A forced kernel that lacks a required feature is an error that says which."""
    with pytest.raises(NoKernelFoundError, match="does not offer fast"):
        _chosen(features=frozenset({"fast"}), override="a")


@pytest.mark.parametrize(
    "machine", [("cpu", 0, 0), ("nvidia", 7, 0), ("amd", 9, 0), ("acme", 1, 0)], ids=["cpu", "sm_70", "gfx90a", "acme"]
)
@pytest.mark.parametrize("how", ["environment", "context", "argument"])
def test_override_does_not_skip_capability(
    kernel: Kernel,
    platform: Callable[..., PlatformInfo],
    monkeypatch: pytest.MonkeyPatch,
    machine: tuple[Any, ...],
    how: str,
) -> None:
    """Every way to force a kernel passes the capability gate, with a clear error (case 73)."""
    capability = CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(8, 0))
    kernel("hopper", capability=capability, priority=19)
    Platform.override(platform(*machine))
    assert _chosen() == "d"
    if how == "environment":
        monkeypatch.setenv(VARIABLE, "hopper")
    context = kernel_override("quant", "op", "hopper") if how == "context" else nullcontext()
    argument = "hopper" if how == "argument" else None
    with context, pytest.raises(NoKernelFoundError, match=rf"(?s)hopper.*capable: needs .*{machine[0]}"):
        _chosen(override=argument)


@pytest.mark.parametrize("machine", [("cpu", 0, 0), ("nvidia", 7, 0), ("nvidia", 9, 0), ("acme", 1, 0)])
def test_all_entrances_choose_the_same(
    kernel: Kernel, platform: Callable[..., PlatformInfo], monkeypatch: pytest.MonkeyPatch, machine: tuple[Any, ...]
) -> None:
    """A slot call, resolve, select_kernel and ``auto`` give one implementation on any machine (case 73)."""
    handle = declare_slot(SlotContract(name="op", family="quant", mode="op"))
    capability = CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(8, 0))
    kernel("hopper", capability=capability, priority=19)
    Platform.override(platform(*machine))
    expected = "hopper" if machine == ("nvidia", 9, 0) else "d"
    for word in ("", "auto"):
        monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", word)
        refresh()
        resolved = handle.resolve()
        assert resolved is not None
        actual = [handle(), resolved(), select_kernel("quant", "op", None)(), handle.explain().chosen]
        assert actual == [expected] * 4


def test_unknown_name_as_argument_is_an_error() -> None:
    """The error lists what there is (case 41)."""
    with pytest.raises(NoKernelFoundError, match=r"'nope'.*quant\.op.*a, b, c, d, solution_a"):
        _chosen(override="nope")


def test_unknown_name_in_a_context_is_an_error() -> None:
    """The error lists what there is, and the context leaves nothing behind (case 41)."""
    with kernel_override("quant", "op", "nope"), pytest.raises(NoKernelFoundError, match=r"'nope'.*a, b, c, d"):
        _chosen()
    assert _chosen() == "d"


def test_unknown_name_in_the_environment_is_warned_about_once(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """One warning lists what there is, and the normal order holds (case 41)."""
    monkeypatch.setenv(VARIABLE, "nope")
    assert [_chosen(traits={"n": n}) for n in range(3)] == ["d"] * 3
    assert len(said()) == 1
    assert all(part in said()[0] for part in (VARIABLE, "'nope'", "a, b, c, d"))


def test_unknown_name_in_the_environment_leaves_the_weaker_override(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A context still counts where the variable names nothing."""
    monkeypatch.setenv(VARIABLE, "nope")
    with kernel_override("quant", "op", "a"):
        assert _chosen() == "a"
    assert len(said()) == 1


def test_contexts_nest_and_restore() -> None:
    """The innermost context wins and leaving it restores the outer one, also after an exception (case 41, case 49)."""
    chosen = []
    with kernel_override("quant", "op", "a"):
        with suppress(ZeroDivisionError), kernel_override("quant", "op", "b"):
            chosen.append(_chosen())
            raise ZeroDivisionError
        chosen.append(_chosen())
        with kernel_override("quant", "other", "x"):
            chosen.append(_chosen())
    chosen.append(_chosen())
    assert chosen == ["b", "a", "a", "d"]


def test_contexts_are_per_thread() -> None:
    """Two threads with different contexts, interleaved, each see their own; a third sees none (case 49)."""
    step = threading.Barrier(3)
    chosen: dict[str | None, list[str]] = {}

    def run(wanted: str | None) -> None:
        seen = chosen.setdefault(wanted, [])
        if wanted is None:
            for _ in range(3):
                step.wait(10)
                seen.append(_chosen())
            return
        with kernel_override("quant", "op", wanted):
            for _ in range(3):
                step.wait(10)
                seen.append(_chosen())

    threads = [threading.Thread(target=run, args=(wanted,)) for wanted in ("a", "b", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == {"a": ["a"] * 3, "b": ["b"] * 3, None: ["d"] * 3}


def test_contexts_are_per_task() -> None:
    """Interleaved asyncio tasks each see their own choice, in selections and in slot calls (case 49)."""
    handle = declare_slot(SlotContract(name="op", family="quant", mode="op"))

    async def run(wanted: str) -> list[str]:
        seen = []
        with kernel_override("quant", "op", wanted):
            for _ in range(3):
                await asyncio.sleep(0)
                seen += [_chosen(), handle()]
        return seen

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(run("a"), run("b")))

    assert asyncio.run(both()) == [["a"] * 6, ["b"] * 6]
    assert handle() == "d"


def test_slots_obey_the_environment_from_their_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot reads its override variable on first use and at a refresh, not at each call."""
    handle = declare_slot(SlotContract(name="op", family="quant", mode="op"))
    chosen = [handle()]
    monkeypatch.setenv(VARIABLE, "a")
    chosen.append(handle())
    refresh()
    chosen.append(handle())
    assert chosen == ["d", "d", "a"]


def test_slots_obey_contexts_around_the_call() -> None:
    """A context counts for slot calls inside it and for none after it."""
    handle = declare_slot(SlotContract(name="op", family="quant", mode="op"))
    chosen = [handle()]
    with kernel_override("quant", "op", "a"):
        chosen.append(handle())
        with kernel_override("quant", "op", "solution_b"):
            chosen.append(handle())
        chosen.append(handle())
    chosen.append(handle())
    assert chosen == ["d", "a", "b", "a", "d"]


def test_slot_with_an_unknown_override_is_an_error() -> None:
    """A slot call inside a context that names nothing says what there is (case 41)."""
    with (
        kernel_override("attention", "sdpa", "nope"),
        pytest.raises(NoKernelFoundError, match=r"'nope'.*attention\.sdpa"),
    ):
        slot("sdpa")()


def test_explanation_obeys_the_context() -> None:
    """``explain_selection`` says who is forced and that the others yield to an override."""
    with kernel_override("quant", "op", "a"):
        text = explain_selection("quant", "op", None)
    assert text.splitlines()[0].endswith(": a")
    assert text.count("an override asks for 'a'") == 3


def test_context_in_a_closed_generator_is_left() -> None:
    """A generator that is closed inside its context restores the normal order."""

    def generate() -> Generator[None, None, None]:
        with kernel_override("quant", "op", "a"):
            yield

    generator = generate()
    next(generator)
    assert _chosen() == "a"
    generator.close()
    assert _chosen() == "d"
