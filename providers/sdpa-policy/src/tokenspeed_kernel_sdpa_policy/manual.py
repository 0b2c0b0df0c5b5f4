# SPDX-License-Identifier: Apache-2.0
"""Attention in primitive ops: what a graph capture records in place of the fused op.

The meaning is that of ``torch.nn.functional.scaled_dot_product_attention`` as PyTorch documents it. Nothing here checks
its inputs: `attention` does, and is where the arguments are described. Under ``torch.jit.trace`` no length becomes a
constant of the graph, and TorchScript compiles this module as it stands.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch.jit import TracerWarning, is_scripting, is_tracing

__all__ = ["manual_attention", "manual_weights"]


def manual_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask), shape (..., Lq, Lk): float32 for halves, else the inputs' dtype.

    A fully masked row is all zeros, and so is its gradient. While ``torch.jit.trace`` runs, ``is_causal`` may be the
    0-d bool tensor that a comparison of sizes then is: it stays a part of the graph.
    """
    if enable_gqa:
        k = _repeat_heads(k, q.shape[-3])
    if scale is None:
        scale = _default_scale(q)
    # The query is scaled before the product, and halves are widened: 40 * 40 * 64 is past float16's 65504, an eighth of
    # it is not. Under autocast, which narrows the product again, the scaling alone has to do.
    scores = (_widen(q) * scale) @ _widen(k).transpose(-2, -1)
    # Nothing may follow a `type: ignore` inside a function: TorchScript takes such a line for a signature.
    if isinstance(is_causal, torch.Tensor):  # type: ignore[unreachable]
        scores = scores.masked_fill(_later_keys(scores) & is_causal, -math.inf)  # type: ignore[unreachable]
    elif is_causal:
        # A fill, as in the flash kernels: a NaN in a later key stays out of the row (torch's math kernel, which runs
        # where Ev is not E, lets it in). One in a later value does not, for 0 * NaN is NaN.
        scores = scores.masked_fill(_later_keys(scores), -math.inf)
    if attn_mask is None:
        return torch.softmax(scores, dim=-1)
    # A sum, as in the fused op's kernels, for bool masks too: a NaN in a masked key gives NaN on both paths.
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -math.inf)
    scores = scores + attn_mask
    # softmax makes NaN of a row of -inf, forwards and backwards. The first fill keeps it from arising, the second gives
    # the zeros.
    dead = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)


def manual_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Return attention's output, (..., Lq, Ev) in ``v``'s dtype (autocast's where that is on), by way of all scores."""
    weights = manual_weights(q, k, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    if enable_gqa:
        v = _repeat_heads(v, q.shape[-3])
    out = weights @ _widen(v)
    return out.to(v.dtype) if _is_half(v) else out


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if _is_half(x) else x


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (..., heads, L, E) for ``x`` of (..., H, L, E): head h is a copy of the old head h // (heads / H)."""
    sizes = [-1] * (x.dim() - 2) + [heads // x.shape[-3], -1, -1]
    return x.unsqueeze(-3).expand(sizes).flatten(-4, -3)


def _default_scale(q: torch.Tensor) -> float:
    """Return 1 / sqrt(E). The head size is a model's constant, so a trace may keep it, without the warning about it."""
    if is_scripting():
        size = q.shape[-1]
    elif is_tracing():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TracerWarning)
            size = int(q.shape[-1])
    else:
        size = q.shape[-1]
    return 1.0 / math.sqrt(max(size, 1))  # no features: every score is 0, whatever the scale


def _later_keys(scores: torch.Tensor) -> torch.Tensor:
    """Return (Lq, Lk) bool, True where the key comes after the query, each counted from its own first (top-left)."""
    # Counted with ones: a traced `arange` keeps the device of the example inputs, and ONNX opset 13 has no triangle.
    rows = scores.new_ones([scores.shape[-2]], dtype=torch.int64).cumsum(0)
    columns = scores.new_ones([scores.shape[-1]], dtype=torch.int64).cumsum(0)
    return columns > rows.unsqueeze(-1)
