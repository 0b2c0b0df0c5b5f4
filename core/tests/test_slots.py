# SPDX-License-Identifier: Apache-2.0
"""slots: the table of named operations, and what a host registers, resolves and keeps."""

from __future__ import annotations

import copy
import pickle
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import (
    SlotContract,
    active,
    declare_slot,
    iter_impls,
    references,
    refresh,
    register,
    resolve,
    select_kernel,
    slot,
    unregister,
)
from tokenspeed_kernel.registry import KernelRegistry

Said = Callable[..., list[str]]
FAKE_QUANT = [
    "fake_quant_fp8",
    "fake_quant_int8_affine",
    "fake_quant_int8_per_channel",
    "fake_quant_int_grouped",
    "fake_quant_mxfp4_dynamic",
    "fake_quant_mxfp4_weight",
    "fake_quant_nvfp4_dynamic",
    "fake_quant_nvfp4_weight",
]
DOUBLE = SlotContract(name="double", family="math", mode="double", reference=lambda x: ("reference", x))


def _answer(name: str) -> Callable[..., Any]:
    return lambda x=None: (name, x)


def test_built_in_slots_have_their_operators() -> None:
    """The slots of this version, their operators, and which of them have a reference."""
    actual = {c.name: (c.family, c.mode, c.reference is not None) for c in references.contracts.values()}
    assert actual == {
        **{name: ("quant", name, True) for name in FAKE_QUANT},
        "ms_deform_attn": ("attention", "ms_deform_attn", False),
        "sdpa": ("attention", "sdpa", False),
    }


def test_slot_is_one_handle() -> None:
    """Asking twice gives the same handle, which knows its name."""
    assert slot("sdpa") is slot("sdpa")
    assert (slot("sdpa").name, repr(slot("sdpa"))) == ("sdpa", "<slot 'sdpa'>")


@pytest.mark.parametrize(("name", "hint"), [("sdap", "did you mean 'sdpa'?"), ("zzz", "declare_slot")])
def test_unknown_slot_is_an_error_that_helps(name: str, hint: str) -> None:
    """The error lists the slots, and the one that was probably meant or how to declare one."""
    with pytest.raises(LookupError) as caught:
        slot(name)
    message = str(caught.value)
    assert [
        part for part in (repr(name), ", ".join([*FAKE_QUANT, "ms_deform_attn", "sdpa"]), hint) if part not in message
    ] == []


def test_newest_registration_wins() -> None:
    """Without a priority the newest implementation comes first, and the reference last."""
    handle = declare_slot(DOUBLE)
    for name in ("old", "new"):
        register("double", _answer(name), name=name)
    assert handle(4) == ("new", 4)
    assert [name for name, _ in iter_impls("double")] == ["new", "old", "reference"]


def test_resolve_gives_the_bare_implementation() -> None:
    """``resolve`` is the very function that was registered."""
    implementation = _answer("mine")
    register("sdpa", implementation, name="mine")
    assert resolve("sdpa") is implementation
    assert slot("sdpa").resolve() is implementation


def test_nothing_registered_resolves_to_none() -> None:
    """A slot without a reference, and one that nobody knows, have no implementation."""
    assert (resolve("sdpa"), resolve("unheard_of"), list(iter_impls("unheard_of"))) == (None, None, [])
    assert slot("sdpa")(1, 2, 3) is None


def test_active_names_the_first_solution() -> None:
    """``active`` maps every slot to the solution that comes first, or "unavailable"."""
    declare_slot(DOUBLE)
    register("sdpa", _answer("mine"), name="mine")
    for name in FAKE_QUANT:  # their references need torch, which may be missing here
        unregister(name, "reference")
    expected = {"double": "reference", "sdpa": "mine", "ms_deform_attn": "unavailable"}
    assert active() == {**expected, **dict.fromkeys(FAKE_QUANT, "unavailable")}


def test_default_priorities() -> None:
    """A registration gets 19, and 0 if it is called "reference"; its kernel is called ``<slot>:<name>``."""
    register("sdpa", _answer("a"), name="mine")
    register("sdpa", _answer("b"), name="reference")
    register("sdpa", _answer("c"), name="low", priority=3)
    actual = {spec.name: spec.priority for spec in KernelRegistry.get().list_kernels("attention", "sdpa")}
    assert actual == {"sdpa:mine": 19, "sdpa:reference": 0, "sdpa:low": 3}


