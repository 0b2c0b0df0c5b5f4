# SPDX-License-Identifier: Apache-2.0
"""A plugin with one kernel: ``fake_quant_fp8`` in plain PyTorch (plugin ``kernel_plugin_template``)."""

from tokenspeed_kernel.registry import Priority, register_kernel

__all__ = ["register"]


def register() -> None:
    """Declare this plugin's kernels. Called by ``discover_plugins()``; import nothing heavy here."""
    register_kernel(
        "quant",
        "fake_quant_fp8",
        name="template_fake_quant_fp8",
        solution="template",
        signatures=(),
        priority=Priority.PLUGIN,  # 16 to 19 belong to third parties and win over what ships with the host
        supports=f"{__name__}.fp8:supports",
    )(f"{__name__}.fp8:fake_quant_fp8")
