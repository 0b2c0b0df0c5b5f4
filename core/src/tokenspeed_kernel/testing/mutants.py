# SPDX-License-Identifier: Apache-2.0
"""Proof that the examination of this very kernel can fail: copies of it with one fault each must be caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenspeed_kernel.testing import checks
from tokenspeed_kernel.testing.checks import Check
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Subject

__all__ = ["CHECKS"]

_Kernel = Callable[..., Any]


def _largest_off(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    """Return a result whose largest element is 6 % off: more than any tolerance, and less than a step of E4M3."""
    result = call(*args, **kwargs)
    size = result.detach().abs()
    size = torch.where(size.isfinite(), size, 0.0)
    return torch.where(size == size.amax(), result * 1.06, result) if result.numel() else result


def _last_unwritten(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs).detach()
    out = torch.empty(result.shape, dtype=result.dtype, device=result.device)
    out.view(-1)[:-1] = result.reshape(-1)[:-1]
    return out


def _nan_swallowed(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    return torch.nan_to_num(call(*args, **kwargs), nan=0.0, posinf=math.inf, neginf=-math.inf)


def _other_axis(call: _Kernel, x: torch.Tensor, scale: Any) -> Any:
    is_square = x.dim() == 2 and x.shape[0] == x.shape[1] and isinstance(scale, torch.Tensor) and scale.dim() == 2
    return call(x, scale.t() if is_square else scale)


def _gradient_off(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 1.06)
    return result


def _input_overwritten(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    result, first = call(*args, **kwargs), args[0].detach()
    if first.numel():
        first[(0,) * first.dim()] += 1.0
    return result


_MUTANTS: dict[str, tuple[Callable[..., Any], str, Check]] = {
    "a value off by 6 %": (_largest_off, "parity_shapes", partial(checks.parity, group="shapes")),
    "an element not written": (_last_unwritten, "outputs_written", checks.outputs_written),
    "NaN swallowed": (_nan_swallowed, "parity_nonfinite", partial(checks.parity, group="nonfinite")),
    "a gradient off by 6 %": (_gradient_off, "gradients", checks.gradients),
    "an input overwritten": (_input_overwritten, "inputs_unchanged", checks.inputs_unchanged),
}
_QUANT_MUTANTS: dict[str, tuple[Callable[..., Any], str, Check]] = {
    "a scale on the other axis": (_other_axis, "parity_channels", partial(checks.parity, group="channels")),
}


def catches_mutants(subject: Subject) -> list[str]:
    """Copies of the kernel, each with one fault put in, fail the check that is there for it."""
    mutants = _MUTANTS | (_QUANT_MUTANTS if subject.yardstick.straight_through else {})
    findings, caught = [], []
    for fault, (change, name, check) in mutants.items():
        changed = replace(subject.registration, implementation=partial(change, subject.call))
        try:
            found = check(Subject(changed, tolerance=subject.tolerance))
        except NotExamined:  # the kernel serves no call that would show it
            continue
        if any(": raised " in finding for finding in found):  # that the copy cannot run proves nothing
            findings.append(f"a copy of the kernel with {fault} cannot be examined: {found[0]}")
        elif found:
            caught.append(fault)
        else:
            findings.append(f"a copy of the kernel with {fault} passes {name}")
    if not caught and not findings:
        raise NotExamined("the kernel serves no call that would show a fault")
    subject.notes.append(f"caught {', '.join(caught)}")
    return findings


CHECKS: dict[str, Check] = {"catches_mutants": catches_mutants}
"""By name, in the order in which they run."""
