# SPDX-License-Identifier: Apache-2.0
"""registry: who registered which kernel under which name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, PlatformInfo
from tokenspeed_kernel.registry import (
    KernelRegistry,
    KernelSpec,
    Priority,
    describe_kernel,
    load_attribute,
    register_kernel,
    registering_owner,
)
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

Kernel = Callable[..., Any]
Said = Callable[..., list[str]]


@contextmanager
def _owned_by(owner: str) -> Iterator[None]:
    token = registering_owner.set(owner)
    try:
        yield
    finally:
        registering_owner.reset(token)


def _owner(name: str) -> str | None:
    registration = KernelRegistry.get().registration(name)
    assert registration is not None
    return registration.owner


def test_bands_of_priority() -> None:
    """The bands have the published values."""
    expected = {"REFERENCE": 0, "PORTABLE": 4, "PERFORMANT": 8, "SPECIALIZED": 12, "PLUGIN": 16}
    assert {band.name: band.value for band in Priority} == expected


def test_register_kernel_gives_the_implementation_back() -> None:
    """The decorator returns what it decorates, and fills in name, priority and fields."""

    def implementation() -> None: ...

    decorate = register_kernel("quant", "op", solution="mine", signatures=())
    assert decorate(implementation) is implementation
    spec = KernelRegistry.get().get_by_name("mine_quant_op")
    assert spec is not None
    assert (spec.family, spec.mode, spec.solution, spec.priority) == ("quant", "op", "mine", 10)
    assert KernelRegistry.get().get_impl("mine_quant_op") is implementation


@pytest.mark.parametrize("value", [0, 1, 19, Priority.PLUGIN, Priority.PLUGIN + 3])
def test_priority_in_range_is_taken(kernel: Kernel, value: int) -> None:
    """Every int in [0, 20) is a priority."""
    kernel("a", priority=value)
    assert KernelRegistry.get().list_kernels()[0].priority == value


@pytest.mark.parametrize("value", [-1, 20, 100])
def test_priority_out_of_range_is_refused(kernel: Kernel, value: int) -> None:
    """The message names the kernel, the value and the range, and nothing is registered."""
    with pytest.raises(ValueError, match=rf"'my_kernel'.*\[0, 20\), got {value}"):
        kernel("my_kernel", priority=value)
    assert KernelRegistry.get().list_kernels() == []


@pytest.mark.parametrize("value", [True, False, 1.0, "10", None])
def test_priority_of_another_type_is_refused(kernel: Kernel, value: object) -> None:
    """A bool is not an int here, nor is anything else."""
    with pytest.raises(TypeError, match=rf"'my_kernel'.*\[0, 20\), got {value!r}"):
        kernel("my_kernel", priority=value)


@pytest.mark.parametrize("field", ["name", "family", "mode"])
@pytest.mark.parametrize("value", ["", None, 3])
def test_names_are_non_empty_strings(field: str, value: object) -> None:
    """A kernel without a proper name, family or mode is refused."""
    fields: dict[str, Any] = {"name": "n", "family": "f", "mode": "m", field: value}
    with pytest.raises(ValueError, match=f"{field} must be a non-empty str, got {value!r}"):
        KernelSpec(**fields)


@pytest.mark.parametrize("field", ["predicate", "probe", "supports"])
def test_questions_are_callables_or_strings(kernel: Kernel, field: str) -> None:
    """A question is a callable or ``"module:attribute"``."""
    kernel("a", **{field: "module:attribute"})
    with pytest.raises(ValueError, match=f"{field} as a str must be 'module:attribute', got 'module.attribute'"):
        kernel("b", **{field: "module.attribute"})
    with pytest.raises(TypeError, match=f"{field} must be callable"):
        kernel("c", **{field: 1})
    assert [spec.name for spec in KernelRegistry.get().list_kernels()] == ["a"]


@pytest.mark.parametrize(
    ("implementation", "error"),
    [
        (None, TypeError),
        (3, TypeError),
        ("", ValueError),
        ("module", ValueError),
        ("module:", ValueError),
        (":f", ValueError),
    ],
)
def test_implementation_is_a_callable_or_a_string(implementation: Any, error: type[Exception]) -> None:
    """Anything else is refused at registration, and nothing is registered."""
    with pytest.raises(error, match=r"kernel 'k'.*implementation"):
        register_kernel("quant", "op", name="k", solution="s", signatures=())(implementation)
    assert KernelRegistry.get().list_operators() == []


def test_registry_takes_specs_only() -> None:
    """``register`` refuses what is not a KernelSpec."""
    with pytest.raises(TypeError, match="must be a KernelSpec"):
        KernelRegistry.get().register({"name": "k"}, print)  # type: ignore[arg-type]


def test_string_implementation_is_imported_when_asked_for(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registering a name imports nothing; asking for the implementation does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tsk_lazy_one.py").write_text("class Kernels:\n    run = staticmethod(lambda: 5)\n")
    kernel("lazy", "tsk_lazy_one:Kernels.run")
    assert "tsk_lazy_one" not in sys.modules
    implementation = KernelRegistry.get().get_impl("lazy")
    assert implementation is not None
    assert implementation() == 5


@pytest.mark.parametrize(
    ("target", "error"),
    [("tsk_absent:f", ImportError), ("sys:absent", AttributeError), ("sys:path", TypeError)],
)
def test_string_that_leads_nowhere(target: str, error: type[Exception]) -> None:
    """A missing module, a missing attribute and something not callable are told apart."""
    with pytest.raises(error, match=target.split(":")[target.count("sys")]):
        load_attribute(target)


def test_same_owner_replaces_silently(kernel: Kernel, said: Said) -> None:
    """A second registration under one name replaces the first, without a warning to its own author."""
    kernel("a", priority=4)
    second = kernel("a", priority=5)
    registry = KernelRegistry.get()
    assert [spec.priority for spec in registry.list_kernels()] == [5]
    assert registry.get_impl("a") is second
    assert said() == []


def test_replacing_may_move_the_operator(kernel: Kernel) -> None:
    """A kernel that comes again for another operator leaves the first one."""
    kernel("a", mode="one")
    kernel("a", mode="two")
    assert KernelRegistry.get().list_operators() == [("quant", "two")]


def test_other_owner_replaces_with_one_warning(kernel: Kernel, said: Said) -> None:
    """A plugin that takes a name of the host gets it, and one warning names the kernel and both owners."""
    kernel("a")
    with _owned_by("plug"):
        kernel("a")
    assert _owner("a") == "plug"
    assert len(said()) == 1
    assert all(part in said()[0] for part in ("'a'", "the host", "plug"))


def test_plugin_replaces_a_plugin_with_one_warning(kernel: Kernel, said: Said) -> None:
    """Among plugins, the later one gets the name, with one warning that names both."""
    for owner in ("alpha", "beta"):
        with _owned_by(owner):
            kernel("a")
    assert _owner("a") == "beta"
    assert len(said("alpha")) == len(said("beta")) == len(said()) == 1


def test_host_that_comes_late_is_kept_aside(kernel: Kernel, said: Said) -> None:
    """A host's kernel under a name that a plugin took does not displace it, and one warning says so."""
    with _owned_by("plug"):
        kernel("a")
    kernel("a")
    assert _owner("a") == "plug"
    assert len(said()) == 1
    assert "kept aside" in said()[0]


