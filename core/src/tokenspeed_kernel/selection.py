# SPDX-License-Identifier: Apache-2.0
"""Choose a kernel: filter by the rules, rank, take the first. One piece of code decides and explains.

Stages, in order: enabled, capable, matching, available, buildable (for the winner, before its first use) and, at a slot
call, accepting. The rank is oracle score, then priority, then newest registration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel import epoch, settings
from tokenspeed_kernel.explanation import Explanation
from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.overrides import NoKernelFoundError, context_override, forced_kernel, kernel_override
from tokenspeed_kernel.platform import Platform, PlatformInfo
from tokenspeed_kernel.policy import (
    AutotuneParams,
    SelectionPolicy,
    SelectionStrategy,
    current_policy,
    set_selection_policy,
)
from tokenspeed_kernel.references import registry_with_references
from tokenspeed_kernel.registry import PRIORITY_LIMIT, KernelRegistry, KernelSpec, Registration, registering_owner
from tokenspeed_kernel.rules import RULES, Reason, Request, buildable, load_or_trip
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import spec_matches_traits

__all__ = [
    "AutotuneParams",
    "Decision",
    "NoKernelFoundError",
    "Reason",
    "Request",
    "SelectedKernel",
    "SelectionOracle",
    "SelectionPolicy",
    "SelectionStrategy",
    "decide",
    "explain_selection",
    "kernel_override",
    "register_oracle",
    "select_kernel",
    "set_selection_policy",
    "spec_matches_traits",
    "warmup_selection",
]


class SelectedKernel:
    """A chosen kernel: its name, and its implementation, which calling this calls."""

    __slots__ = ("impl", "name")

    def __init__(self, name: str, impl: Callable[..., Any]) -> None:
        self.name = name
        self.impl = impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation."""
        return self.impl(*args, **kwargs)

    def __repr__(self) -> str:
        return f"SelectedKernel(name={self.name!r})"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The kernels that may run, best first, and the reason of each other one."""

    request: Request
    ranked: tuple[Registration, ...]
    others: tuple[Registration, ...]
    refused: tuple[Reason, ...]
    """One for each of ``others``."""


def decide(registry: KernelRegistry, request: Request) -> Decision:
    """Return who may serve ``request``, best first, and why each other one may not. Imports no implementation."""
    accepted: list[Registration] = []
    others: list[Registration] = []
    refused: list[Reason] = []
    for registration in registry.registrations(request.family, request.mode):
        reason = _refusal(registry, registration, request)
        if reason is None:
            accepted.append(registration)
        else:
            others.append(registration)
            refused.append(reason)
    return Decision(
        request=request,
        ranked=tuple(_rank(accepted, request)),
        others=tuple(sorted(others, key=lambda r: (r.spec.priority, r.order), reverse=True)),
        refused=tuple(refused),
    )


def _refusal(registry: KernelRegistry, registration: Registration, request: Request) -> Reason | None:
    for stage, rule in RULES:
        refusal = rule(registry, registration, request)
        if refusal is not None:
            return Reason(registration.spec.name, stage, *refusal)
    return None


def _rank(accepted: list[Registration], request: Request) -> list[Registration]:
    oracles = _oracles.get(request.family)

    def score(registration: Registration) -> tuple[int, int, int]:
        adjusted = _adjust(oracles[-1][1], registration.spec, request) if oracles else _NEUTRAL_SCORE
        return adjusted, registration.spec.priority, registration.order

    return sorted(accepted, key=score, reverse=True)


_NEUTRAL_SCORE = 10  # of a kernel that no oracle has a word on; what lies outside 0 to 19 counts as the nearer end


class SelectionOracle:
    """Knowledge of one op family that outweighs priorities. Subclass and give to :func:`register_oracle`."""

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: dict[str, Any] | None) -> int:
        """Return the score of a kernel for a request, 0 to 19: higher wins, before priority is looked at."""
        return _NEUTRAL_SCORE


# By family, each with its owner; the last one counts.
_oracles: dict[str, tuple[tuple[str | None, SelectionOracle], ...]] = {}


def register_oracle(family: str, oracle: SelectionOracle) -> None:
    """Rank the kernels of ``family`` by ``oracle`` first. A second one for the family replaces the first.

    One that a plugin registers goes when the plugin is unloaded, and the one before it counts again.
    """
    owner = registering_owner.get()
    _oracles[family] = (*(entry for entry in _oracles.get(family, ()) if entry[0] != owner), (owner, oracle))
    epoch.bump()


def withdraw_oracles(owner: str) -> None:
    """Forget the oracles that the plugin ``owner`` registered."""
    for family, entries in list(_oracles.items()):
        _oracles[family] = tuple(entry for entry in entries if entry[0] != owner)
    epoch.bump()


def _adjust(oracle: SelectionOracle, spec: KernelSpec, request: Request) -> int:
    """Return the oracle's score; one that raises, or answers anything but an int, counts as no word, with a warning."""
    who = f"the oracle of family {request.family!r}"
    try:
        score = oracle.adjust(spec, request.platform, dict(request.traits) or None)
    except Exception as error:  # noqa: BLE001 -- a third party's code must not break selection
        warn(f"{who} raised {describe(error)} for kernel {spec.name!r}; it counts as {_NEUTRAL_SCORE}.")
        return _NEUTRAL_SCORE
    if isinstance(score, bool) or not isinstance(score, int):
        warn(f"{who} gave {score!r} for kernel {spec.name!r}, not an int; it counts as {_NEUTRAL_SCORE}.")
        return _NEUTRAL_SCORE
    return min(max(score, 0), PRIORITY_LIMIT - 1)


