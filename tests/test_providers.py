# SPDX-License-Identifier: Apache-2.0
"""Provider wheels installed one by one: found, chosen or refused with a reason, skipped on demand, uninstalled."""

import json
from pathlib import Path

from environments import Environment

PLUGINS = {
    "triton-fake-quant": "triton_fake_quant",
    "hub-ms-deform-attn": "hub_ms_deform_attn",
    "sdpa-policy": "sdpa_policy",
}

ACTIVE = """
import json
from tokenspeed_kernel import active, discover_plugins
discover_plugins()
print(json.dumps(active()))
"""


def _states(environment: Environment, **variables: str) -> dict[str, str]:
    done = environment.plugins("list", **variables)
    assert done.returncode == 0, done.stderr
    return dict(line.split()[:2] for line in done.stdout.splitlines())


def test_each_provider_is_found_as_it_is_installed(environment: Environment, wheels: dict[str, Path]) -> None:
    """After each ``pip install`` one more plugin is loaded, and after an uninstall it is gone."""
    installed: dict[str, str] = {}
    for folder, plugin in PLUGINS.items():
        environment.install(wheels[folder])
        installed[plugin] = "loaded"
        assert _states(environment) == dict(sorted(installed.items()))
    environment.uninstall("tokenspeed-kernel-sdpa-policy")
    del installed["sdpa_policy"]
    assert _states(environment) == installed


def test_a_disabled_plugin_stays_visible(environment: Environment, wheels: dict[str, Path]) -> None:
    """``TOKENSPEED_KERNEL_DISABLE_PLUGINS`` skips a plugin, and ``list`` and ``info`` say so."""
    environment.install(wheels["triton-fake-quant"], wheels["sdpa-policy"])
    variables = {"TOKENSPEED_KERNEL_DISABLE_PLUGINS": " triton_fake_quant,, "}
    assert _states(environment, **variables) == {"sdpa_policy": "loaded", "triton_fake_quant": "disabled"}
    done = environment.plugins("info", "triton_fake_quant", **variables)
    assert done.returncode == 0
    assert "TOKENSPEED_KERNEL_DISABLE_PLUGINS" in done.stdout


def test_a_machine_without_a_gpu_runs_the_same_code(environment: Environment, wheels: dict[str, Path]) -> None:
    """With every provider and no GPU the reference answers, sdpa is plain PyTorch, and each refusal says why."""
    environment.install(*(wheels[folder] for folder in PLUGINS))
    active = json.loads(environment.output(ACTIVE, CUDA_VISIBLE_DEVICES=""))
    references = {name: solution for name, solution in active.items() if name.startswith("fake_quant_")}
    assert references == dict.fromkeys(references, "reference")
    assert len(references) == 8
    assert active == {**references, "ms_deform_attn": "unavailable", "sdpa": "sdpa"}
    off = json.loads(environment.output(ACTIVE, TOKENSPEED_KERNEL_SELECTION="off"))
    assert off == {**references, "ms_deform_attn": "unavailable", "sdpa": "unavailable"}


def test_the_template_is_built_installed_and_chosen(environment: Environment, wheels: dict[str, Path]) -> None:
    """A third party's wheel, the template as it stands, wins its slot and computes the reference's bits."""
    environment.install(wheels["triton-fake-quant"], wheels["template"])
    code = """
import torch
from tokenspeed_kernel import discover_plugins, slot
from tokenspeed_kernel.reference.quant import fake_quant_fp8
discover_plugins()
x, scale = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.tensor(0.1)
chosen = slot("fake_quant_fp8")
print(torch.equal(chosen(x, scale), fake_quant_fp8(x, scale)))
print(chosen.explain(x, scale).chosen, chosen.stats()["template_fake_quant_fp8"]["served"])
"""
    assert environment.output(code).splitlines() == ["True", "template_fake_quant_fp8 1"]


def test_discovery_does_not_initialise_cuda(environment: Environment, wheels: dict[str, Path]) -> None:
    """Import and discovery leave CUDA alone, so a process may fork afterwards (case 4)."""
    environment.install(*(wheels[folder] for folder in PLUGINS))
    code = """
import sys
import tokenspeed_kernel
tokenspeed_kernel.discover_plugins()
print("torch" in sys.modules)
import torch
print(torch.cuda.is_initialized())
"""
    assert environment.output(code).splitlines() == ["False", "False"]
