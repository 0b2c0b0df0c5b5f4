# SPDX-License-Identifier: Apache-2.0
"""What registration refuses: with the kernel's name, the value and what was expected, and without a trace."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import select_kernel
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, register_kernel

Kernel = Callable[..., Any]

REFUSED = {
    "priority too high": ({"priority": 20}, ValueError, "20"),
    "priority negative": ({"priority": -1}, ValueError, "-1"),
    "priority a flag": ({"priority": True}, TypeError, "True"),
    "priority a float": ({"priority": 3.0}, TypeError, "3.0"),
    "name empty": ({"name": ""}, ValueError, "''"),
    "solution a number": ({"solution": 3}, TypeError, "solution"),
    "features a str": ({"features": "fast"}, TypeError, "'fast'"),
    "features of numbers": ({"features": {1}}, TypeError, "features"),
    "features a number": ({"features": 3}, TypeError, "features"),
    "signatures of dtypes": ({"signatures": ["bf16"]}, TypeError, "FormatSignature"),
    "signatures a number": ({"signatures": 3}, TypeError, "FormatSignature"),
    "capability a str": ({"capability": "sm90"}, TypeError, "CapabilityRequirement"),
    "traits a list": ({"traits": ["causal"]}, TypeError, "traits"),
    "trait a bare value": ({"traits": {"head_dim": 64}}, TypeError, "head_dim"),
    "trait a str": ({"traits": {"layout": "bhsd"}}, TypeError, "layout"),
    "trait name a number": ({"traits": {3: {1}}}, TypeError, "3"),
    "trait value unhashable": ({"traits": {"dims": [[1, 2]]}}, TypeError, "dims"),
    "alignment zero": ({"traits": {"m_align": {0}}}, ValueError, "m_align"),
    "alignment a str": ({"traits": {"ispp_alignment": {"64"}}}, TypeError, "ispp_alignment"),
    "bound a flag": ({"traits": {"m_min": {True}}}, TypeError, "m_min"),
    "filter no function": ({"traits": {"mnk_problem_filter": {8}}}, TypeError, "mnk_problem_filter"),
    "predicate no function": ({"predicate": 3}, TypeError, "predicate"),
    "probe no target": ({"probe": "module"}, ValueError, "module:attribute"),
    "supports no target": ({"supports": ":attribute"}, ValueError, "module:attribute"),
    "weight_preprocessor a str": ({"weight_preprocessor": "pack"}, TypeError, "weight_preprocessor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_registration_is_refused_by_name(case: str, kernel: Kernel) -> None:
    """The error names kernel and fault, nothing is registered, and a kernel that comes later is not hurt."""
    changed, error, part = REFUSED[case]
    spec = {"name": "broken", "solution": "s", "signatures": (), **changed}
    with pytest.raises(error) as caught:
        register_kernel("quant", "op", **spec)(lambda: None)
    assert part in str(caught.value)
    assert repr(spec["name"]) in str(caught.value)
    assert KernelRegistry.get().list_kernels() == []
    kernel("later")
    assert select_kernel("quant", "op", None, traits={"m": 8, "head_dim": 64}).name == "later"


@pytest.mark.parametrize("implementation", [None, 3, "module", "module:", ":attribute"])
def test_a_malformed_implementation_is_refused(implementation: Any) -> None:
    """What is neither callable nor ``module:attribute`` is refused, by the decorator and by the registry."""
    with pytest.raises((TypeError, ValueError), match="'a'"):
        register_kernel("quant", "op", name="a", solution="s", signatures=())(implementation)
    with pytest.raises((TypeError, ValueError), match="'a'"):
        KernelRegistry.get().register(KernelSpec("a", "quant", "op"), implementation)
    assert KernelRegistry.get().list_kernels() == []


def test_what_is_registered_does_not_change_with_its_source(kernel: Kernel) -> None:
    """A plugin may go on using the sets and the dict that it registered with."""
    features, served = {"fast"}, {64}
    traits = {"head_dim": served}
    kernel("a", features=features, traits=traits)
    features.clear()
    served.clear()
    traits["causal"] = {True}
    assert select_kernel("quant", "op", None, features=frozenset({"fast"}), traits={"head_dim": 64}).name == "a"
    spec = KernelRegistry.get().get_by_name("a")
    assert spec is not None
    assert spec.traits == {"head_dim": frozenset({64})}
