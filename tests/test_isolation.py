# SPDX-License-Identifier: Apache-2.0
"""Broken plugins, as real wheels: recorded, said, and without effect on the host and on the others."""

from collections.abc import Callable
from pathlib import Path

from environments import Environment

HALF_DONE = """
from tokenspeed_kernel.registry import register_kernel

def register():
    register_kernel("quant", "fake_quant_fp8", solution="broken", signatures=(), priority=19)(lambda x, scale: x)
    raise RuntimeError("no such library")
"""

STATE = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from tokenspeed_kernel import active, discover_plugins
    print([plugin.name for plugin in discover_plugins()])
print([str(warning.message) for warning in said])
print(active()["fake_quant_fp8"])
"""


def test_a_failing_plugin_leaves_nothing_behind(
    environment: Environment, wheels: dict[str, Path], make_wheel: Callable[..., Path]
) -> None:
    """A plugin that registers a kernel and then raises costs one warning; the others load (cases 35, 61)."""
    environment.install(wheels["sdpa-policy"], make_wheel("half-done", {"half_done": "half_done:register"}, HALF_DONE))
    loaded, said, active = environment.output(STATE).splitlines()
    assert loaded == "['sdpa_policy']"
    assert said.count("half_done") == 2
    assert "RuntimeError: no such library" in said
    assert "TOKENSPEED_KERNEL_DISABLE_PLUGINS=half_done" in said
    assert active == "reference"


def test_a_failed_plugin_shows_in_list_and_info(slim_environment: Environment, make_wheel: Callable[..., Path]) -> None:
    """``list`` shows the state and the cause with exit code 1; ``info`` shows the traceback (case 88)."""
    slim_environment.install(make_wheel("quits", {"quits": "quits:register"}, "import sys\nsys.exit(3)\n"))
    listed = slim_environment.plugins("list")
    assert listed.returncode == 1
    assert listed.stdout.split()[:4] == ["quits", "failed", "quits", "0.5"]
    assert "SystemExit: 3" in listed.stdout
    info = slim_environment.plugins("info", "quits")
    assert info.returncode == 1
    assert "sys.exit(3)" in info.stdout
