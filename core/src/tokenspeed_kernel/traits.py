# SPDX-License-Identifier: Apache-2.0
"""Compare the traits of a call (head_dim, causal, m, n, k, ...) with those that a kernel declares.

A kernel declares, by trait name, the values that it serves. Three kinds of names mean more than membership:
``<dim>_align``, ``<dim>_min`` and ``<dim>_max`` bound the size that the call gives as ``<dim>``; ``ispp_alignment`` and
``hidden_alignment`` do so if the call gives that size; ``mnk_problem_filter`` holds functions of ``(m, n, k)``.
Where a kernel declares several bounds, one that holds is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_kernel.spec import KernelSpec

__all__ = ["checked_traits", "spec_matches_traits", "trait_mismatch"]

_BOUNDS: Mapping[str, Callable[[int, int], bool]] = {
    "_align": lambda size, bound: bound > 0 and size % bound == 0,
    "_min": lambda size, bound: size >= bound,
    "_max": lambda size, bound: size <= bound,
}
_PROBLEM_SIZES = ("batch", "m", "n", "k")  # a kernel that declares one serves no call that leaves it open
_OPTIONAL_ALIGNMENTS = {"ispp_alignment": "ispp", "hidden_alignment": "hidden"}
_PROBLEM_FILTER = "mnk_problem_filter"


def checked_traits(who: str, traits: Mapping[str, Iterable[Any]]) -> dict[str, frozenset[Any]]:
    """Return a kernel's traits with their values frozen.

    Raises:
        TypeError: they are not names with sets of values, or a bound or filter is of another kind than its name says.
        ValueError: an alignment is not positive.
    """
    if not isinstance(traits, Mapping):
        raise TypeError(f"{who}: traits must map names to sets of values, got {traits!r}")
    checked: dict[str, frozenset[Any]] = {}
    for name, values in traits.items():
        if not isinstance(name, str) or not isinstance(values, (set, frozenset, tuple, list)):
            raise TypeError(f"{who}: traits must map names to sets of values, got {name!r}: {values!r}")
        try:
            checked[name] = frozenset(values)
        except TypeError as error:
            raise TypeError(f"{who}: trait {name!r} has a value that cannot be in a set: {values!r}") from error
        _check_kind(who, name, checked[name])
    return checked


def _check_kind(who: str, name: str, values: frozenset[Any]) -> None:
    if name == _PROBLEM_FILTER:
        if wrong := [value for value in values if not callable(value)]:
            raise TypeError(f"{who}: trait {name!r} holds functions of (m, n, k), got {wrong[0]!r}")
    elif name in _OPTIONAL_ALIGNMENTS or name.endswith(tuple(_BOUNDS)):
        if wrong := [value for value in values if isinstance(value, bool) or not isinstance(value, int)]:
            raise TypeError(f"{who}: trait {name!r} holds sizes, got {wrong[0]!r}")
        if not name.endswith(("_min", "_max")) and (wrong := [value for value in values if value <= 0]):
            raise ValueError(f"{who}: trait {name!r} holds alignments, which are positive, got {wrong[0]!r}")


def spec_matches_traits(spec: KernelSpec, traits: Mapping[str, Any], *, require_all_traits: bool = False) -> bool:
    """Return whether ``spec`` serves every trait value asked for, sizes apart.

    A trait that the kernel does not declare is served, unless ``require_all_traits``; a declared one that is not asked
    for does not matter. A set of values is served if each of them is.
    """
    return _value_mismatch(spec, traits, require_all_traits) is None


def trait_mismatch(spec: KernelSpec, traits: Mapping[str, Any]) -> str | None:
    """Return what ``spec`` does not serve of ``traits``, or None if it serves all. No traits ask for nothing."""
    if not traits:
        return None
    return _value_mismatch(spec, traits, False) or _size_mismatch(spec, traits)


def _value_mismatch(spec: KernelSpec, traits: Mapping[str, Any], require_all: bool) -> str | None:
    for name, value in traits.items():
        if name in spec.traits:
            if not _serves(spec.traits[name], value):
                return f"serves {name} in {_text(spec.traits[name])}, asked is {value!r}"
        elif require_all and not any(
            dim == name and bound in spec.traits for bound, dim in _OPTIONAL_ALIGNMENTS.items()
        ):
            return f"does not declare the trait {name!r}"
    for name, dim in _OPTIONAL_ALIGNMENTS.items():
        if dim in spec.traits and dim not in traits:
            return f"serves {dim} in {_text(spec.traits[dim])}, asked is none"
        if name in spec.traits and dim in traits and not _in_bounds(spec.traits[name], traits[dim], _BOUNDS["_align"]):
            return f"needs {dim} to be a multiple of {_text(spec.traits[name])}, asked is {traits[dim]!r}"
    return None


def _size_mismatch(spec: KernelSpec, traits: Mapping[str, Any]) -> str | None:
    for name, bounds in spec.traits.items():
        if name in _PROBLEM_SIZES and name not in traits:
            return f"serves {name} in {_text(bounds)}, asked is none"
        if name == _PROBLEM_FILTER:
            if not _passes_filter(bounds, traits):
                return f"its {name} refuses m={traits.get('m')!r}, n={traits.get('n')!r}, k={traits.get('k')!r}"
            continue
        for suffix, holds in _BOUNDS.items():
            dim = name.removesuffix(suffix)
            if dim != name and not _in_bounds(bounds, traits.get(dim), holds):
                return f"needs {dim} to meet {name} {_text(bounds)}, asked is {traits.get(dim)!r}"
    return None


def _serves(declared: Iterable[Any], value: Any) -> bool:
    if isinstance(value, (set, frozenset)):
        return all(_serves(declared, item) for item in value)
    return any(_same(served, value) for served in declared)


def _same(served: Any, value: Any) -> bool:
    if isinstance(served, bool) != isinstance(value, bool):
        return False  # True == 1 in Python, but a flag is not a count
    try:
        return bool(served == value)
    except Exception:  # noqa: BLE001 -- a tensor or an array compares elementwise and has no truth value: not the same
        return False


def _in_bounds(bounds: Iterable[Any], size: object, holds: Callable[[int, int], bool]) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and any(holds(size, bound) for bound in bounds)


def _passes_filter(filters: Iterable[Callable[..., object]], traits: Mapping[str, Any]) -> bool:
    sizes = [traits.get(dim) for dim in ("m", "n", "k")]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return any(_accepts(accepts, sizes) for accepts in filters)


def _accepts(accepts: Callable[..., object], sizes: list[Any]) -> bool:
    try:
        return bool(accepts(*sizes))
    except Exception:  # noqa: BLE001 -- a kernel author's function; one that raises does not vouch for the sizes
        return False


def _text(values: Iterable[Any]) -> str:
    return "{" + ", ".join(sorted(map(repr, values))) + "}"
