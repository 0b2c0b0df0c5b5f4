# SPDX-License-Identifier: Apache-2.0
"""Triton fake-quant kernels for ``tokenspeed_kernel`` (plugin ``triton_fake_quant``)."""

from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel.registry import Priority, register_kernel

__all__ = ["register"]


_NVIDIA = CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(8, 0))
_KERNELS = {
    "fake_quant_fp8": ("fp8", "supports"),
    "fake_quant_int8_affine": ("int8_affine", "supports"),
    "fake_quant_int8_per_channel": ("int8_per_channel", "supports"),
    "fake_quant_int_grouped": ("int_grouped", "supports"),
    "fake_quant_mxfp4_dynamic": ("mxfp4", "supports_dynamic"),
    "fake_quant_mxfp4_weight": ("mxfp4", "supports_weight"),
    "fake_quant_nvfp4_dynamic": ("nvfp4", "supports_dynamic"),
    "fake_quant_nvfp4_weight": ("nvfp4", "supports_weight"),
}


def register() -> None:
    """Declare this provider's kernels. Called by discovery; imports neither torch nor Triton."""
    for slot, (module, supports) in _KERNELS.items():
        register_kernel(
            "quant",
            slot,
            name=f"triton_{slot}",
            solution="triton",
            signatures=(),
            priority=Priority.PERFORMANT + 2,
            capability=_NVIDIA,
            predicate=f"{__name__}.availability:triton_is_installed",
            probe=f"{__name__}.availability:triton_can_launch",
            supports=f"{__name__}.{module}:{supports}",
        )(f"{__name__}.{module}:{slot}")
