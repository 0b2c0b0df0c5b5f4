# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: a program has brought into the L2 cache what a later program is going to load.

So the memory is busy while programs compute, too, and not only as much of it as registers can hold. From NVIDIA's
Hopper on ("cp.async.bulk.prefetch" in the manual of PTX).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tokenspeed_kernel_triton_fake_quant.doors import Kernel, Start, has_hopper

__all__ = ["prefetch", "programs_ahead"]


@triton.jit
def prefetch(x_ptr, program, length):
    """Have read what a program is going to load, if each loads ``length`` elements, but the last one maybe fewer."""
    if program < tl.num_programs(0) - 1:
        size = tl.cast(length * (x_ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        first = tl.cast(program, tl.int64) * length
        tl.inline_asm_elementwise(  # of memory in pieces of 16 bytes
            """{
                .reg .pred is_first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 is_first, thread, 0;
                @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r", [(x_ptr + first).to(tl.int64) & -16, size & -16], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def programs_ahead(start: Start, x: torch.Tensor, elements: int, limit: int) -> int:
    """Return by how many programs to read ahead, or zero where a kernel started so must not.

    Args:
        start: what starts the kernel.
        x: what it reads.
        elements: how many of them a program loads.
        limit: bytes for each multiprocessor; of more, some are gone from the cache before they are loaded.
    """
    if start is not Kernel.launch:
        return 0
    return _programs_ahead(x.get_device(), elements * x.element_size(), limit)


@lru_cache
def _programs_ahead(device: int, size: int, limit: int) -> int:
    if not has_hopper(device):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * limit // size
