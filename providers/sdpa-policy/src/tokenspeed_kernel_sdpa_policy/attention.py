# SPDX-License-Identifier: Apache-2.0
"""The policy: which of two equal ways attention takes, the fused op of stock PyTorch or primitive ops.

Fused always, but in a graph that ``torch.jit.trace``, ``torch.jit.script`` or the ONNX exporter takes. Nothing here
looks at sizes or memory to choose, and the fused op's own choice among its kernels is left to PyTorch.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch.jit import TracerWarning, is_scripting, is_tracing
from torch.nn import functional

from tokenspeed_kernel_sdpa_policy.manual import manual_attention, manual_weights

__all__ = ["attend", "attention_weights", "manual_attention_required", "supports"]


def manual_attention_required() -> bool:
    """Return True while a graph is captured that must hold primitive ops: ``torch.jit.trace`` and both ONNX exporters.

    ``torch.compile`` and ``torch.export`` are outside this gate on purpose: the first lowers the fused op better than
    the primitive ops, and what the second feeds decomposes it (``ExportedProgram.run_decompositions``).
    """
    return bool(is_tracing()) or torch.onnx.is_in_onnx_export()


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool | str:
    """Return True, or why the slot declines: in a capture the host records its own portable math.

    Bad inputs are not declined: `attend` raises for them, where a decline would hide the error.
    """
    if manual_attention_required():
        return "graph capture (torch.jit.trace or ONNX export): the graph keeps primitive ops"
    return True


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v, shape (..., Lq, Ev), in the inputs' dtype (autocast's where that is on).

    The meaning is the documented one of ``torch.nn.functional.scaled_dot_product_attention``. ``q`` is (..., Lq, E),
    ``k`` (..., Lk, E), ``v`` (..., Lk, Ev), floating, of any strides; what comes before the last two axes broadcasts.
    ``attn_mask`` broadcasts to (..., Lq, Lk): a bool mask keeps where True, a float mask of any float dtype is added.
    ``dropout_p`` is applied whenever it is not 0: a module passes 0 in eval. ``is_causal`` aligns top-left: query i
    sees keys 0 to i, whatever Lq and Lk are. ``scale`` is 1 / sqrt(E) unless given. ``enable_gqa`` lets each head
    (axis -3) of ``k`` and ``v`` serve several neighbouring heads of ``q``. A fully masked row, or no keys, gives zeros
    and a zero gradient. Writes no input; the gradient is autograd's.

    Raises:
        ValueError: ``attn_mask`` together with ``is_causal``; an operand of rank below 2; ``k`` and ``v`` of different
            length; ``q`` and ``k`` of different head size; sizes that do not broadcast, or a mask that would enlarge
            the scores; heads that do not divide under ``enable_gqa``; ``dropout_p`` outside [0, 1]; operands on
            different devices.
        TypeError: operands that are not floating, or of different dtypes outside autocast; a mask that is neither bool
            nor floating.

    Inside TorchScript these arrive as ``torch.jit.Error``, which names them. (It is also why nothing after ``v`` is
    keyword-only: TorchScript compiles no keyword-only argument that has a default.)
    """
    if is_scripting():
        _validate(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        return manual_attention(q, k, v, _mask_for(q, attn_mask), dropout_p, is_causal, scale, enable_gqa)
    else:  # noqa: RET505  (TorchScript leaves only an else uncompiled)
        _validate_eager(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        attn_mask = _mask_for(q, attn_mask)
        if manual_attention_required():
            return manual_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if q.is_cuda:
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
            attn_mask = None if attn_mask is None else _aligned(_mask_on_gpu(q, attn_mask))
        # Chosen from sizes, `is_causal` may come as torch.SymBool, which the operator does not take. A branch makes a
        # bool of it under torch.compile too, where bool() leaves it symbolic.
        causal = True if is_causal else False  # noqa: SIM210
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask), which the fused op never gives out: shape (..., Lq, Lk).

    For a caller that was asked for the weights: arguments and errors are those of `attend`, so no mask is lost on the
    way. float32 for float16 and bfloat16, else the inputs' dtype; a fully masked row is all zeros.
    """
    if is_scripting():
        _validate(q, k, k, attn_mask, 0.0, is_causal, enable_gqa)
    else:
        _validate_eager(q, k, k, attn_mask, 0.0, is_causal, enable_gqa)
    return manual_weights(q, k, _mask_for(q, attn_mask), is_causal, scale, enable_gqa)


def _mask_for(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask as the fused op takes it: rank 2 or more; bool, float32 or ``q``'s dtype, others as float32."""
    if mask is None:
        return None
    while mask.dim() < 2:
        mask = mask.unsqueeze(0)
    if mask.dtype in (torch.bool, torch.float32, q.dtype):
        return mask
    if mask.dtype == torch.float64:
        # A finite number stays finite: a row of float64's minimum is uniform, not fully masked.
        largest = 3.4028234663852886e38
        mask = torch.where(mask.isinf(), mask, mask.clamp(-largest, largest))
    return mask.to(torch.float32)


def _mask_on_gpu(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mask as an additive one in the dtype that the operator computes in.

    The operator takes more, but where it then picks cuDNN's kernel (as it does for halves with a mask: seen on an H200,
    torch 2.11), a fully masked row of a bool mask is not zeros, and a float32 mask beside a half query gives values
    that are not finite. The memory-efficient kernel turns a bool mask into this very tensor by itself.
    """
    autocast = torch.is_autocast_enabled("cuda") and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cuda") if autocast else q.dtype
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
    if mask.dtype == dtype:
        return mask
    largest = torch.finfo(dtype).max  # a finite number stays finite: a row of the least number is uniform, not masked
    return torch.where(mask.isinf(), mask, mask.clamp(-largest, largest)).to(dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it where it does not start at a multiple of 16 bytes.

    The operator's kernels read 16 bytes at a time. From another address the memory-efficient one faults, which leaves
    the device unusable for the rest of the process (H200, torch 2.11). A compiler sees to its own inputs.
    """
    is_wrapped = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if is_wrapped or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor  # what a trace, a transform or a subclass stands for has no address to ask for
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _validate_eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raise what `attend` documents, without a warning from the tracer, to which sizes are tensors."""
    if is_tracing():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TracerWarning)
            _validate(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    else:
        _validate(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(f"sdpa: q, k and v must have one dtype outside autocast, got {q.dtype}, {k.dtype}, {v.dtype}")


def _validate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raise what `attend` documents, but for dtypes that differ. TorchScript compiles it."""
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"sdpa: q, k and v must be floating, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dim() < 2 or k.dim() < 2 or v.dim() < 2:
        raise ValueError(f"sdpa: q, k and v must have rank 2 or more, got shapes {q.shape}, {k.shape}, {v.shape}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"sdpa: k and v must have the same length (axis -2), got shapes {k.shape}, {v.shape}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"sdpa: q and k must have the same head size (axis -1), got shapes {q.shape}, {k.shape}")
    if q.device != k.device or q.device != v.device or (attn_mask is not None and attn_mask.device != q.device):
        raise ValueError(f"sdpa: q ({q.device}), k ({k.device}), v ({v.device}) and attn_mask must be on one device")
    if dropout_p < 0.0 or dropout_p > 1.0:
        raise ValueError(f"sdpa: dropout_p must be in [0, 1], got {dropout_p}")
    if enable_gqa:
        _validate_heads(q, k, v)
        batch = _broadcast(list(q.shape[:-3]), list(k.shape[:-3]))
        _broadcast(batch, list(v.shape[:-3]))
        batch.append(q.shape[-3])
    else:
        batch = _broadcast(list(q.shape[:-2]), list(k.shape[:-2]))
        _broadcast(batch, list(v.shape[:-2]))
    if attn_mask is not None:
        if is_causal:
            raise ValueError("sdpa: attn_mask and is_causal exclude each other: merge the causal mask into attn_mask")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"sdpa: attn_mask must be bool or floating, got {attn_mask.dtype}")
        scores = batch
        scores.append(q.shape[-2])
        scores.append(k.shape[-2])
        if _broadcast(list(attn_mask.shape), scores) != scores:
            raise ValueError(f"sdpa: attn_mask of shape {attn_mask.shape} would enlarge the scores of shape {scores}")


def _validate_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless each head of ``k`` and ``v`` serves a whole number of heads of ``q``."""
    if q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
        raise ValueError(f"sdpa: enable_gqa needs a head axis (-3), got shapes {q.shape}, {k.shape}, {v.shape}")
    for heads in (k.shape[-3], v.shape[-3]):
        if heads == 0 or q.shape[-3] % heads != 0:
            raise ValueError(f"sdpa: {heads} heads (axis -3) of k or v do not divide the {q.shape[-3]} of q")


def _broadcast(a: list[int], b: list[int]) -> list[int]:
    """Return the sizes that both broadcast to; raise ValueError where there are none."""
    sizes: list[int] = []
    rank = max(len(a), len(b))
    for i in range(rank):
        m = a[i - rank + len(a)] if i >= rank - len(a) else 1
        n = b[i - rank + len(b)] if i >= rank - len(b) else 1
        if m != n and 1 not in (m, n):
            raise ValueError(f"sdpa: sizes {a} and {b} do not broadcast")
        sizes.append(n if m == 1 else m)
    return sizes
