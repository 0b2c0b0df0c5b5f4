# SPDX-License-Identifier: Apache-2.0
"""Importing, registering and explaining stay cheap: a fresh interpreter shows which modules were loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]
HEAVY = ("torch", "triton", "numpy", "importlib_metadata", "packaging")
_SHOW = f"\nimport sys\nsys.stdout.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
_REGISTER = """
from tokenspeed_kernel import registry, selection, slots
from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, Platform, PlatformInfo
Platform.override(PlatformInfo("nvidia", ArchVersion(9, 0), "H", 1, 0, 0.0, 0, 0, 0))
registry.register_kernel(
    "quant", "fake_quant_fp8", solution="heavy", signatures=(), supports="torch.nn:Linear",
    capability=CapabilityRequirement(vendors=frozenset({"nvidia"})),
)("torch:relu")
slots.register("sdpa", "torch:relu", name="mine", predicate=lambda: True)
"""


def _loaded(python: Python, code: str) -> str:
    done = python(code + _SHOW)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import tokenspeed_kernel",
        "from tokenspeed_kernel.plugins import discover_plugins",
        "import tokenspeed_kernel as t; [getattr(t, name) for name in t.__all__]",
        "import tokenspeed_kernel; tokenspeed_kernel.slot('fake_quant_fp8')",
    ],
)
def test_import_loads_nothing_heavy(python: Python, code: str) -> None:
    """Importing the package, every public name, and a slot handle load no third-party module."""
    assert _loaded(python, code) == ""


def test_import_loads_no_module_of_its_own(python: Python) -> None:
    """``import tokenspeed_kernel`` loads none of its modules, so it costs next to nothing."""
    code = (
        "import sys, tokenspeed_kernel; sys.stdout.write(' '.join(m for m in sys.modules if 'tokenspeed_kernel.' in m))"
    )
    assert python(code).stdout == ""


def test_registering_loads_nothing_heavy(python: Python) -> None:
    """Registering kernels given by name imports neither them nor torch."""
    assert _loaded(python, _REGISTER) == ""


def test_explaining_loads_no_torch_for_a_given_platform(python: Python) -> None:
    """Explaining a choice imports no implementation, and no torch if the platform is given."""
    code = _REGISTER + (
        "assert slots.slot('fake_quant_fp8').explain().chosen == 'heavy_quant_fake_quant_fp8'\n"
        "assert 'mine' in selection.explain_selection('attention', 'sdpa', None)"
    )
    assert _loaded(python, code) == ""


def test_discovery_loads_no_torch(python: Python) -> None:
    """Discovery asks for no device, so it needs no torch (case 4)."""
    code = "import tokenspeed_kernel; tokenspeed_kernel.discover_plugins()"
    loaded = _loaded(python, code).split()
    assert not {"torch", "triton", "numpy"} & set(loaded)


def test_host_that_never_discovers_is_told_once(python: Python) -> None:
    """The first slot resolution logs once that discovery was never called."""
    code = _REGISTER + "slots.slot('sdpa').explain()\nslots.slot('sdpa').explain()\nslots.active"
    assert python(code).stderr.count("discover_plugins() was never called") == 1


def test_host_that_discovers_is_not_told(python: Python) -> None:
    """After a discovery nothing is logged about one that is missing."""
    code = (
        "import tokenspeed_kernel\ntokenspeed_kernel.discover_plugins()\n" + _REGISTER + "slots.slot('sdpa').explain()"
    )
    done = python(code)
    assert (done.returncode, "never called" in done.stderr) == (0, False)
