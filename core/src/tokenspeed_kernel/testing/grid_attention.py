# SPDX-License-Identifier: Apache-2.0
"""Calls of the attention slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tokenspeed_kernel.testing.grid import FLOATS, LAYOUTS, Call, Case, dtype_name

__all__ = ["ms_deform_attn", "sdpa"]

_Levels = Sequence[tuple[int, int]]


def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- sdpa -----------------------------------------------------------------------------------------------------------


def sdpa() -> tuple[Case, ...]:
    """Return the cases of ``sdpa(q, k, v, *, attn_mask, dropout_p, is_causal, scale, enable_gqa)``."""
    return (*_sdpa_shapes(), *_sdpa_strides(), *_sdpa_options(), *_sdpa_values(), *_sdpa_malformed())


def _attention(
    group: str,
    name: str,
    q: tuple[int, ...],
    k: tuple[int, ...] | None = None,
    *,
    values: int | None = None,
    dtype: torch.dtype = torch.float32,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    only: int | None = None,
    gradient: bool = True,
    malformed: bool = False,
    **options: Any,
) -> Case:
    keys = q if k is None else k

    def build(device: str) -> Call:
        shapes = (q, keys, (*keys[:-1], keys[-1] if values is None else values))
        tensors = [_normal(shape, seed).to(device, dtype) for seed, shape in enumerate(shapes)]
        if change is not None:
            tensors = [change(t) if only in (None, i) else t for i, t in enumerate(tensors)]
        return Call(tuple(tensors), {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()})

    return Case(name=name, group=group, build=build, gradients=(0, 1, 2) if gradient else (), malformed=malformed)


def _sdpa_shapes() -> Iterator[Case]:
    for shape in ((1, 1, 1, 8), (2, 3, 17, 16), (1, 2, 127, 64), (1, 1, 128, 32), (1, 2, 257, 64), (5, 8), (3, 7, 24)):
        yield _attention("shapes", f"q{list(shape)}", shape)
    for q, k in (((1, 2, 5, 16), (1, 2, 130, 16)), ((1, 2, 130, 16), (1, 2, 5, 16)), ((2, 2, 1, 8), (1, 2, 9, 8))):
        yield _attention("shapes", f"q{list(q)}, k{list(k)}", q, k)
    for q, k in (((0, 2, 4, 8), (0, 2, 4, 8)), ((1, 2, 0, 8), (1, 2, 4, 8)), ((1, 2, 4, 8), (1, 2, 0, 8))):
        yield _attention("shapes", f"q{list(q)}, k{list(k)}", q, k, gradient=False)
    yield _attention("shapes", "v of its own width", (1, 2, 9, 16), values=5)
    for dtype in FLOATS:
        yield _attention("dtypes", dtype_name(dtype), (2, 2, 33, 32), dtype=dtype)
        yield _attention("dtypes", f"{dtype_name(dtype)}, causal", (1, 2, 65, 16), dtype=dtype, is_causal=True)


def _sdpa_strides() -> Iterator[Case]:
    for name, layout in LAYOUTS.items():
        yield _attention("strides", name, (2, 3, 17, 16), change=layout)
    heads_last: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731 -- one of a table in spirit
    yield _attention("strides", "heads beside channels", (2, 3, 17, 16), change=heads_last)


def _sdpa_options() -> Iterator[Case]:
    keep = _normal((9, 11), 3) > 0
    keep[:, 0] = True
    masked = keep.clone()
    masked[2] = False
    q, k = (2, 3, 9, 8), (2, 3, 11, 8)
    masks = {
        "bool mask": keep,
        "bool mask, a row masked": masked,
        "float mask": _normal((9, 11), 4),
        "float mask, a row masked": torch.zeros(9, 11).masked_fill(~masked, -math.inf),
        "mask per batch": keep[None, None].repeat(2, 1, 1, 1),
        "mask of keys": keep[:1],
        "expanded mask": keep.expand(2, 3, 9, 11),
    }
    for name, mask in masks.items():
        yield _attention("options", name, q, k, attn_mask=mask)
    for dtype in (torch.float16, torch.bfloat16):
        yield _attention("options", f"a row masked, {dtype_name(dtype)}", q, k, dtype=dtype, attn_mask=masked)
    yield _attention("options", "causal, more keys", (1, 2, 9, 8), (1, 2, 13, 8), is_causal=True)
    yield _attention("options", "causal, fewer keys", (1, 2, 13, 8), (1, 2, 9, 8), is_causal=True)
    for scale in (0.0, 1.0, -0.5):
        yield _attention("options", f"scale {scale}", (1, 2, 9, 8), scale=scale)
    yield _attention("options", "grouped queries", (2, 6, 9, 8), (2, 2, 11, 8), enable_gqa=True)


def _sdpa_values() -> Iterator[Case]:
    for size in (1e-30, 1e-6, 30.0):
        yield _attention("scales", f"q and k of {size}", (1, 2, 17, 8), change=lambda t, n=size: t * n, gradient=False)  # type: ignore[misc]  # mypy infers no lambda with a default
    half = torch.float16
    yield _attention(
        "scales",
        "float16 scores past 65504",
        (1, 1, 9, 64),
        dtype=half,
        change=lambda t: t * 100,
        scale=1.0,
        gradient=False,
    )

    # A NaN in a query is left out: the contract is silent, and PyTorch's own CPU kernel answers zeros there.
    def spoiled(t: torch.Tensor) -> torch.Tensor:
        t[..., 1, 0] = math.nan
        return t

    for name, position in (("key", 1), ("value", 2)):
        yield _attention("nonfinite", f"NaN in a {name}", (1, 2, 9, 8), change=spoiled, only=position, gradient=False)


def _sdpa_malformed() -> Iterator[Case]:
    q = (1, 2, 4, 8)
    yield _attention("malformed", "k of another head size", q, (1, 2, 4, 6), malformed=True)
    yield _attention("malformed", "int mask", q, attn_mask=torch.ones(4, 4, dtype=torch.int64), malformed=True)
    yield _attention("malformed", "mask that enlarges", q, attn_mask=torch.ones(5, 4, dtype=torch.bool), malformed=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    yield _attention("malformed", "mask and is_causal", q, attn_mask=mask, is_causal=True, malformed=True)


# --- ms_deform_attn -------------------------------------------------------------------------------------------------

_LEVELS = ((7, 5), (4, 3))


def ms_deform_attn() -> tuple[Case, ...]:
    """Return the cases of ``ms_deform_attn(value, spatial_shapes, sampling_locations, attention_weights)``."""
    return (*_deform_shapes(), *_deform_strides(), *_deform_values(), *_deform_malformed())


def _deform(
    group: str,
    name: str,
    *,
    levels: _Levels = _LEVELS,
    sizes: tuple[int, int, int, int, int] = (2, 13, 3, 8, 4),
    dtype: torch.dtype = torch.float32,
    change: Callable[[list[torch.Tensor]], None] | None = None,
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None,
    tensor_shapes: bool = True,
    gradients: tuple[int, ...] = (0, 2, 3),
    malformed: bool = False,
) -> Case:
    """Return a case; ``sizes`` are N, Q, M, D, P. No location is near a whole pixel unless ``change`` puts it there."""

    def build(device: str) -> Call:
        batch, queries, heads, channels, points = sizes
        generator = torch.Generator().manual_seed(0)
        value = torch.randn(batch, sum(h * w for h, w in levels), heads, channels, generator=generator)
        shape = (batch, queries, heads, len(levels), points)
        extent = torch.tensor([[w, h] for h, w in levels], dtype=torch.float32).reshape(-1, 1, 2)
        pixel = (torch.rand(*shape, 2, generator=generator) * (extent + 2) - 1.5).floor()  # from off the map to off it
        fraction = torch.rand(*shape, 2, generator=generator) * 0.6 + 0.2  # halves move a location by a tenth of it
        weights = torch.randn(shape, generator=generator)
        tensors = [value, (pixel + fraction + 0.5) / extent, weights]
        if change is not None:
            change(tensors)
        tensors = [tensor.to(device, dtype) for tensor in tensors]
        if layout is not None:
            tensors = [layout(tensor) for tensor in tensors]
        shapes: object = torch.tensor(levels, device=device).reshape(-1, 2) if tensor_shapes else list(levels)
        return Call((tensors[0], shapes, *tensors[1:]))

    return Case(name=name, group=group, build=build, gradients=gradients, malformed=malformed)


def _deform_shapes() -> Iterator[Case]:
    for sizes in ((1, 1, 1, 1, 1), (1, 7, 3, 17, 2), (2, 13, 8, 32, 4), (1, 300, 4, 33, 4), (3, 5, 1, 64, 1)):
        yield _deform("shapes", f"N, Q, M, D, P = {sizes}", sizes=sizes)
    for sizes in ((0, 3, 2, 4, 2), (1, 0, 2, 4, 2), (1, 3, 2, 4, 0)):
        yield _deform("shapes", f"N, Q, M, D, P = {sizes}", sizes=sizes, gradients=())
    for dtype in FLOATS:
        exact = dtype in (torch.float32, torch.float64)  # the halves of a location may be whole pixels
        yield _deform(
            "dtypes", dtype_name(dtype), dtype=dtype, tensor_shapes=False, gradients=(0, 2, 3) if exact else (0, 3)
        )
    for levels in ([(1, 1)], [(5, 1), (1, 9)], [(4, 4)] * 5, [(3, 2), (0, 4), (2, 2)]):
        yield _deform("options", f"levels {levels}", levels=levels)


def _deform_strides() -> Iterator[Case]:
    for name, layout in LAYOUTS.items():
        if name != "flipped":  # flipped locations are (y, x), no layout
            yield _deform(
                "strides", name, layout=layout, gradients=() if name in ("negated", "expanded") else (0, 2, 3)
            )


def _deform_values() -> Iterator[Case]:
    def edges(tensors: list[torch.Tensor]) -> None:
        flat = tensors[1].view(-1, 2)
        flat[:8] = torch.tensor(
            [[0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.1, 0.125], [-1, 0.5], [2, 0.5], [-1e30, 0], [1e30, 1]]
        )

    def nonfinite(tensors: list[torch.Tensor]) -> None:
        flat = tensors[1].view(-1, 2)
        flat[:4] = torch.tensor([[math.nan, 0.5], [0.5, math.inf], [-math.inf, 0.5], [math.nan, math.nan]])
        tensors[2].view(-1)[:2] = math.nan  # of a location that is not finite: it counts as zero

    yield _deform("options", "locations on edges and far outside", change=edges, gradients=(0, 3))

    def spoiled(tensors: list[torch.Tensor]) -> None:
        tensors[0][:, ::9, :, 0] = math.nan

    yield _deform("nonfinite", "NaN in pixels", change=spoiled, gradients=())
    yield _deform("nonfinite", "locations, and NaN weights there", change=nonfinite, gradients=(0,))
    for size in (1e-30, 1e-6, 1e6, 1e30):

        def scaled(tensors: list[torch.Tensor], size: float = size) -> None:
            tensors[0] *= size

        yield _deform("scales", f"values of {size}", change=scaled, gradients=())


def _deform_malformed() -> Iterator[Case]:
    def cut(tensors: list[torch.Tensor]) -> None:
        tensors[0] = tensors[0][:, :-1]

    def fewer(tensors: list[torch.Tensor]) -> None:
        tensors[2] = tensors[2][:, :-1]

    yield _deform("malformed", "a pixel too few", change=cut, gradients=(), malformed=True)
    yield _deform("malformed", "a query's weights too few", change=fewer, gradients=(), malformed=True)
