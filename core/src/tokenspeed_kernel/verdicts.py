# SPDX-License-Identifier: Apache-2.0
"""What the answer of a kernel's ``supports``, and an error of a kernel, mean for a call."""

from __future__ import annotations

from typing import Any

from tokenspeed_kernel.notices import describe
from tokenspeed_kernel.registry import Registration, load_attribute
from tokenspeed_kernel.rules import Reason

__all__ = ["declines", "is_nobodys_fault", "raised_text", "verdict_text"]


def declines(registration: Registration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason | None:
    """Return why a kernel declines a call, or None."""
    name, supports = registration.spec.name, registration.spec.supports
    if supports is None:
        return None
    try:
        verdict = load_attribute(supports)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 -- as in a call: a fault of the check declines
        return Reason(name, "accepting", "supports_raised", raised_text(error), "report it to its provider")
    return None if verdict is True else Reason(name, "accepting", "declined", verdict_text(verdict), _DECLINED_REMEDY)


_DECLINED_REMEDY = "change the arguments to fit, or leave them to the kernel that is chosen"


def raised_text(error: Exception) -> str:
    """Return why a ``supports`` that raised declines; raise again what is nobody's fault."""
    if is_nobodys_fault(error):
        raise error
    return f"its supports() raised {describe(error)}"


def verdict_text(verdict: object) -> str:
    """Return why a kernel declined, from what its ``supports`` answered."""
    if isinstance(verdict, str):
        return verdict
    if verdict is None or verdict is False:
        return "declines these arguments without a reason"
    return f"its supports() answered {verdict!r}, which is neither True, False, None nor a str"


# What CUDA says once a context is beyond use: every later call in the process fails, whoever makes it. Errors that
# leave it usable, such as a launch with too many threads or a missing kernel image, are their kernel's.
_POISON = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "invalid address space",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "uncorrectable ecc",
)


def is_nobodys_fault(error: Exception) -> bool:
    """Return whether an error says nothing about the kernel: no memory, or a device context that is beyond use."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = describe(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _POISON)
