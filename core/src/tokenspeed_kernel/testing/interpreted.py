# SPDX-License-Identifier: Apache-2.0
"""The check of Triton kernels on a machine without a GPU: their logic, through Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from tokenspeed_kernel.testing import elsewhere
from tokenspeed_kernel.testing.checks import Check, raised, short
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Declined, Subject

__all__ = ["CHECKS", "compare", "triton_functions"]

_SECONDS = 20.0
_LARGEST = 20_000  # elements: the interpreter runs one program after the other
_DTYPES = (torch.float32, torch.float16)
_PARTS = 8
_REFUSALS = (ValueError, NotImplementedError)


def interpreted(subject: Subject) -> list[str]:
    """Without a GPU, in Triton's interpreter, results equal the reference's. Runs in a process of its own."""
    if torch.cuda.is_available():
        raise NotExamined("a CUDA device is there: the compiled kernel is examined")
    if find_spec("triton") is None:
        raise NotExamined("Triton is not installed")
    functions = list(triton_functions(subject.registration.load()))
    if not functions:
        raise NotExamined("the kernel is not made of Triton functions")
    if any("float8" in _source(function) for function in functions):
        raise NotExamined("it uses a float8 dtype, and Triton's interpreter rounds to those wrongly")
    return elsewhere.ask(subject, "interpreted", TRITON_INTERPRET="1")


def triton_functions(implementation: Callable[..., Any]) -> Iterator[Any]:
    """Yield the Triton functions in the module of an implementation, and in those of its package that it imports."""
    while isinstance(implementation, functools.partial):
        implementation = implementation.func
    first = getattr(implementation, "__module__", None) or ""  # a function in C may have none
    package = first.partition(".")[0]
    waiting = [] if package == "torch" else [first]  # it has Triton functions, and they are no kernel's own
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] != package:
            continue
        seen.add(name)
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if type(value).__module__.startswith("triton.runtime."):
                yield value
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str):
                waiting.append(home)


def _source(function: Any) -> str:
    while hasattr(function, "fn"):  # autotuners and heuristics wrap the function that Triton wraps
        function = function.fn
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def compare(subject: Subject) -> list[str]:
    """Run the bare implementation on CPU tensors, in a process whose Triton interprets, for as long as time allows."""
    call_kernel = subject.registration.load()
    cases = [
        case
        for part in range(_PARTS)  # so that whatever there is time for is spread over the whole grid
        for case in [case for case in subject.grid if not case.malformed][part::_PARTS]
    ]
    findings: list[str] = []
    ran = 0
    refusals: list[str] = []
    started = time.monotonic()
    for case in cases:
        if time.monotonic() - started > _SECONDS:
            subject.notes.append(f"stopped after {_SECONDS:.0f} s")
            break
        call = case.build("cpu")
        tensors = [tensor for tensor in call.tensors() if tensor.is_floating_point()]
        if call.args[0].dtype not in _DTYPES or any(t.dtype == torch.bfloat16 for t in tensors):
            continue
        if any(tensor.numel() > _LARGEST for tensor in tensors):
            continue
        try:
            result = call_kernel(*call.args, **call.kwargs)
            if result is NotImplemented:
                raise Declined
            found = subject.fault(result, call)
        except (*_REFUSALS, Declined) as refusal:
            refusals.append(raised(refusal) if str(refusal) else "returned NotImplemented")
            continue
        except Exception as error:  # noqa: BLE001 -- whatever a third party's kernel raises
            found = raised(error)
        ran += 1
        if found is not None:
            findings.append(f"{case.group}, {case.name}: {found}")
    if not ran and not refusals:
        raise NotExamined("the slot has no such calls")
    if not ran:
        raise NotExamined(f"refuses each of {len(refusals)} calls on CPU tensors, the first: {refusals[0]}")
    subject.notes.append(f"{ran} calls in float32 and float16; the interpreter truncates to bfloat16")
    if refusals:
        subject.notes.append(f"{len(refusals)} calls refused, the first: {refusals[0]}")
    return short(findings)


CHECKS: dict[str, Check] = {"interpreted": interpreted}
"""By name."""
