# SPDX-License-Identifier: Apache-2.0
"""Two ways to one Triton kernel: through ``torch.library`` where something watches, and straight where nothing does.

An operator of ``torch.library`` is one node for ``torch.compile``, dispatch modes and functorch, but costs an eager
call three times what the launch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.library import wrap_triton
from triton import knobs

from tokenspeed_kernel_triton_fake_quant.support import PLAIN, is_dynamo_compiling, is_functorch_active

__all__ = ["Kernel", "Start", "apply_of", "has_hopper", "is_plain", "may_use_hopper", "straight_through"]

_runtime = knobs.runtime
_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_plain(*tensors: torch.Tensor) -> bool:
    """Return whether a kernel may be launched on these tensors straight away, because nothing watches the call.

    Not so while ``torch.compile`` traces; under a dispatch mode (fake tensors, a trace by ``make_fx``), a functorch
    transform or forward-mode differentiation; for a subclass; or for a lazy negation, whose memory has the other sign.
    """
    if is_dynamo_compiling():
        return False
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.is_neg():
            return False
    return _dispatch_modes() == 0 and not is_functorch_active() and forward_ad._current_level < 0


def _is_hooked() -> bool:
    """Return whether a profiler wants to hear of launches; a chain of hooks may be empty."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Kernel:
    """A Triton kernel whose arguments are tensors, then sizes, then constants."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[object, ...],
        warps: int = 4,
        early: bool = False,
    ) -> None:
        """Launch on the current stream of the first tensor's device, as compiled before if it was.

        Numbers are not specialised, so what was compiled depends on the constants, on the dtype of the first tensor,
        which with the constants determines the others', and on which tensors start at 16 bytes.

        With ``early``, which the constants say, too, the kernel starts as soon as the one before it lets it, and waits
        for it itself ("programmatic dependent launch" in CUDA's programming guide).

        Raises:
            ValueError: the tensors are on several devices.
        """
        x = tensors[0]
        device = x.get_device()
        if device < 0:  # Triton's interpreter takes tensors on the CPU, and the compiler says that it does not
            self.function[grid](*tensors, *numbers, *constants)
            return None
        if device != torch._C._cuda_getDevice():  # Triton launches on the current device, whatever its arguments' is
            with torch.cuda.device(device):
                return self.launch(grid, tensors, numbers, constants, warps, early)
        pointers = []  # Triton takes numbers too, and asks the driver about each tensor
        start = starts = x.data_ptr()
        for tensor in tensors:
            pointer = start
            if tensor is not x:  # which stands wherever a call has no tensor
                if tensor.get_device() != device:
                    raise ValueError(f"a kernel on {x.device} cannot read a tensor on {tensor.device}; move it there")
                pointer = tensor.data_ptr()
                starts |= pointer
            pointers.append(pointer)
        aligned: object = True if starts & 15 == 0 else tuple([pointer & 15 == 0 for pointer in pointers])
        key = (constants, warps, device, x.dtype, aligned)
        compiled = self._compiled.get(key)
        if compiled is None:
            options = {"launch_pdl": True} if early else {}  # not every backend has that one
            self._compiled[key] = self.function[grid](*tensors, *numbers, *constants, num_warps=warps, **options)
            return None
        stream = torch._C._cuda_getCurrentRawStream(device)
        if _is_hooked():
            compiled[grid](*tensors, *numbers, *constants, stream=stream)
        else:  # what that does where nobody profiles, less a quarter of its time
            function, metadata = compiled.function, compiled.packed_metadata
            compiled.run(*grid, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)
        return None

    def record(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[object, ...],
        warps: int = 4,
        early: bool = False,
    ) -> None:
        """Do the same inside an operator of ``torch.library``, so that a compiler sees the kernel; never ``early``.

        A compiler that cannot tell what a kernel writes takes it that it writes all of its tensors, and copies each to
        where it came from: so none that is written may be passed twice, and inline assembly has to be pure.

        Raises:
            NotImplementedError: forward-mode differentiation is active, in which such an operator loses tangents
                without a word.
        """
        if forward_ad._current_level >= 0:
            raise NotImplementedError(
                "forward-mode differentiation is active, for which fake quantization has no rule; "
                "use reverse mode, such as torch.autograd.grad or torch.func.grad"
            )
        with torch.cuda.device_of(tensors[0]):
            wrap_triton(self.function)[grid](*tensors, *numbers, *constants, num_warps=warps)


Start = Callable[..., None]
"""``Kernel.launch`` or ``Kernel.record``: what a quantizing function starts its kernels with."""


def may_use_hopper(start: Start, x: torch.Tensor) -> bool:
    """Return whether a kernel of ``x`` started so may use what NVIDIA's GPUs have from Hopper on.

    That is an early start, and reading ahead; not where a compiler sees the kernel, which knows neither.
    """
    return start is Kernel.launch and has_hopper(x.get_device())


@lru_cache
def has_hopper(device: int) -> bool:
    """Return whether a device, -1 for the CPU, has what NVIDIA's GPUs have from Hopper on."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 9


def straight_through(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: object) -> torch.Tensor:
    """Return ``function(x, *rest)``, whose gradient for ``x`` is to be the cotangent; ``rest`` gets none.

    What a kernel writes has no history, so it need not be found within autograd's call, where the host takes longer.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return function(x, *rest)
    # In a tuple, for autograd makes a view of an argument that is returned.
    quantized: torch.Tensor = _apply_straight_through(x, (function(x, *rest),))
    return quantized


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: tuple[torch.Tensor]) -> torch.Tensor:
        return quantized[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what ``function.apply`` calls outside of functorch's transforms, of which :func:`is_plain` knows.

    Up to torch 2.11, ``apply`` itself takes half as long again to find out.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # torch._C has it
    return apply


_apply_straight_through = apply_of(_StraightThrough)
