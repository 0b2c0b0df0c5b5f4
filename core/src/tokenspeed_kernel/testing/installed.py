# SPDX-License-Identifier: Apache-2.0
"""What the installed plugin must show before any kernel is called. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

from tokenspeed_kernel.plugins import PluginRecord, discover_plugins, plugin_records
from tokenspeed_kernel.plugins.metadata import normal
from tokenspeed_kernel.registry import KernelRegistry, Registration
from tokenspeed_kernel.testing.report import NotExamined

__all__ = ["CHECKS", "kernels_of", "record_of"]

_PROGRAM = """
import importlib, json, sys, time
import tokenspeed_kernel.registry
HEAVY = ("torch", "triton", "numpy")
there = [name for name in HEAVY if name in sys.modules]
started = time.perf_counter()
module, _, path = sys.argv[1].partition(":")
value = importlib.import_module(module)
for name in path.split("."):
    value = getattr(value, name)
value()
milliseconds = (time.perf_counter() - started) * 1000
heavy = [name for name in HEAVY if name in sys.modules and name not in there]
torch = sys.modules.get("torch")
cuda = bool(torch is not None and torch.cuda.is_initialized())
print()
print(json.dumps({"milliseconds": milliseconds, "heavy": heavy, "cuda": cuda, "there": there}))
"""


def record_of(plugin: str) -> PluginRecord | None:
    """Discover plugins and return what became of the one of this name (or ``name@distribution``), None if unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what went wrong is in the record
        discover_plugins()
    wanted = normal(plugin)
    return next((r for r in plugin_records() if wanted in (normal(r.name), normal(f"{r.name}@{r.package}"))), None)


def kernels_of(record: PluginRecord) -> tuple[Registration, ...]:
    """Return what a loaded plugin registered."""
    owned = KernelRegistry.get().owned_by(f"{record.name}@{record.package}")
    return owned if record.state == "loaded" else ()


def entry_point(record: PluginRecord | None) -> tuple[list[str], list[str]]:
    """Installed metadata names the plugin's function, discovery loads it, and it registers a kernel."""
    if record is None:
        return ["no installed distribution has an entry point of that name in 'tokenspeed_kernel.plugins'"], []
    if record.state != "loaded":
        return [f"{record.value or record.name} is {record.state}: {record.reason}"], []
    kernels = [registration.spec.name for registration in kernels_of(record)]
    return ([] if kernels else ["it registers no kernel"]), [f"{record.value}: {', '.join(kernels)}"]


def cheap_import(record: PluginRecord | None) -> tuple[list[str], list[str]]:
    """In a fresh interpreter, ``register()`` imports neither torch nor Triton and makes no CUDA context."""
    if record is None or not record.value or record.state in ("disabled", "not allowed", "off", "clashing"):
        raise NotExamined("the plugin is not loaded")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _PROGRAM, record.value]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return [f"{record.value} fails in a fresh interpreter: {done.stderr.strip()[-500:]}"], []
    seen = json.loads(done.stdout.splitlines()[-1])
    if seen["there"]:
        raise NotExamined(f"a fresh interpreter here starts with {', '.join(seen['there'])} imported")
    findings = [f"importing the plugin and calling register() imports {name}" for name in seen["heavy"]]
    if seen["cuda"]:
        findings.append("it makes a CUDA context")
    return findings, [f"{seen['milliseconds']:.1f} ms"]


CHECKS: dict[str, Callable[[PluginRecord | None], tuple[list[str], list[str]]]] = {
    "entry_point": entry_point,
    "cheap_import": cheap_import,
}
"""By name; each returns its findings and notes."""
