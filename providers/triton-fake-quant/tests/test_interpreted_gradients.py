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


def test_interpreted_gradients_equal_the_references() -> None:
    """Of every differentiable call of the kit's grid, in float32 and float16, for a random cotangent (case 1)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr
