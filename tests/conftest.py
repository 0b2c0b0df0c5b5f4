# SPDX-License-Identifier: Apache-2.0
"""Real wheels in real environments: build each project once, and make environments to install them in."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from environments import Environment, Site

ROOT = Path(__file__).parent.parent
PROJECTS = {"core": ROOT / "core", "template": ROOT / "plugin-template"} | {
    path.parent.name: path.parent
    for folder in ("providers", "hosts")
    for path in sorted((ROOT / folder).glob("*/pyproject.toml"))
}


def _build(project: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(project)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheel of each project of this repository, by the name of its folder (``core``, ``template``, ...)."""
    return {name: _build(project, tmp_path_factory.mktemp(name)) for name, project in PROJECTS.items()}


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of plugin wheels: a distribution, its entry points, and the source of its one module."""

    def make(name: str, entry_points: Mapping[str, str], source: str) -> Path:
        module = name.replace("-", "_")
        project = tmp_path / name
        project.mkdir()
        (project / f"{module}.py").write_text(source, encoding="utf-8")
        lines = [f"{key} = {value!r}" for key, value in entry_points.items()]
        text = f"""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"
            [project]
            name = {name!r}
            version = "0.5"
            [project.entry-points."tokenspeed_kernel.plugins"]
            {chr(10).join(lines)}
            [tool.hatch.build.targets.wheel]
            only-include = ["{module}.py"]
        """
        (project / "pyproject.toml").write_text("\n".join(map(str.strip, text.splitlines())), encoding="utf-8")
        return _build(project, project / "dist")

    return make


@pytest.fixture(scope="session")
def slim_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what core depends on and nothing else: no torch, no Triton, no NumPy."""
    folder = tmp_path_factory.mktemp("slim")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "packaging", "importlib-metadata"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def slim_environment(tmp_path: Path, slim_packages: Path, wheels: dict[str, Path]) -> Environment:
    """Return an environment with core and what it depends on."""
    environment = Environment(tmp_path / "env", slim_packages)
    environment.install(wheels["core"])
    return environment


@pytest.fixture(scope="session")
def shared_environment(tmp_path_factory: pytest.TempPathFactory, slim_packages: Path) -> Environment:
    """Return a slim environment for many tests: they write distributions into its ``site``, and take them out again."""
    folder = tmp_path_factory.mktemp("shared")
    environment = Environment(folder / "env", slim_packages)
    environment.install(_build(PROJECTS["core"], folder))
    return environment


@pytest.fixture
def site(shared_environment: Environment) -> Iterator[Site]:
    """Install distributions into the shared environment for one test."""
    with Site(shared_environment) as site:
        yield site


@pytest.fixture
def environment(tmp_path: Path, wheels: dict[str, Path]) -> Environment:
    """Return an environment with core, torch, and the other packages that the tests run with."""
    environment = Environment(tmp_path / "env", Path(sysconfig.get_path("purelib")))
    environment.install(wheels["core"])
    return environment
