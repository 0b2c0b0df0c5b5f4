# SPDX-License-Identifier: Apache-2.0
"""The masked gradient's logic without a GPU, in Triton's interpreter; the values are the conformance kit's to check.

The interpreter narrows float32 to bfloat16 by truncation, so that dtype is examined on the GPU only.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = """
import torch
from importlib import import_module
from tokenspeed_kernel.reference import quant
from tokenspeed_kernel.testing.grid import grid_of

compared = 0
for module in ("int8_affine", "int8_per_channel"):
    slot = f"fake_quant_{module}"
    call_kernel = getattr(import_module(f"tokenspeed_kernel_triton_fake_quant.{module}"), slot)
    for case in grid_of(slot):
        call = case.build("cpu")
        x = call.args[0]
        beside = [value for value in call.args[1:] if isinstance(value, torch.Tensor) and value.numel() > 1]
        if case.malformed or not case.gradients or x.dtype not in (torch.float32, torch.float16) or x.numel() > 20000:
            continue
        if module == "int8_affine" and beside:
            continue
        cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
        got, wanted = [], []
        for function, gradients in ((call_kernel, got), (getattr(quant, slot), wanted)):
            mine, (leaf,) = call.with_gradients((0,))
            gradients += torch.autograd.grad(function(*mine.args, **mine.kwargs), leaf, cotangent)
        assert torch.equal(got[0], wanted[0]), (slot, case.group, case.name)
        compared += 1
assert compared > 100, compared
print("equal")
"""
# Each width is of another variant of the kernel that holds a row: its place, multiples of 16 and others, and too wide.
ROWS = """
import torch
from tokenspeed_kernel.reference import quant
from tokenspeed_kernel_triton_fake_quant.int8_per_channel import fake_quant_int8_per_channel

WIDTHS = (
    *(1, 37, 1024, 1500, 1792, 2047, 2048, 3000, 3584, 4095, 4096),
    *(7001, 7168, 8191, 8192, 9001, 14336, 16383, 16384, 16400),
)
for dtype in (torch.float32, torch.float16):
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(width)
        row = torch.randn(2, width, generator=generator).to(dtype)
        row[1, width // 2] = torch.inf  # beyond the grid that it makes
        cotangent = torch.randn(2, width, generator=generator).to(dtype)
        results = []
        for function in (fake_quant_int8_per_channel, quant.fake_quant_int8_per_channel):
            leaf = row.clone().requires_grad_()
            with torch.no_grad():
                alone = function(leaf)
            y = function(leaf)
            results.append((alone, y.detach(), *torch.autograd.grad(y, leaf, cotangent)))
        for what, ours, right in zip(("without a gradient", "with one", "gradient"), *results, strict=True):
            assert torch.equal(ours, right), (dtype, width, what)
print("equal")
"""


@pytest.mark.parametrize("program", [PROGRAM, ROWS], ids=["grid", "rows"])
def test_interpreted_gradients_equal_the_references(program: str) -> None:
    """Of every differentiable call of the kit's grid and of long rows, in float32 and float16 (case 1)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr
