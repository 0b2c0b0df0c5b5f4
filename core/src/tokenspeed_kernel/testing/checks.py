# SPDX-License-Identifier: Apache-2.0
"""What a kernel's own calls must show, on any device. Each check returns its findings: none means passed."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tokenspeed_kernel.testing.grid import GROUPS, Call, Case
from tokenspeed_kernel.testing.parity import differing_bits, largest_finite
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Declined, Subject

__all__ = ["CHECKS", "Check", "each", "raised", "short"]

Check = Callable[[Subject], list[str]]

_FIRST = 3  # findings named in full; one fault tends to show in many calls
_THREADS = 8


def short(findings: list[str]) -> list[str]:
    """Return the first findings, and how many more there are."""
    more = len(findings) - _FIRST
    return findings if more <= 0 else [*findings[:_FIRST], f"and {more} more"]


def raised(error: Exception) -> str:
    """Return an error as a finding, on one line."""
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def each(calls: list[tuple[Case, Call]], look: Callable[[Case, Call], str | None]) -> list[str]:
    """Look at each call; what raises is a finding too."""
    findings = []
    declined = 0
    for case, call in calls:
        try:
            found = look(case, call)
        except Declined:
            declined += 1
            continue
        except Exception as error:  # noqa: BLE001 -- whatever a third party's kernel raises
            found = raised(error)
        if found is not None:
            findings.append(f"{case.group}, {case.name}: {found}")
    if declined == len(calls):  # to pass would be to have looked at something
        raise NotExamined(f"declines each of {len(calls)} calls late, by NotImplemented or under this check")
    return short(findings)


def parity(subject: Subject, group: str) -> list[str]:
    """Results equal the reference's or the oracle's, for one group of calls."""
    return each(subject.accepted(group), lambda _, call: subject.fault(subject.run(call), call))


def refusals(subject: Subject) -> list[str]:
    """Whatever is not served is refused with a reason, or raises; a refusal itself never raises."""
    findings = []
    for case in subject.grid:
        call = case.build(subject.device)
        verdict = subject.verdict(call)
        if isinstance(verdict, Exception):
            findings.append(f"{case.name}: supports() raised {type(verdict).__name__}: {verdict}")
        elif verdict is not True and not (isinstance(verdict, str) and verdict.strip()):
            findings.append(f"{case.name}: refused without a reason: {verdict!r}")
        elif verdict is True and case.malformed and not _raises(subject, call):
            findings.append(f"{case.name}: neither refused nor an error, and the contract has no answer to it")
    return short(findings)


def _raises(subject: Subject, call: Call) -> bool:
    try:
        subject.run(call)
    except Declined:
        return True
    except Exception:  # noqa: BLE001 -- any error is an answer here
        return True
    return False


def gradients(subject: Subject) -> list[str]:
    """Gradients for random cotangents equal the reference's or the oracle's; a scale has none."""
    return each(subject.accepted(differentiable=True), partial(_gradient_fault, subject))


def _gradient_fault(subject: Subject, case: Case, call: Call) -> str | None:
    yardstick = subject.yardstick
    others = [
        i
        for i, value in enumerate(call.args)
        if yardstick.straight_through
        and i not in case.gradients
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    ]
    mine, leaves = call.with_gradients((*case.gradients, *others))
    theirs, right = call.with_gradients(case.gradients)
    actual, expected = subject.run(mine), subject.expected(theirs)
    if not (isinstance(actual, torch.Tensor) and actual.requires_grad):
        return "the result does not require a gradient"
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(actual.device)
    got = torch.autograd.grad(actual, leaves, cotangent.to(actual.dtype), allow_unused=True)
    wanted = torch.autograd.grad(expected, right, cotangent.to(actual.dtype).to(expected.dtype))
    beside = largest_finite(*wanted)
    for position, one, other in zip(case.gradients, got, wanted, strict=False):
        if found := yardstick.check_gradient(one, other, subject.tolerance, beside):
            return f"the gradient of argument {position}: {found}"
    for position, one in zip(others, got[len(case.gradients) :], strict=True):
        if one is not None and bool(one.count_nonzero()):
            return f"argument {position} has a gradient, and the contract gives it none"
    return None


def gradcheck(subject: Subject) -> list[str]:
    """In float64, numeric differentiation agrees with the gradient."""
    if subject.yardstick.straight_through:
        raise NotExamined("the slot's gradient is a straight-through estimator, not a derivative")
    calls = [(case, call) for case, call in subject.accepted("dtypes") if call.args[0].dtype == torch.float64]
    if not calls:
        raise NotExamined("float64 is not served")

    def look(case: Case, call: Call) -> str | None:
        mine, leaves = call.with_gradients(case.gradients)

        def function(*values: torch.Tensor) -> Any:
            args = list(mine.args)
            for position, value in zip(case.gradients, values, strict=True):
                args[position] = value
            return subject.run(Call(tuple(args), mine.kwargs))

        torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-4)
        return None

    return each(calls, look)


def inputs_unchanged(subject: Subject) -> list[str]:
    """Neither forward nor backward writes to an input, or to the memory around it, or returns a part of it."""

    def look(case: Case, call: Call) -> str | None:
        mine, leaves = call.with_gradients(case.gradients)
        before = [_memory(tensor).clone() for tensor in mine.tensors()]
        result = subject.run(mine)
        if written := _written(mine, before):  # before backward: that raises where autograd has noticed
            return written
        if leaves and isinstance(result, torch.Tensor) and result.requires_grad:
            torch.autograd.grad(result.sum(), leaves, allow_unused=True)
        if isinstance(result, torch.Tensor) and result.numel():
            for index, tensor in enumerate(mine.tensors()):
                if _starts_at(result) == _starts_at(tensor):
                    return f"the result shares its memory with tensor {index} of the arguments"
        return _written(mine, before)

    return each(subject.accepted(), look)


def _written(call: Call, before: list[torch.Tensor]) -> str | None:
    for index, (tensor, memory) in enumerate(zip(call.tensors(), before, strict=True)):
        if not torch.equal(_memory(tensor), memory):
            return f"tensor {index} of the arguments, or the memory around it, was written"
    return None


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _starts_at(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def outputs_written(subject: Subject) -> list[str]:
    """No element of the result is what the memory held before."""

    def look(_: Case, call: Call) -> str | None:
        expected = subject.expected(call)
        with _poisoned_memory():
            actual = subject.run(call)
        if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
            return None  # parity's finding
        unwritten = actual.isnan() & ~expected.isnan()
        return f"{int(unwritten.sum())} of {unwritten.numel()} elements were not written" if unwritten.any() else None

    return each(subject.accepted(), look)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Let torch fill what it allocates with NaN, also in C++ and inside custom ops."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a property of the module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that have no deterministic form: that is not what this is for
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def same_bits_twice(subject: Subject) -> list[str]:
    """A second run on the same inputs gives the same bits."""
    return each(subject.accepted(), lambda _, call: differing_bits(subject.run(call), subject.run(call)))


def autocast(subject: Subject) -> list[str]:
    """Under autocast the dtype stays, and with it the bits; ``sdpa`` alone takes autocast's dtype if it likes."""
    half = torch.bfloat16

    def look(_: Case, call: Call) -> str | None:
        with torch.autocast(subject.device, dtype=half):
            if subject.verdict(call) is not True:
                raise Declined
            actual = subject.run(call)
        if subject.slot_name == "sdpa":
            allowed = {call.args[0].dtype, half}
            return None if actual.dtype in allowed else f"returned {actual.dtype}, not one of {allowed}"
        return subject.fault(actual, call)

    return each(subject.accepted("dtypes", "channels"), look)


