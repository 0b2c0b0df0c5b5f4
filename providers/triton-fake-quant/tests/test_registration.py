# SPDX-License-Identifier: Apache-2.0
"""What the plugin declares, and what declaring it costs."""

import subprocess
import sys

import tokenspeed_kernel_triton_fake_quant
from tokenspeed_kernel.platform import ArchVersion, PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry


def _gpu(vendor: str, *arch: int) -> PlatformInfo:
    return PlatformInfo(vendor, ArchVersion(*arch), "a GPU", 1, 0, 0.0, 0, 0, 0)


def test_registering_imports_neither_torch_nor_triton() -> None:
    """A host that discovers the plugin pays for no kernel before it is chosen."""
    code = (
        "import sys, tokenspeed_kernel_triton_fake_quant as plugin; plugin.register();"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_serves_nvidia_from_ampere_on() -> None:
    """Capability admits exactly the GPUs that the kernel was written for (case 73)."""
    KernelRegistry.reset()
    tokenspeed_kernel_triton_fake_quant.register()
    spec = KernelRegistry.get().get_by_name("triton_fake_quant_fp8")
    assert spec is not None
    assert (spec.solution, spec.priority) == ("triton", 10)
    platforms = [_gpu("nvidia", 8, 0), _gpu("nvidia", 9, 0), _gpu("nvidia", 7, 0), _gpu("amd", 9, 0), _gpu("cpu", 0, 0)]
    assert [spec.capability.satisfied_by(platform) for platform in platforms] == [True, True, False, False, False]
