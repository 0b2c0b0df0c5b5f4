# SPDX-License-Identifier: Apache-2.0
"""What a kernel says that starts before the one in front of it has ended ("griddepcontrol" in the manual of PTX).

From NVIDIA's Hopper on. Triton has functions for it, which in version 3.4 no kernel can call.
"""

import triton
import triton.language as tl

__all__ = ["let_next_start", "wait_for_previous"]


@triton.jit
def let_next_start():
    """Let the next kernel start, which has to wait for what this one writes."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous():
    """Wait until all is written that the kernel before this one writes."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
