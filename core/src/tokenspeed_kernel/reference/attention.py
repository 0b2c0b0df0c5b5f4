# SPDX-License-Identifier: Apache-2.0
"""Attention oracles in plain PyTorch: what ``ms_deform_attn`` and ``sdpa`` compute, written to be read.

Neither is registered: both slots answer None when no accelerated kernel fits. Tests compare kernels against these
functions, and a host without a portable path of its own may call them. Both are differentiable by plain autograd.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import nullcontext

import torch

__all__ = ["ms_deform_attn", "sdpa", "validate_sdpa"]

_NEGATIVE_INFINITY = float("-inf")


def ms_deform_attn(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor | Sequence[Sequence[int]],
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the attention-weighted bilinear samples of every level, (N, Q, M*D) in ``value``'s dtype.

    Deformable DETR (ICLR 2021), equation 3, with the projections left to the caller. Pixel coordinates are
    RN(RN(loc * size) - 0.5), in float64 if value and locations are both float64 and in float32 otherwise; sums run in
    float64 for a float64 value and in float32 otherwise. A sample outside its level, or whose location is not finite,
    is zero whatever its weight, and its location and weight receive a zero gradient.

    Args:
        value: (N, S, M, D): the levels one after the other, each row-major; floating point.
        spatial_shapes: (H, W) of each of the L levels: an int64 or int32 tensor (L, 2) on any device, or pairs of
            ints; S is the sum of H * W. An empty level contributes zero. Reading a tensor on a GPU synchronises.
        sampling_locations: (N, Q, M, L, P, 2): (x, y), where 0 and 1 are the outer edges of the level.
        attention_weights: (N, Q, M, L, P).

    Raises:
        TypeError: if a dtype is not of the kind named above.
        ValueError: if shapes or devices disagree, or S is not the sum of H * W.

    >>> value = torch.arange(6.0).reshape(1, 6, 1, 1)
    >>> ms_deform_attn(value, [(2, 3)], torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1)).item()
    2.5
    """
    levels = _levels(spatial_shapes)
    _check_ms_deform_attn(value, levels, sampling_locations, attention_weights)
    is_double = value.dtype == torch.float64
    accumulate = torch.float64 if is_double else torch.float32
    position = torch.float64 if is_double and sampling_locations.dtype == torch.float64 else torch.float32

    # Sums over nothing: zeros that autograd connects to all three inputs even where no level has a pixel.
    nothing = sampling_locations[..., :0].sum((3, 4, 5)) + attention_weights[..., :0].sum((3, 4))
    out = (value[:, :0].sum(1)[:, None] + nothing[..., None]).to(accumulate)  # (N, Q, M, D)
    start = 0
    for index, (height, width) in enumerate(levels):
        pixels = value[:, start : start + height * width].to(accumulate)
        start += height * width
        if height * width:
            locations, weights = sampling_locations[:, :, :, index], attention_weights[:, :, :, index]
            out = out + _sample_level(pixels, height, width, locations.to(position), weights.to(accumulate))
    return out.flatten(2).to(value.dtype)


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v, (..., Lq, Ev) in ``q``'s dtype, as PyTorch documents its operator.

    Arithmetic is float64 for a float64 ``q`` and float32 otherwise, also under autocast, so half-precision scores
    cannot overflow. Masked positions get the weight zero and are multiplied all the same: a NaN or an infinity in
    their keys or values comes out as NaN, as in PyTorch. A row without any key left has zero weights and gradients.

    Args:
        q: (..., Lq, E).
        k: (..., Lk, E).
        v: (..., Lk, Ev).
        attn_mask: broadcasts to (..., Lq, Lk). Bool: True keeps the position. Floating point: added to the scores.
        dropout_p: probability of zeroing a weight; always applied, so pass 0 in evaluation.
        is_causal: query i sees keys 0 to i (aligned top-left), also where Lq and Lk differ.
        scale: factor on the scores; 1 / sqrt(E) by default.
        enable_gqa: repeat the heads (third axis from the end) of ``k`` and of ``v`` up to those of ``q``.

    Raises:
        TypeError: if ``attn_mask`` is neither bool nor floating point.

    >>> q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    >>> sdpa(q, k, v, is_causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    validate_sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa:
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    size = q.shape[-1]
    factor = scale if scale is not None else (1 / math.sqrt(size) if size else 1.0)

    device = q.device.type
    # Autocast would turn the products back into half precision.
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        scores = (q.to(accumulate) * factor) @ k.to(accumulate).transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            scores = scores + _additive(attn_mask, accumulate)
        masked = (scores == _NEGATIVE_INFINITY).all(-1, keepdim=True)
        weights = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
        if dropout_p:
            weights = torch.nn.functional.dropout(weights, dropout_p)
        return (weights @ v.to(accumulate)).to(q.dtype)


def _sample_level(
    pixels: torch.Tensor, height: int, width: int, locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted samples of one level, (N, Q, M, D).

    ``pixels`` (N, H*W, M, D) and ``weights`` (N, Q, M, P) have the dtype of the sums, ``locations`` (N, Q, M, P, 2)
    that of the coordinates.
    """
    pixels = pixels.transpose(1, 2)  # (N, M, H*W, D)
    x = locations[..., 0] * width - 0.5
    y = locations[..., 1] * height - 0.5
    # False for NaN. Written on the float coordinate, before any conversion to an integer, which is undefined there.
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    x, y = torch.where(inside, x, 0.0), torch.where(inside, y, 0.0)
    left, top = x.detach().floor(), y.detach().floor()
    right_share, lower_share = (x - left).to(pixels.dtype), (y - top).to(pixels.dtype)
    column, row = left.long(), top.long()

    samples = torch.zeros((), dtype=pixels.dtype, device=pixels.device)
    for j, share_y in enumerate((1 - lower_share, lower_share)):
        for i, share_x in enumerate((1 - right_share, right_share)):
            corner = _pixels_at(pixels, (height, width), row + j, column + i, inside)
            samples = samples + (share_y * share_x)[..., None] * corner
    return (torch.where(inside, weights, 0.0)[..., None] * samples).sum(3)


def _pixels_at(
    pixels: torch.Tensor, size: tuple[int, int], row: torch.Tensor, column: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor:
    """Return ``pixels`` (N, M, H*W, D) at (row, column), each (N, Q, M, P), as (N, Q, M, P, D); zero off the map."""
    height, width = size
    valid = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    index = torch.where(valid, row * width + column, 0).transpose(1, 2)  # (N, M, Q, P)
    channels = pixels.shape[-1]
    found = pixels.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, channels))
    found = found.unflatten(2, index.shape[2:]).transpose(1, 2)
    return torch.where(valid[..., None], found, 0.0)


def _levels(spatial_shapes: torch.Tensor | Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    if isinstance(spatial_shapes, torch.Tensor):
        if spatial_shapes.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"spatial_shapes must be int64 or int32, got {spatial_shapes.dtype}")
        if spatial_shapes.ndim != 2 or spatial_shapes.shape[1] != 2:
            raise ValueError(f"spatial_shapes must be (L, 2), got {tuple(spatial_shapes.shape)}")
        spatial_shapes = spatial_shapes.tolist()
    levels = []
    for pair in spatial_shapes:
        if len(pair) != 2:
            raise ValueError(f"spatial_shapes must hold (H, W) pairs, got {pair!r}")
        height, width = operator.index(pair[0]), operator.index(pair[1])
        if height < 0 or width < 0:
            raise ValueError(f"spatial_shapes must not be negative, got {(height, width)}")
        levels.append((height, width))
    return levels


def _check_ms_deform_attn(
    value: torch.Tensor, levels: list[tuple[int, int]], locations: torch.Tensor, weights: torch.Tensor
) -> None:
    named = {"value": value, "sampling_locations": locations, "attention_weights": weights}
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if len({tensor.device for tensor in named.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"all inputs must be on one device, got {devices}")
    if value.ndim != 4:
        raise ValueError(f"value must be (N, S, M, D), got {tuple(value.shape)}")
    if locations.ndim != 6:
        raise ValueError(f"sampling_locations must be (N, Q, M, L, P, 2), got {tuple(locations.shape)}")
    batch, pixels, heads, _ = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    expected = (batch, queries, heads, len(levels), points, 2)
    if tuple(locations.shape) != expected:
        raise ValueError(
            f"sampling_locations must be {expected} for value {tuple(value.shape)} and {len(levels)} levels, "
            f"got {tuple(locations.shape)}"
        )
    if tuple(weights.shape) != expected[:-1]:
        raise ValueError(f"attention_weights must be {expected[:-1]}, got {tuple(weights.shape)}")
    total = sum(height * width for height, width in levels)
    if total != pixels:
        raise ValueError(f"spatial_shapes {levels} hold {total} pixels, value has {pixels}")


def validate_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Raise what :func:`sdpa` documents if these arguments are at fault, else return None."""
    _check_operands(q, k, v, dropout_p)
    heads = 3 if enable_gqa else 2  # with enable_gqa the head axis of k and v need not broadcast
    if enable_gqa:
        for name, tensor in (("k", k), ("v", v)):
            _check_heads(q, name, tensor)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    try:
        batch = torch.broadcast_shapes(q.shape[:-heads], k.shape[:-heads])
        torch.broadcast_shapes(batch, v.shape[:-heads])
    except RuntimeError as error:
        raise ValueError(f"the leading axes must broadcast, got {shapes}") from error
    if attn_mask is not None:
        _check_mask(attn_mask, torch.Size((*batch, *q.shape[-heads:-1], k.shape[-2])), is_causal, q.device)


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not all(tensor.is_floating_point() for tensor in (q, k, v)):
        raise TypeError(f"q, k and v must be floating point, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(f"q, k and v must have one dtype outside autocast, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"q, k and v need at least two axes, got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same last axis, got {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"k and v must have the same length, got {shapes}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")


def _check_heads(q: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    if q.ndim < 3 or tensor.ndim < 3:
        raise ValueError(f"enable_gqa needs a head axis, got q {tuple(q.shape)} and {name} {tuple(tensor.shape)}")
    wanted, heads = q.shape[-3], tensor.shape[-3]
    if not heads or wanted % heads:
        raise ValueError(f"enable_gqa needs the heads of {name} to divide those of q, got {heads} and {wanted}")


def _check_mask(mask: torch.Tensor, scores: torch.Size, is_causal: bool, device: torch.device) -> None:
    if is_causal:
        raise ValueError("attn_mask and is_causal exclude each other: merge the causal mask into attn_mask")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating point, got {mask.dtype}")
    if mask.device != device:
        raise ValueError(f"attn_mask must be on the device of q, got {mask.device} and {device}")
    try:
        fits = torch.broadcast_shapes(mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"attn_mask {tuple(mask.shape)} must broadcast to the scores {tuple(scores)}")


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what to add to the scores. Adding -inf, unlike filling it in, keeps a NaN score visible, as in PyTorch."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, _NEGATIVE_INFINITY)
