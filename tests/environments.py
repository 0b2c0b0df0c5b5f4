# SPDX-License-Identifier: Apache-2.0
"""Virtual environments to install wheels in, and to talk to through subprocesses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Environment", "Site"]

_ASIDE = ("LIBREYOLO_", "TOKENSPEED_KERNEL_", "PYTHONPATH", "VIRTUAL_ENV")


class Environment:
    """A virtual environment that holds nothing but what a test installs in it, besides ``third_party`` packages."""

    def __init__(self, folder: Path, third_party: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        scheme = "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()  # Python 3.10
        self.site = Path(sysconfig.get_path("purelib", scheme, {"base": str(folder)}))
        (self.site / "third_party.pth").write_text(f"{third_party}\n", encoding="utf-8")

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


class Site:
    """Writes real distributions, whole or broken, into an environment; they are gone when the block ends."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.folder = environment.site

    def __enter__(self) -> Site:
        self._before = set(os.listdir(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        for name in set(os.listdir(self.folder)) - self._before:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def file(self, path: str, content: str | bytes) -> Path:
        """Write a file, and the folders that it needs."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        return target

    def info(
        self,
        entry_points: str | bytes | None,
        *,
        name: str = "bad-dist",
        version: str = "1.0",
        metadata: str | bytes | None = "",
        folder: str = "",
        under: str = "",
    ) -> None:
        """Write a distribution's metadata: the lines of the group, or the whole file as bytes; fields for METADATA."""
        folder = under + (folder or f"{name.replace('-', '_')}-{version}.dist-info")
        if isinstance(entry_points, str):
            entry_points = f"[tokenspeed_kernel.plugins]\n{entry_points}\n".encode()
        if isinstance(metadata, str):
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}\n\nText\n".encode()
        self.file(f"{folder}/INSTALLER", "test\n")
        if entry_points is not None:
            self.file(f"{folder}/entry_points.txt", entry_points)
        if metadata is not None:
            self.file(f"{folder}/{'METADATA' if folder.endswith('.dist-info') else 'PKG-INFO'}", metadata)

    def plugin(self, name: str, source: str, distribution: str = "", **info: str) -> None:
        """Install a plugin: a module of that name with this source, whose ``register`` is the entry point."""
        self.file(f"{name}.py", source)
        self.info(f"{name} = {name}:register", name=distribution or f"{name.replace('_', '-')}-dist", **info)
