# SPDX-License-Identifier: Apache-2.0
"""Faults that installed plugins have had: each as real files in a real environment, and what must become of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from environments import Site

__all__ = ["CASES", "KERNEL", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault beside two innocent plugins and a kernel of the host's."""

    install: Callable[[Site], object]
    states: dict[str, str] = field(default_factory=lambda: {"bad": "failed"})
    """State by plugin, of all but the innocent."""
    said: tuple[str, ...] = ("bad-dist",)
    """Parts that one message has; empty if nothing must be said."""
    kernels: tuple[str, ...] = ()
    """Kernels that it brings, if it loads."""
    before: str = ""
    """What the host does before it discovers."""
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Arguments of the interpreter."""


def kernel(name: str = "bad_kernel", priority: int = 9) -> str:
    """Return a statement that registers a kernel."""
    return (
        f"__import__('tokenspeed_kernel.registry').registry.register_kernel('quant', 'op', name={name!r}, "
        f"solution='s', signatures=(), priority={priority})(print)"
    )


KERNEL = kernel()
_NOTHING: dict[str, Any] = {"states": {}, "said": ()}
_FINE: dict[str, Any] = {"states": {"bad": "loaded"}, "said": (), "kernels": ("bad_kernel",)}
_GOOD = f"def register():\n    {KERNEL}\n"
_LOADED: dict[str, Any] = {"states": {"bad": "loaded"}, "kernels": ("bad_kernel",)}


def at_import(source: str, **expected: Any) -> Case:
    """Return a case whose module has these lines before its register()."""
    return _source(f"{source}\n{_GOOD}", {"said": ("bad-dist", "import")}, expected)


def in_register(body: str, **expected: Any) -> Case:
    """Return a case whose register() registers a kernel and then does this."""
    lines = "".join(f"    {line}\n" for line in (KERNEL, *body.splitlines()))
    return _source(f"def register():\n{lines}", {"said": ("bad-dist", "register")}, expected)


def source(text: str | bytes, **expected: Any) -> Case:
    """Return a case whose module is this."""
    return _source(text, {}, expected)


def _source(text: str | bytes, usual: dict[str, Any], expected: dict[str, Any]) -> Case:
    def install(site: Site) -> None:
        site.file("bad.py", text)
        site.info("bad = bad:register")

    return Case(install=install, **{**usual, **expected})


def entry(lines: str | bytes | None, text: str = _GOOD, **options: Any) -> Case:
    """Return a case with these entry points, whose module is whole."""
    own = {key: options.pop(key) for key in ("metadata", "folder", "name", "version") if key in options}

    def install(site: Site) -> None:
        site.file("bad.py", text)
        site.info(lines, **own)

    return Case(install=install, **options)


def requires(*lines: str, **options: Any) -> Case:
    """Return a case whose distribution has these requirements."""
    metadata = "\n".join(f"Requires-Dist: {line}" for line in lines)
    return entry("bad = bad:register", metadata=metadata, **options)


def files(*steps: Callable[[Site], object], **options: Any) -> Case:
    """Return a case made of several steps, with a whole module."""

    def install(site: Site) -> None:
        site.file("bad.py", _GOOD)
        for step in steps:
            step(site)

    return Case(install=install, **options)


def _zip(site: Site, name: str = "bad.zip", entry_points: bytes = b"", info: str = "bad_dist-1.0.dist-info/") -> None:
    entry_points = entry_points or b"[tokenspeed_kernel.plugins]\nbad = bad_zipped:register\n"
    with zipfile.ZipFile(site.folder / name, "w") as archive:
        archive.writestr("bad_zipped.py", _GOOD)
        archive.writestr(f"{info}entry_points.txt", entry_points)
        archive.writestr(f"{info}METADATA", "Metadata-Version: 2.1\nName: bad-dist\nVersion: 1.0\n")
    site.file("zip.pth", f"{site.folder / name}\n")


def _second_folder(site: Site, folder: str, entry_points: str = "bad = bad:register") -> None:
    site.info(entry_points, folder=folder, under="second/")
    site.file("second.pth", f"{site.folder / 'second'}\n")


def _other_plugin(site: Site, name: str, distribution: str, body: str = "") -> None:
    site.plugin(name, f"def register():\n    {body or kernel(name)}\n", distribution)


_INFO = "bad = bad:register"
_IMPORT = "from tokenspeed_kernel.registry import KernelRegistry"
_BOTH: dict[str, str] = {"bad": "clashing", "Bad": "clashing"}

LOADING = {
    "import raises": at_import("raise RuntimeError('boom')"),
    "register raises": in_register("raise ImportError('libfoo.so: undefined symbol: bar')", said=("bar",)),
    "raises after two registrations": in_register(f"{kernel('second')}\nraise RuntimeError('boom')"),
    "decorators at import, then import fails": at_import(f"{KERNEL}\nraise RuntimeError('boom')"),
    "decorators at import, then register fails": source(f"{KERNEL}\ndef register():\n    raise LookupError('boom')\n"),
    "exit at import": at_import("import sys; sys.exit(3)", said=("bad-dist", "SystemExit: 3")),
    "exit in register": in_register("raise SystemExit(0)", said=("SystemExit",)),
    "quit()": in_register("quit()"),
    "BaseException at import": at_import("class Stop(BaseException): pass\nraise Stop('now')"),
    "BaseException in register": in_register("class Stop(BaseException): pass\nraise Stop('now')"),
    "GeneratorExit": in_register("raise GeneratorExit"),
    "CancelledError": in_register("import asyncio\nraise asyncio.CancelledError"),
    "MemoryError": in_register("raise MemoryError"),
    "StopIteration": in_register("raise StopIteration"),
    "a warning raised": in_register("raise UserWarning('careful')"),
    "str() raises": in_register("class E(Exception):\n    def __str__(self): raise ValueError\nraise E"),
    "str() exits": in_register("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E"),
    "str() and repr() raise": in_register(
        "class E(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise E"
    ),
    "an error that is its own cause": in_register("e = ValueError('x')\ne.__cause__ = e\nraise e"),
    "an error with a surrogate": in_register("raise ValueError('\\udcff')"),
    "missing attribute": source("x = 1\n"),
    "module is empty": source(""),
    "missing module": entry("bad = absent_module:register", said=("absent_module",)),
    "missing submodule": entry("bad = bad.part:register", said=("bad.part",)),
    "missing dependency": at_import("import absent_dependency", said=("absent_dependency",)),
    "torch is missing": at_import("import torch", said=("No module named 'torch'",)),
    "register is a class": source("class register:\n    pass\n", said=("bad-dist", "must be a function")),
    "register is a coroutine function": source(
        f"async def register():\n    {KERNEL}\n", said=("bad-dist", "plain function")
    ),
    "register is a generator function": source(
        f"def register():\n    {KERNEL}\n    yield\n", said=("bad-dist", "plain function")
    ),
    "register is an asynchronous generator": source(
        f"async def register():\n    {KERNEL}\n    yield\n", said=("bad-dist", "plain function")
    ),
    "module with an attribute of every name": source(
        f"def __getattr__(name):\n    if name != 'register': raise SystemExit\n    {KERNEL}\n    return print\n",
        **_FINE,
    ),
    "register is a number": source("register = 3\n", said=("bad-dist", "must be a function")),
    "register is None": source("register = None\n"),
    "register is a module": source("import sys as register\n"),
    "register wants an argument": source("def register(registry): pass\n", said=("must take no arguments",)),
    "register wants a keyword": source("def register(*, registry): pass\n", said=("must take no arguments",)),
    "register raises TypeError itself": in_register("len(3)", said=("object of type 'int' has no len()",)),
    "register is a callable object": source(
        f"class R:\n    def __call__(self):\n        {KERNEL}\nregister = R()\n", **_FINE
    ),
    "register is partial": source(
        f"import functools\ndef f(x):\n    {KERNEL}\nregister = functools.partial(f, 1)\n", **_FINE
    ),
    "register is a static method": entry(
        "bad = bad:Plugin.start", f"class Plugin:\n    @staticmethod\n    def start():\n        {KERNEL}\n", **_FINE
    ),
    "registers nothing": source(
        "def register(): pass\n", states={"bad": "loaded"}, said=("bad-dist", "registered nothing")
    ),
    "recursive discovery": in_register("import tokenspeed_kernel\ntokenspeed_kernel.discover_plugins()", **_FINE),
    "recursive discovery by force": in_register(
        "import tokenspeed_kernel\ntokenspeed_kernel.discover_plugins(force=True)", **_FINE
    ),
    "takes long": in_register("import time; time.sleep(1.05)", **_LOADED, said=("bad-dist", "1.1 s")),
    "absent shared library": at_import("import ctypes; ctypes.CDLL('libdoes_not_exist.so')"),
    "broken shared library": files(
        lambda site: site.file("bad_native.so", b"\x7fELF broken"),
        lambda site: site.info("bad = bad_native:register"),
    ),
    "truncated bytecode": files(
        lambda site: site.file("bad_code.pyc", b"\x00\x01"), lambda site: site.info("bad = bad_code:register")
    ),
    "endless recursion at import": at_import("def f(): f()\nf()", said=("RecursionError",)),
    "endless recursion in register": source("def register(): register()\n", said=("RecursionError",)),
    "SyntaxError": source("def (\n", said=("SyntaxError",)),
    "IndentationError": source("def register():\npass\n"),
    "null bytes": source(b"def register(): pass\x00\n"),
    "source is not UTF-8": source(b"x = '\xff'\ndef register(): pass\n"),
    "circular import": files(
        lambda site: site.file("bad.py", "from bad_second import x\ny = 1\n"),
        lambda site: site.file("bad_second.py", "from bad import y\nx = 1\n"),
        lambda site: site.info(_INFO),
    ),
    "module that removes itself": at_import("import sys; del sys.modules[__name__]"),
    "bad priority": in_register(kernel("k", 99), said=("priority",)),
    "registers with a wrong argument": in_register("__import__('tokenspeed_kernel').register('sdpa')"),
    "warns where warnings are errors": in_register(
        "import warnings; warnings.warn('old api', FutureWarning)", arguments=("-W", "error"), said=("old api",)
    ),
    "half an oracle, then raises": in_register(
        "from tokenspeed_kernel.selection import SelectionOracle, register_oracle\n"
        "register_oracle('quant', SelectionOracle())\nraise RuntimeError('boom')"
    ),
    "half an override, then raises": in_register(
        "from tokenspeed_kernel.selection import kernel_override\nglobal kept\n"
        "kept = kernel_override('quant', 'op', 'host_kernel')\nkept.__enter__()\nraise RuntimeError('boom')"
    ),
}

METADATA = {
    "malformed value": entry("bad = !! not valid", said=("bad-dist", "module:function")),
    "empty value": entry("bad =", said=("bad-dist", "module:function")),
    "value without a module": entry("bad = :register"),
    "value without an attribute": entry("bad = bad:"),
    "value with two colons": entry("bad = bad:register:x"),
    "value with a space": entry("bad = bad : reg ister"),
    "value is a module": entry("bad = bad", said=("bad-dist", "must be a function")),
    "extras in the value (case 64)": entry("bad = bad:register [cuda,triton]", **_FINE),
    "line without =": entry("this line", states={"this line": "failed"}, said=("bad-dist", "'this line'")),
    "line without = beside a good one": entry(
        f"this line\n{_INFO}", states={"this line": "failed", "bad": "loaded"}, kernels=("bad_kernel",)
    ),
    "line without a name": entry("= bad:register", states={"bad-dist": "failed"}, said=("bad-dist", "no entry point")),
    "no section header": entry(
        b"bad = bad:register\n", metadata="Requires-Dist: tokenspeed-kernel>=1", said=("bad-dist", "before any section")
    ),
    "header without brackets": entry(
        b"tokenspeed_kernel.plugins\nbad = bad:register\n",
        states={"bad": "failed", "tokenspeed_kernel.plugins": "failed"},
    ),
    "another group only": entry(b"[console_scripts]\nbad = bad:register\n", **_NOTHING),
    "empty entry points": entry(b"", **_NOTHING),
    "comments and blank lines": entry(f"# a = b\n\n; c\n{_INFO}", **_FINE),
    "byte-order mark": entry(b"\xef\xbb\xbf[tokenspeed_kernel.plugins]\nbad = bad:register\n", **_FINE),
    "byte-order mark and CRLF": entry(b"\xef\xbb\xbf[tokenspeed_kernel.plugins]\r\nbad = bad:register\r\n", **_FINE),
    "not UTF-8": entry(
        b"[tokenspeed_kernel.plugins]\n# \xff\nbad = bad:register\n", states={"bad-dist": "failed"}, said=("not UTF-8",)
    ),
    "UTF-16": entry(
        "[tokenspeed_kernel.plugins]\nbad = bad:register\n".encode("utf-16"),
        metadata="Requires-Dist: tokenspeed-kernel",
        states={"bad-dist": "failed"},
        said=("bad-dist", "not UTF-8"),
    ),
    "entry points are a folder": files(
        lambda site: site.file("bad_dist-1.0.dist-info/entry_points.txt/x", ""), states={"bad-dist": "failed"}
    ),
    "an unrelated distribution is not UTF-8": entry(b"[console_scripts]\nx = \xff\n", **_NOTHING),
    "an unrelated distribution has no section header": entry(b"x = y\n", **_NOTHING),
    "an unrelated distribution's METADATA is not UTF-8": entry(None, metadata=b"Name: \xff\n", **_NOTHING),
    "an unrelated distribution's METADATA is missing": entry(None, metadata=None, **_NOTHING),
    "METADATA missing": entry(_INFO, metadata=None, **_FINE),
    "METADATA empty": entry(_INFO, metadata=b"", **_FINE),
    "METADATA is not UTF-8": entry(_INFO, metadata=b"Name: bad-dist\nVersion: 1.0\nAuthor: \xff\n", **_FINE),
    "METADATA has no header line": entry(_INFO, metadata=b"\x00\x01 nonsense\n", **_FINE),
    "METADATA is a folder": files(
        lambda site: site.info(_INFO, metadata=None),
        lambda site: site.file("bad_dist-1.0.dist-info/METADATA/x", ""),
        **_FINE,
    ),
    "dist-info without a name": entry(_INFO, folder=".dist-info", **_FINE),
    "dist-info without a name, but a version": entry(_INFO, folder="-1.0.dist-info", metadata=None, **_FINE),
    "dist-info without a version": entry(_INFO, folder="bad_dist.dist-info", metadata=None, **_FINE),
    "dist-info is a file": files(lambda site: site.file("bad_dist-1.0.dist-info", "x"), **_NOTHING),
    "dist-info is a dangling link": files(
        lambda site: (site.folder / "bad_dist-1.0.dist-info").symlink_to("nowhere"), **_NOTHING
    ),
    "dist-info is a link to itself": files(
        lambda site: (site.folder / "bad_dist-1.0.dist-info").symlink_to("bad_dist-1.0.dist-info"),
        states={"bad-dist": "failed"},
    ),
    "stale dist-info beside (case 14)": files(
        lambda site: site.info(_INFO),
        lambda site: site.info("old = absent_module:register", version="0.9"),
        **_LOADED,
        said=("bad_dist-1.0.dist-info counts", "bad_dist-0.9.dist-info"),
    ),
    "stale dist-info without METADATA": files(
        lambda site: site.info(_INFO),
        lambda site: site.info("old = absent_module:register", version="2.0", metadata=None),
        **_LOADED,
        said=("bad_dist-1.0.dist-info counts",),
    ),
    "stale egg-info beside": files(
        lambda site: site.info(_INFO),
        lambda site: site.info("old = absent_module:register", folder="bad_dist-1.0-py3.9.egg-info"),
        **_LOADED,
        said=("bad_dist-1.0.dist-info counts",),
    ),
    "stale dist-info with other spelling": files(
        lambda site: site.info(_INFO),
        lambda site: site.info("old = absent_module:register", folder="Bad.Dist-0.9.dist-info"),
        **_LOADED,
        said=("bad_dist-1.0.dist-info counts",),
    ),
    "left over by pip": files(
        lambda site: site.info("old = absent_module:register", folder="~ad_dist-0.9.dist-info"), **_NOTHING
    ),
    "egg-info is a file": files(lambda site: site.file("bad_dist-1.0.egg-info", "Name: bad-dist\n"), **_NOTHING),
    "egg-info alone": entry(_INFO, folder="bad_dist.egg-info", **_FINE),
    "editable install beside a wheel (case 14)": files(
        lambda site: site.info(_INFO), lambda site: _second_folder(site, "bad_dist.egg-info"), **_FINE
    ),
    "older copy further down the path (case 14)": files(
        lambda site: site.info(_INFO),
        lambda site: _second_folder(site, "Bad-Dist-0.9.dist-info", "old = absent_module:register"),
        **_FINE,
    ),
    "namespace package over two folders (case 19)": files(
        lambda site: site.file("accel_plugins/one.py", _GOOD),
        lambda site: site.file("second/accel_plugins/two.py", f"def register():\n    {kernel('two')}\n"),
        lambda site: site.info("bad = accel_plugins.one:register"),
        lambda site: site.info("two = accel_plugins.two:register", name="two-dist", under="second/"),
        lambda site: site.file("second.pth", f"{site.folder / 'second'}\n"),
        states={"bad": "loaded", "two": "loaded"},
        said=("priority",),
        kernels=("bad_kernel", "two"),
    ),
    "zip on the path (case 19)": Case(install=_zip, **_FINE),
    "zipped egg": Case(
        install=lambda site: _zip(site, "bad_dist-1.0-py3.egg", info="EGG-INFO/"),
        **_FINE,
    ),
    "egg that is a folder": files(
        lambda site: site.file("bad-1.0.egg/EGG-INFO/entry_points.txt", f"[tokenspeed_kernel.plugins]\n{_INFO}\n"),
        lambda site: site.file("egg.pth", f"{site.folder / 'bad-1.0.egg'}\n"),
        **_FINE,
    ),
    "zip whose entry points are not UTF-8": Case(
        install=lambda site: _zip(site, entry_points=b"[tokenspeed_kernel.plugins]\n\xff\n"),
        states={"bad-dist": "failed"},
        said=("not UTF-8",),
    ),
    "zip that is none": files(
        lambda site: site.file("bad.zip", b"PK broken"),
        lambda site: site.file("zip.pth", f"{site.folder / 'bad.zip'}\n"),
        **_NOTHING,
    ),
    "same name from two distributions": files(
        lambda site: site.info(_INFO),
        lambda site: site.info("Bad = absent_module:register", name="second-dist"),
        states=_BOTH,
        said=("bad-dist", "second-dist", "TOKENSPEED_KERNEL_PLUGINS"),
    ),
    "same name twice in one distribution": entry(
        f"{_INFO}\nBad = bad:other", states={"bad": "loaded", "Bad": "failed"}, kernels=("bad_kernel",), said=("twice",)
    ),
    "same line twice": entry(f"{_INFO}\n{_INFO}", **_FINE),
    **{
        f"the name {name!r} (case 8)": entry(
            f"{name} = bad:register", states={name: "loaded"}, said=(), kernels=("bad_kernel",)
        )
        for name in ("my-plugin", "1fast", "class", "a.b", "x y", "über", "日本", "a@b", "it's", "x" * 300)
    },
    "entry added later, metadata unchanged (case 104)": files(
        lambda site: site.info(None),
        variables={"TOKENSPEED_KERNEL_DISABLE_PLUGINS": "bad-dist"},
        states={},
        said=("'bad-dist'", "0 entry points in the group tokenspeed_kernel.plugins"),
    ),
    "path entries that are none": files(
        before="import pathlib, sys; sys.path += ['/absent', None, 3, pathlib.Path('/absent'), sys.executable]",
        **_NOTHING,
    ),
    "finder that raises": files(
        before="class F:\n    def find_spec(self, *a): pass\n    def find_distributions(self, c): 1 / 0\n"
        "import sys; sys.meta_path.append(F())",
        states={},
        said=("ZeroDivisionError",),
    ),
    "finder whose distribution raises": files(
        before="class D:\n    name = property(lambda s: 1 / 0)\n    def read_text(self, f): raise ValueError('gone')\n"
        "class F:\n    def find_spec(self, *a): pass\n    def find_distributions(self, c): return [D()]\n"
        "import sys; sys.meta_path.append(F())",
        states={"unknown": "failed"},
        said=("gone",),
    ),
    "distribution that may not be read": files(
        before="class D:\n    name = 'bad-dist'\n    def read_text(self, f): raise PermissionError(13, 'denied')\n"
        "class F:\n    def find_spec(self, *a): pass\n    def find_distributions(self, c): return [D()]\n"
        "import sys; sys.meta_path.append(F())",
        states={},
        said=("may not read", "bad-dist"),
    ),
    "finder that has a plugin": files(
        before="class D:\n    name = 'bad-dist'\n    def read_text(self, f):\n"
        "        return '[tokenspeed_kernel.plugins]\\nbad = bad:register' if f == 'entry_points.txt' else None\n"
        "class F:\n    def find_spec(self, *a): pass\n    def find_distributions(self, c): return [D()]\n"
        "import sys; sys.meta_path.append(F())",
        **_FINE,
    ),
}

_UNMET: dict[str, Any] = {
    "states": {"bad": "incompatible"},
    "said": ("bad-dist", "requires", "1.0.0", "0.1.4", "bad@bad-dist"),
}
_INSIST: dict[str, str] = {"TOKENSPEED_KERNEL_PLUGINS": "bad@bad-dist,a_good,z_good"}

REQUIREMENTS = {
    "requires a later core": requires("tokenspeed-kernel>=2", **_UNMET),
    "requires an unknown pin": requires("tokenspeed-kernel==0.1.3", **_UNMET),
    "requirements that no one version meets": requires("tokenspeed-kernel<1", "Tokenspeed.Kernel>0.1.4", **_UNMET),
    "later core, but the user insists": requires(
        "tokenspeed-kernel>=2", variables=_INSIST, **_LOADED, said=("bad-dist", "tokenspeed-kernel>=2")
    ),
    "the allow-list's plain name is no insisting": requires(
        "tokenspeed-kernel>=2", variables={"TOKENSPEED_KERNEL_PLUGINS": "bad,a_good,z_good"}, **_UNMET
    ),
    "requires what this is": requires("tokenspeed-kernel<2,>=1.0", **_FINE),
    "requires a compatible version": requires("tokenspeed_kernel==0.1.4", **_FINE),
    "requires a pre-release or later": requires("tokenspeed-kernel>=1.0.0rc1", **_FINE),
    "requires in parentheses": requires("tokenspeed-kernel (>=1.0)", **_FINE),
    "requires with an extra": requires("tokenspeed-kernel[all] >= 1.0 ; python_version >= '3'", **_FINE),
    "marker that does not apply": requires("tokenspeed-kernel>=2; sys_platform == 'none'", **_FINE),
    "marker of an extra": requires("tokenspeed-kernel>=2; extra == 'gpu'", **_FINE),
    "marker that applies": requires("tokenspeed-kernel>=2; python_version >= '3'", **_UNMET),
    "requires a file": requires("tokenspeed-kernel @ file:///absent.whl", **_FINE),
    "requirement that is none": requires(
        "tokenspeed-kernel >= not a version", **_LOADED, said=("tokenspeed-kernel >= not",)
    ),
    "requires something else that starts alike": requires("tokenspeed-kernel-extras>=2", **_FINE),
    "requires.txt of an egg-info": files(
        lambda site: site.info(_INFO, folder="bad_dist.egg-info"),
        lambda site: site.file(
            "bad_dist.egg-info/requires.txt", "[gpu]\nx\n[:python_version>'3']\ntokenspeed-kernel>=2\n"
        ),
        **_UNMET,
    ),
    "needs a later contract": source(
        f"TOKENSPEED_KERNEL_CONTRACT = 2\n{_GOOD}",
        states={"bad": "incompatible"},
        said=("bad-dist", "contract 2", "bad@bad-dist"),
    ),
    "needs a later contract, but the user insists": source(
        f"TOKENSPEED_KERNEL_CONTRACT = 2\n{_GOOD}", variables=_INSIST, **_LOADED, said=("bad-dist", "contract 2")
    ),
    "needs this contract": source(f"TOKENSPEED_KERNEL_CONTRACT = 1\n{_GOOD}", **_FINE),
    "needs a contract that is no number": source(
        f"TOKENSPEED_KERNEL_CONTRACT = '1'\n{_GOOD}", said=("must be an int",)
    ),
}

MISUSE = {
    "takes a built-in's name": in_register(
        kernel("host_kernel"), states={"bad": "loaded"}, kernels=("bad_kernel", "host_kernel"), said=("host_kernel",)
    ),
    "takes another plugin's name": files(
        lambda site: site.info(_INFO),
        lambda site: _other_plugin(site, "c_second", "second-dist", KERNEL),
        states={"bad": "loaded", "c_second": "loaded"},
        kernels=("bad_kernel",),
        said=("bad@bad-dist", "c_second@second-dist"),
    ),
    "takes a built-in's name, then fails": in_register(f"{kernel('host_kernel')}\nraise RuntimeError('boom')"),
    "resets the registry": in_register(f"{_IMPORT}\nKernelRegistry.reset()", said=("bad-dist", "reset")),
    "replaces the registry": in_register(f"{_IMPORT}\nKernelRegistry._instance = KernelRegistry()"),
    "resets the registry, then fails": in_register(f"{_IMPORT}\nKernelRegistry.reset()\nraise RuntimeError"),
    "patches a method of the registry": in_register(
        f"{_IMPORT}\nKernelRegistry.register = None", said=("bad-dist", "patched KernelRegistry.register")
    ),
    "patches the registry's instance": in_register(f"{_IMPORT}\nKernelRegistry.get().owned_by = None"),
    "patches KernelRegistry.get": in_register(f"{_IMPORT}\nKernelRegistry.get = None\nraise RuntimeError"),
    "patches register_kernel": in_register(
        "from tokenspeed_kernel import registry\nregistry.register_kernel = print", said=("registry.register_kernel",)
    ),
    "removes a built-in": in_register(
        f"{_IMPORT}\nr = KernelRegistry.get()\nr.remove(r.owned_by(None))", said=("bad-dist", "host_kernel")
    ),
    "removes another plugin's kernels": in_register(
        f"{_IMPORT}\nr = KernelRegistry.get()\nr.remove(r.owned_by('a_good@a-good-dist'))",
        said=("a_kernel",),
    ),
    "empties the registry": in_register(f"{_IMPORT}\nKernelRegistry.get()._by_name.clear()"),
    "resets the plugins": in_register("import tokenspeed_kernel.plugins as p\np.reset_plugins()"),
    "sets a variable": in_register("import os; os.environ['TSK_X'] = 'secret'", **_LOADED, said=("bad-dist", "TSK_X")),
    "deletes a variable": in_register("import os; del os.environ['PATH']", **_LOADED, said=("bad-dist", "PATH")),
    "empties the environment": in_register("import os; os.environ.clear()", **_LOADED, said=("bad-dist", "PATH")),
    "sets a variable, then fails": in_register(
        "import os; os.environ['TSK_X'] = '1'\nraise LookupError", said=("TSK_X",)
    ),
    "silences all warnings": at_import(
        "import warnings; warnings.simplefilter('ignore')", **_LOADED, said=("bad-dist", "warnings filter")
    ),
    "makes warnings errors": at_import(
        "import warnings; warnings.filterwarnings('error', category=DeprecationWarning)",
        **_LOADED,
        said=("bad-dist", "DeprecationWarning"),
    ),
    "resets the warnings filter": in_register(
        "import warnings; warnings.resetwarnings()", **_LOADED, said=("bad-dist", "warnings filter")
    ),
    "breaks the warnings filter": in_register(
        "import warnings; warnings.filters = None", **_LOADED, said=("bad-dist", "warnings filter")
    ),
    "replaces os.environ": in_register("import os; os.environ = {}", **_LOADED, said=("bad-dist", "os.environ")),
    "deletes os.environ": in_register("import os; del os.environ", **_LOADED, said=("bad-dist", "os.environ")),
    "empties sys.path": in_register("import sys; sys.path.clear()", **_LOADED, said=("bad-dist", "sys.path")),
    "filters its own warnings only": at_import("import warnings; warnings.filterwarnings('ignore', 'bad: ')", **_FINE),
    "disables another plugin": in_register(
        "import tokenspeed_kernel.plugins as p\np.disable_plugin('m_third')\np.enable_plugin('m_third')", **_FINE
    ),
}

_RAISING_LOGGER = "import logging\nclass H(logging.Handler):\n    def emit(self, record): raise OSError('disk full')\n"
_QUIET = "logging.getLogger('tokenspeed_kernel').addHandler(H())\n"

HOST = {
    "warnings are errors": in_register("raise RuntimeError('boom')", arguments=("-W", "error")),
    "a logger that raises": in_register("raise RuntimeError('boom')", before=_RAISING_LOGGER + _QUIET),
    "a logger that raises, warnings are errors": in_register(
        "raise RuntimeError('boom')", before=_RAISING_LOGGER + _QUIET, arguments=("-W", "error")
    ),
    "showwarning raises": in_register(
        "raise RuntimeError('boom')",
        before="import warnings\ndef f(*a, **k): raise OSError('closed')\nwarnings.showwarning = f\nRECORD = False",
    ),
    **{
        f"disabled as {value!r}": entry(
            "My_Bad = bad:register",
            states={"My_Bad": "disabled"},
            said=(),
            variables={"TOKENSPEED_KERNEL_DISABLE_PLUGINS": value},
        )
        for value in ("My_Bad", "my-bad", "MY.BAD", " my_bad ,, ", "my_bad@bad-dist", "My.Bad@Bad_Dist")
    },
    **{
        f"{variable} has {value!r}": entry(
            _INFO,
            states={"bad": "loaded"},
            kernels=("bad_kernel",),
            said=(repr(value), hint),
            variables={f"TOKENSPEED_KERNEL_{variable}": f"{value}{also}"},
        )
        for variable, also in (("DISABLE_PLUGINS", ""), ("PLUGINS", ",bad,a_good,z_good"))
        for value, hint in (("Bad_Dist", "'bad'"), ("nonsense", "a_good, bad, z_good"), ("bad@other", "a_good, bad, z"))
    },
    "not on the allow-list": entry(
        _INFO,
        states={"bad": "not allowed"},
        said=(),
        variables={"TOKENSPEED_KERNEL_PLUGINS": "A-GOOD,z_good@z-good-dist"},
    ),
    "a faulty line that is disabled": entry(
        "this line",
        states={"this line": "disabled"},
        said=(),
        variables={"TOKENSPEED_KERNEL_DISABLE_PLUGINS": "this line"},
    ),
}

CASES: dict[str, Case] = {**LOADING, **METADATA, **REQUIREMENTS, **MISUSE, **HOST}
