# SPDX-License-Identifier: Apache-2.0
"""Force a kernel for one operator. Strongest first: the environment, the innermost context, the call's argument."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType

from tokenspeed_kernel import epoch, settings
from tokenspeed_kernel.notices import warn
from tokenspeed_kernel.registry import KernelRegistry

__all__ = ["NoKernelFoundError", "context_override", "forced_kernel", "kernel_override"]


class NoKernelFoundError(RuntimeError):
    """No registered kernel may serve the request; the message lists each with its reason."""


_NONE: Mapping[tuple[str, str], str] = MappingProxyType({})
_context_overrides: ContextVar[Mapping[tuple[str, str], str]] = ContextVar("tokenspeed_kernel_overrides", default=_NONE)


@contextmanager
def kernel_override(family: str, mode: str, kernel_name: str) -> Generator[None, None, None]:
    """Run the kernel or solution called ``kernel_name`` for ``(family, mode)`` inside the context.

    It holds for the current thread and task alone; leaving restores what held before, also after an exception.
    """
    epoch.open_context()
    token = _context_overrides.set({**_context_overrides.get(), (family, mode): kernel_name})
    try:
        yield
    finally:
        epoch.close_context()
        with suppress(ValueError):  # left in another context than entered in, as by a finaliser: nothing is set there
            _context_overrides.reset(token)


def context_override(family: str, mode: str) -> str | None:
    """Return the kernel or solution that the innermost open context names for an operator, or None."""
    return _context_overrides.get().get((family, mode))


def forced_kernel(
    registry: KernelRegistry, family: str, mode: str, environment: Mapping[str, str], wanted: str | None
) -> str | None:
    """Return the kernel or solution that the environment forces, else ``wanted``: a context's or argument's, or None.

    A name from the environment that no kernel of the operator has is warned about once and passed over.

    Raises:
        NoKernelFoundError: a context or the argument names something that no kernel of the operator has.
    """
    known = {name for r in registry.registrations(family, mode) for name in (r.spec.name, r.spec.solution)}
    variable = settings.override_variable(family, mode)
    if preferred := environment.get(variable, "").strip():
        if preferred in known:
            return preferred
        _warn_unknown_override(variable, preferred, tuple(sorted(known)))
    if wanted and wanted not in known:
        raise NoKernelFoundError(
            f"override {wanted!r} names no kernel or solution of {family}.{mode}; "
            f"there are: {', '.join(sorted(known)) or 'none'}"
        )
    return wanted or None


_said: set[tuple[str, str]] = set()


def _warn_unknown_override(variable: str, wanted: str, known: tuple[str, ...]) -> None:
    if (variable, wanted) not in _said:
        _said.add((variable, wanted))
        warn(f"{variable}={wanted!r} is ignored: it names no kernel or solution of {', '.join(known) or 'none'}.")
