# SPDX-License-Identifier: Apache-2.0
"""The examples in the README and the documentation do what they say."""

import re
from pathlib import Path

import pytest

from environments import Environment

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "core/README.md",
    "docs/discovery.md",
    "docs/host.md",
    "docs/plugin.md",
    "docs/simulate.md",
    "hosts/simulate/README.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_python_example_runs(page: str, environment: Environment, wheels: dict[str, Path]) -> None:
    """Each Python block of a page runs by itself, where core and the providers that need no GPU are installed."""
    environment.install(wheels["sdpa-policy"], wheels["triton-fake-quant"], wheels["simulate"])
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    assert blocks
    for block in blocks:
        done = environment.run("-W", "error", "-c", block)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_every_setting_is_documented(environment: Environment) -> None:
    """The page on settings names every variable that the code reads, and no other."""
    code = (
        "from tokenspeed_kernel.settings import VARIABLES, OVERRIDE_PREFIX;"
        "print(*{name for names in VARIABLES.values() for name in names}, OVERRIDE_PREFIX)"
    )
    read = set(environment.output(code).split())
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`((?:TOKENSPEED_KERNEL|LIBREYOLO)_[A-Z_]+)(?:<FAMILY>_<MODE>)?`", page))
    assert documented == read
