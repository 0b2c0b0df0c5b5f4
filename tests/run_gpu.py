# SPDX-License-Identifier: Apache-2.0
"""Run on a GPU machine what CI cannot: every test marked ``gpu``, and the demo in each way of having its provider.

    python tests/run_gpu.py [--wheels DIR] [--model DIR] [--out DIR]

It needs torch, Triton, transformers and pytest; nothing is fetched. The wheels (``nox -s wheels`` builds them) are
installed into a folder of their own. Results go to ``--out`` as JSON, and as a short table to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRITON_PROVIDER = "tokenspeed_kernel_triton_fake_quant"


def main() -> int:
    """Run everything and return 0 if all of it passed."""
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    wheels = sorted(options.wheels.glob("*.whl"))
    if not wheels:
        print(f"no wheel in {options.wheels}; build them with: nox -s wheels", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        everything, without_triton = Path(folder, "all"), Path(folder, "without-triton")
        _install(everything, [w for w in wheels if "template" not in w.name])
        _install(without_triton, [w for w in wheels if "template" not in w.name and TRITON_PROVIDER not in w.name])
        tests = _run_tests(everything, options.out)
        demos = {
            "provider installed": _run_demo(everything, options, {}),
            "plugin disabled": _run_demo(
                everything, options, {"TOKENSPEED_KERNEL_DISABLE_PLUGINS": "triton_fake_quant"}
            ),
            "provider not installed": _run_demo(without_triton, options, {}),
            "no GPU visible": _run_demo(everything, options, {"CUDA_VISIBLE_DEVICES": ""}),
        }
    result: dict[str, dict[str, Any]] = {"machine": _machine(), "tests": tests, "demo": {**demos}}
    (options.out / "gpu-tests.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return _print_table(result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="the folder with the built wheels")
    parser.add_argument(
        "--model", type=Path, help="a folder made by hosts/encoder_demo/pack.py, in place of the package"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "dist")), help="where JSON goes")
    return parser.parse_args()


def _install(target: Path, wheels: list[Path]) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(target), *map(str, wheels)], check=True)


def _environment(site: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def _run_tests(site: Path, out: Path) -> dict[str, object]:
    folders = [str(path) for pattern in ("core/tests", "providers/*/tests") for path in sorted(ROOT.glob(pattern))]
    report = out / "gpu-tests.xml"
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--junitxml", str(report), *folders]
    done = subprocess.run(command, cwd=ROOT, env=_environment(site), check=False)
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 -- a file that pytest has just written
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    by_module: dict[str, int] = {}
    for case in suite.iter("testcase"):
        if case.find("skipped") is None:
            module = str(case.get("classname"))
            by_module[module] = by_module.get(module, 0) + 1
    skipped = sorted(
        {f"{c.get('name')}: {s.get('message')}" for c in suite.iter("testcase") for s in c.iter("skipped")}
    )
    seconds = round(time.perf_counter() - started, 1)
    return {**counts, "exit_code": done.returncode, "seconds": seconds, "ran": by_module, "skipped_tests": skipped}


def _run_demo(site: Path, options: argparse.Namespace, variables: dict[str, str]) -> dict[str, object]:
    report = options.out / "demo.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "hosts" / "encoder_demo"), "--json", str(report)]
    if options.model is not None:
        command += ["--model", str(options.model)]
    print(f"--- demo {variables or ''}", flush=True)
    done = subprocess.run(command, env=_environment(site, **variables), check=False)
    facts = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    report.unlink(missing_ok=True)
    return {"exit_code": done.returncode, **facts}


def _machine() -> dict[str, object]:
    import torch

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cards": torch.cuda.device_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("torch", "triton", "transformers", "kernels")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _print_table(result: dict[str, dict[str, Any]]) -> int:
    tests, demos = result["tests"], result["demo"]
    print("\n" + "  ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print("  ".join(f"{name} {tests[name]}" for name in ("tests", "failures", "errors", "skipped", "seconds")))
    for how, facts in demos.items():
        print(f"demo, {how:<24} exit {facts['exit_code']}")
    failed = tests["exit_code"] != 0 or any(facts["exit_code"] != 0 for facts in demos.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