_CACHE_LIMIT = 4096  # entries an operator; a host with no end of trait values must not grow without end
_epoch = epoch.current


class _Operator:
    """The selections made for one operator."""

    __slots__ = ("found", "variable")

    def __init__(self, family: str, mode: str) -> None:
        self.variable = settings.environment_key(settings.override_variable(family, mode))
        # With the epoch they belong to, replaced whole. A selection that a change overtakes ends in a dict that nobody
        # reads any more.
        self.found: tuple[int, dict[object, SelectedKernel]] = (-1, {})

    def current(self) -> dict[object, SelectedKernel]:
        """Return the selections of the present epoch, none if it has just begun or there were too many."""
        made, found = self.found
        now = _epoch.value
        if made != now or len(found) >= _CACHE_LIMIT:
            found = {}
            self.found = (now, found)
        return found


_operators: dict[tuple[str, str], _Operator] = {}
_PLAIN = frozenset({bool, int, float, str, type(None)})


def select_kernel(
    family: str,
    mode: str,
    format_signature: FormatSignature | None,
    *,
    features: frozenset[str] | None = None,
    platform: PlatformInfo | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> SelectedKernel:
    """Return the best kernel for an operator, imported and probed.

    Args:
        format_signature: the operands' formats, or None to ask for none.
        features: abilities that the kernel must offer.
        platform: the platform to select for; this machine's by default.
        traits: other properties of the call, by name.
        solution: the only solution to consider.
        override: the kernel or solution to run, whatever the rank; see :func:`kernel_override` for what outweighs it.

    Raises:
        NoKernelFoundError: no kernel may serve the request, or an override names none; each candidate's reason is said.
    """
    operator = _operators.get((family, mode))
    if operator is None:
        operator = _operators.setdefault((family, mode), _Operator(family, mode))
    made, found = operator.found
    if made != _epoch.value:
        found = operator.current()
    key: object = None
    if not (settings.is_set(operator.variable) or _epoch.contexts):
        key = _key(format_signature, features, platform, traits, solution, override)
        try:
            return found[key]
        except KeyError:
            pass
        except TypeError:  # something in it does not hash: nothing is cached
            key = None
    registry = registry_with_references()  # may register, and so begin an epoch: hence before the cache is chosen
    found = operator.current()
    request = _request(registry, family, mode, format_signature, features, platform, traits, solution, override)
    selected = _first_buildable(registry, request)
    if key is not None:
        found[key] = selected
    return selected


def _key(
    signature: FormatSignature | None,
    features: frozenset[str] | None,
    platform: PlatformInfo | None,
    traits: Mapping[str, Any] | None,
    solution: str | None,
    override: str | None,
) -> object:
    """Return everything the choice depends on, apart from what makes the epoch change."""
    if not traits:
        return signature, features, platform, solution, override
    values = tuple(traits.values())
    types = tuple(map(type, values))
    if not _PLAIN.issuperset(types):
        values, types = tuple(map(_typed, values)), ()
    # With the types, for 1 and True are equal and hash alike, but are two trait values.
    return signature, features, platform, solution, override, tuple(traits), values, types


def _typed(value: object) -> object:
    """Return a value that equals another's only if their types are the same, all the way down."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(_typed, value))
    return type(value), value


def _request(
    registry: KernelRegistry,
    family: str,
    mode: str,
    format_signature: FormatSignature | None,
    features: frozenset[str] | None,
    platform: PlatformInfo | None,
    traits: Mapping[str, Any] | None,
    solution: str | None,
    override: str | None,
) -> Request:
    return Request(
        family=family,
        mode=mode,
        platform=Platform.get() if platform is None else platform,
        signature=format_signature,
        features=frozenset(features or ()),
        traits=traits or {},
        solution=solution or None,
        forced=forced_kernel(registry, family, mode, os.environ, context_override(family, mode) or override),
    )


def _first_buildable(registry: KernelRegistry, request: Request) -> SelectedKernel:
    decision = decide(registry, request)
    if current_policy().get_strategy(request.family, request.mode) is SelectionStrategy.AUTOTUNE:
        _log(f"{_subject(request)}: nothing to measure on, the rank decides")
    if settings.current().verbose:
        _log(str(_explanation(registry, decision)), level="WARNING")
    for registration in decision.ranked:
        if buildable(registry, registration) is None:
            loaded = load_or_trip(registry, registration)
            if loaded is not None:
                return SelectedKernel(registration.spec.name, loaded[0])
    # Decided anew: an import that failed just now has a reason.
    explanation = _explanation(registry, decide(registry, request))
    raise NoKernelFoundError(f"no kernel for {_subject(request)} can run\n{explanation}")


def explain_selection(
    family: str,
    mode: str,
    format_signature: FormatSignature | None,
    *,
    features: frozenset[str] | None = None,
    platform: PlatformInfo | None = None,
    traits: Mapping[str, Any] | None = None,
    solution: str | None = None,
) -> str:
    """Return as text whom :func:`select_kernel` would select for these arguments, and why each other would not do."""
    registry = registry_with_references()
    request = _request(registry, family, mode, format_signature, features, platform, traits, solution, None)
    return str(_explanation(registry, decide(registry, request)))


def _explanation(registry: KernelRegistry, decision: Decision) -> Explanation:
    unbuildable = tuple(r for r in (buildable(registry, each) for each in decision.ranked) if r is not None)
    refused = {reason.kernel: reason for reason in (*unbuildable, *decision.refused)}
    everyone = (*decision.ranked, *decision.others)
    return Explanation.of(_subject(decision.request), str(decision.request.platform), everyone, refused)


def warmup_selection(
    ops: Iterable[tuple[str, str, FormatSignature | None, Mapping[str, Any] | None]] | None = None,
) -> None:
    """Select, and so import, probe and cache, a kernel for each ``(family, mode, signature, traits)``.

    Without ``ops``, for one signature of each operator that there is: the first in the order of their text. What no
    kernel serves is logged and skipped: what is warmed up is not yet needed.
    """
    for family, mode, signature, traits in _representatives() if ops is None else ops:
        _warm_up(family, mode, signature, traits)


def _representatives() -> Iterator[tuple[str, str, FormatSignature | None, None]]:
    registry = registry_with_references()
    for family, mode in registry.list_operators():
        signatures = {s for r in registry.registrations(family, mode) for s in r.spec.format_signatures}
        yield family, mode, min(signatures, key=str, default=None), None


def _warm_up(family: str, mode: str, signature: FormatSignature | None, traits: Mapping[str, Any] | None) -> None:
    try:
        select_kernel(family, mode, signature, traits=traits)
    except NoKernelFoundError as error:
        _log(f"warm-up of {family}.{mode}: {error}")


def _log(message: str, level: str = "INFO") -> None:
    import logging

    logging.getLogger("tokenspeed_kernel").log(getattr(logging, level), "%s", message)


def _subject(request: Request) -> str:
    return f"{request.family}.{request.mode}" + (f" ({request.signature})" if request.signature else "")
