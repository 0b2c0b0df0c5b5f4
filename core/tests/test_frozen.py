# SPDX-License-Identifier: Apache-2.0
"""freeze, thaw and adopt: a plan that no longer changes, its digest, and another process that runs it."""

import json
import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import SlotContract, adopt, declare_slot, discover_plugins, freeze, refresh, slot, thaw
from tokenspeed_kernel.platform import Platform, PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry
from tokenspeed_kernel.selection import SelectionOracle, kernel_override, register_oracle

Kernel = Callable[..., Any]
Declare = Callable[..., Any]
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _thawed() -> Any:
    yield
    thaw()


def test_a_plan_maps_operators_to_kernels_in_order(kernel: Kernel, declare: Declare) -> None:
    """The plan is an immutable mapping with the candidates of every operator, the first choice first."""
    kernel("low", priority=4)
    kernel("high", priority=12)
    declare()
    plan = freeze()
    assert [k.name for k in plan["quant.op"]] == ["high", "low", "op:reference"]
    assert {"quant.op", "quant.fake_quant_fp8"} <= set(plan)
    with pytest.raises(TypeError):
        plan["quant.op"] = ()  # type: ignore[index]


def test_what_cannot_run_is_not_in_the_plan(kernel: Kernel, declare: Declare) -> None:
    """A kernel whose probe says no, or whose module is missing, is found out when the plan is made."""
    pytest.importorskip("torch")  # the built-in references are imported, too
    kernel("unbuildable", priority=12, probe=lambda: "no compiler")
    kernel("absent", "tsk_no_such_module:function", priority=11)
    declare()
    with pytest.warns(RuntimeWarning, match="tsk_no_such_module"):
        assert [k.name for k in freeze()["quant.op"]] == ["op:reference"]


def test_after_it_nothing_registers_and_nothing_goes(kernel: Kernel, declare: Declare) -> None:
    """A registration and a withdrawal raise with the way out, and change nothing; ``thaw`` allows them again."""
    kernel("a")
    handle = declare()
    plan = freeze()
    with pytest.raises(RuntimeError, match=r"'b' cannot be registered.*thaw\(\)"):
        kernel("b", priority=12)
    with pytest.raises(RuntimeError, match="thaw"):
        KernelRegistry.get().remove(KernelRegistry.get().registrations("quant", "op"))
    assert handle(1) == "a"
    thaw()
    kernel("b", priority=12)
    assert handle(1) == "b"
    assert freeze().digest != plan.digest


def test_a_frozen_plan_takes_no_new_slot(declare: Declare) -> None:
    """Declaring a slot is refused at once, and a slot that is there goes on; the same contract again is no change."""
    handle = declare()
    freeze()
    with pytest.raises(RuntimeError, match=r"'late' cannot be declared.*thaw\(\)"):
        declare_slot(SlotContract(name="late", family="quant", mode="late", reference=print))
    assert declare_slot(handle.contract) is handle
    assert handle(1) == "reference"