def copies(subject: Subject) -> list[str]:
    """A module that holds the slot pickles and deep-copies, and its copy runs the kernel."""
    calls = subject.accepted("dtypes", "shapes")[:1]
    findings = []
    with subject.alone() as handle:
        for copied in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):  # noqa: S301 -- its own pickle
            served = subject.counts("served")
            findings += each(calls, lambda _, call, it=copied: subject.fault(it(*call.args, **call.kwargs), call))  # type: ignore[misc]  # mypy infers no lambda with a default
            if subject.counts("served") == served:
                findings.append("the copy did not run the kernel")
    return findings


def threads(subject: Subject) -> list[str]:
    """Eight threads at once get what each would get alone."""
    calls = [(case, call) for case, call in subject.accepted() if call.args[0].numel() < 100_000]
    findings: list[list[str]] = [[] for _ in range(_THREADS)]
    expected = {id(call): subject.expected(call) for _, call in calls}
    start = threading.Barrier(_THREADS)

    def work(index: int, host: Callable[..., Any]) -> None:
        start.wait()
        mine = calls[index::2] + calls[1 - index % 2 :: 2]
        findings[index] = each(
            mine, lambda _, call: subject.fault(host(*call.args, **call.kwargs), call, expected[id(call)])
        )

    with subject.hosted() as host:
        workers = [threading.Thread(target=work, args=(index, host)) for index in range(_THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return short([f"thread {index}: {finding}" for index, found in enumerate(findings) for finding in found])


def func_transforms(subject: Subject) -> list[str]:
    """``torch.func.grad`` and ``vmap`` work through the slot, whoever then serves them."""
    findings: list[str] = []
    calls = [(c, call) for c, call in subject.accepted("dtypes", differentiable=True) if call.args[0].dim() > 1][:2]
    with subject.hosted() as host:

        def by_grad(case: Case, call: Call) -> str | None:
            position = case.gradients[0]

            def loss(value: torch.Tensor) -> torch.Tensor:
                return host(*call.args[:position], value, *call.args[position + 1 :], **call.kwargs).float().sum()

            mine, leaves = call.with_gradients((position,))
            expected = torch.autograd.grad(subject.expected(mine).float().sum(), leaves)[0]
            return subject.yardstick.check_gradient(torch.func.grad(loss)(call.args[position]), expected)

        def by_vmap(case: Case, call: Call) -> str | None:
            axes = tuple(0 if i in case.gradients else None for i in range(len(call.args)))
            batch = [
                torch.stack([value, value * 2]) if i in case.gradients else value for i, value in enumerate(call.args)
            ]

            def one(*args: Any) -> torch.Tensor:
                return host(*args, **call.kwargs)

            result = torch.func.vmap(one, in_dims=axes)(*batch)
            for index in range(2):
                args = tuple(v[index] if i in case.gradients else v for i, v in enumerate(batch))
                if found := subject.fault(result[index], Call(args, call.kwargs)):
                    return found
            return None

        findings += [f"grad: {finding}" for finding in each(calls, by_grad)]
        findings += [f"vmap: {finding}" for finding in each(calls, by_vmap)]
    return findings


CHECKS: dict[str, Check] = {
    "refusals": refusals,
    **{f"parity_{group}": partial(parity, group=group) for group in GROUPS},
    "gradients": gradients,
    "gradcheck": gradcheck,
    "inputs_unchanged": inputs_unchanged,
    "outputs_written": outputs_written,
    "same_bits_twice": same_bits_twice,
    "autocast": autocast,
    "func_transforms": func_transforms,
    "copies": copies,
    "threads": threads,
}
"""By name, in the order in which they run."""
