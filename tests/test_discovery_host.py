# SPDX-License-Identifier: Apache-2.0
"""The host's side of discovery, with real distributions in fresh interpreters: threads, processes, wishes, the CLI."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from discovery_cases import KERNEL, kernel
from environments import Environment, Site

SHOW = """
from tokenspeed_kernel.plugins import *
from tokenspeed_kernel.registry import KernelRegistry
def kernels():
    registry = KernelRegistry.get()
    names = sorted(spec.name for spec in registry.list_kernels("quant", "op"))
    return {name: registry.registration(name).owner for name in names}
def states():
    return {r.name: r.state for r in plugin_records()}
"""


def _plugin(site: Site, name: str, priority: int = 5, top: str = "", body: str = "") -> None:
    """Install a plugin that registers ``k_<name>`` after ``body``, and counts its calls on stderr."""
    lines = f"import sys; print('call {name}', file=sys.stderr)\n{body}\n{kernel(f'k_{name}', priority)}\n"
    site.plugin(name, f"{top}\ndef register():\n" + textwrap.indent(lines, "    "))


def _run(site: Site, code: str, *arguments: str, **variables: str) -> tuple[str, str]:
    done = site.environment.run(*arguments, "-c", SHOW + textwrap.dedent(code), variables=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n"), done.stderr


def test_eight_threads_load_once(site: Site) -> None:
    """Threads that discover at once all get everything, each plugin once, each kernel credited to its own plugin."""
    for index, name in enumerate("abc"):
        _plugin(site, name, 5 + index, body="import time; time.sleep(0.05)")
    code = """
    import threading
    start, found = threading.Barrier(8), []
    def run():
        start.wait()
        found.append(tuple(info.name for info in discover_plugins()))
    threads = [threading.Thread(target=run) for _ in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    print(set(found), len(found), kernels())
    """
    out, err = _run(site, code)
    assert out == f"{ {('a', 'b', 'c')} } 8 " + str({f"k_{n}": f"{n}@{n}-dist" for n in "abc"})
    assert [err.count(f"call {name}") for name in "abc"] == [1, 1, 1]


def test_waiting_for_a_thread_that_waits_ends(site: Site) -> None:
    """A plugin that waits for a thread which discovers does not hang the host: that thread gives up, and says so."""
    body = """
    import threading
    from tokenspeed_kernel import discover_plugins
    thread = threading.Thread(target=discover_plugins)
    thread.start()
    thread.join()
    """
    _plugin(site, "a", body=textwrap.dedent(body))
    code = """
    from tokenspeed_kernel.plugins import discovery
    discovery._PATIENCE = 0.1
    discover_plugins()
    print(kernels())
    """
    out, err = _run(site, code)
    assert out == "{'k_a': 'a@a-dist'}"
    assert "another thread has been discovering" in err


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_have_the_same_plugins(site: Site, tmp_path: Path, method: str) -> None:
    """A forked child keeps what is loaded; a spawned one discovers the same."""
    _plugin(site, "a")
    code = f"""
    import multiprocessing
    def child(queue):
        queue.put(([i.name for i in discover_plugins()], kernels(), states()))
    if __name__ == "__main__":
        discover_plugins()
        context = multiprocessing.get_context({method!r})
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=60))
        process.join()
    """
    script = tmp_path / "host.py"
    script.write_text(SHOW + textwrap.dedent(code))
    done = site.environment.run(str(script))
    assert done.stdout.strip() == "(['a'], {'k_a': 'a@a-dist'}, {'a': 'loaded'})", done.stderr
    assert done.stderr.count("call a") == {"fork": 1, "spawn": 2}[method]


def test_fork_while_another_thread_discovers(site: Site) -> None:
    """The child does not wait for a lock whose holder it does not have: it loads what was not loaded yet."""
    _plugin(site, "a", body="import time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(1)")
    code = """
    import os, pathlib, sys, threading, time
    thread = threading.Thread(target=discover_plugins)
    thread.start()
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        sys.stdout.write(f"child {[i.name for i in discover_plugins()]} {kernels()}\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    thread.join()
    print("parent", kernels())
    """
    flag = site.folder / "flag"
    done = site.environment.run("-W", "ignore", "-c", SHOW + textwrap.dedent(code), str(flag), timeout=30)
    owned = {"k_a": "a@a-dist"}
    assert done.stdout.splitlines() == [f"child ['a'] {owned}", f"parent {owned}"], done.stderr


def test_every_order_of_wishes_keeps_the_record(site: Site) -> None:
    """After any four of the calls, a discovery has exactly what is not disabled, and the record of who owns it."""
    _plugin(site, "a", 5, top=kernel("top_a", 7))
    _plugin(site, "b", 6)
    code = """
    import io, itertools, sys
    sys.stderr = io.StringIO()
    calls = {
        "discover": discover_plugins,
        "force": lambda: discover_plugins(force=True),
        "registry": KernelRegistry.reset,
        "reset": reset_plugins,
        "disable": lambda: disable_plugin("A"),
        "disable at": lambda: disable_plugin("a@A_dist"),
        "enable": lambda: (enable_plugin("a"), enable_plugin("a@a-dist")),
    }
    wrong, tried = [], 0
    for order in itertools.product(calls, repeat=4):
        for name in order:
            calls[name]()
        wishes = [name for name in order if name.startswith(("disable", "enable"))]
        off = bool(wishes) and wishes[-1] != "enable"
        loaded = {i.name: set(i.kernel_names) for i in discover_plugins()}
        expected = {"b": {"k_b"}} | ({} if off else {"a": {"top_a", "k_a"}})
        owned = {name: owner[0] for name, owner in kernels().items()}
        tried += 1
        if loaded != expected or owned != {k: p for p, ks in expected.items() for k in ks} or (
            states() != {"a": "disabled" if off else "loaded", "b": "loaded"}
        ):
            wrong.append((order, loaded, owned))
        calls["enable"]()
    print(tried, wrong[:3])
    """
    assert _run(site, code)[0] == f"{7**4} []"


def test_frozen_plan_keeps_plugins_and_records(site: Site) -> None:
    """Under a frozen plan discovery changes nothing, force and a withdrawal raise, and wishes hold after ``thaw``."""
    _plugin(site, "a")
    code = """
    import tokenspeed_kernel
    from tokenspeed_kernel.platform import Platform, PlatformInfo
    Platform.override(PlatformInfo("cpu", None, "host", 1, 0, 0.0, 0, 0, 0))
    discover_plugins()
    tokenspeed_kernel.freeze()
    def attempt(call):
        try:
            call()
        except RuntimeError as error:
            assert "thaw()" in str(error)
            return "raises", states(), kernels()
        return states(), kernels()
    print(attempt(discover_plugins))
    for call in (lambda: discover_plugins(force=True), reset_plugins, lambda: disable_plugin("a")):
        print(attempt(call))
    tokenspeed_kernel.thaw()
    print(attempt(discover_plugins))
    """
    lines = _run(site, code)[0].splitlines()
    loaded = "{'a': 'loaded'}, {'k_a': 'a@a-dist'}"
    assert lines == [f"({loaded})", *[f"('raises', {loaded})"] * 3, "({'a': 'disabled'}, {})"]


def test_interrupt_rolls_back_and_goes_up(site: Site) -> None:
    """KeyboardInterrupt reaches the host, leaves nothing of its plugin, and the next call loads it (case 88)."""
    _plugin(site, "a", 5)
    stop = f"{KERNEL}\nimport os\nif 'STOP' in os.environ: raise KeyboardInterrupt"
    _plugin(site, "b", 6, body=stop)
    _plugin(site, "c", 7, top=textwrap.dedent(stop).replace("bad_kernel", "c_top"))
    code = """
    import os
    for _ in range(3):
        try:
            discover_plugins()
        except KeyboardInterrupt:
            print("interrupted", kernels())
        os.environ.pop("STOP", None)
    print(sorted(kernels()))
    """
    out, _ = _run(site, code, STOP="1")
    assert out.splitlines() == [
        "interrupted {'k_a': 'a@a-dist'}",
        "['bad_kernel', 'c_top', 'k_a', 'k_b', 'k_c']",
    ]


def test_retry_after_a_passing_failure(site: Site) -> None:
    """A plugin that failed loads whole when the cause is gone, with what its module had registered at import."""
    _plugin(site, "a", top=kernel("top_a", 7), body="import os\nif 'FAIL' in os.environ: raise OSError('busy')")
    code = """
    import os
    print([i.name for i in discover_plugins()], kernels(), states())
    del os.environ["FAIL"]
    print([i.kernel_names for i in discover_plugins()], states())
    """
    out, _ = _run(site, code, FAIL="1")
    assert out.splitlines() == ["[] {} {'a': 'failed'}", "[('top_a', 'k_a')] {'a': 'loaded'}"]


def test_strict_raises_with_the_cause(site: Site) -> None:
    """``strict=True`` raises the first failure, a fault of the metadata too, after undoing it."""
    _plugin(site, "a", body=f"{KERNEL}\nraise LookupError('boom')")
    site.info("no entry point", name="z-dist")
    code = """
    for _ in range(2):
        try:
            discover_plugins(strict=True)
        except RuntimeError as error:
            print(error, "/", repr(error.__cause__), kernels())
        disable_plugin("a")
    """
    first, second = _run(site, code)[0].splitlines()
    assert first == "plugin 'a': LookupError: boom / LookupError('boom') {}"
    assert "'no entry point'" in second


def test_frozen_application_has_no_plugins(site: Site, tmp_path: Path) -> None:
    """Without any metadata discovery is an empty list, quietly, and registering explicitly works (case 91)."""
    code = """
    import os, sys
    sys.frozen = True
    root = os.path.dirname(os.path.dirname(__import__("tokenspeed_kernel").__file__))
    sys.path[:] = [p for p in sys.path if "site-packages" not in p and "slim" not in p] + [sys.argv[1]]
    import tokenspeed_kernel
    print(discover_plugins(), plugin_records(), tokenspeed_kernel.__version__)
    tokenspeed_kernel.register("sdpa", print, name="mine")
    print(tokenspeed_kernel.resolve("sdpa") is print)
    """
    core = site.folder / "tokenspeed_kernel"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "tokenspeed_kernel").symlink_to(core)
    done = site.environment.run("-c", SHOW + textwrap.dedent(code), str(tmp_path / "app"))
    assert (done.stdout.splitlines(), done.stderr) == (["[] [] 1.0.0", "True"], "")


def test_change_within_the_same_moment_is_seen(site: Site) -> None:
    """Distributions that come and go as fast as the disk allows are found and lost, whatever a folder's time says."""
    _plugin(site, "a")
    code = """
    import os, pathlib, shutil, sys
    folder = pathlib.Path(sys.argv[1])
    wrong = 0
    for turn in range(50):
        discover_plugins()
        info = folder / f"b_dist-{turn}.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text("[tokenspeed_kernel.plugins]\\nb = a:register\\n")
        wrong += states() != {"a": "loaded"} or len(discover_plugins()) != 2
        shutil.rmtree(info)
        wrong += len(discover_plugins()) != 1
    print(wrong)
    """
    done = site.environment.run("-W", "ignore", "-c", SHOW + textwrap.dedent(code), str(site.folder))
    assert done.stdout == "0\n", done.stderr


def test_unchanged_folders_are_not_read_again(site: Site) -> None:
    """With the path and its old folders unchanged nothing is listed again; ``force`` and a change read them."""
    _plugin(site, "a")
    code = """
    import os, sys
    from tokenspeed_kernel.plugins import installed
    for entry in sys.path:
        if os.path.isdir(entry) and os.access(entry, os.W_OK):
            os.utime(entry, (1e9, 1e9))
    listed, read = [], os.listdir
    installed.os.listdir = lambda folder: listed.append(folder) or read(folder)
    def count(*arguments, **options):
        listed.clear()
        discover_plugins(*arguments, **options)
        return sys.argv[1] in listed
    print(count(), count(), count(force=True), count())
    open(sys.argv[1] + "/new", "w").close()
    print(count())
    sys.path.append("/")
    print(count())
    """
    done = site.environment.run("-c", SHOW + textwrap.dedent(code), str(site.folder))
    assert done.stdout.splitlines() == ["True False True False", "True", "True"], done.stderr


@pytest.mark.parametrize(
    ("needs", "expected"),
    [("", []), ("tokenspeed-kernel", []), ("tokenspeed-kernel>=1", ["packaging"]), ("zip", ["importlib_metadata"])],
)
def test_imports_only_what_the_plugins_need(site: Site, needs: str, expected: list[str]) -> None:
    """Comparing versions needs packaging, a zip importlib_metadata; plain plugins in plain folders need neither."""
    requires = f"Requires-Dist: {needs}" if needs.startswith("tokenspeed") else ""
    site.plugin("a", f"def register():\n    {KERNEL}\n", metadata=requires)
    code = """
    import sys, zipfile
    if sys.argv[2] == "zip":
        zipfile.ZipFile(sys.argv[1] + "/empty.zip", "w").close()
        sys.path.append(sys.argv[1] + "/empty.zip")
    assert len(discover_plugins()) == 1
    print(*sorted({"packaging", "importlib_metadata"} & set(sys.modules)))
    """
    done = site.environment.run("-c", SHOW + textwrap.dedent(code), str(site.folder), needs)
    assert (done.stdout.split(), done.stderr) == (expected, "")


def test_metadata_changed_while_running_is_seen_by_force(site: Site) -> None:
    """An entry point added in place, which leaves the folder's time alone, is found by ``force=True`` (case 104)."""
    site.info("", name="a-dist")
    site.file("a.py", f"def register():\n    {KERNEL}\n")
    code = """
    import sys
    print(discover_plugins())
    with open(sys.argv[1], "a") as file:
        file.write("a = a:register\\n")
    print([i.name for i in discover_plugins(force=True)])
    """
    path = site.folder / "a_dist-1.0.dist-info" / "entry_points.txt"
    done = site.environment.run("-c", SHOW + textwrap.dedent(code), str(path))
    assert done.stdout.splitlines() == ["[]", "['a']"], done.stderr


def test_torch_settings_are_watched(environment: Environment, make_wheel: Callable[..., Path]) -> None:
    """A plugin that changes torch's default dtype, grad mode or thread count is named, with what changed."""
    body = f"""
import torch
def register():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    {KERNEL}
"""
    environment.install(make_wheel("changes-torch", {"changes_torch": "changes_torch:register"}, body))
    code = """
    import torch
    threads = torch.get_num_threads()
    discover_plugins()
    (record,) = plugin_records()
    print(record.state, threads, record.notes)
    """
    done = environment.run("-c", SHOW + textwrap.dedent(code))
    state, threads, notes = done.stdout.split(maxsplit=2)
    assert state == "loaded", done.stderr
    changes = ("dtype from torch.float32 to torch.float64", "grad mode from True to False", f"count from {threads} to")
    assert [change for change in changes if change not in notes or change not in done.stderr] == []


def test_importing_torch_is_no_misuse(environment: Environment, make_wheel: Callable[..., Path]) -> None:
    """A plugin that imports torch at its top, as the contract's example does, is loaded, and changes nothing."""
    body = f"import torch\ndef register():\n    {KERNEL}\n"
    environment.install(make_wheel("uses-torch", {"uses_torch": "uses_torch:register"}, body))
    done = environment.run("-W", "always::UserWarning", "-c", SHOW + "discover_plugins()\nprint(states())")
    assert done.stdout == "{'uses_torch': 'loaded'}\n"
    assert "it changed" not in done.stderr


RECORD = ("name", "package", "version", "value", "state", "reason", "phase", "traceback", "milliseconds")
RECORD_FIELDS = [*RECORD, "kernel_names", "notes", "kernels"]


def test_json_has_the_documented_schema(site: Site) -> None:
    """``list`` and ``info NAME`` with ``--json`` print one document with the fields that the page lists."""
    _plugin(site, "a", body="print('noise')")
    _plugin(site, "b", body="raise RuntimeError('boom')")
    listed = site.environment.plugins("list", "--json")
    assert listed.returncode == 1
    document = json.loads(listed.stdout)
    assert {key: document[key] for key in ("schema", "version", "contract", "group")} == {
        "schema": 1,
        "version": "1.0.0",
        "contract": 1,
        "group": "tokenspeed_kernel.plugins",
    }
    a, b = document["plugins"]
    assert list(a) == list(b) == RECORD_FIELDS
    assert (a["name"], a["package"], a["version"], a["state"], a["kernel_names"]) == (
        "a",
        "a-dist",
        "1.0",
        "loaded",
        ["k_a"],
    )
    assert a["kernels"] == [
        {"name": "k_a", "operator": "quant.op", "solution": "s", "priority": 5, "active": True},
    ]
    assert (b["state"], b["phase"], b["reason"], b["kernels"]) == ("failed", "register", "RuntimeError: boom", [])
    assert "raise RuntimeError" in b["traceback"]
    page = (Path(__file__).parents[1] / "docs" / "discovery.md").read_text(encoding="utf-8")
    assert [name for name in RECORD_FIELDS if f"`{name}`" not in page] == []
    one = site.environment.plugins("info", "A", "--json")
    (alone,) = json.loads(one.stdout)["plugins"]
    assert (one.returncode, alone | {"milliseconds": 0}) == (0, a | {"milliseconds": 0})
    none = site.environment.plugins("info", "nope", "--json")
    assert (none.returncode, json.loads(none.stdout)["plugins"]) == (1, [])
    assert len([line for line in none.stderr.splitlines() if "nope" in line]) == 1


def test_list_and_info_show_everything(site: Site) -> None:
    """State, distribution, version, what each owns, reason and time are in both, in words."""
    _plugin(site, "a", body="import os; os.environ['TSK_X'] = '1'")
    site.plugin("c", f"def register():\n    {KERNEL}\n", metadata="Requires-Dist: tokenspeed-kernel>=7")
    listed = site.environment.plugins("list")
    first, second = listed.stdout.splitlines()
    assert first.split()[:4] == ["a", "loaded", "a-dist", "1.0"]
    assert first.split()[5:] == ["ms", "k_a"]
    assert second.split()[:4] == ["c", "incompatible", "c-dist", "1.0"]
    assert "tokenspeed-kernel>=7" in second
    info = site.environment.plugins("info", "a@A-dist")
    assert (info.returncode, "Note: it changed the environment: TSK_X" in info.stdout) == (0, True)
    assert "Kernel: k_a" in info.stdout
    assert site.environment.plugins("info", "c").stdout.count("tokenspeed-kernel>=7") == 1