def test_two_of_one_name_live_side_by_side(said: Said) -> None:
    """The newer one comes first, without a warning; unregistering the name takes both."""
    for number in (1, 2, 3):
        register("sdpa", _answer(str(number)), name="mine")
    assert [implementation()[0] for _, implementation in iter_impls("sdpa")] == ["3", "2", "1"]
    assert {name for name, _ in iter_impls("sdpa")} == {"mine"}
    assert said() == []
    unregister("sdpa", "mine")
    assert list(iter_impls("sdpa")) == []


def test_unregister_of_nothing_is_no_error() -> None:
    """A name or slot that is not there changes nothing."""
    register("sdpa", _answer("mine"), name="mine")
    unregister("sdpa", "other")
    unregister("unheard_of", "mine")
    assert active()["sdpa"] == "mine"


def test_predicate_that_raises_is_warned_about_and_counts_as_no() -> None:
    """A broken third-party check degrades to the portable path."""
    handle = declare_slot(DOUBLE)
    register("double", _answer("broken"), name="broken", predicate=lambda: 1 / 0)
    with pytest.warns(UserWarning, match=r"'double:broken' raised ZeroDivisionError"):
        assert handle(1) == ("reference", 1)


def test_predicate_that_says_no_leaves_the_next() -> None:
    """An implementation that is not available is passed over."""
    handle = declare_slot(DOUBLE)
    register("double", _answer("yes"), name="yes", predicate=lambda: True)
    register("double", _answer("no"), name="no", predicate=lambda: False)
    assert handle(1) == ("yes", 1)


@pytest.mark.parametrize("problem", [{"priority": 20}, {"priority": True}, {"predicate": 3}, {"impl": None}])
@pytest.mark.parametrize("name", ["sdpa", "unheard_of"])
def test_refused_registration_leaves_nothing(name: str, problem: dict[str, Any]) -> None:
    """A registration with a bad argument registers nothing, and declares no slot either."""
    before = sorted(references.contracts)
    arguments = {"impl": _answer("a"), "name": "mine", **problem}
    with pytest.raises((ValueError, TypeError)):
        register(name, **arguments)
    assert resolve(name) is None
    assert sorted(references.contracts) == before


def test_register_makes_a_slot_that_nobody_declared() -> None:
    """An unknown slot becomes one without a reference."""
    register("fresh", _answer("mine"), name="mine")
    assert slot("fresh")(2) == ("mine", 2)
    unregister("fresh", "mine")
    assert slot("fresh")(2) is None


