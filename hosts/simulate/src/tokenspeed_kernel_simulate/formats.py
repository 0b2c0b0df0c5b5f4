# SPDX-License-Identifier: Apache-2.0
"""The formats by name: which slot computes each, with which arguments, and what an element of it costs in bits.

A weight comes as a matrix with a row per output channel: scales, groups and blocks lie along the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_kernel import Slot, slot

__all__ = ["ActivationFormat", "SlotCall", "WeightFormat", "activation_format", "weight_format"]

SlotCall = tuple[Slot, tuple[Any, ...]]
"""A slot, and the arguments to call it with."""

_E4M3_MAX = 448.0
_GROUP_SIZE = 128

_FP8 = slot("fake_quant_fp8")
_INT8_PER_CHANNEL = slot("fake_quant_int8_per_channel")
_INT8_AFFINE = slot("fake_quant_int8_affine")
_INT_GROUPED = slot("fake_quant_int_grouped")
_NVFP4_WEIGHT = slot("fake_quant_nvfp4_weight")
_NVFP4_DYNAMIC = slot("fake_quant_nvfp4_dynamic")
_MXFP4_WEIGHT = slot("fake_quant_mxfp4_weight")
_MXFP4_DYNAMIC = slot("fake_quant_mxfp4_dynamic")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """What an element costs: its own bits, and its share of the scales."""

    name: str
    element_bits: int
    block: int | None  # elements that share a scale; None: a whole row
    scale_bits: int
    tensor_bits: int = 0  # of one more scale, for the tensor

    def bits(self, rows: int, columns: int) -> int:
        """Return the bits of a matrix with its scales, a short last block included."""
        blocks = 1 if self.block is None else -(-columns // self.block)
        return rows * (columns * self.element_bits + blocks * self.scale_bits) + self.tensor_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat(_Format):
    """A format of weights, whose scales are found anew at each call: a weight in training changes."""

    call: Callable[[torch.Tensor, WeightFormat], SlotCall]  # of the matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationFormat(_Format):
    """A format of activations. Scales of blocks are found at each call; a static format has one fixed range."""

    slot: Slot
    fixed: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]] | None  # arguments from the range; static


def _amax(rows: torch.Tensor, *axes: int) -> torch.Tensor:
    """Return the largest magnitudes, in float32 or float64. NaN does not count, and infinity as the largest finite."""
    magnitudes = rows.detach().abs().nan_to_num(nan=0.0)
    return magnitudes.amax(axes, keepdim=bool(axes)).to(torch.promote_types(rows.dtype, torch.float32))


def _fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    # By a tensor: CUDA would turn a Python number into a product with its reciprocal, and the scales of a CPU and a GPU
    # would differ in the last bit.
    return amax / torch.full_like(amax, _E4M3_MAX)


def _fp8(rows: torch.Tensor, _: WeightFormat) -> SlotCall:
    return _FP8, (rows, _fp8_scale(_amax(rows, 1)))


def _int8(rows: torch.Tensor, _: WeightFormat) -> SlotCall:
    return _INT8_PER_CHANNEL, (rows, 0)


def _int_grouped(rows: torch.Tensor, wanted: WeightFormat) -> SlotCall:
    return _INT_GROUPED, (rows, wanted.element_bits, wanted.block)


def _nvfp4(rows: torch.Tensor, _: WeightFormat) -> SlotCall:
    return _NVFP4_WEIGHT, (rows, _amax(rows))


def _mxfp4(rows: torch.Tensor, _: WeightFormat) -> SlotCall:
    return _MXFP4_WEIGHT, (rows,)


def _fp8_fixed(lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_fp8_scale(torch.maximum(-lo, hi)),)


def _int8_fixed(lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return lo, hi


_WEIGHTS = {
    known.name: known
    for known in (
        WeightFormat(name="fp8", element_bits=8, block=None, scale_bits=32, call=_fp8),
        WeightFormat(name="int8", element_bits=8, block=None, scale_bits=32, call=_int8),
        *(
            WeightFormat(name=f"int{bits}", element_bits=bits, block=_GROUP_SIZE, scale_bits=32, call=_int_grouped)
            for bits in (7, 6, 5, 4, 3, 2)
        ),
        WeightFormat(name="nvfp4", element_bits=4, block=16, scale_bits=8, tensor_bits=32, call=_nvfp4),
        WeightFormat(name="mxfp4", element_bits=4, block=32, scale_bits=8, call=_mxfp4),
    )
}
# The fixed scale of a static format and the one of an nvfp4 tensor are shared by too many elements to count.
_ACTIVATIONS = {
    known.name: known
    for known in (
        ActivationFormat(name="fp8", element_bits=8, block=None, scale_bits=0, slot=_FP8, fixed=_fp8_fixed),
        ActivationFormat(name="int8", element_bits=8, block=None, scale_bits=0, slot=_INT8_AFFINE, fixed=_int8_fixed),
        ActivationFormat(name="nvfp4", element_bits=4, block=16, scale_bits=8, slot=_NVFP4_DYNAMIC, fixed=None),
        ActivationFormat(name="mxfp4", element_bits=4, block=32, scale_bits=8, slot=_MXFP4_DYNAMIC, fixed=None),
    )
}


def weight_format(name: str | None, group_size: int | None) -> WeightFormat | None:
    """Return the format of weights called ``name``; None is none.

    Raises:
        ValueError: there is no such format, or ``group_size`` is no positive integer or the format has no groups.
    """
    if name is not None and name not in _WEIGHTS:
        raise ValueError(f"weights {name!r} is no format; use one of {', '.join(map(repr, _WEIGHTS))}, or None")
    known = None if name is None else _WEIGHTS[name]
    if group_size is None:
        return known
    if known is None or not known.name.startswith("int"):
        raise ValueError(
            f"group_size {group_size!r} does not go with weights {name!r}; only 'int2' to 'int8' have groups"
        )
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"group_size must be an integer, 1 or more, got {group_size!r}; 128 and 32 are usual")
    return replace(known, block=group_size, call=_int_grouped)


def activation_format(name: str | None) -> ActivationFormat | None:
    """Return the format of activations called ``name``; None is none.

    Raises:
        ValueError: there is no such format.
    """
    if name is None:
        return None
    if name not in _ACTIVATIONS:
        raise ValueError(f"activations {name!r} is no format; use one of {', '.join(map(repr, _ACTIVATIONS))}, or None")
    return _ACTIVATIONS[name]
