# SPDX-License-Identifier: Apache-2.0
"""What each slot is examined with: named calls in groups, made from the slot's contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

__all__ = ["FLOATS", "GROUPS", "LAYOUTS", "Call", "Case", "dtype_name", "grid_of", "random"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

GROUPS: Mapping[str, str] = {
    "shapes": "sizes 0, 1, prime, no multiple of a block, and large",
    "dtypes": "every dtype that the slot takes",
    "strides": "transposed, sliced, expanded, channels-last, flipped and negated inputs",
    "ties": "values halfway between two of the grid",
    "saturation": "values at and beyond the largest",
    "nonfinite": "NaN and infinities",
    "tiny": "zeros of both signs, subnormal numbers",
    "scales": "magnitudes from 1e-30 to 1e30",
    "channels": "a scale for each channel of each axis, or each group",
    "options": "masks, causality, heads, levels, ranges, bits: the other arguments",
}
"""The groups of cases, each a check of its own, with what they hold."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the arguments that are tensors."""
        return (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor))

    def with_gradients(self, positions: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
        """Return the call with fresh leaves of the same strides at ``positions``, and these leaves."""
        args = list(self.args)
        for position in positions:
            args[position] = args[position].detach().requires_grad_()
        return Call(tuple(args), self.kwargs), [args[position] for position in positions]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call by name; built anew, from its own seed, each time."""

    name: str
    group: str
    build: Callable[[str], Call]
    """Makes the call on a device."""
    gradients: tuple[int, ...] = ()
    """Positions of the arguments whose gradients are compared; empty where they are not."""
    malformed: bool = False
    """Whether the slot has no answer to it: it may only be refused, or raise."""


_GRIDS: Mapping[str, str] = {
    "fake_quant_fp8": "tokenspeed_kernel.testing.grid_quant",
    "fake_quant_int8_affine": "tokenspeed_kernel.testing.grid_integer",
    "fake_quant_int8_per_channel": "tokenspeed_kernel.testing.grid_integer",
    "fake_quant_int_grouped": "tokenspeed_kernel.testing.grid_integer",
    "fake_quant_mxfp4_dynamic": "tokenspeed_kernel.testing.grid_block",
    "fake_quant_mxfp4_weight": "tokenspeed_kernel.testing.grid_block",
    "fake_quant_nvfp4_dynamic": "tokenspeed_kernel.testing.grid_block",
    "fake_quant_nvfp4_weight": "tokenspeed_kernel.testing.grid_block",
    "ms_deform_attn": "tokenspeed_kernel.testing.grid_attention",
    "sdpa": "tokenspeed_kernel.testing.grid_attention",
}


def grid_of(slot: str) -> tuple[Case, ...]:
    """Return the cases of a slot; none for one that the kit does not know."""
    if slot not in _GRIDS:
        return ()
    cases: tuple[Case, ...] = getattr(import_module(_GRIDS[slot]), slot)()
    return cases


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return float32 values of every magnitude from 1e-3 to 1e3, the same ones on every machine."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 3, shape[-1]) if shape and shape[-1] > 1 else torch.ones(())
    return torch.randn(shape, generator=generator) * spread


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0, dtype=x.dtype, device=x.device)
    room[..., 1::2] = x
    return room[..., 1::2]


def _offset(x: torch.Tensor) -> torch.Tensor:
    room = torch.full((x.numel() + 1,), 7.0, dtype=x.dtype, device=x.device)
    room[1:] = x.reshape(-1)
    return room[1:].reshape(x.shape)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1, :].expand(x.shape)


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-x)  # what the imaginary part of a conjugate is


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else _transposed(x)


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": _transposed,
    "sliced": _sliced,
    "offset": _offset,
    "expanded": _expanded,
    "channels-last": _channels_last,
    "flipped": _flipped,
    "negated": _negated,
}
"""Each returns a tensor with the shape and, but for ``expanded`` and ``flipped``, the values of its argument."""
