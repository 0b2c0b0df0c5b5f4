# SPDX-License-Identifier: Apache-2.0
"""A host with core alone: no torch, no provider, nothing that costs time to import."""

from environments import Environment


def test_importing_loads_nothing_heavy(slim_environment: Environment) -> None:
    """Neither the package nor ``discover_plugins`` brings in torch, Triton, NumPy or a metadata library."""
    code = (
        "import sys, tokenspeed_kernel; from tokenspeed_kernel.plugins import discover_plugins;"
        "heavy = {'torch', 'triton', 'numpy', 'importlib_metadata', 'packaging'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert slim_environment.output(code) == "[]"


def test_list_says_that_nothing_is_installed(slim_environment: Environment) -> None:
    """``list`` without a plugin is a sentence, not an error."""
    done = slim_environment.plugins("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No kernel plugin is installed")


def test_info_of_an_unknown_plugin_is_one_line(slim_environment: Environment) -> None:
    """An unknown name on the command line is one clear line, exit code 1, no traceback."""
    done = slim_environment.plugins("info", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no installed plugin is called 'nope'; there are: none\n"


def test_discovers_a_provider_without_torch(slim_environment: Environment, wheels: dict) -> None:
    """A provider whose wheel is there but whose torch is not is listed with its kernels, and the host goes on."""
    slim_environment.install(wheels["triton-fake-quant"])
    done = slim_environment.plugins("list")
    assert done.returncode == 0, done.stderr
    assert "triton_fake_quant  loaded" in done.stdout
    code = (
        "from tokenspeed_kernel import discover_plugins, slot; discover_plugins();"
        "print(slot('fake_quant_fp8').explain())"
    )
    explanation = slim_environment.output(code)
    assert "triton_fake_quant_fp8" in explanation
    assert "needs nvidia" in explanation
