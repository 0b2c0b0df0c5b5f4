# SPDX-License-Identifier: Apache-2.0
"""Discovery over real distributions: what loads, when, once, and what comes back."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel.plugins import (
    disable_plugin,
    discover_plugins,
    enable_plugin,
    installed,
    list_plugins,
    plugin_records,
    reset_plugins,
)
from tokenspeed_kernel.registry import KernelRegistry, describe_kernel

Kernel = Callable[..., Any]
Said = Callable[..., list[str]]


def _kernels() -> list[str]:
    return [spec.name for spec in KernelRegistry.get().list_kernels("quant", "op")]


def test_nothing_installed_is_an_empty_list(plugins: Any, said: Said) -> None:
    """Without plugins discovery returns nothing, quietly (case 91)."""
    assert (discover_plugins(), list_plugins(), plugin_records(), said()) == ([], [], [], [])


def test_plugins_load_in_alphabetical_order(plugins: Any) -> None:
    """The order is that of the entry-point names, not of the folders."""
    for name, distribution in (("b", "one"), ("c", "two"), ("a", "zzz")):
        plugins.add(name, plugins.kernel(f"kernel_{name}", priority=10 - ord(name) % 10), distribution=distribution)
    assert [info.name for info in discover_plugins()] == ["a", "b", "c"]
    assert _kernels() == ["kernel_a", "kernel_b", "kernel_c"]


def test_info_of_a_loaded_plugin(plugins: Any) -> None:
    """The info has the contract's fields, in their order."""
    plugins.add("mine", plugins.kernel("k1", 3) + "\n" + plugins.kernel("k2", 4), distribution="My.Dist")
    (info,) = discover_plugins()
    assert (info.name, info.package, info.version, info.num_kernels) == ("mine", "my-dist", "1.0", 2)
    assert info.kernel_names == ("k1", "k2")
    assert list(vars(info))[:5] == ["name", "package", "version", "num_kernels", "kernel_names"]
    (record,) = plugin_records()
    assert (record.state, record.reason, record.value) == ("loaded", "", "tsk_plugin_mine:register")
    assert record.milliseconds > 0
    assert "Registered by: mine" in describe_kernel("k1")


def test_discovery_is_idempotent(plugins: Any) -> None:
    """A second call runs no ``register()`` again and registers nothing new."""
    module = plugins.add("mine", plugins.kernel("k"))
    first = discover_plugins()
    assert discover_plugins() == first
    assert (plugins.calls(module), _kernels()) == (1, ["k"])


def test_force_runs_register_again(plugins: Any, said: Said) -> None:
    """``force=True`` runs ``register()`` again, replaces its kernels silently, and keeps record of what is owned."""
    module = plugins.add("mine", plugins.kernel("k"))
    discover_plugins()
    (info,) = discover_plugins(force=True)
    assert (plugins.calls(module), _kernels(), info.kernel_names) == (2, ["k"], ("k",))
    assert said() == []


def test_new_plugin_is_found_by_the_next_call(plugins: Any) -> None:
    """What is installed while the process runs loads at the next discovery, and only that (case 104)."""
    first = plugins.add("one", plugins.kernel("k1"))
    discover_plugins()
    plugins.add("two", plugins.kernel("k2", 11))
    assert [info.name for info in discover_plugins()] == ["one", "two"]
    assert plugins.calls(first) == 1


def test_reset_of_the_registry_is_noticed(plugins: Any) -> None:
    """After ``KernelRegistry.reset()`` a plain discovery loads again."""
    plugins.add("mine", plugins.kernel("k"))
    discover_plugins()
    KernelRegistry.reset()
    assert _kernels() == []
    (info,) = discover_plugins()
    assert (_kernels(), info.kernel_names) == (["k"], ("k",))


def test_reset_plugins_forgets_and_withdraws(plugins: Any) -> None:
    """After a reset nothing is loaded, and a plain discovery loads again."""
    module = plugins.add("mine", plugins.kernel("k"))
    discover_plugins()
    reset_plugins()
    assert (_kernels(), list_plugins(), plugin_records()) == ([], [], [])
    assert len(discover_plugins()) == 1
    assert (_kernels(), plugins.calls(module)) == (["k"], 2)


AT_IMPORT: dict[str, Callable[[Any], dict[str, str]]] = {
    "top": lambda plugins: {"top": plugins.kernel("k")},
    "top and register": lambda plugins: {"top": plugins.kernel("k"), "body": plugins.kernel("k2", 11)},
    "module that register imports": lambda plugins: {"body": "import tsk_side_module"},
}


@pytest.mark.parametrize("again", ["force", "registry", "plugins", "disable"])
@pytest.mark.parametrize("where", AT_IMPORT)
def test_kernels_registered_at_import_come_back(plugins: Any, where: str, again: str) -> None:
    """What modules register while they are imported is the plugin's, and comes back though they are imported once."""
    plugins.module("tsk_side_module", plugins.kernel("k"))
    plugins.add("mine", **AT_IMPORT[where](plugins))
    discover_plugins()
    expected = _kernels()
    assert "k" in expected
    if again == "registry":
        KernelRegistry.reset()
    elif again == "plugins":
        reset_plugins()
    elif again == "disable":
        disable_plugin("mine")
        enable_plugin("mine")
    (info,) = discover_plugins(force=again == "force")
    assert sorted(_kernels()) == sorted(info.kernel_names) == sorted(expected)


def test_recursive_discovery_is_a_no_op(plugins: Any) -> None:
    """A plugin that calls discovery gets what is loaded so far, and everybody loads once (case 71)."""
    body = "from tokenspeed_kernel import discover_plugins\nSEEN.extend(i.name for i in discover_plugins())"
    first = plugins.add("a", plugins.kernel("k"))
    module = plugins.add("b", body, top="SEEN = []")
    assert [info.name for info in discover_plugins()] == ["a", "b"]
    assert sys.modules[module].SEEN == ["a"]
    assert (plugins.calls(first), plugins.calls(module)) == (1, 1)


@pytest.mark.parametrize("order", ["import tsk_host", "import tsk_plugin_mine, tsk_host"])
def test_plugin_and_host_that_import_each_other(
    plugins: Any, python: Callable[..., subprocess.CompletedProcess[str]], order: str
) -> None:
    """A host that discovers while imported, and a plugin that imports it, work in both orders (case 71)."""
    plugins.module("tsk_host", "import tokenspeed_kernel\nNAME = 'k'\nLOADED = tokenspeed_kernel.discover_plugins()")
    top = "import tsk_host\nfrom tokenspeed_kernel.registry import register_kernel"
    body = "register_kernel('quant', 'op', name=tsk_host.NAME, solution='s', signatures=())(print)"
    plugins.add("mine", body, top=top)
    code = f"{order}\nimport sys\nfrom tokenspeed_kernel.registry import KernelRegistry as R\n"
    code += "import tsk_plugin_mine as p, tokenspeed_kernel as t\nt.discover_plugins()\n"
    code += "sys.stdout.write(f\"{len(p.CALLS)} {[s.name for s in R.get().list_kernels('quant', 'op')]}\")"
    done = python(code, TOKENSPEED_KERNEL_PLUGINS="mine")
    assert done.stdout == "1 ['k']", done.stderr


def test_discovery_from_many_threads_loads_once(plugins: Any) -> None:
    """Eight threads that discover at once all get the loaded plugins, each loaded once."""
    module = plugins.add("mine", "import time; time.sleep(0.05)\n" + plugins.kernel("k"))
    start, found = threading.Barrier(8), []

    def run() -> None:
        start.wait(10)
        found.append(tuple(info.name for info in discover_plugins()))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("mine",)] * 8
    assert (plugins.calls(module), _kernels()) == (1, ["k"])


@pytest.mark.parametrize("second", ["dist-info", "egg-info", "case and dash"])
def test_duplicate_metadata_is_one_plugin(
    plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said, second: str
) -> None:
    """Metadata of one distribution in two folders loads its plugin once, with one record (case 14)."""
    module = plugins.add("alpha", plugins.kernel("k"), distribution="al-pha")
    other = tmp_path / "other"
    if second == "egg-info":
        info = plugins.metadata("al-pha", f"alpha = {module}:register", folder=other)
        egg = info.rename(other / "al_pha.egg-info")
        (egg / "METADATA").rename(egg / "PKG-INFO")
    else:
        name = "Al_Pha" if second == "case and dash" else "al-pha"
        plugins.metadata(name, f"alpha = {module}:register", version="0.9", folder=other)
    monkeypatch.syspath_prepend(str(other))
    assert len(discover_plugins()) == len(plugin_records()) == 1
    assert (plugins.calls(module), said()) == (1, [])


@pytest.mark.parametrize("name", ["my-plugin", "1fast", "class", "a.b", "x y", "über", "with.dots-and_dashes"])
def test_entry_point_name_need_not_be_an_identifier(plugins: Any, name: str) -> None:
    """Any name that metadata can hold loads, is owned, and can be disabled (case 8)."""
    plugins.module("tsk_odd_name", f"def register():\n    {plugins.kernel('k')}\n")
    plugins.metadata("odd", f"{name} = tsk_odd_name:register")
    (info,) = discover_plugins()
    assert (info.name, info.kernel_names) == (name, ("k",))
    disable_plugin(name)
    assert (list_plugins(), _kernels()) == ([], [])


def _unreachable(entry: str) -> Iterator[Any]:
    raise OSError(f"stale handle: {entry}")
    yield


def test_transient_scan_error_is_no_end(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a scan that failed once, the next call finds the plugin, and a third registers nothing new (case 22)."""
    module = plugins.add("mine", plugins.kernel("k"))
    with monkeypatch.context() as broken:
        broken.setattr(installed, "_in_entry", _unreachable)
        with pytest.warns(UserWarning, match="stale handle"):
            assert discover_plugins() == []
    for _ in range(2):
        assert [info.name for info in discover_plugins()] == ["mine"]
    assert plugins.calls(module) == 1


def test_scan_error_keeps_what_is_loaded(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that fails later loses no loaded plugin; with ``strict`` its error is raised (case 22)."""
    plugins.add("mine", plugins.kernel("k"))
    discover_plugins()
    monkeypatch.setattr(installed, "_in_entry", _unreachable)
    with pytest.warns(UserWarning, match="stale handle"):
        assert [info.name for info in discover_plugins()] == ["mine"]
    with pytest.raises(RuntimeError) as caught:
        discover_plugins(strict=True)
    assert "stale handle" in str(caught.value.__cause__)
    assert (_kernels(), len(list_plugins())) == (["k"], 1)


def test_uninstalled_plugin_is_gone_after_the_next_discovery(plugins: Any, tmp_path: Path) -> None:
    """A plugin whose metadata went has no record, and leaves no kernel that nobody owns up to."""
    plugins.add("mine", plugins.kernel("k"), distribution="mine")
    discover_plugins()
    shutil.rmtree(tmp_path / "mine-1.0.dist-info")
    plugins.metadata("nothing", "")
    assert (discover_plugins(), plugin_records(), _kernels()) == ([], [], [])


def test_extras_in_the_value_change_nothing(plugins: Any) -> None:
    """``module:attribute [extra]`` loads the attribute (case 64)."""
    module = plugins.add("mine", plugins.kernel("k"), distribution="mine")
    plugins.metadata("mine", f"mine = {module}:register [cuda,triton]")
    assert [info.name for info in discover_plugins()] == ["mine"]


def test_plugin_replaces_a_kernel_of_the_host_until_it_is_unloaded(plugins: Any, kernel: Kernel, said: Said) -> None:
    """Taking the host's name is said once with both owners, and undone when the plugin goes."""
    kernel("k", priority=1)
    plugins.add("mine", plugins.kernel("k", 2))
    discover_plugins()
    assert len(said("'k'")) == len(said()) == 1
    assert "Registered by: mine" in describe_kernel("k")
    disable_plugin("mine")
    assert "Registered by: the host" in describe_kernel("k")


def test_built_in_that_comes_late_is_kept_aside(plugins: Any, kernel: Kernel, said: Said) -> None:
    """A host that registers after discovery under a plugin's name does not displace it, with one warning."""
    plugins.add("mine", plugins.kernel("k"))
    discover_plugins()
    kernel("k")
    assert "Registered by: mine" in describe_kernel("k")
    assert len(said("kept aside")) == len(said()) == 1


def test_equal_priorities_are_warned_about(plugins: Any, said: Said) -> None:
    """One warning names both kernels, both plugins, and who wins: the newer."""
    from tokenspeed_kernel import select_kernel

    plugins.add("a", plugins.kernel("ka"))
    plugins.add("b", plugins.kernel("kb"))
    plugins.add("c", plugins.kernel("kc", 11))
    discover_plugins()
    assert len(said()) == 1
    parts = ("'ka' (a@dist-a)", "'kb' (b@dist-b)", "'kb' is newer and wins")
    assert [part for part in parts if part not in said()[0]] == []
    disable_plugin("c")
    assert select_kernel("quant", "op", None).name == "kb"


def test_slots_use_what_plugins_bring(plugins: Any) -> None:
    """A slot that was resolved before discovery sees the plugin's kernel after it."""
    from tokenspeed_kernel import resolve

    body = "from tokenspeed_kernel import register; register('sdpa', lambda *a: 'fast', name='mine')"
    plugins.add("mine", body)
    assert resolve("sdpa") is None
    discover_plugins()
    implementation = resolve("sdpa")
    assert implementation is not None
    assert implementation() == "fast"
