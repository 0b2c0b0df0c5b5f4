# SPDX-License-Identifier: Apache-2.0
"""The template's kernel against the reference, and its registration."""

import math

import pytest

torch = pytest.importorskip("torch")

import kernel_plugin_template  # noqa: E402 -- after the check that torch is there
from kernel_plugin_template import fp8  # noqa: E402
from tokenspeed_kernel import slot  # noqa: E402
from tokenspeed_kernel.reference import quant as reference  # noqa: E402
from tokenspeed_kernel.registry import KernelRegistry  # noqa: E402

SPECIAL = [448, 464, 465, -1000, math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**-10, 2.0**-7 * 1.5, 17.0, 19.0]


@pytest.mark.parametrize("scale", [1e-30, 0.1, 1.0, 1e30, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_reference_with_its_gradient(dtype: torch.dtype, scale: float) -> None:
    """Values and gradients are the reference's, bit for bit."""
    torch.manual_seed(0)
    x = (
        torch.cat([torch.tensor(SPECIAL), torch.randn(1000) * 100 * scale, torch.randn(1000)])
        .to(dtype)
        .requires_grad_()
    )
    step, cotangent = torch.tensor([scale]), torch.randn(x.shape).to(dtype)
    assert fp8.supports(x, step) is True
    actual, expected = fp8.fake_quant_fp8(x, step), reference.fake_quant_fp8(x, step)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    zero = expected == 0
    assert torch.equal(torch.signbit(actual[zero]), torch.signbit(expected[zero]))
    gradients = [torch.autograd.grad(y, x, cotangent)[0] for y in (actual, expected)]
    assert torch.equal(*gradients)


def test_is_chosen_once_registered() -> None:
    """After ``register()`` the slot runs this kernel, and for what it declines the reference."""
    KernelRegistry.reset()
    kernel_plugin_template.register()
    fake_quant = slot("fake_quant_fp8")
    x, step = torch.randn(8), torch.tensor(0.1)
    assert fake_quant.explain(x, step).chosen == "template_fake_quant_fp8"
    assert torch.equal(fake_quant(x, step), reference.fake_quant_fp8(x, step))
    assert fake_quant.explain(x.double(), step).chosen == "fake_quant_fp8:reference"
