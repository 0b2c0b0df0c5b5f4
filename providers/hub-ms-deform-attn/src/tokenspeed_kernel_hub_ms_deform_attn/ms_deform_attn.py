# SPDX-License-Identifier: Apache-2.0
"""Multi-scale deformable attention through the compiled Hub kernel: checks, launch, autograd.

The kernel multiplies a location by the size and subtracts one half, each rounded to float32, and samples only if
``-1 < x < W and -1 < y < H`` holds. That is false for NaN and both infinities, so such a sample adds nothing, forward
and backward, whatever its weight, and no check of the data is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from tokenspeed_kernel_hub_ms_deform_attn.loading import DEFORMABLE_DETR, KernelModule, switched_off_reason

__all__ = ["ms_deform_attn", "supports"]

_Levels = tuple[tuple[int, int], ...]

_INDEX_LIMIT = 2**31  # the kernel computes its offsets in C int

# Levels read from a device tensor, with the tensor's version: decoder layers share one tensor, and every reading
# waits for the device.
_levels_read = WeakIdKeyDictionary()


def supports(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor | Sequence[Sequence[int]],
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> bool | str:
    """Return True if the compiled kernel takes this very call, else the reason why not. Loads nothing.

    It takes plain float32 CUDA tensors in eager execution. Under CUDA-graph capture it also needs an earlier call
    with the same levels, because neither loading nor a copy to the device can be captured.
    """
    reason = (
        switched_off_reason()
        or DEFORMABLE_DETR.failure
        or _graph_reason()
        or _tensor_reason(value, sampling_locations, attention_weights)
    )
    if reason is not None:
        return reason
    tensors = (value, sampling_locations, attention_weights)
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if is_training and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and the compiled backward adds in no fixed order"
    is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing and not DEFORMABLE_DETR.is_loaded:
        return "not loaded yet, which a CUDA-graph capture cannot do: run one call before the capture"
    levels = _levels(spatial_shapes, is_capturing=is_capturing)
    if isinstance(levels, str):
        return levels
    reason = _size_reason(value, levels, sampling_locations, attention_weights)
    if reason is None and is_capturing and (levels, value.device) not in _tables:
        return "these levels are not on the device yet: run one call with them before the CUDA-graph capture"
    return True if reason is None else reason


def ms_deform_attn(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor | Sequence[Sequence[int]],
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the attention-weighted bilinear samples of every level, (N, Q, M*D) float32, or ``NotImplemented``.

    ``NotImplemented`` means that the kernel may not or could not be loaded; the first call loads it. Inputs are as
    the slot ``ms_deform_attn`` has them, all float32 on one CUDA device; strided ones are copied. Gradients of value,
    sampling_locations and attention_weights come from the compiled backward, once; it cannot be differentiated again.
    The gradient of value is summed with atomic additions, so its last bits vary from run to run.

    Args:
        value: (N, S, M, D).
        spatial_shapes: (H, W) of each level: an int64 or int32 tensor (L, 2) on any device, or pairs of ints.
            Where each level starts is computed here. A tensor on a device is read on its first use, which synchronises;
            pairs are not.
        sampling_locations: (N, Q, M, L, P, 2): (x, y), where 0 and 1 are the outer edges of the level.
        attention_weights: (N, Q, M, L, P).
    """
    reason = _tensor_reason(value, sampling_locations, attention_weights)
    if reason is not None:
        raise ValueError(reason)
    levels = _levels(spatial_shapes, is_capturing=torch.cuda.is_current_stream_capturing())
    if isinstance(levels, str):
        raise ValueError(levels)
    reason = _size_reason(value, levels, sampling_locations, attention_weights)
    if reason is not None:
        raise ValueError(reason)
    kernel = DEFORMABLE_DETR.load()
    if kernel is None:
        return NotImplemented  # type: ignore[no-any-return]  # the core's word for a late refusal
    return _attend(kernel, value, levels, sampling_locations, attention_weights)


