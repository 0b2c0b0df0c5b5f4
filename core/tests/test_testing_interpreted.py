# SPDX-License-Identifier: Apache-2.0
"""The conformance kit runs Triton kernels in Triton's interpreter where there is no GPU, and faults show there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel.registry import KernelSpec, Registration  # noqa: E402 -- after the check that torch is there
from tokenspeed_kernel.testing import examine_kernel, interpreted  # noqa: E402

PLUGIN = """
from tokenspeed_kernel.platform import CapabilityRequirement
from tokenspeed_kernel.registry import register_kernel

def register():
    register_kernel(
        "quant", "fake_quant_fp8", name="tiny", solution="tiny", signatures=(),
        capability=CapabilityRequirement(vendors=frozenset({"nvidia"})),
    )("tiny_kernels.outer:quantize")
"""
OUTER = """
from tiny_kernels import inner

def quantize(x, scale):
    return inner.launch(x, scale)
"""
INNER = """
import torch
import triton
import triton.language as tl

@triton.jit
def _to_grid(code):
    exponent = tl.maximum(code.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    steps = (exponent - (3 << 23)).to(tl.float32, bitcast=True)
    return ROUNDED * steps

@triton.jit
def _kernel(x_ptr, s_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    step = tl.maximum(tl.load(s_ptr + at, mask=at < n, other=1.0), 1e-12, propagate_nan=tl.PropagateNan.ALL)
    code = tl.minimum(tl.abs(tl.div_rn(x, step)), 448.0, propagate_nan=tl.PropagateNan.ALL)
    bits = _to_grid(code).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    y = bits.to(tl.float32, bitcast=True) * step
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)

def launch(x, scale):
    scale = torch.as_tensor(scale, device=x.device).float()
    scale = (scale.reshape(()) if scale.numel() == 1 else scale).expand(x.shape).contiguous()
    if x.dim() == 0:
        raise ValueError("x has no axis")
    plain, y = x.resolve_neg().contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _kernel[(triton.cdiv(x.numel(), 1024),)](plain, scale, y, x.numel(), BLOCK=1024)
    return torch.empty_like(x).copy_(y)
"""
TO_EVEN = "((code / steps + 12582912.0) - 12582912.0)"
AWAY_FROM_ZERO = "tl.floor(code / steps + 0.5)"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a writer of a package with a Triton kernel, as an installed plugin ``tiny`` below ``tmp_path``."""

    def write(inner: str) -> None:
        package, metadata = tmp_path / "tiny_kernels", tmp_path / "tiny_kernels-0.5.dist-info"
        package.mkdir()
        metadata.mkdir()
        for name, source in (("__init__", PLUGIN), ("outer", OUTER), ("inner", inner)):
            (package / f"{name}.py").write_text(source, encoding="utf-8")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-kernels\nVersion: 0.5\n")
        (metadata / "entry_points.txt").write_text("[tokenspeed_kernel.plugins]\ntiny = tiny_kernels:register\n")

    return write


def _verify(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what the check said, of a process that finds the plugin below ``folder``."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tokenspeed_kernel.testing", "verify", "tiny", "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    report = json.loads(done.stdout)
    return report["exit_code"], next(r for r in report["results"] if r["check"] == "interpreted")


def test_a_right_kernel_passes(write: Write, tmp_path: Path) -> None:
    """Its values are the reference's; the notes say how many calls ran and were refused, and what was left out."""
    pytest.importorskip("triton")
    write(INNER.replace("ROUNDED", TO_EVEN))
    code, result = _verify(tmp_path)
    assert result["outcome"] == "passed", result["findings"]
    ran, refused = result["notes"]
    assert int(ran.split()[0]) > 50
    assert "truncates to bfloat16" in ran
    assert "the first: raised ValueError: x has no axis" in refused
    assert code == 3, "what the interpreter ran is not the kernel itself"


def test_ties_rounded_wrongly_fail(write: Write, tmp_path: Path) -> None:
    """A kernel that rounds halves away from zero fails, by a call made of ties."""
    pytest.importorskip("triton")
    write(INNER.replace("ROUNDED", AWAY_FROM_ZERO))
    code, result = _verify(tmp_path)
    assert (code, result["outcome"]) == (1, "failed")
    assert "elements differ" in result["findings"][0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("raise ValueError", "raise KeyError"), None),
        (("if x.dim() == 0:", "if not x.is_cuda:"), "on CPU tensors, the first: raised ValueError: x has no axis"),
        (("_to_grid(code).to(", "_to_grid(code).to(tl.float8e4nv).to(tl.float32).to("), "uses a float8 dtype"),
    ],
    ids=["raises", "refuses the CPU", "float8"],
)
def test_what_the_interpreter_cannot_judge_says_why(
    write: Write, tmp_path: Path, change: tuple[str, str], reason: str | None
) -> None:
    """A kernel that refuses every CPU tensor, or casts to a float8, is not examined; another error is a fault."""
    pytest.importorskip("triton")
    write(INNER.replace("ROUNDED", TO_EVEN).replace(*change))
    _, result = _verify(tmp_path)
    assert result["outcome"] == ("failed" if reason is None else "not examined")
    assert (reason or "raised KeyError") in result["findings"][0]


def test_a_kernel_in_plain_torch_is_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds no Triton function, a partial of one included, says so, and no process is started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interpreted, "find_spec", lambda name: name)
    plain = functools.partial(functools.partial(test_a_right_kernel_passes))
    for implementation in (plain, torch.abs, _verify):
        spec = KernelSpec("mine", "quant", "fake_quant_fp8")
        (result,) = examine_kernel(
            Registration(spec=spec, implementation=implementation, owner=None, order=0), checks=["interpreted"]
        )
        assert (result.outcome, result.findings) == ("not examined", ("the kernel is not made of Triton functions",))


@pytest.mark.parametrize(("has_cuda", "has_triton", "reason"), [(True, True, "CUDA"), (False, False, "not installed")])
def test_machines_that_need_or_have_no_interpreter(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, has_triton: bool, reason: str
) -> None:
    """With a GPU the kernel itself is examined, and without Triton there is no interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(interpreted, "find_spec", lambda name: name if has_triton else None)
    spec = KernelSpec("mine", "quant", "fake_quant_fp8")
    (result,) = examine_kernel(
        Registration(spec=spec, implementation=_verify, owner=None, order=0), checks=["interpreted"]
    )
    assert result.outcome == "not examined"
    assert reason in result.findings[0]
