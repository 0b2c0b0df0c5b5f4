# SPDX-License-Identifier: Apache-2.0
"""The names that other people's code relies on, and the published document's example plugins."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import tokenspeed_kernel
from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, Platform
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.selection import select_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

PUBLIC = [
    "COMPATIBLE_VERSIONS",
    "CONTRACT",
    "FrozenPlan",
    "Slot",
    "SlotContract",
    "__version__",
    "active",
    "adopt",
    "declare_slot",
    "disable_plugin",
    "discover_plugins",
    "enable_plugin",
    "expect",
    "freeze",
    "iter_impls",
    "list_plugins",
    "refresh",
    "register",
    "register_kernel",
    "report",
    "resolve",
    "select_kernel",
    "slot",
    "thaw",
    "unregister",
]
CONTRACT = {
    "registry": ["KernelRegistry", "KernelSpec", "Priority", "describe_kernel", "register_kernel"],
    "signature": [
        "FormatSignature",
        "ScaleFormat",
        "TensorFormat",
        "dense_tensor_format",
        "format_signature",
        "format_signatures",
        "tensor_format",
    ],
    "platform": ["ArchVersion", "CapabilityRequirement", "Platform", "PlatformInfo", "current_platform"],
    "selection": [
        "NoKernelFoundError",
        "SelectedKernel",
        "SelectionOracle",
        "explain_selection",
        "kernel_override",
        "register_oracle",
        "select_kernel",
        "spec_matches_traits",
    ],
    "plugins": [
        "DISABLE_ENV_VAR",
        "ENTRY_POINT_GROUP",
        "PluginInfo",
        "disable_plugin",
        "discover_plugins",
        "enable_plugin",
        "list_plugins",
        "reset_plugins",
    ],
}
REGISTRY_METHODS = [
    "get",
    "get_by_name",
    "get_for_operator",
    "get_impl",
    "list_kernels",
    "list_operators",
    "list_solutions",
    "register",
    "reset",
]


def test_all_is_the_stored_list() -> None:
    """A public name comes or goes only together with this list."""
    assert sorted(tokenspeed_kernel.__all__) == PUBLIC


def test_dir_lists_the_public_names() -> None:
    """``dir()`` shows what may be used, loaded or not."""
    assert dir(tokenspeed_kernel) == PUBLIC


@pytest.mark.parametrize("name", sorted(tokenspeed_kernel._MODULE_OF))
def test_public_name_is_the_one_of_its_module(name: str) -> None:
    """Each public name is the object that its module defines."""
    module = importlib.import_module(f"tokenspeed_kernel.{tokenspeed_kernel._MODULE_OF[name]}")
    assert getattr(tokenspeed_kernel, name) is getattr(module, name)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in CONTRACT.items() for n in names])
def test_contract_name_is_public_in_its_module(module: str, name: str) -> None:
    """A plugin written for the published package finds every name where it was."""
    found = importlib.import_module(f"tokenspeed_kernel.{module}")
    assert name in found.__all__
    assert hasattr(found, name)


@pytest.mark.parametrize("name", REGISTRY_METHODS)
def test_registry_has_the_published_methods(name: str) -> None:
    """The registry's published methods are there."""
    assert callable(getattr(tokenspeed_kernel.registry.KernelRegistry, name))


@pytest.mark.parametrize("module", ["tokenspeed_kernel", "tokenspeed_kernel.plugins"])
def test_unknown_attribute_raises(module: str) -> None:
    """A name that does not exist is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = importlib.import_module(module).nonsense


def test_plugins_dir_lists_its_names() -> None:
    """``dir()`` of the plugins package shows the contract's names."""
    assert set(CONTRACT["plugins"]) <= set(dir(importlib.import_module("tokenspeed_kernel.plugins")))


def test_constants_of_the_contract() -> None:
    """The group and the variable have the published names."""
    from tokenspeed_kernel.plugins import DISABLE_ENV_VAR, ENTRY_POINT_GROUP

    assert ENTRY_POINT_GROUP == "tokenspeed_kernel.plugins"
    assert DISABLE_ENV_VAR == "TOKENSPEED_KERNEL_DISABLE_PLUGINS"


def test_published_example_plugin_is_selected_on_hopper(platform: Callable[..., Any]) -> None:
    """The published document's decode kernel registers as written and is selected on a Hopper."""

    @register_kernel(
        "attention",
        "decode",
        solution="my_custom",
        signatures=format_signatures(("q", "k_cache", "v_cache"), "dense", {"bfloat16"}),  # type: ignore[arg-type]
        capability=CapabilityRequirement(
            vendors=frozenset({"nvidia"}),
            min_arch_version=ArchVersion(9, 0),
        ),
        priority=19,
    )
    def my_custom_attn_decode(
        q: object, kv_cache: object, page_table: object, seq_lens: object, **kwargs: object
    ) -> str:
        return "decoded"

    Platform.override(platform("nvidia", 9, 0))
    dense = dense_tensor_format("bfloat16")  # type: ignore[arg-type]
    selected = select_kernel("attention", "decode", format_signature(q=dense, k_cache=dense, v_cache=dense))
    assert selected.name == "my_custom_attention_decode"
    assert selected.impl is my_custom_attn_decode
    assert selected(1, 2, 3, 4) == "decoded"


def test_published_notebook_kernel_is_selected_on_hopper() -> None:
    """The published document's ad-hoc GEMM registers as written and is selected."""

    @register_kernel(
        "gemm",
        "mm",
        solution="experiment",
        signatures=format_signatures(("a", "b"), "dense", {"bfloat16"}),  # type: ignore[arg-type]
        priority=15,
    )
    def my_experimental_gemm(a: int, b: int, **kwargs: object) -> int:
        return a * b

    dense = dense_tensor_format("bfloat16")  # type: ignore[arg-type]
    assert select_kernel("gemm", "mm", format_signature(b=dense, a=dense))(6, 7) == 42
    assert my_experimental_gemm(2, 3) == 6
