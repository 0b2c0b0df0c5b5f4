# SPDX-License-Identifier: Apache-2.0
"""The path of one slot call: who is asked, who declines, who serves it, and who is switched off after a failure."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tokenspeed_kernel import capture, epoch, settings
from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.counts import Counts
from tokenspeed_kernel.explanation import Explanation
from tokenspeed_kernel.overrides import NoKernelFoundError, context_override, forced_kernel
from tokenspeed_kernel.plan import NEVER, Candidate, Plan
from tokenspeed_kernel.platform import Platform
from tokenspeed_kernel.references import registry_with_references
from tokenspeed_kernel.registry import KernelRegistry, load_attribute
from tokenspeed_kernel.rules import Reason, Request, buildable, load_or_trip, trip
from tokenspeed_kernel.selection import Decision, decide
from tokenspeed_kernel.verdicts import declines, is_nobodys_fault, raised_text, verdict_text

__all__ = ["Dispatch", "handles"]

_epoch = epoch.current


def _ask_torch() -> bool:
    """Return whether Dynamo is tracing, until :func:`_bind_torch` has found torch; outside a trace, let it look."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)  # another thread may be importing torch right now
    if compiler is None:
        return False
    if compiler.is_dynamo_compiling():
        return True
    _bind_torch()
    return False


# torch's own answers, or those of a process without torch. They are names of this module, which Python finds soonest.
_is_dynamo_compiling: Callable[[], bool] = _ask_torch
_is_tracing: Callable[[], bool] = bool
_compiler: Any = SimpleNamespace(_is_exporting_flag=False)


def _bind_torch() -> None:
    """Use torch's own answers from now on, if torch has been imported."""
    global _compiler, _is_dynamo_compiling, _is_tracing  # noqa: PLW0603 -- facts of the process
    torch = sys.modules.get("torch")
    if torch is None or _is_dynamo_compiling is not _ask_torch or not hasattr(torch, "compiler"):
        return
    # The public torch.jit.is_tracing() and torch.compiler.is_exporting() wrap these two and cost three times as much.
    _is_tracing = torch._C._is_tracing
    if hasattr(torch.compiler, "_is_exporting_flag"):
        _compiler = torch.compiler
    _is_dynamo_compiling = torch.compiler.is_dynamo_compiling


handles: dict[str, Any] = {}  # every slot by name: Dynamo hands the two functions below nothing but constants


def _prepare_trace(name: str) -> bool:
    handles[name].prepare_trace()
    return True


def _count_trace(name: str, index: int) -> bool:
    handles[name].count_trace(index)
    return True


