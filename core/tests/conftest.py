# SPDX-License-Identifier: Apache-2.0
"""A fresh world for every test of core, and the small makers that the tests share."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenspeed_kernel
from tokenspeed_kernel import SlotContract, dispatch, overrides, references, selection, settings, slots
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
from tokenspeed_kernel.plugins import discovery, installed, reset_plugins
from tokenspeed_kernel.registry import KernelRegistry, register_kernel

SOURCE = Path(tokenspeed_kernel.__file__).parents[1]


def _platform(vendor: str = "nvidia", major: int = 9, minor: int = 0, *features: str) -> PlatformInfo:
    return PlatformInfo(
        vendor=vendor,
        arch_version=ArchVersion(major, minor),
        device_name=f"{vendor} device",
        device_count=1,
        total_memory=80 << 30,
        memory_bandwidth=3350.0,
        sm_count=132,
        max_threads_per_sm=2048,
        max_shared_memory_per_sm=233472,
        sm_features=frozenset(features),
    )


@pytest.fixture
def platform() -> Callable[..., PlatformInfo]:
    """Make a platform: ``platform("amd", 9, 5, "feature")``; a Hopper by default."""
    return _platform


@pytest.fixture(autouse=True)
def _fresh_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from nothing: no kernel, plugin, slot of a host, oracle or variable, on a machine that is a Hopper."""
    for name in [*(n for names in settings.VARIABLES.values() for n in names), *os.environ]:
        if name.startswith((settings.OVERRIDE_PREFIX, "TOKENSPEED_KERNEL_", "LIBREYOLO_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discovery, "_state", discovery._State())
    kept = dict(dispatch.handles)  # other tests of the process hold them, as hosts do, for ever
    dispatch.handles.clear()
    dispatch.handles.update({contract.name: slots.Slot(contract) for contract in references.BUILT_IN})
    for name in set(references.contracts) - {contract.name for contract in references.BUILT_IN}:
        del references.contracts[name]
    monkeypatch.setattr(overrides, "_said", set())
    monkeypatch.setattr(selection, "_oracles", {})
    _forget()
    Platform.override(_platform())
    yield
    _forget()
    dispatch.handles.clear()
    dispatch.handles.update(kept)


def _forget() -> None:
    KernelRegistry.reset()
    Platform.reset()
    reset_plugins()
    settings.refresh()


@pytest.fixture
def kernel() -> Callable[..., Any]:
    """Register a kernel of ``("quant", "op")``: ``kernel("a", priority=12)``. Its implementation returns its name."""

    def make(name: str, impl: Any = None, *, family: str = "quant", mode: str = "op", **spec: Any) -> Any:
        spec = {"solution": name, "signatures": (), **spec}
        return register_kernel(family, mode, name=name, **spec)(impl or (lambda *args, **kwargs: name))

    return make


@pytest.fixture
def declare() -> Callable[..., slots.Slot]:
    """Declare the slot ``op`` of ``("quant", "op")``; its reference returns "reference" unless another is given."""

    def make(reference: Any = lambda *args, **kwargs: "reference", **contract: Any) -> slots.Slot:
        return slots.declare_slot(SlotContract(name="op", family="quant", mode="op", reference=reference, **contract))

    return make


@pytest.fixture
def states() -> Callable[..., dict[str, str]]:
    """Explain a slot's call: for every kernel "chosen", or the stage and code that refused it."""

    def explain(handle: slots.Slot, *args: Any) -> dict[str, str]:
        candidates = handle.explain(*args).to_dict()["candidates"]
        return {c["kernel"]: "chosen" if c["chosen"] else f"{c['stage']} {c['code']}" for c in candidates}

    return explain


@pytest.fixture
def said() -> Iterator[Callable[..., list[str]]]:
    """Record warnings: ``said("part")`` returns the messages so far that hold the part, in order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda part="": [str(w.message) for w in caught if part in str(w.message)]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, or arguments, in a fresh interpreter that finds this package and ``tmp_path``."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        if len(arguments) == 1:
            arguments = ("-c", textwrap.dedent(arguments[0]))
        search = os.pathsep.join(map(str, (tmp_path, SOURCE)))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": search, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


class Installer:
    """Write real distributions with an entry point into a folder on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str) -> None:
        """Write a module, or one of a package if the name has a dot, that can be imported at once."""
        path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def metadata(self, distribution: str, entry_points: str, version: str = "1.0", folder: Path | None = None) -> Path:
        """Write the dist-info folder of a distribution, whose entry points are the given lines of the group."""
        name = distribution.replace("-", "_")
        info = (folder or self.folder) / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tokenspeed_kernel.plugins]\n{entry_points}\n", encoding="utf-8")
        importlib.invalidate_caches()
        return info

    def add(self, name: str, body: str = "", *, top: str = "", module: str = "", distribution: str = "") -> str:
        """Install a plugin whose ``register()`` has this body, after these top-level lines; return its module."""
        module = module or f"tsk_plugin_{name.replace('-', '_')}"
        lines = textwrap.indent(textwrap.dedent(body).strip() or "pass", "    ")
        self.module(module, f"{textwrap.dedent(top)}\nCALLS = []\n\ndef register():\n    CALLS.append(1)\n{lines}\n")
        self.metadata(distribution or f"dist-{name}", f"{name} = {module}:register")
        return module

    @staticmethod
    def kernel(name: str, priority: int = 10, mode: str = "op") -> str:
        """Return the line of a plugin that registers a kernel of ``("quant", mode)``."""
        return (
            "from tokenspeed_kernel.registry import register_kernel; register_kernel('quant', "
            f"{mode!r}, name={name!r}, solution={name!r}, signatures=(), priority={priority})(lambda *a: {name!r})"
        )

    @staticmethod
    def calls(module: str) -> int:
        """Return how often the ``register()`` of an imported module ran."""
        return len(sys.modules[module].CALLS)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Install plugins into ``tmp_path``; those of the environment that runs the tests are hidden."""
    read = installed.search_path
    monkeypatch.setattr(installed, "search_path", lambda: [e for e in read() if Path(e).is_relative_to(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Installer(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("tsk_"):
            del sys.modules[name]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what this package logged so far."""
    caplog.set_level(logging.DEBUG, logger="tokenspeed_kernel")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "tokenspeed_kernel"]
