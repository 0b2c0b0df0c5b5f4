# SPDX-License-Identifier: Apache-2.0
"""A plugin that fails, in any way, is recorded, said once, leaves nothing behind, and stops no other."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel import select_kernel
from tokenspeed_kernel.overrides import context_override
from tokenspeed_kernel.plugins import discover_plugins, list_plugins, plugin_records
from tokenspeed_kernel.registry import KernelRegistry

Said = Callable[..., list[str]]

FAILURES = {
    "import error": ("", "import tsk_absent_module", "import", "tsk_absent_module"),
    "error at import": ("", "raise RuntimeError('boom')", "import", "boom"),
    "syntax error": ("", "def (", "import", "SyntaxError"),
    "exit at import (case 88)": ("", "import sys; sys.exit(3)", "import", "SystemExit: 3"),
    "own BaseException (case 88)": ("", "class Stop(BaseException): pass\nraise Stop('now')", "import", "Stop: now"),
    "native library (case 107)": ("", "import ctypes; ctypes.CDLL('libdoes_not_exist.so')", "import", "OSError"),
    "undefined symbol (case 107)": ("", "raise ImportError('undefined symbol: bar')", "import", "undefined symbol"),
    "register raises (case 35)": ("raise ImportError('libfoo.so: undefined symbol: bar')", "", "register", "libfoo.so"),
    "register exits": ("import sys; sys.exit()", "", "register", "SystemExit"),
    "str() raises": (
        "raise Mute",
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError('mute')\n    __repr__ = __str__",
        "register",
        "Mute",
    ),
    "bad priority": (
        "from tokenspeed_kernel.registry import register_kernel\n"
        "register_kernel('quant', 'op', name='k', solution='s', signatures=(), priority=99)",
        "",
        "register",
        "priority",
    ),
}


def _kernels() -> list[str]:
    return [spec.name for spec in KernelRegistry.get().list_kernels("quant", "op")]


def _record(name: str) -> Any:
    return next(record for record in plugin_records() if record.name == name)


@pytest.mark.parametrize("kind", FAILURES)
def test_failing_plugin_is_isolated(plugins: Any, said: Said, kind: str) -> None:
    """The others load; one warning has plugin, distribution, cause and how to skip; the record keeps all (case 61)."""
    body, top, phase, cause = FAILURES[kind]
    plugins.add("a_good", plugins.kernel("good"))
    plugins.add("bad", body, top=top, distribution="Bad.Dist")
    plugins.add("c_good", plugins.kernel("also_good", 11))
    assert [info.name for info in discover_plugins()] == ["a_good", "c_good"]
    assert len(said()) == 1
    parts = ("'bad'", "bad-dist", phase, cause, "TOKENSPEED_KERNEL_DISABLE_PLUGINS=bad")
    assert [part for part in parts if part not in said()[0]] == []
    record = _record("bad")
    assert (record.state, record.phase, record.package, record.version) == ("failed", phase, "bad-dist", "1.0")
    assert cause in record.reason
    assert "Traceback" in record.traceback
    assert record.milliseconds > 0


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("tsk_whole:absent", "absent"),
        ("tsk_whole:NUMBER", "NUMBER"),
        ("tsk_whole", "tsk_whole"),
        ("!! not valid", "not valid"),
    ],
)
def test_value_that_names_no_function_is_isolated(plugins: Any, said: Said, value: str, part: str) -> None:
    """A missing attribute, something not callable and a malformed value are failures like any other."""
    plugins.module("tsk_whole", "NUMBER = 3\n")
    plugins.metadata("bad", f"bad = {value}")
    plugins.add("good", plugins.kernel("good"))
    assert [info.name for info in discover_plugins()] == ["good"]
    assert (_record("bad").state, len(said("'bad'"))) == ("failed", 1)
    assert part in _record("bad").value


def test_line_that_is_no_entry_point_hides_no_other(plugins: Any) -> None:
    """A distribution with unreadable entry points does not keep the others from loading."""
    plugins.metadata("bad", "this line has no equals sign")
    plugins.add("good", plugins.kernel("good"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [info.name for info in discover_plugins()] == ["good"]


def test_distribution_without_metadata_hides_no_other(plugins: Any) -> None:
    """A broken installation, whose dist-info lacks METADATA, does not keep the others from loading (case 91)."""
    plugins.module("tsk_bare", f"def register():\n    {plugins.kernel('bare')}\n")
    (plugins.metadata("bare", "bare = tsk_bare:register") / "METADATA").unlink()
    plugins.add("good", plugins.kernel("good", 11))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "good" in [info.name for info in discover_plugins()]


def test_missing_dependency_is_named(plugins: Any, said: Said) -> None:
    """A plugin whose own dependency is absent is skipped, and the message names the missing module (case 64)."""
    module = plugins.add("bad", top="import tsk_absent_triton", distribution="bad")
    plugins.metadata("bad", f"bad = {module}:register [triton]")
    assert discover_plugins() == []
    assert len(said("tsk_absent_triton")) == len(said()) == 1


def test_failure_is_not_said_at_each_call(plugins: Any, said: Said) -> None:
    """Slot calls and selections after a failed discovery repeat no warning (case 35)."""
    from tokenspeed_kernel import slot

    plugins.add("bad", "raise ImportError('libfoo.so')")
    discover_plugins()
    for _ in range(3):
        slot("sdpa")(1)
    assert len(said()) == 1


FAIL_AFTER: dict[str, Callable[[str], dict[str, str]]] = {
    "register": lambda line: {"body": f"{line}\nraise RuntimeError('boom')"},
    "import": lambda line: {"top": f"{line}\nraise RuntimeError('boom')"},
    "register after import": lambda line: {"top": line, "body": "raise RuntimeError('boom')"},
}


@pytest.mark.parametrize("where", FAIL_AFTER)
@pytest.mark.filterwarnings("ignore:plugin 'bad'")
def test_failing_plugin_leaves_no_kernel(plugins: Any, where: str) -> None:
    """What it had registered before it failed is withdrawn (case 61)."""
    plugins.add("bad", **FAIL_AFTER[where](plugins.kernel("k")))
    discover_plugins()
    assert (_kernels(), _record("bad").kernel_names) == ([], ())


@pytest.mark.filterwarnings("ignore:plugin 'bad'", "ignore:kernel 'k'")
def test_failing_plugin_gives_names_back(plugins: Any, kernel: Callable[..., Any]) -> None:
    """A kernel of the host that it had replaced is active again."""
    kernel("k", priority=1)
    plugins.add("bad", plugins.kernel("k", 15) + "\nraise RuntimeError('boom')")
    discover_plugins()
    assert [spec.priority for spec in KernelRegistry.get().list_kernels("quant", "op")] == [1]


@pytest.mark.filterwarnings("ignore:plugin 'bad'")
def test_failing_plugin_leaves_no_oracle(plugins: Any, kernel: Callable[..., Any]) -> None:
    """An oracle that it had registered is gone too, and one that it replaced is back."""
    kernel("high", priority=12)
    kernel("low", priority=4)
    body = """
    from tokenspeed_kernel.selection import SelectionOracle, register_oracle
    class Upside(SelectionOracle):
        def adjust(self, spec, platform, traits):
            return -spec.priority
    register_oracle("quant", Upside())
    raise RuntimeError("boom")
    """
    plugins.add("bad", body)
    discover_plugins()
    assert select_kernel("quant", "op", None).name == "high"


@pytest.mark.filterwarnings("ignore:plugin 'bad'")
def test_failing_plugin_leaves_no_override(plugins: Any) -> None:
    """An override context that it entered and never left does not outlive it."""
    body = """
    from tokenspeed_kernel.selection import kernel_override
    KEPT.append(kernel_override("quant", "op", "k"))
    KEPT[0].__enter__()
    raise RuntimeError("boom")
    """
    plugins.add("bad", body, top="KEPT = []")
    discover_plugins()
    assert context_override("quant", "op") is None


@pytest.mark.parametrize("where", ["top", "side module", "package"])
@pytest.mark.filterwarnings("ignore:plugin 'mine'")
def test_retry_after_the_cause_is_mended_has_every_kernel(
    plugins: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What modules registered at import comes back on a retry, although those modules are not imported again."""
    fail = "import os\nif 'TSK_FAIL' in os.environ: raise RuntimeError('boom')"
    if where == "top":  # the module stays imported, register() fails
        plugins.add("mine", fail, top=plugins.kernel("k"))
    elif where == "side module":  # register() imports it, then fails
        plugins.module("tsk_side_retry", plugins.kernel("k"))
        plugins.add("mine", f"import tsk_side_retry\n{fail}")
    else:  # the plugin's own import fails, after that of a module which stays imported
        plugins.module("tsk_side_package", plugins.kernel("k"))
        plugins.add("mine", top=f"import tsk_side_package\n{fail}")
    monkeypatch.setenv("TSK_FAIL", "1")
    assert (discover_plugins(), _kernels()) == ([], [])
    monkeypatch.delenv("TSK_FAIL")
    assert [info.kernel_names for info in discover_plugins()] == [("k",)]
    assert _kernels() == ["k"]


