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


def _scale_of_columns(call: _Kernel, x: torch.Tensor, scale: Any) -> Any:
    is_square = x.dim() == 2 and x.shape[0] == x.shape[1] and isinstance(scale, torch.Tensor) and scale.dim() == 2
    return call(x, scale.t() if is_square else scale)


def _channels_of_columns(call: _Kernel, weight: torch.Tensor, ch_axis: int = 0, scale: Any = None) -> Any:
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
        return call(weight, ch_axis, scale)
    return call(weight.t().contiguous(), ch_axis, scale).t()


def _group_scales_of_columns(
    call: _Kernel, weight: torch.Tensor, bits: int, group_size: int, scale: torch.Tensor | None = None
) -> Any:
    is_square = scale is not None and scale.dim() == 2 and scale.shape[0] == scale.shape[1]
    return call(weight, bits, group_size, scale.t().contiguous() if scale is not None and is_square else scale)


def _blocks_shifted(call: _Kernel, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return call(x.roll(1, -1), *args, **kwargs).roll(-1, -1)


def _maximum_of_a_half(call: _Kernel, x: torch.Tensor) -> Any:
    halves = [half for half in x.tensor_split(2) if half.numel()]
    return torch.cat([call(half) for half in halves]) if len(halves) > 1 else call(x)


def _maximum_not_the_given(call: _Kernel, weight: torch.Tensor, tensor_amax: Any) -> Any:
    return call(weight, weight.detach().abs().amax().float())


def _range_mirrored(call: _Kernel, x: torch.Tensor, lo: Any, hi: Any, scalars: bool = False) -> Any:
    return call(x, -hi, -lo, scalars)


def _gradient_off(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient * 1.06)
    return result


def _gradient_unmasked(call: _Kernel, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = call(x, *args, **kwargs)
    return result.detach() + (x - x.detach()) if result.requires_grad else result


def _input_overwritten(call: _Kernel, *args: Any, **kwargs: Any) -> Any:
    result, first = call(*args, **kwargs), args[0].detach()
    if first.numel():
        first[(0,) * first.dim()] += 1.0
    return result


_Mutant = tuple[Callable[..., Any], str, Check]


def _in_parity(change: Callable[..., Any], group: str) -> _Mutant:
    return change, f"parity_{group}", partial(checks.parity, group=group)


_UNMASKED: _Mutant = (_gradient_unmasked, "gradients", checks.gradients)
_SHIFTED = _in_parity(_blocks_shifted, "shapes")

_MUTANTS: dict[str, _Mutant] = {
    "a value off by 6 %": _in_parity(_largest_off, "shapes"),
    "an element not written": (_last_unwritten, "outputs_written", checks.outputs_written),
    "NaN swallowed": _in_parity(_nan_swallowed, "nonfinite"),
    "a gradient off by 6 %": (_gradient_off, "gradients", checks.gradients),
    "an input overwritten": (_input_overwritten, "inputs_unchanged", checks.inputs_unchanged),
}
_MUTANTS_OF: dict[str, dict[str, _Mutant]] = {
    "fake_quant_fp8": {"a scale on the other axis": _in_parity(_scale_of_columns, "channels")},
    "fake_quant_int8_affine": {
        "a range mirrored": _in_parity(_range_mirrored, "options"),
        "a gradient without its mask": _UNMASKED,
    },
    "fake_quant_int8_per_channel": {
        "channels on the other axis": _in_parity(_channels_of_columns, "channels"),
        "a gradient without its mask": _UNMASKED,
    },
    "fake_quant_int_grouped": {
        "groups shifted by one": _SHIFTED,
        "scales on the other axis": _in_parity(_group_scales_of_columns, "channels"),
    },
    "fake_quant_mxfp4_dynamic": {"blocks shifted by one": _SHIFTED},
    "fake_quant_mxfp4_weight": {"blocks shifted by one": _SHIFTED},
    "fake_quant_nvfp4_dynamic": {
        "blocks shifted by one": _SHIFTED,
        "a maximum of half the tensor": _in_parity(_maximum_of_a_half, "shapes"),
    },
    "fake_quant_nvfp4_weight": {
        "blocks shifted by one": _SHIFTED,
        "a maximum that is not the given one": _in_parity(_maximum_not_the_given, "options"),
    },
}
"""What only some slots can get wrong."""


def catches_mutants(subject: Subject) -> list[str]:
    """Copies of the kernel, each with one fault put in, fail the check that is there for it."""
    mutants = _MUTANTS | _MUTANTS_OF.get(subject.slot_name, {})
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
