# SPDX-License-Identifier: Apache-2.0
"""Code written for the published contracts runs unchanged: a plugin, a host and the slots of a model library."""

from collections.abc import Callable
from pathlib import Path

from environments import Environment

# The plugin and the host of the contract's documentation, which reads as a user would write it.
PLUGIN = """
import torch

from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.signature import format_signatures


def register() -> None:
    @register_kernel(
        "attention",
        "decode",
        solution="my_custom",
        signatures=format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16}),
        capability=CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(9, 0)),
        priority=19,
    )
    def my_custom_attn_decode(q, kv_cache, page_table, seq_lens, **kwargs):
        return "decoded"
"""
ON_HOPPER = """
import torch
import tokenspeed_kernel
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
from tokenspeed_kernel.plugins import discover_plugins, list_plugins
from tokenspeed_kernel.registry import KernelRegistry, register_kernel
from tokenspeed_kernel.selection import NoKernelFoundError, explain_selection, select_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

def platform(vendor, *arch):
    return PlatformInfo(vendor, ArchVersion(*arch), "a device", 1, 0, 0.0, 0, 0, 0)

Platform.override(platform("nvidia", 9, 0))
bf16 = dense_tensor_format(torch.bfloat16)
"""


def test_the_documented_plugin_is_found_and_selected(environment: Environment, make_wheel: Callable[..., Path]) -> None:
    """An engine discovers it, lists it and selects its kernel on Hopper, and on nothing older or of another vendor."""
    environment.install(make_wheel("my-kernels-plugin", {"my_plugin": "my_kernels_plugin:register"}, PLUGIN))
    code = """
discover_plugins()
print(list_plugins())
signature = format_signature(q=bf16, k_cache=bf16, v_cache=bf16)
kernel = select_kernel("attention", "decode", signature)
print(kernel.name, kernel(None, None, None, None))
for other in (platform("nvidia", 8, 0), platform("amd", 9, 5), platform("cpu", 0, 0)):
    try:
        print(select_kernel("attention", "decode", signature, platform=other))
    except NoKernelFoundError as error:
        print("capable" in str(error))
"""
    info, selected, *refused = environment.output(ON_HOPPER + code).splitlines()
    assert info == (
        "[PluginInfo(name='my_plugin', package='my-kernels-plugin', version='0.5', num_kernels=1, "
        "kernel_names=('my_custom_attention_decode',))]"
    )
    assert selected == "my_custom_attention_decode decoded"
    assert refused == ["True"] * 3


def test_the_documented_ad_hoc_registration_is_selected(environment: Environment) -> None:
    """A notebook registers a kernel without any entry point, and it wins over a lower priority."""
    code = """
@register_kernel("gemm", "mm", solution="builtin", signatures=format_signatures(("a", "b"), "dense", {torch.bfloat16}))
def builtin(a, b, **kwargs):
    return "builtin"

@register_kernel(
    "gemm",
    "mm",
    solution="experiment",
    signatures=format_signatures(("a", "b"), "dense", {torch.bfloat16}),
    priority=15,
)
def my_experimental_gemm(a, b, **kwargs):
    return "experiment"

signature = format_signature(a=bf16, b=bf16)
print(select_kernel("gemm", "mm", signature)(None, None))
print(my_experimental_gemm(None, None), KernelRegistry.get().get_by_name("builtin_gemm_mm").priority)
print("unknown" in explain_selection("gemm", "mm", signature))
"""
    assert environment.output(ON_HOPPER + code).splitlines() == ["experiment", "experiment 10", "False"]


def test_the_slots_of_a_model_library(environment: Environment) -> None:
    """Register, resolve and active as a library that has a GEMM slot without a reference uses them."""
    code = """
import warnings
import torch
from tokenspeed_kernel import SlotContract, active, declare_slot, register, resolve

gemm = declare_slot(SlotContract(name="fp8_gemm", family="gemm", mode="fp8_gemm", summary="fp8_gemm(a, b): a @ b"))

def linear(a, b):  # the caller keeps its own portable path
    kernel = resolve("fp8_gemm")
    return a @ b if kernel is None else kernel(a, b)

a, b = torch.eye(2), torch.ones(2, 2)
print(active()["fp8_gemm"], gemm(a, b), torch.equal(linear(a, b), a @ b))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    register("fp8_gemm", lambda a, b: "broken", name="broken", predicate=lambda: 1 / 0)
    print(resolve("fp8_gemm"), len(said))
register("fp8_gemm", lambda a, b: "old", name="mybackend", predicate=lambda: True)
register("fp8_gemm", lambda a, b: "new", name="mybackend")
print(linear(a, b), gemm(a, b), active()["fp8_gemm"])
"""
    program = ["unavailable None True", "None 1", "new new mybackend"]
    assert environment.output(code).splitlines() == program
    off = environment.output(code, LIBREYOLO_KERNELS="off")
    assert off.splitlines()[2].startswith("tensor(")


def test_capability_gates_every_entrance(environment: Environment, wheels: dict[str, Path]) -> None:
    """On a CPU, an old GPU, AMD and an unknown vendor the same kernel answers by each way in (case 73)."""
    environment.install(wheels["triton-fake-quant"])
    code = """
from tokenspeed_kernel import active, discover_plugins, slot
from tokenspeed_kernel.selection import kernel_override
discover_plugins()
x, scale = torch.ones(4), torch.ones(())
for other in (platform("cpu", 0, 0), platform("nvidia", 7, 0), platform("amd", 9, 0), platform("acme", 1, 0)):
    Platform.override(other)
    names = {
        slot("fake_quant_fp8").explain(x, scale).chosen,
        select_kernel("quant", "fake_quant_fp8", None).name,
        active()["fake_quant_fp8"],
    }
    try:
        with kernel_override("quant", "fake_quant_fp8", "triton"):
            slot("fake_quant_fp8")(x, scale)
    except NoKernelFoundError as error:
        names.add("needs" in str(error))
    print(sorted(map(str, names)))
"""
    answer = "['True', 'fake_quant_fp8:reference', 'reference']"
    assert environment.output(ON_HOPPER + code).splitlines() == [answer] * 4
