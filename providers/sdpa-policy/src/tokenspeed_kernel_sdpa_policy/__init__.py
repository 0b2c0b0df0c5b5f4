# SPDX-License-Identifier: Apache-2.0
"""Attention by policy for ``tokenspeed_kernel`` (plugin ``sdpa_policy``): fused, or primitive ops in a graph capture.

Importing this package, and calling `register`, imports no torch: the public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_kernel_sdpa_policy.attention import attend, attention_weights, manual_attention_required
    from tokenspeed_kernel_sdpa_policy.switching import set_fused_attention

__all__ = ["attend", "attention_weights", "manual_attention_required", "register", "set_fused_attention"]

_HOME = {
    "attend": "attention",
    "attention_weights": "attention",
    "manual_attention_required": "attention",
    "set_fused_attention": "switching",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Declare the kernel ``sdpa_policy`` for the slot ``sdpa``. Called by discovery."""
    from tokenspeed_kernel.registry import register_kernel

    declare = register_kernel(
        "attention",
        "sdpa",
        name="sdpa_policy",
        solution="sdpa",
        signatures=(),  # every floating dtype: stock PyTorch does the work
        priority=10,
        supports="tokenspeed_kernel_sdpa_policy.attention:supports",
    )
    declare("tokenspeed_kernel_sdpa_policy.attention:attend")
