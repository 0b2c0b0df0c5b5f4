# SPDX-License-Identifier: Apache-2.0
"""Triton fake-quant kernels for ``tokenspeed_kernel`` (plugin ``triton_fake_quant``)."""

from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel.registry import Priority, register_kernel

__all__ = ["register"]


def register() -> None:
    """Declare this provider's kernels. Called by discovery; imports neither torch nor Triton."""
    register_kernel(
        "quant",
        "fake_quant_fp8",
        name="triton_fake_quant_fp8",
        solution="triton",
        signatures=(),
        priority=Priority.PERFORMANT + 2,
        capability=CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(8, 0)),
        predicate=f"{__name__}.availability:triton_is_installed",
        probe=f"{__name__}.availability:triton_can_launch",
        supports=f"{__name__}.fp8:supports",
    )(f"{__name__}.fp8:fake_quant_fp8")
