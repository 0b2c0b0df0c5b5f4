# SPDX-License-Identifier: Apache-2.0
"""See what loading a plugin changed in the process, and put the kernel registry right if it was tampered with."""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tokenspeed_kernel import epoch
from tokenspeed_kernel import registry as registry_module
from tokenspeed_kernel.notices import describe
from tokenspeed_kernel.registry import KernelRegistry

__all__ = ["Watch"]

_MISSING = object()
_BROAD = ("builtins", "")  # where categories are defined that anybody's warning may have


class Watch:
    """How the process was when this was made, shortly before a plugin ran."""

    def __init__(self, registry: KernelRegistry) -> None:
        self._registry = registry
        self._spaces: tuple[Any, ...] = (registry_module, KernelRegistry, registry)
        self._attributes = [dict(vars(space)) for space in self._spaces]
        self._indices = (dict(registry._by_name), dict(registry._by_operator))
        self._environ, self._variables = os.environ, _variables()
        self._filters = _filters()
        self._path = list(sys.path)
        self._torch = _torch_state()

    def mend_attributes(self) -> list[str]:
        """Undo what was patched in the registry and its module, and return what that was."""
        found = []
        for space, before in zip(self._spaces, self._attributes, strict=True):
            now = dict(vars(space))
            if now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values())):
                continue  # the usual case, and much faster
            for name in {*before, *now}:
                old = before.get(name, _MISSING)
                if name.startswith("__") or name == "_order" or now.get(name, _MISSING) is old:
                    continue  # the order number grows with every registration
                if name == "_instance":
                    found.append("it reset the registry")
                else:
                    what = getattr(space, "__name__", "") or type(space).__name__
                    found.append(f"it patched {what.rpartition('.')[2]}.{name}")
                if old is _MISSING:
                    delattr(space, name)
                else:
                    setattr(space, name, old)
        return sorted(found)

    def mend_kernels(self, owner: str) -> list[str]:
        """Bring back kernels of others than ``owner`` that are gone from the registry, and return which those were."""
        by_name, by_operator = self._indices
        lost = []
        for name, stack in by_name.items():
            here = {r.owner for r in self._registry._by_name.get(name, ())}
            lost += [f"it removed kernel {name!r}" for r in stack if r.owner not in {*here, owner}]
        if lost:
            with self._registry._lock:
                self._registry._by_name = dict(by_name)
                self._registry._by_operator = dict(by_operator)
                self._registry.answers.clear()
            epoch.bump()
        return lost

    def changes(self) -> list[str]:
        """Return what else of the process changed.

        It is left as it is, for a plugin may have its reasons; but not what would harm the plugins after it: a warnings
        filter that silences what is said of them, or a path that they are not on.
        """
        try:
            return [*self._environ_changes(), *self._filter_changes(), *self._path_changes(), *self._torch_changes()]
        except Exception as error:  # noqa: BLE001 -- it may have put anything there
            return [f"what else it changed cannot be told: {describe(error)}"]

    def _environ_changes(self) -> Iterator[str]:
        if getattr(os, "environ", None) is not self._environ:
            os.environ = self._environ  # noqa: B003 -- the very object that it was
            yield "it replaced os.environ, which was undone"
        before, now = self._variables, _variables()
        if before != now:  # names only: a value may be a secret
            changed = sorted(os.fsdecode(name) for name in {*before, *now} if before.get(name) != now.get(name))
            yield f"it changed the environment: {', '.join(changed)}"

    def _filter_changes(self) -> Iterator[str]:
        # Libraries filter by message, module or a category of their own on import: that is no concern of others.
        now = _filters()
        new = [f for f in now if f not in self._filters]
        broad = [f for f in new if f[1] is f[3] is None and getattr(f[2], "__module__", "") in _BROAD]
        said = [f"{f[0]!r} for every {getattr(f[2], '__name__', f[2])}" for f in broad]
        gone = sum(f not in now for f in self._filters)
        said += [f"{gone} removed"] if gone else []
        if said:
            warnings.filters = [f for f in new if f not in broad] + self._filters
            with warnings.catch_warnings():  # entering it makes Python forget what it had decided by the old filter
                pass
            yield f"it changed the warnings filter ({', '.join(said)}), which was undone"

    def _path_changes(self) -> Iterator[str]:
        if gone := [entry for entry in self._path if entry not in sys.path]:
            sys.path[:] = [*self._path, *(entry for entry in sys.path if entry not in self._path)]
            yield f"it removed from sys.path {', '.join(map(repr, gone))}, which was undone"

    def _torch_changes(self) -> Iterator[str]:
        now = _torch_state()
        for what, old in self._torch.items():
            if now.get(what) != old:
                yield f"it changed torch's {what} from {old} to {now.get(what)}"


def _variables() -> dict[Any, Any]:
    """Return a copy of the environment, as it is stored where that is known: decoding it takes 50 times as long."""
    return dict(getattr(os.environ, "_data", os.environ))


def _filters() -> list[Any]:
    return list(warnings.filters) if isinstance(warnings.filters, (list, tuple)) else []


def _torch_state() -> dict[str, object]:
    """Return settings of torch by name: empty if nobody has imported it, or somebody only half."""
    torch: Any = sys.modules.get("torch")
    try:
        return {
            "default dtype": torch.get_default_dtype(),
            "grad mode": torch.is_grad_enabled(),
            "thread count": torch.get_num_threads(),
        }
    except AttributeError:
        return {}
