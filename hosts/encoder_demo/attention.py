# SPDX-License-Identifier: Apache-2.0
"""Attention of a transformers model through the slot ``sdpa``, with the host's own portable path behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tokenspeed_kernel import slot
from tokenspeed_kernel.reference.attention import sdpa as portable_sdpa

if TYPE_CHECKING:
    import torch

__all__ = ["SlotAttention"]


class SlotAttention:
    """An attention function for transformers that counts its calls and keeps the inputs of the first."""

    NAME = "tokenspeed_slot"  # what a model's attn_implementation says

    def __init__(self) -> None:
        """Start with nothing counted."""
        self.slot = slot("sdpa")
        self.calls = 0
        self.portable = 0
        self.first: tuple[tuple[torch.Tensor, ...], dict[str, Any]] | None = None

    def register(self) -> None:
        """Make ``NAME`` known to transformers.

        The mask function matters as much: without one, transformers hands over no mask, and padding would be
        attended to. That of ``sdpa`` gives a bool mask (batch, 1, queries, keys), True where attended, or None.
        """
        AttentionInterface.register(self.NAME, self)
        AttentionMaskInterface.register(self.NAME, sdpa_mask)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the output (batch, queries, heads, width) for inputs (batch, heads, tokens, width), and no weights.

        Dropout is not passed on: the model is in evaluation mode.
        """
        inputs = query, key, value
        options: dict[str, Any] = {"attn_mask": attention_mask, "scale": scaling}
        if self.first is None:
            self.first = inputs, options
        self.calls += 1
        output = self.slot(*inputs, **options)
        if output is None:  # nothing eligible: the slot has no reference, the portable path is the host's
            self.portable += 1
            output = portable_sdpa(*inputs, **options)
        return output.transpose(1, 2).contiguous(), None
