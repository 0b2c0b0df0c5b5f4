# SPDX-License-Identifier: Apache-2.0
"""Run on a GPU machine what CI cannot.

Every test marked ``gpu``, the conformance kit on every plugin, and the demo in each way of having its provider.

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
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRITON_PROVIDER = "tokenspeed_kernel_triton_fake_quant"
TESTS_SECONDS = 400  # for one folder, beside others
CONFORMANCE_SECONDS = 200  # for one kernel, beside others
_NO_TESTS = 5  # pytest's exit code where no test is marked
_KERNELS = """
import json, sys
from tokenspeed_kernel.testing.installed import kernels_of, record_of
print(json.dumps({name: [k.spec.name for k in kernels_of(record_of(name))] for name in sys.argv[1:]}))
"""
# What `tokenspeed-kernel verify` does for all kernels one after the other.
_EXAMINE = """
import json, sys
from dataclasses import asdict
from tokenspeed_kernel.testing.examination import examine_kernel, plugin_results
from tokenspeed_kernel.testing.installed import kernels_of, record_of
plugin, kernel = sys.argv[1:]
kernels = {k.spec.name: k for k in kernels_of(record_of(plugin))}
results = plugin_results(plugin) if kernel == "plugin" else examine_kernel(kernels[kernel])
print()
print(json.dumps([asdict(result) for result in results]))
"""


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
        tests, conformance = _run_side_by_side(everything, options.out)
        demos = {
            "provider installed": _run_demo(everything, options, {}),
            "plugin disabled": _run_demo(
                everything, options, {"TOKENSPEED_KERNEL_DISABLE_PLUGINS": "triton_fake_quant"}
            ),
            "provider not installed": _run_demo(without_triton, options, {}),
            "no GPU visible": _run_demo(everything, options, {"CUDA_VISIBLE_DEVICES": ""}),
        }
    result: dict[str, dict[str, Any]] = {
        "machine": _machine(),
        "tests": tests,
        "conformance": conformance,
        "demo": {**demos},
    }
    written = _without_folders(json.dumps(result, indent=1), everything, without_triton)
    (options.out / "gpu-tests.json").write_text(written + "\n", encoding="utf-8")
    return _print_table(result)


def _without_folders(text: str, *sites: Path) -> str:
    """Return what is to be published without the folders of this machine, which error messages name."""
    entries = [*map(str, sites), sysconfig.get_path("purelib"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for entry in filter(None, entries):
        text = text.replace(entry, "site-packages")
    return text.replace(str(Path.home()), "~")


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


def _run_side_by_side(site: Path, out: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what pytest says of each folder of tests, and the conformance kit of each kernel."""
    folders = [path for pattern in ("core/tests", "*/*/tests") for path in sorted(ROOT.glob(pattern))]
    with ThreadPoolExecutor(max_workers=16) as pool:
        tests = [pool.submit(_run_tests, site, out, folder) for folder in dict.fromkeys(folders)]
        examined = [
            (plugin, pool.submit(_examine, site, plugin, kernel))
            for plugin, kernels in _kernels_by_plugin(site).items()
            for kernel in ("plugin", *kernels)
        ]
        conformance: dict[str, dict[str, Any]] = {}
        for plugin, future in examined:
            conformance.setdefault(plugin, {"kernels": {}})["kernels"] |= future.result()
        return _merged([future.result() for future in tests]), conformance


