# SPDX-License-Identifier: Apache-2.0
"""What the plugin declares, and what declaring it costs."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

import tokenspeed_kernel_triton_fake_quant
from tokenspeed_kernel.platform import ArchVersion, PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry, load_attribute

SLOTS = [
    "fake_quant_fp8",
    "fake_quant_int8_affine",
    "fake_quant_int8_per_channel",
    "fake_quant_int_grouped",
    "fake_quant_mxfp4_dynamic",
    "fake_quant_mxfp4_weight",
    "fake_quant_nvfp4_dynamic",
    "fake_quant_nvfp4_weight",
]


@pytest.fixture
def registry() -> Iterator[KernelRegistry]:
    """Return a registry with this plugin alone, that is emptied again."""
    KernelRegistry.reset()
    tokenspeed_kernel_triton_fake_quant.register()
    yield KernelRegistry.get()
    KernelRegistry.reset()


def _gpu(vendor: str, *arch: int) -> PlatformInfo:
    return PlatformInfo(vendor, ArchVersion(*arch), "a GPU", 1, 0, 0.0, 0, 0, 0)


def test_registering_imports_neither_torch_nor_triton() -> None:
    """A host that discovers the plugin pays for no kernel before it is chosen."""
    code = (
        "import sys, tokenspeed_kernel_triton_fake_quant as plugin; plugin.register();"
        "print([m for m in sys.modules if m in ('torch', 'triton') or m.startswith(plugin.__name__ + '.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_kernel_for_each_slot(registry: KernelRegistry) -> None:
    """Eight kernels, named after their slots, of one solution and one priority."""
    assert [f"triton_{slot}" for slot in SLOTS] == sorted(spec.name for spec in registry.list_kernels())
    for slot in SLOTS:
        (spec,) = registry.get_for_operator("quant", slot)
        assert (spec.name, spec.solution, spec.priority) == (f"triton_{slot}", "triton", 10)


def test_serves_nvidia_from_ampere_on(registry: KernelRegistry) -> None:
    """Capability admits exactly the GPUs that the kernels were written for (case 73)."""
    platforms = [_gpu("nvidia", 8, 0), _gpu("nvidia", 9, 0), _gpu("nvidia", 7, 0), _gpu("amd", 9, 0), _gpu("cpu", 0, 0)]
    for slot in SLOTS:
        (spec,) = registry.get_for_operator("quant", slot)
        admitted = [spec.capability.satisfied_by(platform) for platform in platforms]
        assert admitted == [True, True, False, False, False]


def test_every_declared_name_can_be_loaded(registry: KernelRegistry) -> None:
    """Implementation, ``supports``, predicate and probe are functions that exist: nothing imported them before."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    for slot in SLOTS:
        registration = registry.registration(f"triton_{slot}")
        assert registration is not None
        spec = registration.spec
        assert registration.load().__name__ == slot
        assert all(callable(load_attribute(name)) for name in (spec.supports, spec.predicate, spec.probe))
