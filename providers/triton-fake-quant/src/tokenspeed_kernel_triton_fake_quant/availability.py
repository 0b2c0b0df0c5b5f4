# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has what a Triton kernel needs: the package, and whatever Triton builds its launcher with."""

from importlib.util import find_spec
from typing import Literal

__all__ = ["triton_can_launch", "triton_is_installed"]


def triton_is_installed() -> Literal[True] | str:
    """Return True, or what is missing. Imports nothing."""
    return True if find_spec("triton") is not None else "triton is not installed: pip install triton"


def triton_can_launch() -> Literal[True] | str:
    """Return True if a kernel can be built and run on the current GPU, else the error that says what is missing.

    Triton compiles its launcher with the machine's C compiler and Python headers: that it imports says little.
    """
    try:
        import torch

        from tokenspeed_kernel_triton_fake_quant.fp8 import fake_quant_fp8

        one = torch.ones(1, device="cuda")
        value = fake_quant_fp8(one, one).item()
    except Exception as error:  # noqa: BLE001 -- compilers, linkers and drivers fail in every way there is
        return f"Triton cannot build or launch a kernel here: {type(error).__name__}: {error}"
    return True if value == 1.0 else f"a trial kernel computed {value} instead of 1.0"
