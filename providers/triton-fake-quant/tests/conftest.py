# SPDX-License-Identifier: Apache-2.0
"""The eight kernels as one fixture, and inputs that reach what the conformance kit's grid does not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    import torch

PACKAGE = "tokenspeed_kernel_triton_fake_quant"
MODULES = {
    "fake_quant_fp8": "fp8",
    "fake_quant_int8_affine": "int8_affine",
    "fake_quant_int8_per_channel": "int8_per_channel",
    "fake_quant_int_grouped": "int_grouped",
    "fake_quant_mxfp4_dynamic": "mxfp4",
    "fake_quant_mxfp4_weight": "mxfp4",
    "fake_quant_nvfp4_dynamic": "nvfp4",
    "fake_quant_nvfp4_weight": "nvfp4",
}


class Kernel(NamedTuple):
    """One kernel of this provider, and what it is held against."""

    slot: str
    call: Callable[..., torch.Tensor]
    supports: Callable[..., object]
    reference: Callable[..., torch.Tensor]

    def others(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return what follows the tensor in a usual call."""
        import torch

        numbers: dict[str, tuple[float, ...]] = {
            "fake_quant_fp8": (0.1,),
            "fake_quant_int8_affine": (-3.0, 5.0),
            "fake_quant_nvfp4_weight": (500.0,),
        }
        if self.slot == "fake_quant_int_grouped":
            return 4, 16
        return tuple(torch.tensor(number, device=x.device) for number in numbers.get(self.slot, ()))

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this kernel's result for ``x`` and the reference's."""
        return self.call(x, *self.others(x)), self.reference(x, *self.others(x))

    @property
    def is_masked(self) -> bool:
        """Whether the gradient stops outside of a range."""
        return "int8" in self.slot


@pytest.fixture(params=MODULES)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Return each kernel in turn, or by name where a test is parametrized with names."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tokenspeed_kernel.reference import quant

    slot = request.param
    module = import_module(f"{PACKAGE}.{MODULES[slot]}")
    named = f"supports_{slot.rpartition('_')[2]}"
    supports = getattr(module, named, None) or module.supports
    return Kernel(slot, getattr(module, slot), supports, getattr(quant, slot))


@pytest.fixture
def assert_same_bits() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a check that two tensors hold the same bits, NaN payloads and signs apart."""
    from tokenspeed_kernel.testing.parity import differing_bits

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert differing_bits(actual.detach(), expected.detach()) is None

    return check


@pytest.fixture
def random_bits() -> Callable[..., torch.Tensor]:
    """Return a maker of random bit patterns on the GPU: every exponent, subnormals, infinities and NaN among them."""
    import torch

    def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        width = torch.finfo(dtype).bits
        bits = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), shape, device="cuda", generator=generator)
        return bits.to({16: torch.int16, 32: torch.int32}[width]).view(dtype)

    return make
