# SPDX-License-Identifier: Apache-2.0
"""What the quantization slots compute, in plain PyTorch: the definition in code, and the oracle of parity tests.

No function here synchronises with the device or keeps a table on the CPU, so each can be captured in a CUDA graph.
"""

from __future__ import annotations

from tokenspeed_kernel.reference.block import (
    fake_quant_mxfp4_dynamic,
    fake_quant_mxfp4_weight,
    fake_quant_nvfp4_dynamic,
    fake_quant_nvfp4_weight,
)
from tokenspeed_kernel.reference.fp8 import fake_quant_fp8
from tokenspeed_kernel.reference.integer import (
    fake_quant_int8_affine,
    fake_quant_int8_per_channel,
    fake_quant_int_grouped,
)

__all__ = [
    "fake_quant_fp8",
    "fake_quant_int8_affine",
    "fake_quant_int8_per_channel",
    "fake_quant_int_grouped",
    "fake_quant_mxfp4_dynamic",
    "fake_quant_mxfp4_weight",
    "fake_quant_nvfp4_dynamic",
    "fake_quant_nvfp4_weight",
]
