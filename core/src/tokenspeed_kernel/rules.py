# SPDX-License-Identifier: Apache-2.0
"""The conditions that a kernel must meet to serve a request: one small function each, which says why it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_kernel import epoch, settings
from tokenspeed_kernel.notices import describe, warn
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry, Registration, load_attribute
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import trait_mismatch

__all__ = ["RULES", "Reason", "Request", "buildable", "load_or_trip", "trip"]


@dataclass(frozen=True)
class Reason:
    """Why a kernel does not run: the stage that refused it, a code to test for, a sentence, and what to do about it."""

    kernel: str
    stage: str
    code: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail}; {self.remedy}" if self.remedy else self.detail


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asks for. None asks for nothing in particular."""

    family: str
    mode: str
    platform: PlatformInfo
    signature: FormatSignature | None = None
    features: frozenset[str] = frozenset()
    traits: Mapping[str, Any] = field(default_factory=dict)
    solution: str | None = None
    forced: str | None = None
    """What an override names. It skips rank, signature and traits, never capability or features."""


# Each rule returns (code, detail, remedy) for a refusal, or None.
_Refusal = tuple[str, str, str]


def _tripped(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    cause = registry.tripped.get(registration)
    return (
        None if cause is None else ("tripped", f"switched off after it failed: {cause}", "restart the process to retry")
    )


def _setting(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    only = settings.current().selection
    if only is None or registration.spec.solution in (only, "reference") or request.forced is not None:
        return None
    variable = next((name for name in settings.VARIABLES["selection"] if os.environ.get(name)), "the selection setting")
    return (
        "setting",
        f"the process selects {only!r} only",
        f"unset {variable}, or set it to {registration.spec.solution!r}",
    )


def _capable(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    unmet = registration.spec.capability.unmet_by(request.platform)
    return None if unmet is None else (*unmet, "run on such a device")


def _features(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    missing = request.features - registration.spec.features
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return "features", f"does not offer {names}", "do not ask for it, or install a provider that offers it"


def _solution(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    solution = registration.spec.solution
    if request.solution is None or request.forced is not None or solution == request.solution:
        return None
    return (
        "solution",
        f"its solution is {solution!r}, the call asks for {request.solution!r}",
        "ask for it by that name",
    )


def _forced(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    spec = registration.spec
    if request.forced in (None, spec.name, spec.solution):
        return None
    return "override", f"an override asks for {request.forced!r}", "lift the override"


def _signature(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    spec, asked = registration.spec, request.signature
    if asked is None or request.forced is not None or spec.supports_format_signature(asked):
        return None
    taken = "; ".join(sorted(map(str, spec.format_signatures)))
    return "signature", f"takes {taken}, asked is {asked}", "convert the operands to one of these formats"


def _traits(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    if request.forced is not None:
        return None
    mismatch = trait_mismatch(registration.spec, request.traits)
    return None if mismatch is None else ("traits", mismatch, "change the call to fit, or install a provider for it")


def _available(registry: KernelRegistry, registration: Registration, request: Request) -> _Refusal | None:
    no = _ask(registry, registration, "predicate")
    return None if no is None else (*no, "see the provider's README for what it needs")


RULES = (
    ("enabled", _tripped),
    ("enabled", _setting),
    ("capable", _capable),
    ("matching", _forced),
    ("matching", _solution),
    ("matching", _features),
    ("matching", _signature),
    ("matching", _traits),
    ("available", _available),
)


def _ask(registry: KernelRegistry, registration: Registration, question: str) -> tuple[str, str] | None:
    """Ask a registration's ``predicate`` or ``probe``, once; None is yes, else (code, detail)."""
    target = getattr(registration.spec, question)
    if target is None:
        return None
    key = (registration, question)
    try:
        return registry.answers[key]
    except KeyError:
        answer = registry.answers[key] = _answer(registration, question, target)
        return answer


def _answer(registration: Registration, question: str, target: Callable[[], object] | str) -> tuple[str, str] | None:
    try:
        answer = load_attribute(target)()
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- a third party's code; whatever it raises means no
        warn(f"{question} of kernel {registration.spec.name!r} raised {describe(error)}; the kernel is not used.")
        return f"{question}_raised", f"its {question} raised {describe(error)}"
    if answer is True:
        return None
    if isinstance(answer, str):
        return question, answer
    return question, f"its {question} says {answer!r}"


def buildable(registry: KernelRegistry, registration: Registration) -> Reason | None:
    """Return why this machine cannot build or launch the kernel, or None. Asks its probe once."""
    no = _ask(registry, registration, "probe")
    return None if no is None else Reason(registration.spec.name, "buildable", *no, "see the provider's README")


def trip(registry: KernelRegistry, registration: Registration, error: BaseException) -> None:
    """Switch a kernel that failed off for the rest of the process, and say so once."""
    cause = describe(error)
    if registry.tripped.setdefault(registration, cause) is cause:
        spec, owner = registration.spec, registration.owner or "the host"
        who = f"kernel {spec.name!r} ({owner}) of {spec.family}.{spec.mode}"
        warn(f"{who} failed and is off for the rest of the process: {cause}", RuntimeWarning)
    epoch.bump()


def load_or_trip(
    registry: KernelRegistry, registration: Registration
) -> tuple[Callable[..., Any], Callable[..., object] | None] | None:
    """Return a kernel's implementation and ``supports``, imported; None, and trip it, if that fails.

    Raises:
        MemoryError: the import ran out of memory, which is nobody's fault.
    """
    try:
        supports = registration.spec.supports
        return registration.load(), None if supports is None else load_attribute(supports)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- an import may raise anything; another kernel serves
        trip(registry, registration, error)
        return None
