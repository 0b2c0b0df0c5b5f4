# SPDX-License-Identifier: Apache-2.0
"""The path of one slot call: who is asked, who declines, who serves it, and who is switched off after a failure."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from tokenspeed_kernel import epoch, settings
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.explanation import Explanation
from tokenspeed_kernel.notices import describe
from tokenspeed_kernel.overrides import NoKernelFoundError, context_override, forced_kernel, open_contexts
from tokenspeed_kernel.platform import Platform
from tokenspeed_kernel.references import registry_with_references
from tokenspeed_kernel.registry import KernelRegistry, Registration, load_attribute
from tokenspeed_kernel.rules import Reason, Request, buildable, load_or_trip, trip
from tokenspeed_kernel.selection import Decision, decide

__all__ = ["Dispatch"]

_epoch = epoch.current
_REASONS_KEPT = 64  # a reason may name sizes; what is counted must not grow with them for ever


class _Counts:
    """What one kernel did for one slot. ``next`` on a count is one atomic step, so no call is lost between threads."""

    __slots__ = ("declined", "failed", "served")

    def __init__(self) -> None:
        self.served = itertools.count()
        self.failed = itertools.count()
        self.declined: dict[str, itertools.count[int]] = {}

    def decline(self, reason: str) -> None:
        if reason not in self.declined and len(self.declined) >= _REASONS_KEPT:
            reason = "other reasons"
        next(self.declined.setdefault(reason, itertools.count()))

    def to_dict(self) -> dict[str, Any]:
        declined = {reason: _value(count) for reason, count in list(self.declined.items())}
        return {"served": _value(self.served), "failed": _value(self.failed), "declined": declined}


def _value(count: itertools.count[int]) -> int:
    return int(repr(count)[len("count(") : -1])  # the one way to read a count without advancing it


class _Candidate:
    """A registration as a plan holds it; ``supports`` and ``call`` are imported when its turn first comes."""

    __slots__ = ("call", "counts", "ready", "registration", "supports")

    call: Callable[..., Any]
    supports: Callable[..., object] | None

    def __init__(self, registration: Registration, counts: _Counts) -> None:
        self.registration = registration
        self.counts = counts
        self.ready = False


class _Plan:
    """Who to ask, in order, as of one epoch."""

    __slots__ = ("candidates", "epoch", "forced")

    def __init__(self, epoch: int, candidates: tuple[_Candidate, ...], forced: str | None) -> None:
        self.epoch = epoch
        self.candidates = candidates
        self.forced = forced


class Dispatch:
    """The call path of one slot, with its counters. A call takes no lock and reads no environment."""

    def __init__(self, contract: SlotContract) -> None:
        self.contract = contract
        self._plan = _Plan(-1, (), None)
        self._forced_plans: dict[str, _Plan] = {}
        self._counts: dict[str, _Counts] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the best kernel that accepts these arguments and return its result.

        A kernel that declines is passed over. One that raises is passed over too, and switched off for the rest of the
        process if another then serves the call. Returns None if the slot has no reference and no kernel serves the
        call: the caller then runs its own code.

        Raises:
            NoKernelFoundError: an override forces a kernel that cannot serve this call.
            Exception: whatever every candidate raised, the reference last; out-of-memory errors at once.
        """
        plan = self._plan
        if plan.epoch != _epoch.value or open_contexts.count:
            plan = self._current_plan()
        failures: list[tuple[_Candidate, Exception]] | None = None
        for candidate in plan.candidates:
            if not candidate.ready and not self._prepare(plan, candidate):
                continue
            if candidate.supports is not None:
                try:
                    verdict = candidate.supports(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 -- a third party's code: a fault of the check, not of the call
                    verdict = _raised(error)
                if verdict is not True:
                    candidate.counts.decline(_text(verdict))
                    continue
            try:
                result = candidate.call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- raised again below if nobody serves the call
                failures = self._failed(failures, candidate, error, args, kwargs)
                continue
            if result is NotImplemented or (result is None and not self.contract.mutates):
                candidate.counts.decline(f"returned {result!r}")
                continue
            next(candidate.counts.served)
            if failures is not None:
                _trip(failures)
            return result
        return self._unserved(plan, failures, args, kwargs)

    # --- plans ------------------------------------------------------------------------------------------------------

    def _current_plan(self) -> _Plan:
        """Return the plan of the present epoch for this thread and task."""
        if self._plan.epoch != _epoch.value:
            self._forced_plans.clear()
            self._plan = self._make_plan(None)
        wanted = context_override(self.contract.family, self.contract.mode) if open_contexts.count else None
        if wanted is None:
            return self._plan
        plan = self._forced_plans.get(wanted)
        if plan is None or plan.epoch != _epoch.value:
            plan = self._forced_plans[wanted] = self._make_plan(wanted)
        return plan

    def _make_plan(self, context: str | None) -> _Plan:
        now = _epoch.value  # read first: a change while the plan is made leaves it stale, never wrong
        decision = self._decide(context)
        candidates = tuple(_Candidate(r, self._counts_of(r.spec.name)) for r in decision.ranked)
        if settings.current().verbose:
            import logging

            logging.getLogger("tokenspeed_kernel").warning("%s", self._explain(decision, (), {}))
        return _Plan(now, candidates, decision.request.forced)

    def _decide(self, context: str | None) -> Decision:
        registry, contract = registry_with_references(), self.contract
        _log_if_undiscovered()
        forced = forced_kernel(registry, contract.family, contract.mode, settings.current().overrides, context)
        request = Request(family=contract.family, mode=contract.mode, platform=Platform.get(), forced=forced)
        return decide(registry, request)

    def _counts_of(self, kernel: str) -> _Counts:
        return self._counts.setdefault(kernel, _Counts())

    def _prepare(self, plan: _Plan, candidate: _Candidate) -> bool:
        """Probe and import a candidate whose turn has come; drop it from the plan if that fails."""
        registry = KernelRegistry.get()
        if buildable(registry, candidate.registration) is None:
            loaded = load_or_trip(registry, candidate.registration)
            if loaded is not None:
                candidate.call, candidate.supports = loaded
                candidate.ready = True
                return True
            next(candidate.counts.failed)
        plan.candidates = tuple(c for c in plan.candidates if c is not candidate)
        return False

    # --- failures ---------------------------------------------------------------------------------------------------

    def _failed(
        self,
        failures: list[tuple[_Candidate, Exception]] | None,
        candidate: _Candidate,
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[tuple[_Candidate, Exception]]:
        """Note the failure and return all so far, or raise what must not be answered by another kernel."""
        next(candidate.counts.failed)
        if _is_nobodys_fault(error):
            raise error
        if self.contract.validate is not None:
            load_attribute(self.contract.validate)(*args, **kwargs)
        if self.contract.mutates or _is_capturing():
            name = candidate.registration.spec.name
            why = "the slot writes to its arguments" if self.contract.mutates else "a CUDA graph is being captured"
            raise RuntimeError(
                f"kernel {name!r} of slot {self.contract.name!r} failed, and {why}: not run again"
            ) from error
        return [*(failures or ()), (candidate, error)]

    def _unserved(
        self,
        plan: _Plan,
        failures: list[tuple[_Candidate, Exception]] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Answer a call that no candidate served: None for a slot without a reference, else an error."""
        if failures and (plan.forced is not None or self.contract.reference is not None):
            raise failures[-1][1]
        if plan.forced is not None:
            raise NoKernelFoundError(
                f"{plan.forced!r} is forced, but cannot serve this call\n{self.explain(*args, **kwargs)}"
            )
        if failures:
            _trip(failures)

    # --- what happened ----------------------------------------------------------------------------------------------

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """Return who would run for these arguments, and why each other would not; without any, before a call."""
        context = context_override(self.contract.family, self.contract.mode)
        return self._explain(self._decide(context), args, kwargs)

    def _explain(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        registry = KernelRegistry.get()
        refused = {reason.kernel: reason for reason in decision.refused}
        for registration in decision.ranked:
            reason = buildable(registry, registration)
            if reason is None and (args or kwargs):
                reason = _declines(registration, args, kwargs)
            if reason is not None:
                refused[registration.spec.name] = reason
        everyone = (*decision.ranked, *decision.others)
        return Explanation.of(self.contract.name, str(decision.request.platform), everyone, refused)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what each kernel did so far: the calls it ``served`` and ``failed``, and ``declined`` by reason."""
        return {kernel: counts.to_dict() for kernel, counts in sorted(self._counts.items())}


def _trip(failures: list[tuple[_Candidate, Exception]]) -> None:
    registry = KernelRegistry.get()
    for candidate, error in failures:
        trip(registry, candidate.registration, error)


def _declines(registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason | None:
    name, supports = registration.spec.name, registration.spec.supports
    if supports is None:
        return None
    try:
        verdict = load_attribute(supports)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 -- as in a call: a fault of the check declines
        return Reason(name, "accepting", "supports_raised", _raised(error), "report it to its provider")
    return None if verdict is True else Reason(name, "accepting", "declined", _text(verdict), _DECLINED_REMEDY)


_DECLINED_REMEDY = "change the arguments to fit, or leave them to the kernel that is chosen"


def _raised(error: Exception) -> str:
    """Return why a ``supports`` that raised declines; raise again what is nobody's fault."""
    if _is_nobodys_fault(error):
        raise error
    return f"its supports() raised {describe(error)}"


def _text(verdict: object) -> str:
    """Return why a kernel declined, from what its ``supports`` answered."""
    if isinstance(verdict, str):
        return verdict
    if verdict is None or verdict is False:
        return "declines these arguments without a reason"
    return f"its supports() answered {verdict!r}, which is neither True, False, None nor a str"


# What CUDA says once a context is beyond use: every later call in the process fails, whoever makes it. Errors that
# leave it usable, such as a launch with too many threads or a missing kernel image, are their kernel's.
_POISON = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "invalid address space",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "uncorrectable ecc",
)


def _is_nobodys_fault(error: Exception) -> bool:
    """Return whether an error says nothing about the kernel: no memory, or a device context that is beyond use."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = describe(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _POISON)


_told = False


def _log_if_undiscovered() -> None:
    global _told  # noqa: PLW0603 -- said once a process
    if not _told and "tokenspeed_kernel.plugins.discovery" not in sys.modules:
        import logging

        logging.getLogger("tokenspeed_kernel").warning(
            "no plugin is loaded: discover_plugins() was never called; slots use what the host registered"
        )
    _told = True


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