@pytest.mark.parametrize("variable", ["TOKENSPEED_KERNEL_SELECTION", "LIBREYOLO_KERNELS", "LIBREYOLO_QUANT_KERNELS"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", "reference"), ("reference", "reference"), ("low", "low"), ("auto", "high"), ("unheard_of", "reference")],
)
def test_selection_setting(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str) -> None:
    """Off, reference, a solution's name, or a name that nothing has: the reference stays eligible always."""
    handle = declare_slot(DOUBLE)
    register("double", _answer("low"), name="low", priority=5)
    register("double", _answer("high"), name="high", priority=15)
    monkeypatch.setenv(variable, value)
    refresh()
    assert handle(1)[0] == expected
    assert [name for name, _ in iter_impls("double")][-1] == "reference"


def test_selection_setting_that_a_slot_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot without a reference has nothing under a setting that its kernels do not meet."""
    register("sdpa", _answer("mine"), name="mine")
    monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", "other")
    refresh()
    assert (resolve("sdpa"), active()["sdpa"]) == (None, "unavailable")


def test_declaring_again_with_the_same_contract_is_no_error() -> None:
    """A host may declare its slot at every start-up."""
    assert declare_slot(DOUBLE) is declare_slot(DOUBLE) is slot("double")


@pytest.mark.parametrize(
    "other",
    [
        SlotContract(name="double", family="math", mode="other"),
        SlotContract(name="other", family="math", mode="double"),
        SlotContract(name="double", family="math", mode="double"),
        SlotContract(name="sdpa", family="attention", mode="sdpa", mutates=True),
    ],
)
def test_conflicting_declaration_is_refused(other: SlotContract) -> None:
    """One name and one operator have one contract; the error names the other one."""
    declare_slot(DOUBLE)
    with pytest.raises(ValueError, match=f"slot '{other.name}' cannot be declared: it is at odds with SlotContract"):
        declare_slot(other)


def test_slot_of_a_host_without_reference() -> None:
    """A GEMM slot without a reference answers None until a kernel is there (the caller keeps its own path)."""
    gemm = declare_slot(SlotContract(name="gemm", family="gemm", mode="mm"))
    assert (gemm(2, 3), gemm.resolve()) == (None, None)
    register("gemm", lambda a, b: a * b, name="mine")
    assert gemm(2, 3) == 6


def test_reference_may_be_a_string() -> None:
    """A reference given by name is imported at the first call."""
    handle = declare_slot(SlotContract(name="root", family="math", mode="root", reference="math:sqrt"))
    assert handle(9) == 3.0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_a_handle_are_the_handle(copied: Callable[[Any], Any]) -> None:
    """A model that keeps a handle can be copied and pickled; only the name travels (case 79)."""
    register("sdpa", lambda: None, name="not picklable")
    assert copied({"attention": slot("sdpa")})["attention"] is slot("sdpa")
    assert b"not picklable" not in pickle.dumps(slot("sdpa"))


def test_pickled_handle_works_without_the_provider(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A handle pickled here and loaded in a fresh process is the slot of that process (case 79)."""
    register("sdpa", _answer("mine"), name="mine")
    data = pickle.dumps(slot("sdpa"))
    code = f"""
    import pickle, sys
    from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
    Platform.override(PlatformInfo("cpu", ArchVersion(0, 0), "c", 0, 0, 0.0, 0, 0, 0))
    handle = pickle.loads({data!r})
    sys.stdout.write(f"{{handle!r}} {{handle(1)}}")
    """
    done = python(code)
    assert done.stdout == "<slot 'sdpa'> None", done.stderr


def test_handle_survives_a_reset_of_the_registry() -> None:
    """A handle kept by a host sees the new registry: the reference is back, other kernels are gone."""
    handle = declare_slot(DOUBLE)
    register("double", _answer("mine"), name="mine")
    seen = [handle(1)[0]]
    KernelRegistry.reset()
    seen.append(handle(1)[0])
    register("double", _answer("again"), name="again")
    seen.append(handle(1)[0])
    assert seen == ["mine", "reference", "again"]


def test_slot_declared_after_a_reset_has_its_reference() -> None:
    """A reference is registered in the registry of the day."""
    slot("sdpa")(1)
    KernelRegistry.reset()
    assert declare_slot(DOUBLE)(1) == ("reference", 1)


def test_operator_of_a_slot_has_its_reference_before_any_slot_call() -> None:
    """``select_kernel`` finds the reference of a slot that nobody has used yet: one op under two names."""
    declare_slot(DOUBLE)
    assert select_kernel("math", "double", None)(3) == ("reference", 3)


def test_threads_that_come_first_all_find_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in one thread, while another registers the references, waits for them instead of finding nothing."""
    handle = declare_slot(DOUBLE)
    entered, go_on = threading.Event(), threading.Event()
    register_reference = references._register_reference

    def slow(*arguments: Any) -> None:
        entered.set()
        go_on.wait(10)
        register_reference(*arguments)

    monkeypatch.setattr(references, "_register_reference", slow)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(handle(1))) for _ in range(2)]
    threads[0].start()
    entered.wait(10)
    threads[1].start()
    threads[1].join(0.3)
    go_on.set()
    for thread in threads:
        thread.join()
    assert answers == [("reference", 1)] * 2


def test_verbose_logs_each_choice(monkeypatch: pytest.MonkeyPatch, log: Callable[[], list[str]]) -> None:
    """With ``TOKENSPEED_KERNEL_VERBOSE`` the explanation of a choice is logged, once for one choice."""
    handle = declare_slot(DOUBLE)
    handle(1)
    monkeypatch.setenv("TOKENSPEED_KERNEL_VERBOSE", "1")
    refresh()
    for _ in range(3):
        handle(1)
    assert (
        len([line for line in log() if line.startswith("double on nvidia device (nvidia 9.0): double:reference")]) == 1
    )
