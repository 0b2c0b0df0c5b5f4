# SPDX-License-Identifier: Apache-2.0
"""traits: which values of a call a kernel serves."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_kernel.registry import KernelSpec
from tokenspeed_kernel.traits import spec_matches_traits, trait_mismatch


def _spec(**traits: Any) -> KernelSpec:
    return KernelSpec(name="k", family="quant", mode="op", traits=traits)


def _values(*values: Any) -> frozenset[Any]:
    return frozenset(values)


class _Tensor:
    """What compares element by element, and has no truth value."""

    def __init__(self, comparable: bool = True) -> None:
        self.comparable = comparable

    def __eq__(self, other: object) -> Any:
        if not self.comparable:
            raise RuntimeError("cannot compare")
        return self

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous truth value")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("served", "asked", "expected"),
    [
        (_values(64, 128), 128, True),
        (_values(64, 128), 96, False),
        (_values(), 64, False),
        (_values(True), True, True),
        (_values(True), False, False),
        (_values(True), 1, False),
        (_values(1), True, False),
        (_values(0), False, False),
        (_values(1), 1.0, True),
        (_values("a", 1, None, True), None, True),
        (_values("a", 1, None), "b", False),
        (_values(64, 128), {64, 128}, True),
        (_values(64, 128), {64, 96}, False),
        (_values(64, 128), frozenset(), True),
        (_values(1), frozenset({True}), False),
        (_values(64), [64], False),
        (_values((1, 2)), (1, 2), True),
        (_values((1, 2), 3), [1, 2], False),
        ((64, 128), 128, True),
        (_values(64), _Tensor(), False),
        (_values(64), _Tensor(comparable=False), False),
        (_values(_Tensor()), 64, False),
    ],
)
def test_values(served: Any, asked: Any, expected: bool) -> None:
    """A value is served if it is declared; a flag is not a count; what has no truth value is not the same."""
    assert spec_matches_traits(_spec(t=served), {"t": asked}) is expected
    assert (trait_mismatch(_spec(t=served), {"t": asked}) is None) is expected


def test_undeclared_trait_is_served() -> None:
    """What a kernel does not declare does not matter, unless all are required."""
    assert spec_matches_traits(_spec(), {"causal": True})
    assert not spec_matches_traits(_spec(), {"causal": True}, require_all_traits=True)
    assert spec_matches_traits(_spec(causal=_values(True)), {"causal": True}, require_all_traits=True)


def test_trait_not_asked_for_does_not_matter() -> None:
    """A call that leaves a declared trait open is served."""
    assert spec_matches_traits(_spec(head_dim=_values(64)), {})
    assert trait_mismatch(_spec(head_dim=_values(64)), {"causal": True}) is None


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ({"n_align": _values(16)}, {"n": 64}, True),
        ({"n_align": _values(16)}, {"n": 0}, True),
        ({"n_align": _values(16)}, {"n": 65}, False),
        ({"n_align": _values(48, 16)}, {"n": 64}, True),
        ({"n_min": _values(8)}, {"n": 8}, True),
        ({"n_min": _values(8)}, {"n": 7}, False),
        ({"n_max": _values(8)}, {"n": 8}, True),
        ({"n_max": _values(8)}, {"n": 9}, False),
        ({"n_max": _values(8)}, {"n": True}, False),
        ({"n_max": _values(8)}, {"n": "8"}, False),
        ({"n_max": _values(8)}, {"m": 8}, False),
        ({"n_min": _values(2), "n_max": _values(4)}, {"n": 3}, True),
        ({"n_min": _values(2), "n_max": _values(4)}, {"n": 5}, False),
        ({"n_min": _values(2)}, {}, True),
    ],
)
def test_bounds(declared: dict[str, Any], asked: dict[str, Any], expected: bool) -> None:
    """Alignment, least and largest size are inclusive; one bound that holds is enough; a size not given fails."""
    assert (trait_mismatch(_spec(**declared), asked) is None) is expected


@pytest.mark.parametrize(("name", "dim"), [("ispp_alignment", "ispp"), ("hidden_alignment", "hidden")])
def test_optional_alignments(name: str, dim: str) -> None:
    """These alignments count only if the call gives the size."""
    spec = _spec(**{name: _values(128)})
    assert spec_matches_traits(spec, {"other": 1})
    assert spec_matches_traits(spec, {dim: 256})
    assert not spec_matches_traits(spec, {dim: 200})


def test_bounds_are_no_matter_of_spec_matches_traits() -> None:
    """``spec_matches_traits`` looks at values, sizes apart."""
    assert spec_matches_traits(_spec(n_max=_values(8)), {"n": 9})


SIZES = {"m": 1, "n": 2, "k": 3}


def _raises(m: int, n: int, k: int) -> bool:
    raise ZeroDivisionError("filter")


@pytest.mark.parametrize(
    ("filters", "asked", "expected"),
    [
        ((lambda m, n, k: m + n == k,), SIZES, True),
        ((lambda m, n, k: False,), SIZES, False),
        ((lambda m, n, k: False, lambda m, n, k: True), SIZES, True),
        ((_raises,), SIZES, False),
        ((lambda m, n, k: True,), {"m": 1, "n": 2}, False),
    ],
)
def test_problem_filters(filters: Any, asked: dict[str, Any], expected: bool) -> None:
    """A filter sees m, n and k; one that accepts is enough; one that raises does not vouch; a size missing fails."""
    assert (trait_mismatch(_spec(mnk_problem_filter=filters), asked) is None) is expected


@pytest.mark.parametrize("order", [1, -1])
def test_filter_that_raises_does_not_silence_another(order: int) -> None:
    """Whether a kernel serves sizes does not depend on the order of its filters, one of which raises."""
    filters = (_raises, lambda m, n, k: True)[::order]
    assert trait_mismatch(_spec(mnk_problem_filter=filters), SIZES) is None


def test_no_traits_ask_nothing() -> None:
    """A call without traits is served by every kernel, bounds or not."""
    assert trait_mismatch(_spec(n_min=_values(8), mnk_problem_filter=(_raises,)), {}) is None


@pytest.mark.parametrize(
    ("declared", "asked", "parts"),
    [
        ({"head_dim": _values(64, 128)}, {"head_dim": 96}, ("head_dim", "128", "64", "96")),
        ({"mixed": _values("a", 1, None)}, {"mixed": 2}, ("mixed", "'a'", "None", "2")),
        ({"n_min": _values(8)}, {"n": 4}, ("n_min", "8", "4")),
        ({"ispp_alignment": _values(8)}, {"ispp": 4}, ("ispp", "8", "4")),
        ({"mnk_problem_filter": (_raises,)}, SIZES, ("mnk_problem_filter", "m=1", "n=2", "k=3")),
    ],
)
def test_mismatch_names_what_is_served_and_what_is_asked(
    declared: dict[str, Any], asked: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """The sentence holds the trait, the served values and the asked one, whatever their types."""
    text = trait_mismatch(_spec(**declared), asked) or ""
    assert [part for part in parts if part not in text] == []
