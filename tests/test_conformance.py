# SPDX-License-Identifier: Apache-2.0
"""The conformance kit out of core's wheel: on installed plugins, from the shell and as a provider's test."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from environments import Environment

pytest.importorskip("torch")

PLUGIN = """
{top}
from tokenspeed_kernel.registry import register_kernel

def register():
    register_kernel("quant", "fake_quant_fp8", name="mine", solution="mine", signatures=(), supports=supports)(quantize)

def supports(x, scale):
    from torch import float32, is_tensor
    if not is_tensor(scale) or scale.numel() != 1 or not scale.is_floating_point():
        return "not one floating scale"
    return True if x.dtype == float32 else f"x is {{x.dtype}}"

def quantize(x, scale):
    from tokenspeed_kernel.reference.quant import fake_quant_fp8
    return fake_quant_fp8(x, scale)
"""
ONE_LINE = "from tokenspeed_kernel.testing import examine\n\ntest_conformance = examine({!r})\n"

Maker = Callable[..., Path]


def _verify(environment: Environment, *arguments: str) -> tuple[int, str]:
    done = environment.run("-m", "tokenspeed_kernel.testing", "verify", *arguments)
    return done.returncode, done.stdout


def _pytest(environment: Environment, folder: Path, source: str, *arguments: str) -> tuple[int, str]:
    path = folder / "test_mine.py"
    path.write_text(source, encoding="utf-8")
    options = ["-p", "no:cacheprovider", "-c", str(folder / "none.ini"), "--rootdir", str(folder), "-W", "error"]
    (folder / "none.ini").touch()
    done = environment.run("-m", "pytest", "-ra", *options, *arguments, str(path))
    return done.returncode, done.stdout + done.stderr


def test_the_template_passes(environment: Environment, wheels: dict[str, Path], tmp_path: Path) -> None:
    """The kernel that third parties start from passes the examination, and what was not examined says why."""
    environment.install(wheels["template"])
    code, table = _verify(environment, "kernel_plugin_template", "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (code, report["exit_code"], report["schema"]) == (0, 0, 1), table
    assert {r["kernel"] for r in report["results"]} == {"plugin", "template_fake_quant_fp8"}
    assert all(r["findings"] for r in report["results"] if r["outcome"] == "not examined")
    assert "parity_ties" in table


def test_torch_imported_at_module_level_is_named(environment: Environment, make_wheel: Maker) -> None:
    """A plugin whose module imports torch fails the check of its import, and no other."""
    source = PLUGIN.format(top="import torch")
    environment.install(make_wheel("heavy-kernels", {"heavy": "heavy_kernels:register"}, source))
    code, text = _verify(environment, "heavy", "--json", "-")
    report = json.loads(text)
    failed = {r["check"]: r["findings"] for r in report["results"] if r["outcome"] == "failed"}
    assert code == 1
    assert failed.keys() == {"cheap_import"}
    assert "importing the plugin and calling register() imports torch" in failed["cheap_import"]


def test_what_is_not_installed_fails(environment: Environment) -> None:
    """A plugin that nobody installed fails, with the reason."""
    code, table = _verify(environment, "absent")
    assert code == 1
    assert "no installed distribution has an entry point of that name" in table


def test_a_plugin_that_does_not_load_fails(environment: Environment, make_wheel: Maker) -> None:
    """The reason that discovery has for it is the finding."""
    source = "raise RuntimeError('a part is missing')"
    environment.install(make_wheel("sick-kernels", {"sick": "sick_kernels:register"}, source))
    code, table = _verify(environment, "sick")
    assert code == 1
    assert "a part is missing" in table


def test_one_line_examines_in_pytest(environment: Environment, make_wheel: Maker, tmp_path: Path) -> None:
    """Each check of each kernel is a test with an id; the plugin of pytest adds the table and the JSON document."""
    environment.install(make_wheel("my-kernels", {"mine": "my_kernels:register"}, PLUGIN.format(top="")))
    reports = tmp_path / "reports"
    options = ("-v", "-p", "tokenspeed_kernel.testing", "--conformance-json", str(reports))
    code, text = _pytest(environment, tmp_path, ONE_LINE.format("mine"), *options)
    assert code == 0, text
    assert "test_conformance[mine-parity_ties] PASSED" in text
    assert "test_conformance[plugin-cheap_import] PASSED" in text
    assert "not examined: the slot's gradient is a straight-through estimator" in text
    assert "conformance of mine" in text
    assert json.loads((reports / "mine.json").read_text(encoding="utf-8"))["package"] == "my-kernels"


def test_a_failure_in_pytest_names_check_and_kernel(
    environment: Environment, make_wheel: Maker, tmp_path: Path
) -> None:
    """Without the plugin of pytest the tests run all the same, and a failure reads as a finding."""
    source = PLUGIN.format(top="").replace("return fake_quant_fp8(x, scale)", "return fake_quant_fp8(x, scale) * 1.5")
    environment.install(make_wheel("off-kernels", {"off": "off_kernels:register"}, source))
    code, text = _pytest(environment, tmp_path, ONE_LINE.format("off"), "-k", "parity_ties or refusals or entry_point")
    assert code == 1, text
    assert "parity_ties of mine:" in text
    assert "1 failed, 2 passed" in text
    assert "conformance of" not in text


def test_nothing_loads_by_itself(environment: Environment, tmp_path: Path) -> None:
    """Pytest with core installed has none of the kit's options, and core does not import the kit."""
    code, text = _pytest(environment, tmp_path, "def test_it(): pass\n", "--conformance-json", "x")
    assert code == 4, text
    code_ = """
import sys, tokenspeed_kernel
from tokenspeed_kernel import discover_plugins, slot
discover_plugins(), slot("fake_quant_fp8")
print([m for m in sys.modules if m.startswith("tokenspeed_kernel.testing")])
import tokenspeed_kernel.testing, tokenspeed_kernel.testing.cli, tokenspeed_kernel.testing.report
print([m for m in ("torch", "pytest", "_pytest") if m in sys.modules])
"""
    assert environment.output(code_).splitlines() == ["[]", "[]"]


def test_the_console_script_is_installed(environment: Environment) -> None:
    """``tokenspeed-kernel verify`` of a plugin that is not there says so, with exit code 1 and no traceback."""
    script = environment.python.parent / "tokenspeed-kernel"
    done = subprocess.run([script, "verify", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nope (not installed)" in done.stdout
    assert "0 passed, 1 failed" in done.stdout
    assert "Traceback" not in done.stderr