@pytest.mark.parametrize("order", [("plug", None), (None, "plug")])
def test_removing_brings_back_what_was_displaced(kernel: Kernel, order: tuple[str | None, ...]) -> None:
    """When a plugin's kernel goes, the host's of that name is active again, in either order of arrival."""
    for owner in order:
        if owner is None:
            kernel("a", priority=3)
        else:
            with _owned_by(owner):
                kernel("a", priority=7)
    registry = KernelRegistry.get()
    registry.remove(registry.owned_by("plug"))
    assert _owner("a") is None
    assert [spec.priority for spec in registry.list_kernels()] == [3]
    assert registry.owned_by("plug") == ()


def test_removing_what_is_not_there_is_no_error(kernel: Kernel) -> None:
    """Removing twice changes nothing."""
    kernel("a")
    registry = KernelRegistry.get()
    gone = registry.owned_by(None)
    registry.remove(gone)
    registry.remove(gone)
    assert (registry.get_by_name("a"), registry.get_impl("a"), registry.list_operators()) == (None, None, [])


def test_lists(kernel: Kernel) -> None:
    """Operators are in the order in which they came, an operator's kernels by priority and age."""
    kernel("z", mode="b")
    kernel("y", mode="a")
    kernel("x", mode="b", solution="s")
    kernel("w", mode="b", solution="s", priority=12)
    registry = KernelRegistry.get()
    assert registry.list_operators() == [("quant", "b"), ("quant", "a")]
    assert [spec.name for spec in registry.list_kernels()] == ["z", "y", "x", "w"]
    assert [spec.name for spec in registry.list_kernels("quant", "b")] == ["w", "z", "x"]
    assert registry.list_kernels(family="other") == []
    assert registry.list_solutions("quant", "b") == ["s", "z"]
    assert registry.list_solutions("quant", "none") == []


def test_filters_of_get_for_operator(kernel: Kernel, platform: Callable[..., PlatformInfo]) -> None:
    """Every condition that is given must hold."""
    floats = format_signatures("x", "dense", {"float32"})  # type: ignore[arg-type]
    kernel("plain")
    kernel("picky", signatures=floats, features={"fast", "small"}, solution="s")
    kernel("new", capability=CapabilityRequirement(min_arch_version=ArchVersion(10, 0)))

    def found(**conditions: Any) -> list[str]:
        return [spec.name for spec in KernelRegistry.get().get_for_operator("quant", "op", **conditions)]

    halves = format_signature(x=dense_tensor_format("float16"))  # type: ignore[arg-type]
    assert found() == ["plain", "picky", "new"]
    assert found(features=frozenset({"fast"})) == ["picky"]
    assert found(platform=platform("nvidia", 9, 0)) == ["plain", "picky"]
    assert found(format_signature=halves) == ["plain", "new"]
    assert found(format_signature=next(iter(floats)), solution="s") == ["picky"]


def test_signatures_by_dtype() -> None:
    """A spec finds its signatures by the dtype of a role, and refuses to pick one of several."""
    signatures = format_signatures(("a", "b"), "dense", {"f16", "f32"})  # type: ignore[arg-type]
    spec = KernelSpec(name="k", family="f", mode="m", format_signatures=signatures)
    (expected,) = (s for s in signatures if str(s.storage_dtype_for("a")) == "f16")
    assert spec.format_signature_for_storage_dtype("f16", "a") == expected  # type: ignore[arg-type]
    assert spec.format_signature_for_storage_dtype("f64", ("a", "b")) is None  # type: ignore[arg-type]
    assert sorted(map(str, spec.storage_dtypes_for_role("b"))) == ["f16", "f32"]
    mixed = format_signature(a=dense_tensor_format("f16"), b=dense_tensor_format("f32"))  # type: ignore[arg-type]
    both = KernelSpec(name="k", family="f", mode="m", format_signatures=frozenset({*signatures, mixed}))
    assert len(both.format_signatures_for_storage_dtype("f16", "a")) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'k' has 2 signatures"):
        both.format_signature_for_storage_dtype("f16", "a")  # type: ignore[arg-type]


def test_describe_kernel(kernel: Kernel) -> None:
    """The description has the operator, the owner, the priority with its band, the features and the traits."""
    with _owned_by("plug"):
        kernel("a", priority=14, features={"fast"}, traits={"head_dim": frozenset({64})}, solution="s")
    text = describe_kernel("a")
    parts = ("a", "quant.op", "s", "plug", "14 (SPECIALIZED+2)", "fast", "head_dim", "64", "any")
    assert [part for part in parts if part not in text] == []


def test_describe_unknown_kernel() -> None:
    """A name that nothing has is said to be not found."""
    assert describe_kernel("nope") == "Kernel 'nope' not found"


def test_reset_makes_an_empty_registry(kernel: Kernel) -> None:
    """After a reset there is another, empty registry; the old one is left alone."""
    kernel("a")
    old = KernelRegistry.get()
    KernelRegistry.reset()
    assert KernelRegistry.get() is not old
    assert KernelRegistry.get() is KernelRegistry.get()
    assert (KernelRegistry.get().list_kernels(), len(old.list_kernels())) == ([], 1)


def test_own_registry_is_apart(kernel: Kernel) -> None:
    """A registry that a test makes for itself shares nothing with the process's."""
    kernel("a")
    assert KernelRegistry().list_kernels() == []