def _run_tests(site: Path, out: Path, folder: Path) -> dict[str, Any]:
    """Return what the tests marked ``gpu`` in a folder did."""
    report = out / f"{folder.parent.name}.xml"
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--junitxml", str(report)]
    try:
        done = subprocess.run(
            [*command, str(folder)], cwd=ROOT, env=_environment(site), timeout=TESTS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        names = ("tests", "failures", "errors", "skipped")
        late = f"{folder}: no end within {TESTS_SECONDS} s"
        return {**dict.fromkeys(names, 0), "exit_code": 1, "seconds": TESTS_SECONDS, "ran": {}, "failed_tests": [late],
                "skipped_tests": []}  # fmt: skip
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 -- a file that pytest has just written
    report.unlink()
    by_module: dict[str, int] = {}
    for case in suite.iter("testcase"):
        if case.find("skipped") is None:
            module = str(case.get("classname"))
            by_module[module] = by_module.get(module, 0) + 1
    return {
        **{name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")},
        "exit_code": 0 if done.returncode == _NO_TESTS else done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        "ran": by_module,
        "failed_tests": sorted(
            str(case.get("name"))
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ),
        "skipped_tests": sorted(
            {f"{c.get('name')}: {s.get('message')}" for c in suite.iter("testcase") for s in c.iter("skipped")}
        ),
    }


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts, and all names."""
    return {
        **{name: sum(part[name] for part in parts) for name in ("tests", "failures", "errors", "skipped")},
        "exit_code": max(part["exit_code"] for part in parts),
        "seconds": max(part["seconds"] for part in parts),
        "ran": {name: count for part in parts for name, count in part["ran"].items()},
        "failed_tests": [test for part in parts for test in part["failed_tests"]],
        "skipped_tests": [test for part in parts for test in part["skipped_tests"]],
    }


def _kernels_by_plugin(site: Path) -> dict[str, list[str]]:
    points = (e for d in distributions(path=[str(site)]) for e in d.entry_points)
    plugins = sorted({point.name for point in points if point.group == "tokenspeed_kernel.plugins"})
    done = subprocess.run(
        [sys.executable, "-c", _KERNELS, *plugins],
        env=_environment(site), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _examine(site: Path, plugin: str, kernel: str) -> dict[str, dict[str, Any]]:
    """Return what the conformance kit says of one kernel, or of the plugin as a whole."""
    command = [sys.executable, "-W", "ignore", "-c", _EXAMINE, plugin, kernel]
    try:
        done = subprocess.run(
            command, env=_environment(site), capture_output=True, text=True, timeout=CONFORMANCE_SECONDS, check=False
        )
        results = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        why = f"{type(error).__name__}: the examination came to no end"
        results = [
            {"check": "all", "kernel": kernel, "slot": "", "outcome": "failed", "findings": [why], "seconds": 0.0}
        ]
    return _by_kernel(results)


def _by_kernel(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kernels: dict[str, dict[str, Any]] = {}
    for result in results:
        kernel = kernels.setdefault(result["kernel"], {"slot": result["slot"], "seconds": 0.0, "checks": {}})
        kernel["seconds"] = round(kernel["seconds"] + result["seconds"], 2)
        kernel["checks"][result["check"]] = {"outcome": result["outcome"], "findings": result["findings"]}
    return kernels


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
    for facts in result["conformance"].values():
        for name, kernel in facts["kernels"].items():
            said = [check["outcome"] for check in kernel["checks"].values()]
            counts = ", ".join(f"{said.count(o)} {o}" for o in ("passed", "failed", "not examined"))
            print(f"conformance, {name:<38} {counts}, {kernel['seconds']} s")
    for test in tests["failed_tests"]:
        print(f"FAILED {test}")
    for facts in result["conformance"].values():
        for name, kernel in facts["kernels"].items():
            for check, said in kernel["checks"].items():
                if said["outcome"] == "failed":
                    print(f"FAILED {check} of {name}: {'; '.join(said['findings'])[:600]}")
    for how, facts in demos.items():
        print(f"demo, {how:<24} exit {facts['exit_code']}")
    examined = [c for facts in result["conformance"].values() for k in facts["kernels"].values() for c in k["checks"]]
    failed = (
        tests["exit_code"] != 0
        or any(facts["exit_code"] != 0 for facts in demos.values())
        or not examined
        or any(
            check["outcome"] == "failed"
            for facts in result["conformance"].values()
            for kernel in facts["kernels"].values()
            for check in kernel["checks"].values()
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