def test_strict_raises_the_first_failure(plugins: Any) -> None:
    """``strict=True`` raises with the cause chained, after undoing what that plugin registered (case 61)."""
    plugins.add("bad", plugins.kernel("k") + "\nraise LookupError('boom')")
    with pytest.raises(RuntimeError, match="boom") as caught, pytest.warns(UserWarning, match="'bad'"):
        discover_plugins(strict=True)
    assert isinstance(caught.value.__cause__, LookupError)
    assert (_kernels(), _record("bad").state) == ([], "failed")


INTERRUPTS = {
    "import": {"top": "import os\nif 'TSK_FAIL' in os.environ: raise KeyboardInterrupt"},
    "register": {"body": "import os\nif 'TSK_FAIL' in os.environ: raise KeyboardInterrupt"},
}


@pytest.mark.parametrize("where", INTERRUPTS)
def test_interrupt_rolls_back_and_goes_up(plugins: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """KeyboardInterrupt reaches the host, leaves nothing of that plugin, and the next call loads it (case 88)."""
    arguments = dict(INTERRUPTS[where])
    arguments["top"] = plugins.kernel("k") + "\n" + arguments.get("top", "")
    plugins.add("mine", **arguments)
    monkeypatch.setenv("TSK_FAIL", "1")
    with pytest.raises(KeyboardInterrupt):
        discover_plugins()
    assert (_kernels(), list_plugins()) == ([], [])
    monkeypatch.delenv("TSK_FAIL")
    assert [info.kernel_names for info in discover_plugins()] == [("k",)]


@pytest.mark.parametrize("how", ["interrupt", "strict"])
@pytest.mark.filterwarnings("ignore:plugin 'm'")
def test_aborted_discovery_keeps_what_was_loaded_before(plugins: Any, how: str) -> None:
    """A discovery that ends early loses no record of a plugin whose kernels are in use."""
    modules = [plugins.add(name, plugins.kernel(f"k_{name}", priority)) for name, priority in (("a", 7), ("z", 8))]
    discover_plugins()
    plugins.add("m", "raise KeyboardInterrupt" if how == "interrupt" else "raise ValueError")
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        discover_plugins(strict=True)
    assert [info.name for info in list_plugins()] == ["a", "z"]
    assert _kernels() == ["k_z", "k_a"]
    assert [plugins.calls(module) for module in modules] == [1, 1]


def test_warnings_as_errors_never_abort(plugins: Any, log: Callable[[], list[str]]) -> None:
    """A host that turns warnings into errors gets a complete discovery; what they said is logged."""
    plugins.add("bad", "raise RuntimeError('boom')")
    plugins.add("c", plugins.kernel("kc"))
    plugins.add("d", plugins.kernel("kd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [info.name for info in discover_plugins()] == ["c", "d"]
    assert [sum(part in line for line in log()) for part in ("boom", "share priority")] == [1, 1]
    assert _kernels() == ["kc", "kd"]


def test_plugin_that_warns_under_warnings_as_errors_is_a_failure(plugins: Any, said: Said) -> None:
    """A warning of the plugin's own that the host made an error is its failure, isolated like any other."""
    plugins.add("bad", "import warnings\nwarnings.warn('old api', FutureWarning)")
    plugins.add("good", plugins.kernel("k"))
    warnings.simplefilter("error", FutureWarning)
    assert [info.name for info in discover_plugins()] == ["good"]
    assert len(said("old api")) == 1


def test_failed_plugin_is_tried_again(plugins: Any, said: Said) -> None:
    """A plugin that failed is tried at the next discovery, a loaded one is not."""
    plugins.add("a", plugins.kernel("k"))
    bad = plugins.add("bad", "raise RuntimeError('boom')")
    discover_plugins()
    discover_plugins()
    assert (plugins.calls(bad), plugins.calls("tsk_plugin_a"), len(said("boom"))) == (2, 1, 2)


def test_discovery_changes_neither_path_nor_modules_nor_environment(plugins: Any) -> None:
    """A failed plugin's modules stay as Python left them, and nothing else of the process is touched."""
    plugins.module("tsk_kept", "")
    plugins.add("bad", "import tsk_kept\nraise RuntimeError('boom')")
    path, environment = list(sys.path), dict(os.environ)
    with pytest.warns(UserWarning, match="boom"):
        discover_plugins()
    assert (sys.path, dict(os.environ)) == (path, environment)
    assert {"tsk_kept", "tsk_plugin_bad"} <= set(sys.modules)
