# SPDX-License-Identifier: Apache-2.0
"""Which modules are simulated, and why each other layer is not. Changes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from tokenspeed_kernel_simulate.layers import SimulatedLayer, Swapped, container_kind, layer_kind

__all__ = ["Choice", "Skip", "choose"]

Skip = str | type[nn.Module]
"""A qualified name, a pattern of names such as ``"*.attention.*"``, or a class of modules."""

_ATTENTION = "torch.nn.MultiheadAttention computes with its weights itself, without calling a layer"


@dataclass(kw_only=True, slots=True)
class Choice:
    """Modules by their first qualified name."""

    layers: dict[str, tuple[nn.Module, type[SimulatedLayer]]] = field(default_factory=dict)
    containers: list[tuple[nn.Module, type[Swapped]]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # the reasons


def choose(root: nn.Module, skip: Skip | Iterable[Skip]) -> Choice:
    """Return what of ``root`` is simulated. A skipped module is left alone with everything in it, wherever it is used.

    Raises:
        TypeError: an entry of ``skip`` is neither a string nor a class of modules.
        ValueError: an entry matches no module, a layer is simulated already, or none is left.
    """
    names: dict[nn.Module, list[str]] = {}  # a module that is used in several places has several
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    unwanted = _unwanted(names, _entries(skip))
    unable = {
        child: _ATTENTION
        for module in names
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
        for child in module.modules()
    }
    choice = Choice()
    for module, (name, *_) in names.items():
        kind = layer_kind(module)
        if kind is None and not (module in unable and isinstance(module, nn.MultiheadAttention)):
            continue
        if module in unwanted:
            choice.skipped[name] = f"skip has {unwanted[module]!r}"
        elif isinstance(module, SimulatedLayer):
            raise ValueError(f"layer {name!r} is simulated already; restore that simulation first, or skip the layer")
        elif module in unable:
            choice.skipped[name] = unable[module]
        elif isinstance(kind, str):
            choice.skipped[name] = kind
        elif kind is not None:
            choice.layers[name] = module, kind
    if not choice.layers:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in choice.skipped.items())
        raise ValueError(
            f"{type(root).__name__} has no layer to simulate ({reasons or 'no linear layer and no convolution in it'})"
        )
    chosen = {module for module, _ in choice.layers.values()}
    choice.containers = [
        (module, container)
        for module in names
        if (container := container_kind(module)) is not None and not chosen.isdisjoint(module.modules())
    ]
    return choice


def _entries(skip: Skip | Iterable[Skip]) -> Sequence[Skip]:
    entries = (skip,) if isinstance(skip, (str, type)) else tuple(skip)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"skip has {entry!r}; give names, patterns of names, or classes of modules")
    return entries


def _unwanted(names: dict[nn.Module, list[str]], entries: Sequence[Skip]) -> dict[nn.Module, Skip]:
    """Return the modules that ``entries`` name, and all in them, with the entry."""
    unwanted: dict[nn.Module, Skip] = {}
    for entry in entries:
        found = [module for module, known in names.items() if _matches(module, known, entry)]
        if not found and isinstance(entry, str):  # a class may well be absent, a name is a slip of the pen
            everything = [name for known in names.values() for name in known]
            close = difflib.get_close_matches(entry, everything, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "named_modules() has the names."
            raise ValueError(f"skip {entry!r} matches no module; {hint}")
        for module in found:
            unwanted.update(dict.fromkeys(module.modules(), entry))
    return unwanted


def _matches(module: nn.Module, names: list[str], entry: Skip) -> bool:
    if isinstance(entry, str):
        return any(fnmatchcase(name, entry) for name in names)
    return isinstance(module, entry)
