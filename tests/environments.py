# SPDX-License-Identifier: Apache-2.0
"""Virtual environments to install wheels in, and to talk to through subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Environment"]

_ASIDE = ("LIBREYOLO_", "TOKENSPEED_KERNEL_", "PYTHONPATH", "VIRTUAL_ENV")


class Environment:
    """A virtual environment that holds nothing but what a test installs in it, besides ``third_party`` packages."""

    def __init__(self, folder: Path, third_party: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        (site / "third_party.pth").write_text(f"{third_party}\n", encoding="utf-8")

    def install(self, *wheels: Path) -> None:
        """Install wheels, and nothing that they depend on."""
        self._pip("install", "-q", "--no-deps", "--no-index", *map(str, wheels))

    def uninstall(self, distribution: str) -> None:
        """Uninstall a distribution."""
        self._pip("uninstall", "-q", "-y", distribution)

    def run(
        self, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with ``arguments`` and return what it printed. No variable of ours is inherited."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_ASIDE)} | dict(variables or {})
        command = [str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)

    def plugins(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m tokenspeed_kernel.plugins`` with ``arguments``."""
        return self.run("-m", "tokenspeed_kernel.plugins", *arguments, variables=variables)

    def output(self, code: str, **variables: str) -> str:
        """Run a program that must succeed and return what it printed, without the last newline."""
        done = self.run("-c", code, variables=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    def _pip(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "pip", "--python", str(self.python), *arguments], check=True)