def test_settings_contexts_and_oracles_do_not_move_a_frozen_slot(
    kernel: Kernel, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would change a choice has no effect until the plan is thawed."""

    class Upside(SelectionOracle):
        def adjust(self, spec: Any, platform: Any, traits: Any) -> int:
            return -int(spec.priority)

    kernel("a", priority=12)
    kernel("b", priority=4)
    handle = declare()
    freeze()
    monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", "reference")
    refresh()
    register_oracle("quant", Upside())
    with kernel_override("quant", "op", "b"):
        assert handle(1) == "a"
    assert handle.explain(1).chosen == "a"
    thaw()
    assert handle(1) == "reference"


@pytest.mark.parametrize("on_error", ["fallback", "raise"])
def test_a_failure_is_the_hosts_choice(kernel: Kernel, declare: Declare, on_error: Any) -> None:
    """``fallback`` switches the kernel off and goes on; ``raise`` names it, and nobody is switched off."""

    def broken(x: int) -> int:
        raise ValueError("bad launch")

    kernel("a", broken, priority=12)
    handle = declare()
    digest = freeze(on_error=on_error).digest
    if on_error == "raise":
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'a'.*frozen") as caught:
                handle(1)
            assert isinstance(caught.value.__cause__, ValueError)
        assert handle.explain(1).chosen == "a"
    else:
        with pytest.warns(RuntimeWarning, match="bad launch"):
            assert handle(1) == "reference"
        assert handle(1) == "reference"
        assert handle.explain(1).chosen == "op:reference"
    assert KernelRegistry.get().frozen is not None
    assert len(digest) == 64


def test_another_word_is_refused() -> None:
    """``on_error`` has two words."""
    with pytest.raises(ValueError, match="'ignore'"):
        freeze(on_error="ignore")  # type: ignore[arg-type]


def _digest(**changes: Any) -> str:
    thaw()
    digest = freeze().digest
    thaw()
    return digest


def test_the_digest_changes_with_all_that_matters_and_nothing_else(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, platform: Callable[..., PlatformInfo]
) -> None:
    """A kernel, a priority, a setting, an architecture and a vendor each make another digest; a call makes none."""
    seen = [_digest()]
    slot("sdpa")(1)
    assert _digest() == seen[0]
    kernel("a", priority=12)
    seen.append(_digest())
    kernel("a", priority=13)
    seen.append(_digest())
    monkeypatch.setenv("TOKENSPEED_KERNEL_HUB", "0")
    refresh()
    seen.append(_digest())
    monkeypatch.setenv("TOKENSPEED_KERNEL_OVERRIDE_QUANT_OP", "a")
    refresh()
    seen.append(_digest())
    for vendor, major in (("nvidia", 10), ("amd", 10)):
        Platform.override(platform(vendor, major))
        seen.append(_digest())
    assert len(set(seen)) == len(seen)


def test_the_digest_does_not_depend_on_the_order_of_registration(kernel: Kernel) -> None:
    """Two processes that registered the same kernels in another order have one plan."""
    digests = []
    for order in (("a", "b"), ("b", "a")):
        KernelRegistry.reset()
        for name in order:
            kernel(name, mode=name, priority=12)
        digests.append(_digest())
    assert digests[0] == digests[1]


PROGRAM = """
import sys
from tokenspeed_kernel import discover_plugins, freeze
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
Platform.override(PlatformInfo("nvidia", ArchVersion(9, 0), sys.argv[1], 1, 0, 0.0, 0, 0, 0))
discover_plugins()
print(freeze().digest)
"""


def test_the_digest_is_the_same_on_two_machines(plugins: Any, python: Python) -> None:
    """Two processes with another hash seed, directory and device name agree; one with a newer plugin does not."""
    plugins.add("mine", plugins.kernel("k"), distribution="mine")
    first, second = (python("-c", PROGRAM, name, PYTHONHASHSEED=seed) for name, seed in (("one", "1"), ("two", "2")))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    (plugins.folder / "mine-1.0.dist-info").rename(plugins.folder / "mine-2.0.dist-info")
    plugins.metadata("mine", "mine = tsk_plugin_mine:register", version="2.0")
    assert python("-c", PROGRAM, "one").stdout != first.stdout


CHILD = """
import json, pickle, sys, warnings
from tokenspeed_kernel import adopt
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
from tokenspeed_kernel.plugins import list_plugins
Platform.override(PlatformInfo("nvidia", ArchVersion(int(sys.argv[2]), 0), "child", 1, 0, 0.0, 0, 0, 0))
plan = pickle.load(open(sys.argv[1], "rb"))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = adopt(plan)
print(json.dumps([[plugin.name for plugin in list_plugins()], found, len(said)]))
"""


def test_a_child_loads_exactly_the_plan(plugins: Any, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process loads the plan's plugins and no other, whatever its environment says, and agrees."""
    pytest.importorskip("torch")  # the built-in references are imported, too
    plugins.add("a", plugins.kernel("ka"))
    plugins.add("b", plugins.kernel("kb", 12))
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "b")
    discover_plugins()
    path = plugins.folder / "plan.pickle"
    path.write_bytes(pickle.dumps(freeze()))
    done = python("-c", CHILD, str(path), "9", TOKENSPEED_KERNEL_DISABLE_PLUGINS="a")
    assert json.loads(done.stdout) == [["a"], [], 0], done.stderr


def test_a_child_says_what_differs(plugins: Any, python: Python) -> None:
    """Another architecture, and a kernel that is gone, are said one by one, each with a warning."""
    plugins.add("a", plugins.kernel("ka"))
    discover_plugins()
    path = plugins.folder / "plan.pickle"
    path.write_bytes(pickle.dumps(freeze()))
    plugins.module("tsk_plugin_a", "def register():\n    pass\n")
    done = python("-c", CHILD, str(path), "10")
    _, found, said = json.loads(done.stdout)
    assert any("nvidia 9.0 there, nvidia 10.0 here" in line for line in found)
    assert any("ka 1.0" in line and "nothing here" in line for line in found)
    assert said >= len(found) == 2


def test_adopting_ones_own_plan_finds_nothing(plugins: Any) -> None:
    """A forked process, which has all of it, agrees with its parent."""
    plugins.add("a", plugins.kernel("ka"))
    discover_plugins()
    assert adopt(freeze()) == []
