# SPDX-License-Identifier: Apache-2.0
"""Which tensor formats a kernel takes, operand by operand: frozen values that compare and hash.

A ``torch.dtype`` is stored as it comes and never looked into, so this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "FormatSignature",
    "ScaleFormat",
    "TensorFormat",
    "dense_tensor_format",
    "format_signature",
    "format_signatures",
    "tensor_format",
]


@dataclass(frozen=True)
class ScaleFormat:
    """How the scales of a quantized tensor are stored.

    Raises:
        ValueError: ``block_shape`` is missing for granularity ``"block"``, given for another, or not positive.
    """

    storage_dtype: torch.dtype
    granularity: str
    """``"tensor"``, ``"channel"``, ``"token"``, ``"block"``, ..."""
    block_shape: tuple[int, ...] | None = None
    """Elements per scale along the last axes, for granularity ``"block"``."""
    dynamic_block_shape: bool = False
    """Whether any block shape is served."""

    def __post_init__(self) -> None:
        if self.granularity != "block":
            if self.block_shape is not None or self.dynamic_block_shape:
                raise ValueError(
                    f"a block shape belongs to granularity 'block', got granularity {self.granularity!r} with "
                    f"block_shape={self.block_shape!r}, dynamic_block_shape={self.dynamic_block_shape!r}"
                )
            return
        if self.block_shape is None:
            if not self.dynamic_block_shape:
                raise ValueError("granularity 'block' needs block_shape, or dynamic_block_shape=True for any")
            return
        if self.dynamic_block_shape:
            raise ValueError(f"give block_shape={self.block_shape!r} or dynamic_block_shape=True, not both")
        object.__setattr__(self, "block_shape", tuple(self.block_shape))
        if not self.block_shape or any(size <= 0 for size in self.block_shape):
            raise ValueError(f"block_shape must hold positive sizes, got {self.block_shape!r}")

    def __str__(self) -> str:
        block = "" if self.granularity != "block" else f", block={self.block_shape or 'dynamic'}"
        return f"scale({self.granularity}, storage={self.storage_dtype}{block})"


@dataclass(frozen=True)
class TensorFormat:
    """How one operand is stored: its dtype, the name of its format, and its scales if it has any.

    Raises:
        ValueError: the format is ``"fp8"``, which does not say whether it is scaled, or ``"scaled-fp8"`` has no scale.
    """

    storage_dtype: torch.dtype
    format: str = "dense"
    scale: ScaleFormat | None = None

    def __post_init__(self) -> None:
        if self.format == "fp8":
            raise ValueError("format 'fp8' is ambiguous: 'dense' is unscaled FP8, 'scaled-fp8' has a scale")
        if self.format == "scaled-fp8" and self.scale is None:
            raise ValueError("format 'scaled-fp8' needs a scale")

    def __str__(self) -> str:
        scale = "" if self.scale is None else f", {self.scale}"
        return f"{self.format}[storage={self.storage_dtype}{scale}]"


@dataclass(frozen=True)
class FormatSignature:
    """One format per operand role, in the order of the roles' names.

    Raises:
        ValueError: a role is named twice.
    """

    roles: tuple[tuple[str, TensorFormat], ...]

    def __post_init__(self) -> None:
        roles = tuple(sorted(self.roles, key=lambda item: item[0]))
        object.__setattr__(self, "roles", roles)
        names = [name for name, _ in roles]
        if len(set(names)) != len(names):
            raise ValueError(f"each operand role may be named once, got {names}")
        object.__setattr__(self, "_hash", hash(roles))  # a selection hashes its signature at every call

    def __hash__(self) -> int:
        value: int = self.__dict__["_hash"]
        return value

    def __reduce__(self) -> tuple[type[FormatSignature], tuple[object, ...]]:
        return FormatSignature, (self.roles,)  # without the hash, which is another one in another process

    def format_for(self, role: str) -> TensorFormat | None:
        """Return the format of ``role``, or None if it is not in the signature."""
        return dict(self.roles).get(role)

    def storage_dtype_for(self, role: str) -> torch.dtype | None:
        """Return the dtype that ``role`` is stored in, or None if it is not in the signature."""
        found = self.format_for(role)
        return None if found is None else found.storage_dtype

    def __str__(self) -> str:
        return ", ".join(f"{name}={tensor}" for name, tensor in self.roles) or "none"


def tensor_format(format: str, storage_dtype: torch.dtype, *, scale: ScaleFormat | None = None) -> TensorFormat:
    """Return the format named ``format`` stored as ``storage_dtype``, with ``scale`` if it is quantized."""
    return TensorFormat(storage_dtype, format, scale)


# Hosts build a signature at every call. Both tables give the same object for the same request, so that a selection
# compares identities. They are emptied when full: a host with no end of formats must not make them grow for ever.
_TABLE_LIMIT = 1024
_dense_formats: dict[torch.dtype, TensorFormat] = {}
_signatures: dict[tuple[object, ...], FormatSignature] = {}


def dense_tensor_format(storage_dtype: torch.dtype) -> TensorFormat:
    """Return the plain, unscaled format of ``storage_dtype``."""
    try:
        return _dense_formats[storage_dtype]
    except KeyError:
        if len(_dense_formats) >= _TABLE_LIMIT:
            _dense_formats.clear()
        return _dense_formats.setdefault(storage_dtype, TensorFormat(storage_dtype))


def format_signature(**roles: TensorFormat) -> FormatSignature:
    """Return the signature with these formats, one keyword per operand role."""
    # By identity: the signature keeps its formats alive, so nothing else can have their ids while it is in the table.
    key = (*roles, *map(id, roles.values()))
    try:
        return _signatures[key]
    except KeyError:
        if len(_signatures) >= _TABLE_LIMIT:
            _signatures.clear()
        return _signatures.setdefault(key, FormatSignature(tuple(roles.items())))


def format_signatures(
    roles: str | Iterable[str], format: str, storage_dtypes: Iterable[torch.dtype], *, scale: ScaleFormat | None = None
) -> frozenset[FormatSignature]:
    """Return one signature per dtype, in which every role has the same format and that dtype."""
    names = (roles,) if isinstance(roles, str) else tuple(roles)
    return frozenset(
        FormatSignature(tuple((name, TensorFormat(dtype, format, scale)) for name in names)) for dtype in storage_dtypes
    )


def __getattr__(name: str) -> ScaleFormat:
    """Make ``MXFP8_BLOCK_SCALE`` when it is first asked for: its dtype is torch's."""
    if name != "MXFP8_BLOCK_SCALE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    return ScaleFormat(torch.float8_e8m0fnu, "block", (1, 32))