# What torch.compiler.assume_constant_result does, without importing Dynamo into every process: Dynamo runs such a
# function while it traces and takes the result for a constant.
_prepare_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's mark on functions
_count_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Dispatch:
    """The call path of one slot, with its counters. A call takes no lock and reads no environment."""

    def __init__(self, contract: SlotContract) -> None:
        self.contract = contract
        self.unserved = itertools.count()
        self._plan = Plan(NEVER, (), None)
        self._forced_plans: dict[str, Plan] = {}
        self._counts: dict[str, Counts] = {}
        self._traced_candidates: tuple[Candidate, ...] = ()
        self._traceable: tuple[tuple[Callable[..., object] | None, Callable[..., Any]], ...] = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the best kernel that accepts these arguments and return its result.

        A kernel that declines is passed over. One that raises is passed over too, and switched off for the rest of the
        process if another then serves the call. Returns None if the slot has no reference and no kernel serves the
        call: the caller then runs its own code.

        Raises:
            NoKernelFoundError: an override forces a kernel that cannot serve this call.
            Exception: whatever every candidate raised, the reference last; out-of-memory errors at once.
        """
        if _is_dynamo_compiling():
            return self._traced_call(args, kwargs)
        plan = self._plan
        if plan.hot != _epoch.settled or _is_tracing() or _compiler._is_exporting_flag:
            return self._considered_call(args, kwargs)
        # What _serve does, for the first candidate: the loop would be a tenth of what a call costs.
        candidate: Any = plan.first
        failures: list[tuple[Candidate, Exception]] | None = None
        supports = candidate.supports
        if supports is not None:
            try:
                verdict = supports(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- a third party's code: the check's fault, not the call's
                verdict = raised_text(error)
            if verdict is not True:
                candidate.counts.decline(verdict_text(verdict))
                return self._serve(plan, candidate.next, None, args, kwargs)
        try:
            result = candidate.call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- raised again if nobody serves the call
            failures = self._failed(None, candidate, error, args, kwargs)
        else:
            if result is not NotImplemented and (result is not None or self.contract.mutates):
                next(candidate.served)
                return result
            candidate.counts.decline(f"returned {result!r}")
        return self._serve(plan, candidate.next, failures, args, kwargs)

    def _considered_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that is recorded, or for which the plan is not the last one or its first kernel not ready."""
        plan = self._current_plan()
        if capture.is_exporting_or_tracing() is not None:
            return self._captured_call(plan, args, kwargs)
        result = self._serve(plan, plan.first, None, args, kwargs)
        if plan.first is not None and plan.first.ready:
            plan.hot = plan.epoch
        return result

    def _serve(
        self,
        plan: Plan,
        candidate: Candidate | None,
        failures: list[tuple[Candidate, Exception]] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the first kernel from ``candidate`` on that accepts the call, and blame those before that failed."""
        while candidate is not None:
            if candidate.ready or self._prepare(plan, candidate):
                verdict: object = True
                if candidate.supports is not None:
                    try:
                        verdict = candidate.supports(*args, **kwargs)
                    except Exception as error:  # noqa: BLE001 -- as above
                        verdict = raised_text(error)
                if verdict is True:
                    try:
                        result = candidate.call(*args, **kwargs)
                    except Exception as error:  # noqa: BLE001 -- as above
                        failures = self._failed(failures, candidate, error, args, kwargs)
                    else:
                        if result is not NotImplemented and (result is not None or self.contract.mutates):
                            next(candidate.served)
                            if failures is not None:
                                _trip(failures)
                            return result
                        candidate.counts.decline(f"returned {result!r}")
                else:
                    candidate.counts.decline(verdict_text(verdict))
            candidate = candidate.next
        return self._unserved(plan, failures, args, kwargs)

    # --- captures ---------------------------------------------------------------------------------------------------

    def _captured_call(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that ``torch.jit.trace`` or an exporter records. Nobody is blamed for what fails here."""
        for candidate in self._allowed_in(plan, capture.is_exporting_or_tracing() or "trace"):
            if candidate.supports is None or candidate.supports(*args, **kwargs) is True:
                result = candidate.call(*args, **kwargs)
                if result is not NotImplemented:
                    next(candidate.counts.traced)
                    return result
        return None

    def _allowed_in(self, plan: Plan, kind: str) -> Iterator[Candidate]:
        """Yield the candidates that may run in a capture, imported: references alone where the contract says so."""
        for candidate in plan:
            if kind in self.contract.portable_in and candidate.registration.spec.solution != "reference":
                continue
            if candidate.ready or self._prepare(plan, candidate):
                yield candidate

    def _traced_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that Dynamo traces: no counter, no ``try``, no context variable in what becomes the graph."""
        _prepare_trace(self.contract.name)
        for index, (supports, call) in enumerate(self._traceable):
            if supports is None or supports(*args, **kwargs) is True:
                result = call(*args, **kwargs)
                if result is not NotImplemented:
                    _count_trace(self.contract.name, index)
                    return result
        return None

    def prepare_trace(self) -> None:
        """Fix the kernels that a trace by Dynamo may choose from. It is called while tracing, but is not traced."""
        plan = self._current_plan()
        self._traced_candidates = tuple(self._allowed_in(plan, capture.dynamo_capture()))
        self._traceable = tuple((candidate.supports, candidate.call) for candidate in self._traced_candidates)

    def count_trace(self, index: int) -> None:
        """Count that a trace holds the kernel at ``index``; what the compiled graph runs later cannot be counted."""
        next(self._traced_candidates[index].counts.traced)

    # --- plans ------------------------------------------------------------------------------------------------------

    def _current_plan(self) -> Plan:
        """Return the plan of the present epoch for this thread and task."""
        _bind_torch()
        if self._plan.epoch != _epoch.value:
            self._forced_plans.clear()
            self._plan = self._make_plan(None)
        wanted = context_override(self.contract.family, self.contract.mode) if _epoch.contexts else None
        if wanted is None or KernelRegistry.get().frozen is not None:
            return self._plan
        plan = self._forced_plans.get(wanted)
        if plan is None or plan.epoch != _epoch.value:
            plan = self._forced_plans[wanted] = self._make_plan(wanted)
        return plan

    def _make_plan(self, context: str | None) -> Plan:
        now = _epoch.value  # read first: a change while the plan is made leaves it stale, never wrong
        decision = self._decide(context)
        candidates = tuple(Candidate(r, self._counts_of(r.spec.name)) for r in decision.ranked)
        if settings.current().verbose:
            import logging

            logging.getLogger("tokenspeed_kernel").warning("%s", self._explain(decision, (), {}))
        return Plan(now, candidates, decision.request.forced)

    def _decide(self, context: str | None) -> Decision:
        registry, contract = registry_with_references(), self.contract
        _log_if_undiscovered()
        if registry.frozen is not None:
            return self._decide_as_frozen(registry, registry.frozen)
        forced = forced_kernel(registry, contract.family, contract.mode, settings.current().overrides, context)
        request = Request(family=contract.family, mode=contract.mode, platform=Platform.get(), forced=forced)
        return decide(registry, request)

    def _decide_as_frozen(self, registry: KernelRegistry, plan: Mapping[str, tuple[str, ...]]) -> Decision:
        """Return the frozen order, without the kernels that were switched off since."""
        contract = self.contract
        names = plan.get(f"{contract.family}.{contract.mode}", ())
        found = [r for r in map(registry.registration, names) if r is not None]
        request = Request(family=contract.family, mode=contract.mode, platform=Platform.get())
        off = tuple(r for r in found if r in registry.tripped)
        return Decision(
            request=request,
            ranked=tuple(r for r in found if r not in registry.tripped),
            others=off,
            refused=tuple(Reason(r.spec.name, "enabled", "tripped", registry.tripped[r]) for r in off),
        )

    def _counts_of(self, kernel: str) -> Counts:
        return self._counts.setdefault(kernel, Counts())

    def _prepare(self, plan: Plan, candidate: Candidate) -> bool:
        """Probe and import a candidate whose turn has come; drop it from the plan if that fails."""
        registry = KernelRegistry.get()
        if buildable(registry, candidate.registration) is None:
            loaded = load_or_trip(registry, candidate.registration)
            if loaded is not None:
                candidate.call, candidate.supports = loaded
                candidate.ready = True
                return True
            next(candidate.counts.failed)
        plan.drop(candidate)
        return False

    # --- failures ---------------------------------------------------------------------------------------------------

    def _failed(
        self,
        failures: list[tuple[Candidate, Exception]] | None,
        candidate: Candidate,
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[tuple[Candidate, Exception]]:
        """Note the failure and return all so far, or raise what must not be answered by another kernel."""
        next(candidate.counts.failed)
        if is_nobodys_fault(error):
            raise error
        if self.contract.validate is not None:
            load_attribute(self.contract.validate)(*args, **kwargs)
        if why := self._must_not_run_again():
            name = candidate.registration.spec.name
            raise RuntimeError(
                f"kernel {name!r} of slot {self.contract.name!r} failed, and {why}: not run again"
            ) from error
        return [*(failures or ()), (candidate, error)]

    def _must_not_run_again(self) -> str:
        """Return why a call that failed is not for the next kernel, or nothing."""
        if self.contract.mutates:
            return "the slot writes to its arguments"
        registry = KernelRegistry.get()
        if registry.frozen is not None and registry.raises_when_frozen:
            return "the plan is frozen with on_error='raise'"
        return "a CUDA graph is being captured" if capture.captures_cuda_graph() else ""

    def _unserved(
        self,
        plan: Plan,
        failures: list[tuple[Candidate, Exception]] | None,
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
        next(self.unserved)

    # --- what happened ----------------------------------------------------------------------------------------------

    def bind(self, /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        """Return the implementation that would serve these arguments, or None if none would.

        It is the function itself: calling it costs nothing more, is not counted, declines nothing, and goes on after
        the kernel has been switched off. ``report()`` lists what was bound.
        """
        plan = self._current_plan()
        for candidate in plan:
            is_ready = candidate.ready or self._prepare(plan, candidate)
            if is_ready and declines(candidate.registration, args, kwargs) is None:
                next(candidate.counts.bound)
                return candidate.call
        return None

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
                reason = declines(registration, args, kwargs)
            if reason is not None:
                refused[registration.spec.name] = reason
        everyone = (*decision.ranked, *decision.others)
        return Explanation.of(self.contract.name, str(decision.request.platform), everyone, refused)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what each kernel did so far: the calls it ``served``, ``failed``, and ``declined`` by reason.

        ``bound`` counts what ``bind`` gave away, ``traced`` the graphs that hold the kernel: once each, however often a
        graph then runs.
        """
        return {kernel: counts.to_dict() for kernel, counts in sorted(self._counts.items())}


def _trip(failures: list[tuple[Candidate, Exception]]) -> None:
    registry = KernelRegistry.get()
    for candidate, error in failures:
        trip(registry, candidate.registration, error)


_told = False


def _log_if_undiscovered() -> None:
    global _told  # noqa: PLW0603 -- said once a process
    if not _told and "tokenspeed_kernel.plugins.discovery" not in sys.modules:
        import logging

        logging.getLogger("tokenspeed_kernel").warning(
            "no plugin is loaded: discover_plugins() was never called; slots use what the host registered"
        )
    _told = True
