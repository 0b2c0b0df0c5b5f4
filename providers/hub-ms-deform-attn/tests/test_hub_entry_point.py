# SPDX-License-Identifier: Apache-2.0
"""The plugin as discovery sees it: one cheap registration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tokenspeed_kernel.registry import KernelRegistry
from tokenspeed_kernel_hub_ms_deform_attn import register


@pytest.fixture
def registry() -> Iterator[KernelRegistry]:
    """Return an empty registry that is emptied again."""
    KernelRegistry.reset()
    yield KernelRegistry.get()
    KernelRegistry.reset()


def test_register_declares_one_kernel(registry: KernelRegistry) -> None:
    """The kernel is hub_ms_deform_attn, solution hub, priority 12, NVIDIA only."""
    register()
    (spec,) = registry.get_for_operator("attention", "ms_deform_attn")
    assert (spec.name, spec.solution, spec.priority) == ("hub_ms_deform_attn", "hub", 12)
    assert spec.capability is not None
    assert spec.capability.vendors == frozenset({"nvidia"})


def test_register_imports_nothing_heavy() -> None:
    """A fresh interpreter has neither torch nor the Hub's client after registration (case 59)."""
    code = (
        "import sys, tokenspeed_kernel_hub_ms_deform_attn as plugin; plugin.register(); "
        "print([name for name in ('torch', 'triton', 'kernels', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
