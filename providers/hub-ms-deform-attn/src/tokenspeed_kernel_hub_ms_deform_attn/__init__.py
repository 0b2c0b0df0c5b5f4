# SPDX-License-Identifier: Apache-2.0
"""Compiled multi-scale deformable attention from the Hugging Face Hub (plugin ``hub_ms_deform_attn``)."""

from __future__ import annotations

from tokenspeed_kernel.platform import CapabilityRequirement
from tokenspeed_kernel.registry import Priority, register_kernel

__all__ = ["register"]


def register() -> None:
    """Declare the kernel. Called by discovery; imports no torch, loads nothing and makes no request."""
    register_kernel(
        "attention",
        "ms_deform_attn",
        name="hub_ms_deform_attn",
        solution="hub",
        signatures=(),
        capability=CapabilityRequirement(vendors=frozenset({"nvidia"})),
        priority=Priority.SPECIALIZED,
        predicate="tokenspeed_kernel_hub_ms_deform_attn.loading:availability",
        supports="tokenspeed_kernel_hub_ms_deform_attn.ms_deform_attn:supports",
    )("tokenspeed_kernel_hub_ms_deform_attn.ms_deform_attn:ms_deform_attn")
