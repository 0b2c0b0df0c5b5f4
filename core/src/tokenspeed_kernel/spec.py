# SPDX-License-Identifier: Apache-2.0
"""What is known of a kernel before it runs, checked when it is made: a malformed one never gets into a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.platform import CapabilityRequirement
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import checked_traits

if TYPE_CHECKING:
    import torch

__all__ = ["PRIORITY_LIMIT", "KernelSpec", "Priority", "check_callable"]

PRIORITY_LIMIT = 20


class Priority(IntEnum):
    """The bands of priority; add a small offset within a band. Higher wins; anything in ``[0, 20)`` may be given."""

    REFERENCE = 0
    PORTABLE = 4
    PERFORMANT = 8
    SPECIALIZED = 12
    PLUGIN = 16


@dataclass(frozen=True)
class KernelSpec:
    """What selection knows of one implementation of ``(family, mode)``.

    Raises:
        ValueError: a name is empty, or ``priority`` is outside ``[0, 20)``.
        TypeError: a field has another type than documented.
    """

    name: str
    """Unique among kernels; a second one under the same name replaces the first."""
    family: str
    mode: str
    features: frozenset[str] = frozenset()
    """Optional abilities that a caller may ask for by name."""
    solution: str = ""
    """Short name of the technology: ``"triton"``, ``"hub"``, ``"reference"``."""
    capability: CapabilityRequirement = field(default_factory=CapabilityRequirement)
    format_signatures: frozenset[FormatSignature] = frozenset()
    """The formats it takes; empty takes all."""
    traits: Mapping[str, frozenset[Any]] = field(default_factory=dict, hash=False)
    """Other properties of a call, by name, each with the values it serves."""
    priority: int = Priority.PERFORMANT + 2
    weight_preprocessor: Callable[..., Any] | None = None
    """What turns a stored weight into the layout that this kernel wants, or None."""
    predicate: Callable[[], object] | str | None = field(default=None, kw_only=True)
    """Asked once: True if what the kernel depends on is there, else anything. May be ``"module:attribute"``."""
    probe: Callable[[], object] | str | None = field(default=None, kw_only=True)
    """Asked once, before the kernel's first use: whether this machine can build and launch it."""
    supports: Callable[..., object] | str | None = field(default=None, kw_only=True)
    """Asked at each slot call, with its arguments: True, or why not as a str (False and None give no reason)."""

    def __post_init__(self) -> None:
        _check_spec(self)

    def supports_format_signature(self, format_signature: FormatSignature) -> bool:
        """Return whether the kernel takes operands of these formats."""
        return not self.format_signatures or format_signature in self.format_signatures

    def format_signatures_for_storage_dtype(
        self, storage_dtype: torch.dtype, roles: str | Iterable[str]
    ) -> tuple[FormatSignature, ...]:
        """Return the signatures in which one of ``roles`` is stored as ``storage_dtype``, ordered by their text."""
        names = _role_names(roles)
        found = (s for s in self.format_signatures if any(s.storage_dtype_for(name) == storage_dtype for name in names))
        return tuple(sorted(found, key=str))

    def format_signature_for_storage_dtype(
        self, storage_dtype: torch.dtype, roles: str | Iterable[str]
    ) -> FormatSignature | None:
        """Return the one signature in which one of ``roles`` is stored as ``storage_dtype``, or None.

        Raises:
            ValueError: there are several.
        """
        found = self.format_signatures_for_storage_dtype(storage_dtype, roles)
        if len(found) > 1:
            texts = "; ".join(map(str, found))
            raise ValueError(
                f"kernel {self.name!r} has {len(found)} signatures with {storage_dtype} in {roles!r}: {texts}"
            )
        return found[0] if found else None

    def storage_dtypes_for_role(self, roles: str | Iterable[str]) -> frozenset[torch.dtype]:
        """Return the dtypes that ``roles`` may be stored in."""
        names = _role_names(roles)
        dtypes = (s.storage_dtype_for(name) for s in self.format_signatures for name in names)
        return frozenset(dtype for dtype in dtypes if dtype is not None)


def _role_names(roles: str | Iterable[str]) -> tuple[str, ...]:
    names = (roles,) if isinstance(roles, str) else tuple(roles)
    if not names:
        raise ValueError("name at least one operand role")
    return names


def _check_spec(spec: KernelSpec) -> None:
    who = f"kernel {spec.name!r} for {spec.family!r}.{spec.mode!r}"
    for field_name in ("name", "family", "mode"):
        value = getattr(spec, field_name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{who}: {field_name} must be a non-empty str, got {value!r}")
    if isinstance(spec.priority, bool) or not isinstance(spec.priority, int):
        raise TypeError(f"{who}: priority must be an int in [0, {PRIORITY_LIMIT}), got {spec.priority!r}")
    if not 0 <= spec.priority < PRIORITY_LIMIT:
        bands = ", ".join(f"{band.name}={band.value}" for band in Priority)
        raise ValueError(f"{who}: priority must be in [0, {PRIORITY_LIMIT}), got {spec.priority}. Bands: {bands}")
    for field_name in ("predicate", "probe", "supports"):
        value = getattr(spec, field_name)
        if value is not None:
            check_callable(who, field_name, value)
    if spec.weight_preprocessor is not None and not callable(spec.weight_preprocessor):
        raise TypeError(f"{who}: weight_preprocessor must be callable, got {spec.weight_preprocessor!r}")
    if not isinstance(spec.solution, str):
        raise TypeError(f"{who}: solution must be a str, got {spec.solution!r}")
    if not isinstance(spec.capability, CapabilityRequirement):
        raise TypeError(f"{who}: capability must be a CapabilityRequirement, got {spec.capability!r}")
    # A plugin may keep a list or a set of its own: what is registered must not change under a selection.
    object.__setattr__(spec, "features", _frozen(who, "features", spec.features, str))
    object.__setattr__(
        spec, "format_signatures", _frozen(who, "format_signatures", spec.format_signatures, FormatSignature)
    )
    object.__setattr__(spec, "traits", checked_traits(who, spec.traits))


def _frozen(who: str, what: str, values: Iterable[Any], kind: type) -> frozenset[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{who}: {what} must be a set of {kind.__name__}, got {values!r}")
    items = tuple(values)
    if wrong := [item for item in items if not isinstance(item, kind)]:
        raise TypeError(f"{who}: {what} must be a set of {kind.__name__}, got {wrong[0]!r} in it")
    return frozenset(items)


def check_callable(who: str, what: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is callable or a str ``"module:attribute"``."""
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        if not (module and colon and attribute):
            raise ValueError(f"{who}: {what} as a str must be 'module:attribute', got {value!r}")
    elif not callable(value):
        raise TypeError(f"{who}: {what} must be callable or 'module:attribute', got {value!r}")