def _attend(
    kernel: KernelModule, value: torch.Tensor, levels: _Levels, locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run checked inputs on the device of ``value``."""
    filled = [index for index, (height, width) in enumerate(levels) if height * width]
    if len(filled) < len(levels):  # the kernel multiplies an empty level's zero by its weight, which may be NaN
        locations, weights = locations[:, :, :, filled], weights[:, :, :, filled]
        levels = tuple(levels[index] for index in filled)
    shapes, starts = _tables_on(value.device, levels)
    out: torch.Tensor = _MsDeformAttn.apply(kernel, value, shapes, starts, locations, weights)
    return out


class _MsDeformAttn(torch.autograd.Function):
    """The compiled forward and backward as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: KernelModule,
        value: torch.Tensor,
        shapes: torch.Tensor,
        starts: torch.Tensor,
        locations: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        value, locations, weights = value.contiguous(), locations.contiguous(), weights.contiguous()
        ctx.kernel = kernel
        ctx.save_for_backward(value, shapes, starts, locations, weights)
        if not (value.numel() and weights.numel()):  # the kernel divides by the batch and launches empty grids
            return value.new_zeros(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])
        # One launch for the whole batch: N divides N, and no buffer grows with the step.
        with torch.cuda.device_of(value):
            return kernel.ms_deform_attn_forward(value, shapes, starts, locations, weights, value.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, shapes, starts, locations, weights = ctx.saved_tensors
        if value.numel() and weights.numel():
            with torch.cuda.device_of(value):  # backward runs in a thread of its own, with its own current device
                grads = ctx.kernel.ms_deform_attn_backward(
                    value, shapes, starts, locations, weights, grad.contiguous(), value.shape[0]
                )
        else:
            grads = [torch.zeros_like(tensor) for tensor in (value, locations, weights)]
        return None, grads[0], None, None, grads[1], grads[2]


def _graph_reason() -> str | None:
    """Return which kind of graph is being built, if any. Each of them records the portable path instead."""
    if torch.compiler.is_compiling():  # first: Dynamo folds it, and then never meets the others
        return "torch.compile is tracing"
    if getattr(torch.compiler, "is_exporting", lambda: False)():  # newer than the oldest torch that is supported
        return "torch.export is tracing"
    if torch.jit.is_tracing():
        return "torch.jit.trace is tracing"
    if torch.onnx.is_in_onnx_export():
        return "an ONNX export is running"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    return None


def _tensor_reason(value: object, locations: object, weights: object) -> str | None:
    """Return what is wrong with the tensors apart from their sizes, or None."""
    if isinstance(locations, (list, tuple)):
        return "sampling_locations is not one tensor: a point count that varies between levels is not supported"
    named = {"value": value, "sampling_locations": locations, "attention_weights": weights}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{name} is a {type(tensor).__name__}, not a plain tensor"
        tensors[name] = tensor
    if not tensors["sampling_locations"].is_floating_point():
        return f"sampling_locations are {tensors['sampling_locations'].dtype}: integer-index sampling is not supported"
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            return f"{name} is {tensor.dtype}: only torch.float32 is supported"
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        return f"all inputs must be on one device: {places}"
    if not tensors["value"].is_cuda:
        return f"value is on {tensors['value'].device}: only CUDA is supported"
    return None


def _size_reason(value: torch.Tensor, levels: _Levels, locations: torch.Tensor, weights: torch.Tensor) -> str | None:
    """Return which sizes do not fit together, or None. The kernel itself believes whatever it is told."""
    if value.ndim != 4:
        return f"value must be (N, S, M, D), got {tuple(value.shape)}"
    if locations.ndim != 6:
        return f"sampling_locations must be (N, Q, M, L, P, 2), got {tuple(locations.shape)}"
    batch, pixels, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    expected = (batch, queries, heads, len(levels), points, 2)
    if tuple(locations.shape) != expected:
        return f"sampling_locations must be {expected} for {len(levels)} levels, got {tuple(locations.shape)}"
    if tuple(weights.shape) != expected[:-1]:
        return f"attention_weights must be {expected[:-1]}, got {tuple(weights.shape)}"
    total = sum(height * width for height, width in levels)
    if total != pixels:
        return f"spatial_shapes {list(levels)} hold {total} pixels, value has {pixels}"
    largest = max(value.numel(), locations.numel(), batch * queries * heads * channels)
    if largest >= _INDEX_LIMIT:
        return f"a tensor of {largest} elements is beyond the kernel's 32-bit offsets"
    return None


def _levels(spatial_shapes: object, *, is_capturing: bool) -> _Levels | str:
    """Return the levels as pairs of ints, or the reason why they cannot be had."""
    if isinstance(spatial_shapes, torch.Tensor):
        if spatial_shapes.dtype not in (torch.int64, torch.int32):
            return f"spatial_shapes must be int64 or int32, got {spatial_shapes.dtype}"
        if spatial_shapes.ndim != 2 or spatial_shapes.shape[1] != 2:
            return f"spatial_shapes must be (L, 2), got {tuple(spatial_shapes.shape)}"
        return _read_levels(spatial_shapes, is_capturing=is_capturing)
    try:
        levels = tuple((int(height), int(width)) for height, width in spatial_shapes)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return f"spatial_shapes must be a tensor or (H, W) pairs, got {spatial_shapes!r}"
    return _negative_reason(levels) or levels


def _read_levels(spatial_shapes: torch.Tensor, *, is_capturing: bool) -> _Levels | str:
    is_on_device = not spatial_shapes.is_cpu
    # Inference tensors count no versions, so what was read once may have changed since.
    is_remembered = is_on_device and not spatial_shapes.is_inference()
    if is_remembered:
        version, levels = _levels_read.get(spatial_shapes, (None, ()))
        if version == spatial_shapes._version:
            return _negative_reason(levels) or levels
    if is_on_device and is_capturing:
        return "spatial_shapes cannot be read under CUDA-graph capture: pass pairs, or call once before the capture"
    levels = tuple((height, width) for height, width in spatial_shapes.tolist())
    if is_remembered:
        _levels_read[spatial_shapes] = (spatial_shapes._version, levels)
    return _negative_reason(levels) or levels


def _negative_reason(levels: _Levels) -> str | None:
    if any(height < 0 or width < 0 for height, width in levels):
        return f"spatial_shapes must not be negative, got {list(levels)}"
    return None


# Kept for ever, 512 bytes for each set of levels: a captured CUDA graph holds their address and nothing else.
_tables: dict[tuple[_Levels, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _tables_on(device: torch.device, levels: _Levels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return size (L, 2) and first pixel (L,) of every level, int64 on ``device``."""
    found = _tables.get((levels, device))
    if found is not None:
        return found
    starts = [0]
    for height, width in levels:
        starts.append(starts[-1] + height * width)
    count = len(levels)
    flat = [size for level in levels for size in level] + starts[:count]
    # Outside inference mode: tensors made inside it cannot be saved for a later backward.
    with torch.inference_mode(False):
        table = torch.tensor(flat, dtype=torch.int64, device=device)
        return _tables.setdefault((levels, device), (table[: 2 * count].view(count, 2), table[2 * count :]))
