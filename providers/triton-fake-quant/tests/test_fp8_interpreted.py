# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel's logic without a GPU, through Triton's interpreter.

The interpreter narrows float32 to bfloat16 by truncation, so that dtype is examined on the GPU only.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = """
import math, torch
from tokenspeed_kernel.reference.quant import fake_quant_fp8 as reference
from tokenspeed_kernel_triton_fake_quant import fp8

generator = torch.Generator().manual_seed(0)
special = torch.tensor([448, 464, 465, -1000, math.inf, -math.inf, math.nan, 0.0, -0.0, 17, 19, 2.0**-10, 1e-45])
for dtype in (torch.float32, torch.float16):
    for shape, scale_shape in (((5,), ()), ((0, 3), (1,)), ((3, 1025), (3, 1)), ((2, 3, 5), (3, 1)), ((4, 6), (6,))):
        x = torch.randn(shape, generator=generator) * 300
        x.view(-1)[:13] = special[: x.numel()]
        x, scale = x.to(dtype), torch.rand(scale_shape, generator=generator) + 0.01
        actual = fp8._fake_quant_fp8(x, scale.reshape(-1), *fp8._scale_layout(x, scale))
        expected = reference(x, scale)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(actual[expected == 0]), torch.signbit(expected[expected == 0]))
print("equal")
"""


def test_interpreted_kernel_equals_the_reference() -> None:
    """Per tensor and per channel, float32 and float16, special values included."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr
