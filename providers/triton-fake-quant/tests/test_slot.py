# SPDX-License-Identifier: Apache-2.0
"""The kernel through its slot: compiled, exported, traced, and without a GPU."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._dynamo.testing import CompileCounter  # noqa: E402 -- after the checks above

import tokenspeed_kernel_triton_fake_quant  # noqa: E402
from tokenspeed_kernel import expect, slot  # noqa: E402
from tokenspeed_kernel.registry import KernelRegistry  # noqa: E402

pytestmark = pytest.mark.gpu


class Tower(torch.nn.Module):
    """Ten calls of the slot."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``x``, quantized ten times with a step between."""
        for _ in range(10):
            x = slot("fake_quant_fp8")(x, scale) + 1.0
        return x


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    KernelRegistry.reset()
    tokenspeed_kernel_triton_fake_quant.register()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiles_once_and_keeps_the_kernel() -> None:
    """One graph without a break, equal to eager to the bit, with the Triton kernel in it and its gradient."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    scale = torch.tensor(0.1, device="cuda")
    counter = CompileCounter()
    torch.compile(Tower(), fullgraph=True, backend=counter)(x, scale)
    assert counter.frame_count == 1
    before = slot("fake_quant_fp8").stats()["triton_fake_quant_fp8"]["traced"]
    torch.compiler.reset()
    with expect("fake_quant_fp8", solution="triton"):
        compiled = torch.compile(Tower(), fullgraph=True, backend="aot_eager")(x, scale)
    assert slot("fake_quant_fp8").stats()["triton_fake_quant_fp8"]["traced"] == before + 10
    assert torch.equal(compiled, Tower()(x, scale))
    compiled.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export_records_portable_math(strict: bool) -> None:
    """Only standard operators are recorded, and afterwards the Triton kernel serves again."""
    x, scale = torch.randn(8, 8, device="cuda"), torch.tensor(0.1, device="cuda")
    program = torch.export.export(Tower(), (x, scale), strict=strict)
    operators = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert operators == {"aten"}
    assert torch.equal(program.module()(x, scale), Tower()(x, scale))
    with expect("fake_quant_fp8", solution="triton"):
        Tower()(x, scale)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_trace_records_portable_math() -> None:
    """``torch.jit.trace`` holds no operator of the provider.

    The graph is not run here: TorchScript's fuser does not come back from one with FP8 casts (H200, torch 2.11).
    """
    x, scale = torch.randn(8, 8, device="cuda"), torch.tensor(0.1, device="cuda")
    traced = torch.jit.trace(Tower(), (x, scale))
    assert "tokenspeed_triton" not in str(traced.graph)
