# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for a Hopper GPU, without one: by the Triton that is there, and by the oldest that may be."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed_kernel_triton_fake_quant import fp8, int8, int8_per_channel, int8_rows, int_grouped, mxfp4, nvfp4

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32"}
nvfp4.may_use_hopper = lambda *_: True
int8_rows.programs_ahead = int_grouped.programs_ahead = lambda *_: 100
compiled = set()

def start(kernel, grid, tensors, numbers, constants, warps=4, early=False):
    names = kernel.function.arg_names
    types = ["*" + TYPES[t.dtype] for t in tensors]
    types += ["fp32" if isinstance(number, float) else "i64" for number in numbers]
    types += ["constexpr"] * len(constants)
    signature = dict(zip(names, types, strict=True))
    constexprs = dict(zip(names[-len(constants):], constants, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
    options = {"num_warps": warps, **({"launch_pdl": True} if early else {})}
    source = ASTSource(kernel.function, signature, constexprs, aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    compiled.add(kernel.function.fn.__name__)

one = torch.tensor(0.5)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    small, rows, large = (torch.ones(shape, dtype=dtype) for shape in ((8, 64), (4, 4096), (513, 1024)))
    fp8.quantize(small, one, start)
    int8.quantize(small, int8.Grid(int8.SCALE, one), start)
    int8.on_grid(small, int8.Grid(int8.RANGE, one, one), start, with_mask=True)
    for x, axis in ((small, 0), (small, 1), (rows, 0)):
        int8_per_channel.dynamic(x, axis, start)
        int8_per_channel.dynamic(x, axis, start, with_mask=True)
    int_grouped.quantize(small, 4, 16, None, start)
    mxfp4.quantize(small, start)
    nvfp4.quantize(small, one, start)
    nvfp4.quantize(small, None, start)
    nvfp4.quantize(large, None, start)
print(triton.__version__, *sorted(compiled))
"""
KERNELS = [
    *("_channel_amax_kernel", "_fake_quant_fp8_kernel", "_int8_kernel", "_int_grouped_kernel"),
    *("_long_rows_kernel", "_mxfp4_kernel", "_nvfp4_kernel", "_partial_amax_kernel"),
]


def _oldest() -> str:
    """Return the oldest Triton that the wheel's metadata allows."""
    needed = map(Requirement, requires("tokenspeed-kernel-triton-fake-quant") or ())
    (bound,) = next(requirement.specifier for requirement in needed if requirement.name == "triton")
    assert bound.operator == ">="
    return bound.version


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
@pytest.mark.parametrize("which", ["installed", "oldest"])
def test_every_kernel_compiles_for_hopper(which: str, tmp_path: Path) -> None:
    """Each with what its eager launch may use there: an early start, and reading ahead."""
    path = [*sys.path]
    if which == "oldest":
        site = str(tmp_path / "site")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
        subprocess.run([*command, f"triton=={_oldest()}"], check=True)
        path.insert(0, site)
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    version, *compiled = done.stdout.split()
    assert compiled == KERNELS
    if which == "oldest":
        assert version.startswith(_oldest())
