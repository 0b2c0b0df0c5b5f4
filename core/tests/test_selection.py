# SPDX-License-Identifier: Apache-2.0
"""selection: who passes which stage, who ranks first, and what a remembered choice depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import refresh
from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, Platform, PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, registering_owner
from tokenspeed_kernel.rules import Request
from tokenspeed_kernel.selection import (
    NoKernelFoundError,
    SelectedKernel,
    SelectionOracle,
    decide,
    explain_selection,
    register_oracle,
    select_kernel,
)
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

Kernel = Callable[..., Any]
Said = Callable[..., list[str]]
FLOATS = format_signatures("x", "dense", {"float32"})  # type: ignore[arg-type]
HALVES = format_signature(x=dense_tensor_format("float16"))  # type: ignore[arg-type]


def _chosen(signature: Any = None, **arguments: Any) -> str:
    return select_kernel("quant", "op", signature, **arguments).name


class _Oracle(SelectionOracle):
    """Scores by kernel name."""

    def __init__(self, **scores: Any) -> None:
        self.scores = scores
        self.seen: list[Any] = []

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: dict[str, Any] | None) -> int:
        self.seen.append((spec.name, platform.vendor, traits))
        score = self.scores.get(spec.name, super().adjust(spec, platform, traits))
        if isinstance(score, Exception):
            raise score
        return score  # type: ignore[no-any-return]


def test_selected_kernel_calls_its_implementation(kernel: Kernel) -> None:
    """What is selected has a name and an implementation, and can be called."""
    implementation = kernel("a", lambda x, *, scale: x * scale)
    selected = select_kernel("quant", "op", None)
    assert isinstance(selected, SelectedKernel)
    assert (selected.name, selected.impl, selected(3, scale=2)) == ("a", implementation, 6)


STAGES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"capability": CapabilityRequirement(vendors=frozenset({"amd"}))}, {}, "capable", "vendor"),
    ({"capability": CapabilityRequirement(min_arch_version=ArchVersion(10, 0))}, {}, "capable", "arch"),
    ({"capability": CapabilityRequirement(required_features=frozenset({"tma"}))}, {}, "capable", "feature"),
    ({"signatures": FLOATS}, {"signature": HALVES}, "matching", "signature"),
    ({}, {"features": frozenset({"fast"})}, "matching", "features"),
    ({"traits": {"causal": frozenset({False})}}, {"traits": {"causal": True}}, "matching", "traits"),
    ({}, {"solution": "other"}, "matching", "solution"),
    ({}, {"forced": "other"}, "matching", "override"),
    ({"predicate": lambda: False}, {}, "available", "predicate"),
]


@pytest.mark.parametrize(("spec", "asked", "stage", "code"), STAGES, ids=[f"{s[2]}-{s[3]}" for s in STAGES])
def test_refusal_has_stage_code_and_detail(
    kernel: Kernel, platform: Callable[..., PlatformInfo], spec: Any, asked: Any, stage: str, code: str
) -> None:
    """Each stage refuses with a record of who, where and why."""
    kernel("a", **spec)
    decision = decide(KernelRegistry.get(), Request(family="quant", mode="op", platform=platform(), **asked))
    (reason,) = decision.refused
    assert (decision.ranked, reason.kernel, reason.stage, reason.code) == ((), "a", stage, code)
    assert reason.detail


def test_first_stage_that_refuses_is_named(kernel: Kernel) -> None:
    """A kernel that fails several stages is refused by the earliest; later ones are not asked."""
    asked: list[int] = []
    capability = CapabilityRequirement(vendors=frozenset({"amd"}))
    kernel("a", capability=capability, signatures=FLOATS, predicate=lambda: asked.append(1))
    assert "capable: needs amd" in explain_selection("quant", "op", HALVES)
    assert asked == []


def test_setting_refuses_other_solutions(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection setting leaves its solution and the references, and says which variable did so."""
    kernel("a", priority=12)
    kernel("b", priority=4)
    kernel("ref", priority=0, solution="reference")
    monkeypatch.setenv("LIBREYOLO_KERNELS", "b")
    refresh()
    assert _chosen() == "b"
    text = explain_selection("quant", "op", None)
    assert "enabled: the process selects 'b' only; unset LIBREYOLO_KERNELS, or set it to 'a'" in text
    monkeypatch.setenv("LIBREYOLO_KERNELS", "off")
    refresh()
    assert _chosen() == "ref"


def test_nobody_registered_is_an_error_that_says_so() -> None:
    """An operator without kernels names itself and what to do."""
    with pytest.raises(NoKernelFoundError, match=r"(?s)quant\.op.*nothing is registered"):
        _chosen()


def test_error_holds_every_reason(kernel: Kernel) -> None:
    """If nobody may serve, the error says for each kernel why not."""
    kernel("a", capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    kernel("b", predicate=lambda: "needs the package foo")
    with pytest.raises(
        NoKernelFoundError, match=r"(?s)needs amd.*needs the package foo|needs the package foo.*needs amd"
    ):
        _chosen()


def test_signature_matches_by_format(kernel: Kernel) -> None:
    """A kernel without signatures takes every format, one with signatures only those."""
    kernel("any", priority=4)
    kernel("floats", priority=12, signatures=FLOATS)
    assert _chosen(next(iter(FLOATS))) == "floats"
    assert _chosen(HALVES) == "any"
    assert _chosen(None) == "floats"


def test_rank_is_priority_then_newest(kernel: Kernel) -> None:
    """The highest priority wins, and among equals the newest registration."""
    kernel("low", priority=4)
    kernel("first", priority=8)
    kernel("second", priority=8)
    kernel("lower", priority=3)
    assert _chosen() == "second"


def test_oracle_outweighs_priority(kernel: Kernel, platform: Callable[..., PlatformInfo]) -> None:
    """An oracle's score ranks before priority; it sees spec, platform and traits."""
    kernel("high", priority=19)
    kernel("low", priority=1)
    oracle = _Oracle(low=11)
    register_oracle("quant", oracle)
    assert _chosen(platform=platform("nvidia", 8, 0), traits={"n": 3}) == "low"
    assert set(map(str, oracle.seen)) == {str((name, "nvidia", {"n": 3})) for name in ("high", "low")}


def test_oracle_of_another_family_is_not_asked(kernel: Kernel) -> None:
    """An oracle belongs to one family."""
    kernel("high", priority=19)
    kernel("low", priority=1)
    register_oracle("attention", _Oracle(low=11))
    assert _chosen() == "high"


@pytest.mark.parametrize("answer", [RuntimeError("lost"), None, "5", True, 1.5])
def test_oracle_that_fails_has_no_word(kernel: Kernel, said: Said, answer: Any) -> None:
    """An oracle that raises, or answers no int, is warned about and changes nothing."""
    kernel("high", priority=19)
    kernel("low", priority=1)
    register_oracle("quant", _Oracle(low=answer))
    assert _chosen() == "high"
    assert said("oracle of family 'quant'")


def test_explanation_of_an_oracle_s_choice_is_true(kernel: Kernel) -> None:
    """Where an oracle prefers the older of two equals, the explanation does not say that the newer wins."""
    kernel("older", priority=8)
    kernel("newer", priority=8)
    register_oracle("quant", _Oracle(older=11))
    text = explain_selection("quant", "op", None)
    assert _chosen() == "older"
    assert "newer registration wins" not in text


@pytest.mark.parametrize(
    ("answer", "part"), [(False, "False"), (None, "None"), (1, "1"), ("no compiler here", "no compiler here")]
)
def test_predicate_that_is_not_true_refuses(kernel: Kernel, answer: object, part: str) -> None:
    """Anything but True is no; a text is the reason."""
    kernel("a", predicate=lambda: answer)
    with pytest.raises(NoKernelFoundError, match=f"available: .*{part}"):
        _chosen()


def test_predicate_that_raises_is_warned_about_once(kernel: Kernel, said: Said) -> None:
    """It counts as no, with one warning that names the kernel and the cause, however often the kernel is asked for."""
    kernel("a", predicate=lambda: 1 / 0, priority=12)
    kernel("b", priority=4)
    assert [_chosen(traits={"n": n}) for n in range(3)] == ["b"] * 3
    assert len(said()) == 1
    assert "'a'" in said()[0]
    assert "division by zero" in said()[0]


def test_predicate_may_raise_what_has_no_text(kernel: Kernel) -> None:
    """An exception whose repr() raises is still a no."""

    class Mute(Exception):  # noqa: N818 -- only its silence matters
        """An error that cannot be shown."""

        def __repr__(self) -> str:
            raise RuntimeError("mute")

    def predicate() -> bool:
        raise Mute

    kernel("a", predicate=predicate, priority=12)
    kernel("b", priority=4)
    assert _chosen() == "b"


def test_predicate_is_asked_once_until_something_changes(kernel: Kernel) -> None:
    """Its answer is remembered until a registration or a refresh."""
    asked: list[int] = []

    def note() -> bool:
        asked.append(1)
        return True

    kernel("a", predicate=note)
    for n in range(3):
        _chosen(traits={"n": n})
    counts = [len(asked)]
    kernel("b", mode="other")
    _chosen()
    counts.append(len(asked))
    refresh()
    _chosen()
    counts.append(len(asked))
    assert counts == [1, 2, 3]


def test_predicate_may_be_a_string(kernel: Kernel) -> None:
    """A predicate given by name is imported when asked; one that cannot be is a no, with a warning."""
    kernel("a", predicate="tsk_absent:predicate", priority=12)
    kernel("b", predicate="builtins:bool", priority=4)
    kernel("c", predicate="sys:is_finalizing", priority=2)
    kernel("d", priority=1)
    with pytest.warns(UserWarning, match="tsk_absent"):
        assert _chosen() == "d"


def test_answer_forgotten_meanwhile_is_no_error(kernel: Kernel) -> None:
    """A registration in another thread, between two look-ups of an answer, does not break the selection."""

    class Forgetful(dict):  # type: ignore[type-arg]
        """Answers that another thread clears at the worst moment."""

        def __setitem__(self, key: object, value: object) -> None:
            """Store nothing."""

    kernel("a", predicate=lambda: True)
    KernelRegistry.get().answers = Forgetful()
    assert _chosen() == "a"


def test_probe_is_asked_for_the_winner_only_and_once(kernel: Kernel) -> None:
    """The winner is probed before its first use; the others are not."""
    asked: list[str] = []

    def note(name: str) -> bool:
        asked.append(name)
        return True

    kernel("a", priority=12, probe=lambda: note("a"))
    kernel("b", priority=4, probe=lambda: note("b"))
    assert [_chosen(traits={"n": n}) for n in range(3)] == ["a"] * 3
    assert asked == ["a"]


@pytest.mark.parametrize("probe", [lambda: False, lambda: "no C compiler", lambda: 1 / 0])
@pytest.mark.filterwarnings("ignore:probe of kernel 'a' raised")
def test_winner_that_cannot_be_built_is_passed_over(kernel: Kernel, probe: Callable[[], object]) -> None:
    """A kernel whose probe says no is not selected, and the explanation says at which stage."""
    kernel("a", priority=12, probe=probe)
    kernel("b", priority=4)
    assert _chosen() == "b"
    assert "buildable: " in explain_selection("quant", "op", None)


def test_capability_gate_is_the_platform_s(kernel: Kernel, platform: Callable[..., PlatformInfo]) -> None:
    """The platform of the call outweighs the process's."""
    kernel("everywhere", priority=0)
    kernel("amd", capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    assert _chosen() == "everywhere"
    assert _chosen(platform=platform("amd", 9, 4)) == "amd"


def test_choice_is_made_anew_after_a_registration(kernel: Kernel) -> None:
    """A better kernel that comes later is chosen, and withdrawn again gives way."""
    kernel("a")
    chosen = [_chosen()]
    token = registering_owner.set("plug")
    kernel("b", priority=12)
    registering_owner.reset(token)
    chosen.append(_chosen())
    registry = KernelRegistry.get()
    registry.remove(registry.owned_by("plug"))
    chosen.append(_chosen())
    assert chosen == ["a", "b", "a"]


def test_choice_is_made_anew_after_an_oracle(kernel: Kernel) -> None:
    """An oracle that comes later counts at once."""
    kernel("a", priority=12)
    kernel("b", priority=4)
    assert _chosen() == "a"
    register_oracle("quant", _Oracle(b=11))
    assert _chosen() == "b"


def test_same_architecture_of_another_vendor_is_another_choice(
    kernel: Kernel, platform: Callable[..., PlatformInfo]
) -> None:
    """NVIDIA 9.0 and AMD 9.0 do not share a choice."""
    kernel("nvidia", capability=CapabilityRequirement(vendors=frozenset({"nvidia"})))
    kernel("amd", capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    chosen = [_chosen(platform=platform(vendor, 9, 0)) for vendor in ("nvidia", "amd", "nvidia")]
    assert chosen == ["nvidia", "amd", "nvidia"]


@pytest.mark.parametrize(
    ("flag", "count"),
    [(True, 1), (False, 0), (frozenset({True}), frozenset({1}))],
    ids=["true", "false", "set"],
)
def test_flag_and_count_are_two_choices(kernel: Kernel, flag: Any, count: Any) -> None:
    """True and 1 are equal in Python, also in a set, but never share a choice."""
    kernel("flags", traits={"t": frozenset({True, False})}, priority=12)
    kernel("counts", traits={"t": frozenset({2, 1, 0})}, priority=4)
    assert [_chosen(traits={"t": value}) for value in (flag, count, flag)] == ["flags", "counts", "flags"]


def test_other_parts_of_the_request_are_other_choices(kernel: Kernel) -> None:
    """Features, solution, traits and signature each make their own choice."""
    kernel("plain", priority=12)
    kernel("fast", priority=4, features={"fast"}, signatures=FLOATS)
    chosen = [
        _chosen(),
        _chosen(features=frozenset({"fast"})),
        _chosen(solution="fast"),
        _chosen(HALVES, traits={"n": 1}),
        _chosen(),
    ]
    assert chosen == ["plain", "fast", "fast", "plain", "plain"]


def test_trait_values_that_do_not_hash(kernel: Kernel) -> None:
    """Lists and sets may be asked for, though nothing can be cached for them."""
    kernel("a", traits={"dims": {(1, 2)}}, priority=12)
    kernel("b", priority=4)
    asked: tuple[Any, ...] = ((1, 2), [1, 2], {1}, {"x": []})
    assert [_chosen(traits={"dims": dims}) for dims in asked] == ["a", "b", "b", "b"]


def test_many_trait_values_neither_grow_nor_confuse(kernel: Kernel) -> None:
    """More different values than the cache holds give the same choices as at first, in bounded memory."""
    from tokenspeed_kernel import selection

    kernel("small", traits={"n_max": frozenset({100})}, priority=12)
    kernel("big", priority=4)
    wrong = [n for n in range(5000) if _chosen(traits={"n": n}) != ("small" if n <= 100 else "big")]
    assert wrong == []
    assert len(selection._operators["quant", "op"].found[1]) <= 4096
    assert _chosen(traits={"n": 5}) == "small"


def test_repeated_selection_is_the_same_object(kernel: Kernel) -> None:
    """A choice that nothing made stale is not made again."""
    kernel("a")
    first = select_kernel("quant", "op", None, traits={"n": 1})
    assert select_kernel("quant", "op", None, traits={"n": 1}) is first


def test_platform_override_makes_choices_anew(kernel: Kernel, platform: Callable[..., PlatformInfo]) -> None:
    """The process's platform is part of a choice that names none."""
    kernel("amd", capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    kernel("cpu", priority=0)
    assert _chosen() == "cpu"
    Platform.override(platform("amd", 9, 4))
    assert _chosen() == "amd"


def test_explanation_names_everybody_in_order(kernel: Kernel) -> None:
    """The text has the chosen kernel first, then the outranked, then the refused, each with its reason."""
    kernel("low", priority=4)
    kernel("never", predicate=lambda: False, priority=19)
    kernel("high", priority=12)
    lines = explain_selection("quant", "op", None).splitlines()
    assert lines[0] == "quant.op on nvidia device (nvidia 9.0): high"
    assert [line.split()[0] for line in lines[1:]] == ["high", "low", "never"]
    assert "chosen" in lines[1]
    assert "its priority 4 is below 12" in lines[2]
    assert "available: its predicate says False" in lines[3]


def test_explanation_imports_no_implementation(kernel: Kernel) -> None:
    """Explaining a kernel given by name does not import it."""
    kernel("a", "tsk_absent:f")
    assert "a  priority 10  chosen" in explain_selection("quant", "op", None)


def test_predicate_that_registers_ends(kernel: Kernel) -> None:
    """A check that registers another kernel is asked once; what it registered is chosen at the next selection."""
    asked = []

    def predicate() -> bool:
        asked.append(1)
        kernel("second", priority=12)
        return True

    kernel("first", predicate=predicate, priority=4)
    assert _chosen() == "first"
    assert [_chosen(), _chosen()] == ["second", "second"]
    assert len(asked) == 1


def test_a_kernel_registered_while_a_selection_runs_is_not_missed(kernel: Kernel) -> None:
    """What a selection in flight remembers does not outlive the registration that overtook it."""

    class Slow(SelectionOracle):
        """Registers a better kernel in the middle of the first selection."""

        def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: dict[str, Any] | None) -> int:
            if KernelRegistry.get().get_by_name("better") is None:
                kernel("better", priority=19)
            return super().adjust(spec, platform, traits)

    kernel("good", priority=4)
    register_oracle("quant", Slow())
    assert _chosen() == "good"
    assert _chosen() == "better"
