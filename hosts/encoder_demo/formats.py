# SPDX-License-Identifier: Apache-2.0
"""Which formats the demo compares. Knows names only, no tensor."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """What the linear layers of the encoder are simulated in."""

    weights: str
    activations: str | None = None
    group_size: int | None = None

    @property
    def name(self) -> str:
        """Weights and activations in short, such as ``int4/32 + int8``: 32 weights share a scale."""
        group = f"/{self.group_size}" if self.group_size else ""
        return f"{self.weights}{group}" + (f" + {self.activations}" if self.activations else "")


FORMATS = (
    Format(weights="fp8", activations="fp8"),
    Format(weights="fp8"),
    Format(weights="int8", activations="int8"),
    Format(weights="int8"),
    Format(weights="int6", group_size=128),
    Format(weights="int5", group_size=128),
    Format(weights="int4", group_size=32, activations="int8"),
    Format(weights="int4", group_size=32),
    Format(weights="int4", group_size=128),
    Format(weights="nvfp4", activations="nvfp4"),
    Format(weights="nvfp4"),
    Format(weights="mxfp4", activations="mxfp4"),
    Format(weights="mxfp4"),
    Format(weights="int3", group_size=32),
)
