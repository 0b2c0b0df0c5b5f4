# SPDX-License-Identifier: Apache-2.0
"""Compare this package's behaviour with that of the published tokenspeed-kernel, scenario by scenario.

    pip install --no-deps --target FOLDER tokenspeed-kernel==0.1.4
    python benchmarks/drop_in.py --peer FOLDER [--json FILE]

Each implementation runs the same scenarios in a process of its own, on a pretended device, each from an empty registry.
A scenario's results are the same, or differ as its ``@differs`` says and for the reason it gives; anything else fails.
The published one imports torch, so torch has to be there; no GPU is used.
"""

# ruff: noqa: D103 -- the name of a scenario says what it does

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "core" / "src"
_ENVIRONMENT = ("TOKENSPEED_KERNEL_", "LIBREYOLO_")


class World:
    """One implementation, imported, and the small makers that the scenarios share."""

    def __init__(self, folder: Path, *, whole: bool, scratch: Path) -> None:
        sys.path.insert(0, str(folder))
        if not whole:  # its __init__ needs a GPU; its modules do not
            package = types.ModuleType("tokenspeed_kernel")
            package.__path__ = [str(folder / "tokenspeed_kernel")]
            sys.modules["tokenspeed_kernel"] = package
        for name in ("importlib_metadata", "packaging.utils") if whole else ():
            import_module(name)  # before plugin scenarios hide the installed distributions
        self.torch: Any = import_module("torch")
        self.platform: Any = import_module("tokenspeed_kernel.platform")
        self.registry: Any = import_module("tokenspeed_kernel.registry")
        self.selection: Any = import_module("tokenspeed_kernel.selection")
        self.signature: Any = import_module("tokenspeed_kernel.signature")
        self.plugins: Any = import_module("tokenspeed_kernel.plugins")
        self.cli: Any = import_module("tokenspeed_kernel.plugins.cli")
        self._scratch = scratch
        self.half, self.single = self.torch.bfloat16, self.torch.float32
        self.asked = self.formats(self.half)
        self._scenario = 0
        self._plugins: set[str] = set()

    def formats(self, dtype: Any) -> Any:
        """Return the signature of operands a and b of one dtype."""
        dense = self.signature.dense_tensor_format(dtype)
        return self.signature.format_signature(a=dense, b=dense)

    def reset(self) -> None:
        """Forget what earlier scenarios did."""
        for name in list(os.environ):
            if name.startswith(_ENVIRONMENT):
                del os.environ[name]
        for name in self._plugins:
            self.plugins.enable_plugin(name)
        self.plugins.reset_plugins()
        self.registry.KernelRegistry.reset()
        self.selection._oracles.clear()
        self.selection.set_selection_policy(self.selection.SelectionPolicy())
        self.platform.Platform.override(self.device())
        self._scenario += 1
        self.installed = self._scratch / f"scenario{self._scenario}"
        self.installed.mkdir()

    def device(self, vendor: str = "nvidia", major: int = 9, minor: int = 0, *features: str) -> Any:
        """Return a platform of one pretended device."""
        arch = self.platform.ArchVersion(major, minor)
        return self.platform.PlatformInfo(vendor, arch, "device", 1, 0, 0.0, 0, 0, 0, frozenset(features))

    def kernel(self, name: str, impl: Any = None, *, family: str = "gemm", mode: str = "mm", **spec: Any) -> Any:
        """Register a kernel that returns its name."""
        spec = {"solution": name, "signatures": {self.asked}, **spec}
        return self.registry.register_kernel(family, mode, name=name, **spec)(impl or (lambda *args, **kwargs: name))

    def spec(self, name: str = "k", **fields_: Any) -> Any:
        """Return a spec that is not registered."""
        return self.registry.KernelSpec(name, "gemm", "mm", format_signatures=frozenset({self.asked}), **fields_)

    def chosen(self, *signature: Any, **request: Any) -> Any:
        """Return the name of the kernel selected for gemm.mm, or the error."""
        asked = signature[0] if signature else self.asked
        return attempt(lambda: self.selection.select_kernel("gemm", "mm", asked, **request).name)

    def needs(self, **capability: Any) -> Any:
        """Return a requirement; architectures are given as pairs, vendors and features as tuples."""
        arch = self.platform.ArchVersion
        for name, value in capability.items():
            if name in ("min_arch_version", "max_arch_version"):
                capability[name] = arch(*value)
            elif name == "vendor_min_arch_versions":
                capability[name] = {vendor: arch(*pair) for vendor, pair in value.items()}
            else:
                capability[name] = frozenset(value)
        return self.platform.CapabilityRequirement(**capability)

    def oracle(self, scores: Callable[[str], Any]) -> Any:
        """Return an oracle that scores kernels by name."""

        def adjust(self: Any, spec: Any, platform: Any, traits: Any) -> Any:
            return scores(spec.name)

        return type("Oracle", (self.selection.SelectionOracle,), {"adjust": adjust})()

    def install(
        self, plugin: str, body: str = "pass", *, top: str = "", distribution: str = "", value: str = ""
    ) -> None:
        """Write a distribution whose plugin has this body."""
        self._plugins.add(plugin)
        module = f"dropin{self._scenario}_{plugin.replace('-', '_')}"
        prelude = "from tokenspeed_kernel.registry import KernelRegistry, register_kernel\n"
        prelude += "def kernel(name, priority=10):\n"
        prelude += (
            "    register_kernel('gemm', 'mm', name=name, solution=name, signatures=set(), priority=priority)(print)\n"
        )
        code = f"{prelude}{top}\ndef register():\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (self.installed / f"{module}.py").write_text(code + "\n", encoding="utf-8")
        self.metadata(distribution or f"dist-{plugin}", f"{plugin} = {value.format(module) or f'{module}:register'}")

    def metadata(self, distribution: str, entry: str | bytes) -> None:
        """Write the metadata of a distribution with one line in the group of plugins."""
        info = self.installed / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n", encoding="utf-8")
        line = entry if isinstance(entry, bytes) else entry.encode()
        (info / "entry_points.txt").write_bytes(b"[tokenspeed_kernel.plugins]\n" + line + b"\n")
        invalidate_caches()

    def discover(self, **options: Any) -> Any:
        """Discover the plugins of this scenario alone; return the names of the plugins that it returns."""
        with self.only_of_this_scenario():
            return attempt(lambda: [info.name for info in self.plugins.discover_plugins(**options)])

    def warned(self, function: Callable[[], Any]) -> list[Any]:
        """Return what ``function`` returns, and whether it warned."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return [function(), bool(caught)]

    @contextlib.contextmanager
    def only_of_this_scenario(self) -> Iterator[None]:
        """Hide the distributions that are really installed."""
        path = sys.path[:]
        sys.path[:] = [str(self.installed), *(p for p in path if "site-packages" not in p and p != path[0])]
        try:
            yield
        finally:
            sys.path[:] = path

    def names(self) -> list[str]:
        """Return the names of all kernels of gemm.mm, sorted."""
        return sorted(spec.name for spec in self.registry.KernelRegistry.get().list_kernels("gemm", "mm"))

    @property
    def kernels(self) -> Any:
        """The process's registry."""
        return self.registry.KernelRegistry.get()


def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result as plain data, or which error was raised."""
    try:
        return plain(function(*arguments, **options))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- which error it is is the result
        return f"raises {type(error).__name__}"


def plain(value: Any) -> Any:
    """Return ``value`` as JSON-able data."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


# --- scenarios ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """What this package does where it means to differ, and why."""

    here: Any
    reason: str


Scenario = Callable[[World], Any]
SCENARIOS: dict[str, Scenario] = {}
DIFFERENCES: dict[str, Difference] = {}


def scenario(function: Scenario) -> Scenario:
    """Add a scenario, called as its function is."""
    name = function.__name__
    assert name not in SCENARIOS, name
    SCENARIOS[name] = function
    return function


def differs(here: Any, reason: str) -> Callable[[Scenario], Scenario]:
    """Add a scenario in which this package gives ``here`` and the published one something else."""

    def add(function: Scenario) -> Scenario:
        DIFFERENCES[function.__name__] = Difference(here, reason)
        return scenario(function)

    return add


# --- registry -------------------------------------------------------------------------------------------------------


@differs(
    ["load_builtin_kernels", "cache_get", "cache_put", "clear_cache"],
    "what the engine uses of itself: its own kernels, and a cache that no caller can keep right",
)
def registry_names_of_the_engine(w: World) -> Any:
    names = "cache_get cache_put clear_cache"
    return _missing(w.registry, "load_builtin_kernels") + _missing(w.registry.KernelRegistry, names)


@scenario
def registry_names(w: World) -> Any:
    methods = "register get_by_name get_impl get_for_operator list_operators list_kernels list_solutions reset get"
    names = "KernelRegistry KernelSpec Priority register_kernel describe_kernel"
    return [_missing(w.registry, names), _missing(w.registry.KernelRegistry, methods)]


@scenario
def priority_bands(w: World) -> Any:
    return {band.name: band.value for band in w.registry.Priority}


@scenario
def register_kernel_arguments(w: World) -> Any:
    given = inspect.signature(w.registry.register_kernel).parameters
    names = "family mode name features solution capability signatures traits priority weight_preprocessor"
    return {name: [given[name].kind.name, plain(attempt(int, given[name].default))] for name in names.split()}


@scenario
def spec_fields_come_in_order(w: World) -> Any:
    spec = w.registry.KernelSpec("n", "f", "m", frozenset({"x"}), "s")
    return [[f.name for f in fields(spec)][:10], spec.name, spec.family, spec.mode, spec.features, spec.solution]


@scenario
def spec_defaults(w: World) -> Any:
    spec = w.registry.KernelSpec("n", "f", "m")
    empty = [spec.features, spec.format_signatures, spec.traits, spec.weight_preprocessor]
    return [spec.solution, spec.priority, empty, spec.capability == w.platform.CapabilityRequirement()]


@scenario
def spec_is_frozen(w: World) -> Any:
    return attempt(setattr, w.spec(), "priority", 3)


@differs([True, False, True], "a frozen value hashes, whatever its traits are")
def spec_compares_and_hashes(w: World) -> Any:
    one, other = w.spec(traits={"x": frozenset({1})}), w.spec(traits={"x": frozenset({1})})
    return [one == other, one == w.spec(), attempt(lambda: hash(one) == hash(other))]


@scenario
def decorator_returns_the_function(w: World) -> Any:
    return w.kernel("a", print) is print


@scenario
def decorator_serves_a_class(w: World) -> Any:
    cls = w.kernel("a", type("Kernel", (), {"__init__": lambda self, size: setattr(self, "size", size)}))
    return [w.kernels.get_impl("a") is cls, w.selection.select_kernel("gemm", "mm", w.asked)(3).size]


@scenario
def one_decorator_used_twice(w: World) -> Any:
    decorate = w.registry.register_kernel("gemm", "mm", name="a", solution="s", signatures={w.asked})
    decorate(len)
    decorate(print)
    return [w.names(), w.kernels.get_impl("a") is print]


@scenario
def name_is_made_of_solution_and_operator(w: World) -> Any:
    w.registry.register_kernel("gemm", "mm", solution="fast", signatures={w.asked})(print)
    return w.names()


@differs("raises ValueError", "refused at registration, with what was expected")
def empty_name(w: World) -> Any:
    return _accepted(w.kernel, "")


@differs("raises ValueError", "refused at registration, with what was expected")
def empty_family(w: World) -> Any:
    return _accepted(w.kernel, "a", family="")


@scenario
def priority_default(w: World) -> Any:
    w.kernel("a")
    return w.kernels.get_by_name("a").priority


@scenario
def priority_kept_in_range(w: World) -> Any:
    found = []
    for priority in (0, 19, w.registry.Priority.PLUGIN + 1, w.registry.Priority.PORTABLE):
        w.kernel("a", priority=priority)
        found.append(w.kernels.get_by_name("a").priority)
    return found


@scenario
def priority_out_of_range(w: World) -> Any:
    return [attempt(w.kernel, "a", priority=p) for p in (20, -1, 10**9)]


@differs(["raises TypeError", "raises TypeError", "raises TypeError"], "a priority is an int, and a flag is none")
def priority_of_another_type(w: World) -> Any:
    return [_accepted(w.kernel, "a", priority=p) for p in (True, "12", 9.7)]


@scenario
def priority_none(w: World) -> Any:
    return attempt(w.kernel, "a", priority=None)


@differs("raises ValueError", "a spec is checked however it comes; out of range there means clamped, silently")
def spec_priority_out_of_range(w: World) -> Any:
    return _accepted(w.spec, priority=99)


@scenario
def registering_a_name_again_replaces(w: World) -> Any:
    w.kernel("a", len, priority=5)
    w.kernel("b", priority=6)
    w.kernel("a", print, priority=7)
    return [w.names(), w.kernels.get_impl("a") is print, w.kernels.get_by_name("a").priority, w.chosen()]


@scenario
def registering_a_name_elsewhere_moves_it(w: World) -> Any:
    w.kernel("a")
    w.kernel("a", mode="bmm")
    return [w.names(), w.chosen(), [s.mode for s in w.kernels.list_kernels("gemm")]]


@differs([["gemm", "bmm"]], "an operator without kernels is none")
def operator_that_lost_its_last_kernel(w: World) -> Any:
    w.kernel("a")
    w.kernel("a", mode="bmm")
    return w.kernels.list_operators()


@differs(
    [["a", "fake_quant_fp8:reference"], [["gemm", "mm"], ["quant", "fake_quant_fp8"]]],
    "the references of the declared slots are kernels, at priority 0",
)
def kernels_that_nobody_registered(w: World) -> Any:
    w.kernel("a")
    w.chosen()
    return [[s.name for s in w.kernels.list_kernels()], w.kernels.list_operators()]


@scenario
def unknown_kernel(w: World) -> Any:
    return [w.kernels.get_by_name("a"), w.kernels.get_impl("a"), w.kernels.get_for_operator("gemm", "mm")]


@scenario
def list_kernels_filters(w: World) -> Any:
    for name, family, mode in (("a", "gemm", "mm"), ("b", "gemm", "bmm"), ("c", "moe", "mm")):
        w.kernel(name, family=family, mode=mode)
    asked: list[dict[str, str]] = [
        {},
        {"family": "gemm"},
        {"mode": "mm"},
        {"family": "moe", "mode": "mm"},
        {"mode": "x"},
    ]
    return [sorted(s.name for s in w.kernels.list_kernels(**one)) for one in asked]


@scenario
def list_kernels_order(w: World) -> Any:
    _three_priorities(w)
    return [s.name for s in w.kernels.list_kernels()]


@scenario
def list_kernels_of_an_operator_order(w: World) -> Any:
    _three_priorities(w)
    return [s.name for s in w.kernels.list_kernels("gemm", "mm")]


@scenario
def get_for_operator_order(w: World) -> Any:
    _three_priorities(w)
    return [s.name for s in w.kernels.get_for_operator("gemm", "mm")]


@scenario
def get_for_operator_filters(w: World) -> Any:
    w.kernel("a", solution="s", features={"x", "y"}, capability=w.needs(vendors={"amd"}))
    w.kernel("b", solution="t", features={"x"}, signatures={w.formats(w.single)})
    asked: list[dict[str, Any]] = [
        {"features": frozenset()},
        {"features": frozenset({"x"})},
        {"features": frozenset({"x", "y"})},
        {"features": frozenset({"z"})},
        {"platform": w.device()},
        {"platform": w.device("amd", 9, 5)},
        {"format_signature": w.asked},
        {"solution": "t"},
        {"solution": "u"},
    ]
    return [sorted(s.name for s in w.kernels.get_for_operator("gemm", "mm", **one)) for one in asked]


@scenario
def list_operators_and_solutions(w: World) -> Any:
    w.kernel("a", solution="t", family="moe")
    w.kernel("b", solution="t")
    w.kernel("c", solution="s")
    return [sorted(w.kernels.list_operators()), sorted(w.kernels.list_solutions("gemm", "mm"))]


@scenario
def list_operators_order(w: World) -> Any:
    w.kernel("a", family="moe")
    w.kernel("b")
    return w.kernels.list_operators()


@scenario
def list_solutions_of_an_unknown_operator(w: World) -> Any:
    return w.kernels.list_solutions("gemm", "mm")


@scenario
def reset_empties_and_get_makes_one(w: World) -> Any:
    w.kernel("a")
    before = w.kernels
    w.registry.KernelRegistry.reset()
    return [before is w.kernels, w.kernels is w.kernels, w.kernels.list_kernels(), w.chosen()]


@scenario
def register_a_spec(w: World) -> Any:
    w.kernels.register(w.spec("a", solution="s"), len)
    return [w.names(), w.chosen(), w.kernels.get_impl("a") is len]


@differs("raises TypeError", "refused at registration, not when a call selects it")
def register_without_implementation(w: World) -> Any:
    return _accepted(w.kernels.register, w.spec("a"), None)


@differs("function", "'module:attribute' is imported when first used, so that registering stays cheap")
def implementation_by_name(w: World) -> Any:
    w.kernel("a", "os.path:join")
    return type(w.kernels.get_impl("a")).__name__


@scenario
def weight_preprocessor_is_kept(w: World) -> Any:
    w.kernel("a", weight_preprocessor=len)
    return w.kernels.get_by_name("a").weight_preprocessor is len


@scenario
def weight_preprocessor_not_callable(w: World) -> Any:
    return [attempt(w.kernel, "a", weight_preprocessor=3), attempt(w.spec, weight_preprocessor=3)]


@scenario
def features_as_list(w: World) -> Any:
    w.kernel("a", features=["x", "y"])
    return w.kernels.get_by_name("a").features


@differs("raises TypeError", "refused: it would count as one feature a letter")
def features_as_str(w: World) -> Any:
    return _accepted(w.kernel, "a", features="paged")


@differs("raises TypeError", "refused at registration: it could never match")
def signatures_of_another_type(w: World) -> Any:
    return _accepted(w.kernel, "a", signatures=[1])


@differs(
    ["raises TypeError", "raises TypeError"],
    "refused at registration: it breaks selection there, for every kernel of the operator",
)
def traits_of_another_type(w: World) -> Any:
    return [_accepted(w.kernel, "a", traits={"head_dim": values}) for values in (3, "xyz")]


@scenario
def traits_as_plain_set(w: World) -> Any:
    w.kernel("a", traits={"head_dim": {64, 128}})
    return [w.chosen(traits={"head_dim": 64}), w.chosen(traits={"head_dim": 32})]


@differs(["a", "a"], "no signatures means any, for kernels whose operands have no formats to tell apart")
def no_signatures_declared(w: World) -> Any:
    w.kernel("a", signatures=set())
    return [w.chosen(), w.chosen(None)]


@scenario
def describe_has_the_facts(w: World) -> Any:
    w.kernel("a", solution="s", priority=13, capability=w.needs(vendors={"amd"}), weight_preprocessor=len)
    lines = w.registry.describe_kernel("a").splitlines()
    wanted = ("Kernel", "  Operator", "  Solution", "  Priority", "  Format signatures", "  Platform", "  Weight")
    return [line for line in lines if line.startswith(wanted)]


@scenario
def describe_at_a_bands_start(w: World) -> Any:
    w.kernel("a", priority=8)
    lines = w.registry.describe_kernel("a").splitlines()
    return [line for line in lines if "Priority" in line or "Weight" in line]


@scenario
def describe_unknown(w: World) -> Any:
    return w.registry.describe_kernel("a")


@scenario
def spec_signatures_by_dtype(w: World) -> Any:
    both = frozenset({w.asked, w.formats(w.single)})
    spec = w.registry.KernelSpec("k", "gemm", "mm", format_signatures=both)
    found = [
        spec.format_signatures_for_storage_dtype(d, r) for d in (w.half, w.single, int) for r in ("a", ("b", "z"), "z")
    ]
    one = [attempt(spec.format_signature_for_storage_dtype, w.half, role) for role in ("a", "z")]
    return [found, one, spec.supports_format_signature(w.asked)]


@scenario
def spec_signature_by_dtype_ambiguous(w: World) -> Any:
    dense = w.signature.dense_tensor_format
    mixed = w.signature.format_signature(a=dense(w.half), b=dense(w.single))
    spec = w.registry.KernelSpec("k", "gemm", "mm", format_signatures=frozenset({w.asked, mixed}))
    return [
        attempt(spec.format_signature_for_storage_dtype, w.half, "a"),
        attempt(spec.format_signature_for_storage_dtype, w.half, "b"),
    ]


@scenario
def spec_signatures_by_no_role(w: World) -> Any:
    return attempt(w.spec().format_signatures_for_storage_dtype, w.half, ())


@scenario
def spec_dtypes_of_a_role(w: World) -> Any:
    return attempt(lambda: w.spec().storage_dtypes_for_role("a"))


def _missing(holder: Any, names: str) -> list[str]:
    """Return those of the names that a module or class lacks."""
    return [name for name in names.split() if not hasattr(holder, name)]


def _accepted(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return "accepted" or which error was raised."""
    found = attempt(function, *arguments, **options)
    return found if isinstance(found, str) and found.startswith("raises") else "accepted"


def _three_priorities(w: World) -> None:
    w.kernel("low", priority=3)
    w.kernel("high", priority=15)
    w.kernel("mid", priority=9)
    w.kernel("mid2", priority=9)
    w.kernel("high", priority=14)


# --- selection ------------------------------------------------------------------------------------------------------


@scenario
def selection_names(w: World) -> Any:
    names = (
        "select_kernel SelectedKernel NoKernelFoundError kernel_override explain_selection SelectionOracle "
        "register_oracle SelectionPolicy SelectionStrategy AutotuneParams set_selection_policy warmup_selection "
        "spec_matches_traits"
    )
    return _missing(w.selection, names)


@differs(
    ["ScoreBreakdown", "resolve_kernel_override", "ref_compatible_with_spec", "spec_matches_shape_traits"],
    "of the engine's own tests and dispatchers, not of the plugin contract",
)
def selection_names_of_the_engine(w: World) -> Any:
    names = "ScoreBreakdown resolve_kernel_override ref_compatible_with_spec spec_matches_shape_traits"
    return _missing(w.selection, names)


@scenario
def select_kernel_arguments(w: World) -> Any:
    return {
        n: [p.kind.name, str(p.default)] for n, p in inspect.signature(w.selection.select_kernel).parameters.items()
    }


@scenario
def explain_selection_arguments(w: World) -> Any:
    return [*inspect.signature(w.selection.explain_selection).parameters]


@scenario
def highest_priority_wins(w: World) -> Any:
    _three_priorities(w)
    return w.chosen()


@differs("new", "the newest registration wins, as the slots' document has it")
def equal_priorities(w: World) -> Any:
    w.kernel("old")
    w.kernel("new")
    return w.chosen()


@scenario
def nothing_registered(w: World) -> Any:
    return [w.chosen(), issubclass(w.selection.NoKernelFoundError, RuntimeError)]


@scenario
def selected_kernel_is_callable(w: World) -> Any:
    w.kernel("a", lambda x, *, y: x - y)
    selected = w.selection.select_kernel("gemm", "mm", w.asked)
    return [type(selected).__name__, repr(selected), selected.name, selected(5, y=2), selected.impl(5, y=1)]


@scenario
def selecting_again_gives_the_same_object(w: World) -> Any:
    w.kernel("a")
    return w.selection.select_kernel("gemm", "mm", w.asked) is w.selection.select_kernel("gemm", "mm", w.asked)


@scenario
def signature_must_match(w: World) -> Any:
    w.kernel("a", priority=12)
    w.kernel("b", signatures={w.formats(w.single)})
    dense = w.signature.dense_tensor_format(w.half)
    return [w.chosen(), w.chosen(w.formats(w.single)), w.chosen(w.signature.format_signature(a=dense)), w.chosen(None)]


@scenario
def features_must_be_offered(w: World) -> Any:
    w.kernel("a", features={"x"}, priority=12)
    w.kernel("b", features={"x", "y"})
    asked: tuple[tuple[str, ...], ...] = ((), ("x",), ("y",), ("x", "y"), ("z",))
    return [w.chosen(features=None), *(w.chosen(features=frozenset(names)) for names in asked)]


@scenario
def features_asked_as_plain_set(w: World) -> Any:
    w.kernel("a", features={"x"})
    return [w.chosen(features={"x"}), w.chosen(features={"y"})]


@scenario
def platform_must_be_capable(w: World) -> Any:
    w.kernel("a", capability=w.needs(vendors={"amd"}), priority=15)
    w.kernel("b", capability=w.needs(min_arch_version=(9, 0), vendors={"nvidia"}), priority=14)
    w.kernel("c", capability=w.needs(required_features={"f8"}), priority=13)
    w.kernel("d", capability=w.needs(max_arch_version=(8, 0)), priority=12)
    w.kernel("e")
    devices: list[Any] = [
        ("amd", 9, 5),
        ("nvidia", 9, 0),
        ("nvidia", 8, 9, "f8"),
        ("nvidia", 8, 0),
        ("nvidia", 8, 6),
        ("cpu", 0, 0),
    ]
    return [w.chosen(platform=w.device(*one)) for one in devices]


@scenario
def platform_override_decides(w: World) -> Any:
    w.kernel("a", capability=w.needs(vendors={"amd"}), priority=15)
    w.kernel("b")
    before = w.chosen()
    w.platform.Platform.override(w.device("amd", 9, 5))
    return [before, w.chosen()]


@differs(["a", "b", "b"], "a remembered choice holds for the very platform")
def cached_choice_and_another_vendor(w: World) -> Any:
    w.kernel("a", capability=w.needs(vendors={"nvidia"}), priority=15)
    w.kernel("b")
    before = w.chosen()
    w.platform.Platform.override(w.device("amd", 9, 0))
    return [before, w.chosen(), w.chosen(platform=w.device("cpu", 9, 0))]


@differs(["a", "b"], "a remembered choice holds for the very platform")
def cached_choice_and_a_missing_device_feature(w: World) -> Any:
    w.kernel("a", capability=w.needs(required_features={"f8"}), priority=15)
    w.kernel("b")
    return [w.chosen(platform=w.device("nvidia", 9, 0, "f8")), w.chosen(platform=w.device("nvidia", 9, 0))]


@scenario
def cached_choice_and_a_new_kernel(w: World) -> Any:
    w.kernel("a")
    before = w.chosen()
    w.kernel("b", priority=15)
    return [before, w.chosen()]


@differs(["a", "b"], "an oracle makes every remembered choice stale")
def cached_choice_and_a_new_oracle(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    before = w.chosen()
    w.selection.register_oracle("gemm", w.oracle(lambda name: 19 if name == "b" else 10))
    return [before, w.chosen()]


@differs(["count", "flag"], "1 and True are two trait values")
def cached_choice_and_a_flag_beside_a_count(w: World) -> Any:
    w.kernel("count", traits={"x": frozenset({1})}, priority=15)
    w.kernel("flag", traits={"x": frozenset({True})})
    return [w.chosen(traits={"x": 1}), w.chosen(traits={"x": True})]


@scenario
def solution_restricts(w: World) -> Any:
    w.kernel("a", solution="s", priority=15)
    w.kernel("b", solution="t")
    w.kernel("c", solution="t", priority=4)
    return [w.chosen(solution=name) for name in (None, "s", "t", "u")]


@scenario
def solution_empty(w: World) -> Any:
    w.kernel("a", solution="s")
    return w.chosen(solution="")


@scenario
def solution_restricts_before_traits(w: World) -> Any:
    w.kernel("a", solution="s", traits={"x": frozenset({1})})
    w.kernel("b", solution="t")
    return w.chosen(solution="s", traits={"x": 2})


@scenario
def argument_overrides(w: World) -> Any:
    w.kernel("a", solution="s", priority=15)
    w.kernel("b", solution="t", priority=4)
    w.kernel("c", solution="t", priority=5)
    return [w.chosen(override=name) for name in ("b", "t", "s", None, "")]


@scenario
def argument_override_that_nothing_has(w: World) -> Any:
    w.kernel("a")
    return w.chosen(override="x")


@scenario
def override_skips_signature_and_traits(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b", signatures={w.formats(w.single)}, traits={"x": frozenset({1})})
    return w.chosen(override="b", traits={"x": 2})


@scenario
def override_and_solution(w: World) -> Any:
    w.kernel("a", solution="s")
    w.kernel("b", solution="t")
    return w.chosen(override="a", solution="t")


@scenario
def override_keeps_features(w: World) -> Any:
    w.kernel("a", solution="s")
    w.kernel("b", solution="t", features={"x"})
    x = frozenset({"x"})
    return [w.chosen(override="a", features=x), w.chosen(override="b", features=x)]


@scenario
def override_by_solution_takes_one_with_the_features(w: World) -> Any:
    w.kernel("a", solution="s", priority=15)
    w.kernel("b", solution="s", features={"x"})
    return [w.chosen(override="s", features=frozenset({"x"})), w.chosen(override="s")]


@differs("raises NoKernelFoundError", "an override chooses among the kernels of its operator")
def override_names_another_operators_kernel(w: World) -> Any:
    w.kernel("a")
    w.kernel("b", family="moe")
    return w.chosen(override="b")


@differs("raises NoKernelFoundError", "an override never outweighs capability; the error says what is missing")
def override_names_a_kernel_this_device_cannot_run(w: World) -> Any:
    w.kernel("a", capability=w.needs(vendors={"amd"}))
    return w.chosen(override="a")


@differs("b", "an override never outweighs capability, so it takes one that can run")
def override_by_solution_and_capability(w: World) -> Any:
    w.kernel("a", solution="s", capability=w.needs(vendors={"amd"}), priority=15)
    w.kernel("b", solution="s")
    return w.chosen(override="s")


@scenario
def override_outweighs_an_oracle(w: World) -> Any:
    w.kernel("a")
    w.kernel("b", priority=4)
    w.selection.register_oracle("gemm", w.oracle(lambda name: 19 if name == "a" else 0))
    return w.chosen(override="b")


@scenario
def context_overrides(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b", solution="t")
    w.kernel("c")
    found = [w.chosen()]
    with w.selection.kernel_override("gemm", "mm", "t"):
        found += [w.chosen(), w.chosen(override="c")]
        with w.selection.kernel_override("gemm", "mm", "c"):
            found.append(w.chosen())
        found.append(w.chosen())
    return [*found, w.chosen()]


@scenario
def context_override_ends_with_an_error(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    with contextlib.suppress(KeyError), w.selection.kernel_override("gemm", "mm", "b"):
        raise KeyError
    return w.chosen()


@scenario
def context_override_of_another_operator(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    with w.selection.kernel_override("gemm", "bmm", "b"):
        return w.chosen()


@scenario
def context_override_that_nothing_has(w: World) -> Any:
    w.kernel("a")
    with w.selection.kernel_override("gemm", "mm", "x"):
        return w.chosen()


@differs(["b", "a"], "a context is the thread's that opened it")
def context_override_in_another_thread(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    found: list[Any] = []
    with w.selection.kernel_override("gemm", "mm", "b"):
        thread = threading.Thread(target=lambda: found.append(w.chosen()))
        thread.start()
        thread.join()
        return [w.chosen(), *found]


@differs(["a", "b"], "a context is the task's that opened it")
def context_override_in_another_task(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")

    async def overriding(entered: asyncio.Event, seen: asyncio.Event) -> Any:
        with w.selection.kernel_override("gemm", "mm", "b"):
            entered.set()
            await seen.wait()
            return w.chosen()

    async def both() -> list[Any]:
        entered, seen = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(overriding(entered, seen))
        await entered.wait()
        found = w.chosen()
        seen.set()
        return [found, await task]

    return asyncio.run(both())


@scenario
def context_override_as_decorator(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    return [w.selection.kernel_override("gemm", "mm", "b")(w.chosen)(), w.chosen()]


@scenario
def environment_overrides(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b", solution="t")
    w.kernel("c")
    found = [w.chosen()]
    for value in ("c", "t", ""):
        os.environ["TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM"] = value
        with w.selection.kernel_override("gemm", "mm", "a"):
            found += [w.chosen(), w.chosen(override="b")]
        found += [w.chosen(), w.chosen(override="b")]
    return found


@differs("a", "one warning and the normal order: a variable may be meant for another program")
def environment_override_that_nothing_has(w: World) -> Any:
    w.kernel("a")
    os.environ["TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM"] = "x"
    return w.chosen()


@differs("a", "no shell can set a variable with a dash; it is an underscore in the name")
def environment_override_of_a_mode_with_a_dash(w: World) -> Any:
    w.kernel("a", mode="m-m", priority=15)
    w.kernel("b", mode="m-m")
    os.environ["TOKENSPEED_KERNEL_OVERRIDE_GEMM_M-M"] = "b"
    return w.selection.select_kernel("gemm", "m-m", w.asked).name


@scenario
def oracle_outweighs_priority(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b", priority=4)
    w.kernel("c", priority=3)
    w.selection.register_oracle("gemm", w.oracle(lambda name: {"b": 12, "c": 12}.get(name, 10)))
    return w.chosen()


@scenario
def oracle_of_another_family(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    w.selection.register_oracle("moe", w.oracle(lambda name: 19 if name == "b" else 0))
    return w.chosen()


@scenario
def oracle_replaced(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    for best in ("b", "a"):
        w.selection.register_oracle("gemm", w.oracle({"a": 5, "b": 5, best: 19}.__getitem__))
    return w.chosen()


@scenario
def oracle_sees_spec_platform_and_traits(w: World) -> Any:
    seen: list[Any] = []

    def adjust(self: Any, spec: Any, platform: Any, traits: Any) -> int:
        seen.append([spec.name, platform.vendor, traits])
        return 10

    w.kernel("a")
    w.selection.register_oracle("gemm", type("Oracle", (w.selection.SelectionOracle,), {"adjust": adjust})())
    w.chosen(traits={"x": 1})
    w.chosen(traits=None)
    return seen


@scenario
def oracle_that_says_nothing_is_neutral(w: World) -> Any:
    return w.selection.SelectionOracle().adjust(w.spec(), w.device(), None)


@scenario
def oracle_beyond_its_range(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    w.selection.register_oracle("gemm", w.oracle(lambda name: 25 if name == "b" else 19))
    high = w.chosen()
    w.selection.register_oracle("gemm", w.oracle(lambda name: 0 if name == "b" else -5))
    return [high, w.chosen(traits={"x": 1})]


@differs("a", "a third party's oracle must not break selection: it is neutral then, and warned about")
def oracle_that_raises(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    w.selection.register_oracle("gemm", w.oracle(lambda name: 1 // 0))
    return w.chosen()


@differs("a", "a third party's oracle must not break selection: it is neutral then, and warned about")
def oracle_that_returns_none(w: World) -> Any:
    w.kernel("a")
    w.selection.register_oracle("gemm", w.oracle(lambda name: None))
    return w.chosen()


@scenario
def policy_fields(w: World) -> Any:
    policy, params = w.selection.SelectionPolicy(), w.selection.AutotuneParams()
    return [
        plain(vars(policy).keys() - {"autotune_params"}),
        vars(params),
        [s.name for s in w.selection.SelectionStrategy],
    ]


@scenario
def policy_by_operator(w: World) -> Any:
    strategy = w.selection.SelectionStrategy
    policy = w.selection.SelectionPolicy(op_strategies={("gemm", "mm"): strategy.AUTOTUNE})
    return [policy.get_strategy("gemm", "mm").name, policy.get_strategy("gemm", "bmm").name, strategy.AUTOTUNE.value]


@scenario
def policy_autotune(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    w.selection.set_selection_policy(w.selection.SelectionPolicy(w.selection.SelectionStrategy.AUTOTUNE))
    return [w.chosen(), w.chosen(traits={"x": 1})]


@differs("raises TypeError", "refused when set, not at the next selection")
def policy_of_another_type(w: World) -> Any:
    return _accepted(w.selection.set_selection_policy, "autotune")


@scenario
def warmup(w: World) -> Any:
    w.kernel("a")
    ask = [("gemm", "mm", w.asked, None), ("gemm", "mm", w.asked, {"x": 1}), ("gemm", "none", w.asked, None)]
    return [attempt(w.selection.warmup_selection), attempt(w.selection.warmup_selection, ask)]


@scenario
def warmup_of_everything(w: World) -> Any:
    seen: set[str] = set()

    def score(name: str) -> int:
        seen.add(name)
        return 10

    w.kernel("a")
    w.kernel("b", mode="bmm", signatures={w.formats(w.single)})
    w.selection.register_oracle("gemm", w.oracle(score))
    w.selection.warmup_selection()
    return seen


@scenario
def explanation_names_the_winner(w: World) -> Any:
    w.kernel("a", priority=15)
    w.kernel("b")
    w.kernel("c", capability=w.needs(vendors={"amd"}), priority=19)
    text = w.selection.explain_selection("gemm", "mm", w.asked)
    return [
        type(text).__name__,
        text.index("a") < text.index("\n") or "a  [SELECTED]" in text,
        "c" in text,
        "amd" in text,
    ]


@differs([False, True], "what decides explains, so no refusal is unknown")
def explanation_of_a_trait(w: World) -> Any:
    w.kernel("a", traits={"head_dim": frozenset({64})})
    text = w.selection.explain_selection("gemm", "mm", w.asked, traits={"head_dim": 32})
    return ["unknown" in text, "head_dim" in text]


@differs("second", "what decides explains, overrides included")
def explanation_under_an_override(w: World) -> Any:
    w.kernel("first", priority=15)
    w.kernel("second")
    with w.selection.kernel_override("gemm", "mm", "second"):
        text = w.selection.explain_selection("gemm", "mm", w.asked)
    return next(name for line in text.splitlines() for name in ("first", "second") if name in line)


@scenario
def explanation_of_nothing(w: World) -> Any:
    return type(w.selection.explain_selection("gemm", "mm", w.asked)).__name__


# What a kernel declares, what is asked: by label. Each becomes one scenario, with spec_matches_traits and selection.
TRAITS: dict[str, tuple[dict[str, Iterable[Any]], dict[str, Any]]] = {
    "flag_served": ({"causal": [True]}, {"causal": True}),
    "flag_not_served": ({"causal": [True]}, {"causal": False}),
    "flag_and_count": ({"causal": [True]}, {"causal": 1}),
    "undeclared": ({}, {"causal": True}),
    "not_asked": ({"causal": [True]}, {}),
    "something_else_asked": ({"causal": [True]}, {"head_dim": 64}),
    "one_of_several": ({"head_dim": [64, 128]}, {"head_dim": 64}),
    "none_of_several": ({"head_dim": [64, 128]}, {"head_dim": 96}),
    "set_asked": ({"head_dim": [64, 128]}, {"head_dim": frozenset({64, 128})}),
    "set_partly_served": ({"head_dim": [64, 128]}, {"head_dim": frozenset({64, 256})}),
    "empty_set_asked": ({"head_dim": [64]}, {"head_dim": frozenset()}),
    "plain_set_asked": ({"head_dim": [64]}, {"head_dim": {64}}),
    "list_asked": ({"head_dim": [64]}, {"head_dim": [64]}),
    "tuple_asked": ({"block": [(1, 32)]}, {"block": (1, 32)}),
    "none_asked": ({"window": [64]}, {"window": None}),
    "none_served": ({"window": [64, None]}, {"window": None}),
    "nothing_declared": ({"head_dim": []}, {"head_dim": 64}),
    "float_and_int": ({"softcap": [1]}, {"softcap": 1.0}),
    "name_served": ({"layout": ["nhd"]}, {"layout": "nhd"}),
    "align_met": ({"m_align": [8]}, {"m": 16}),
    "align_unmet": ({"m_align": [8]}, {"m": 17}),
    "align_one_of_several": ({"m_align": [8, 3]}, {"m": 9}),
    "align_without_size": ({"m_align": [8]}, {"n": 17}),
    "align_without_traits": ({"m_align": [8]}, {}),
    "align_of_a_name": ({"m_align": [8]}, {"m": "16"}),
    "align_of_a_flag": ({"m_align": [1]}, {"m": True}),
    "align_of_none": ({"m_align": [8]}, {"m": None}),
    "align_asked_itself": ({"m_align": [8]}, {"m_align": 8, "m": 8}),
    "align_of_another_dimension": ({"head_align": [8]}, {"head": 9}),
    "min_met": ({"m_min": [8]}, {"m": 8}),
    "min_unmet": ({"m_min": [8]}, {"m": 7}),
    "min_least_of_several": ({"m_min": [8, 4]}, {"m": 5}),
    "max_met": ({"m_max": [8]}, {"m": 8}),
    "max_unmet": ({"m_max": [8]}, {"m": 9}),
    "min_and_max": ({"m_min": [8], "m_max": [16]}, {"m": 17}),
    "exact_size_and_align": ({"m": [16, 24], "m_align": [16]}, {"m": 24}),
    "exact_m_not_asked": ({"m": [16]}, {"n": 16}),
    "exact_batch_not_asked": ({"batch": [16]}, {"m": 16}),
    "exact_m_as_set": ({"m": [16, 32]}, {"m": frozenset({16})}),
    "exact_m_of_a_flag": ({"m": [1]}, {"m": True}),
    "ispp_met": ({"ispp_alignment": [64]}, {"ispp": 128}),
    "ispp_unmet": ({"ispp_alignment": [64]}, {"ispp": 100}),
    "ispp_not_asked": ({"ispp_alignment": [64]}, {"m": 100}),
    "ispp_none": ({"ispp_alignment": [64]}, {"ispp": None}),
    "ispp_exact_not_asked": ({"ispp": [64]}, {"m": 100}),
    "ispp_exact_and_aligned": ({"ispp": [64], "ispp_alignment": [128]}, {"ispp": 64}),
    "ispp_none_undeclared": ({}, {"ispp": None}),
    "ispp_as_text": ({"ispp_alignment": [64]}, {"ispp": "128"}),
    "hidden_met": ({"hidden_alignment": [64, 10]}, {"hidden": 100}),
    "hidden_unmet": ({"hidden_alignment": [64]}, {"hidden": 100}),
    "filter_accepts": ({"mnk_problem_filter": [lambda m, n, k: m > 4]}, {"m": 5, "n": 1, "k": 1}),
    "filter_refuses": ({"mnk_problem_filter": [lambda m, n, k: m > 4]}, {"m": 3, "n": 1, "k": 1}),
    "filter_one_of_two": (
        {"mnk_problem_filter": [lambda m, n, k: m > 4, lambda m, n, k: k > 4]},
        {"m": 1, "n": 1, "k": 9},
    ),
    "filter_without_sizes": ({"mnk_problem_filter": [lambda m, n, k: True]}, {"m": 5}),
    "filter_raises": ({"mnk_problem_filter": [lambda m, n, k: 1 / 0]}, {"m": 3, "n": 1, "k": 1}),
    "dict_asked": ({"x": [1]}, {"x": {}}),
}

TRAIT_DIFFERENCES = {
    "flag_and_count": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", False, False], "1 and True are two trait values"
    ),
    "plain_set_asked": Difference(
        ["a", "a", True, True], "a value that does not hash is matched all the same, only not remembered"
    ),
    "list_asked": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", False, False],
        "a list is a value that no kernel can declare, not an error of the call",
    ),
    "dict_asked": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", False, False],
        "a dict is a value that no kernel can declare, not an error of the call",
    ),
    "align_of_a_flag": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", True, False], "a flag is not a size"
    ),
    "exact_m_of_a_flag": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", False, False], "a flag is not a size"
    ),
    "exact_m_as_set": Difference(
        ["a", "a", True, True], "a set is served if each value is, for sizes as for other traits"
    ),
    "ispp_none_undeclared": Difference(
        ["a", "a", True, False], "a trait that a kernel does not declare cannot refuse it"
    ),
    "ispp_as_text": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", False, False], "a size is an int"
    ),
    "filter_raises": Difference(
        ["raises NoKernelFoundError", "raises NoKernelFoundError", True, False],
        "a kernel whose filter fails is refused; it must not break the selection of others",
    ),
}


def _trait_scenario(declared: dict[str, Iterable[Any]], asked: dict[str, Any]) -> Scenario:
    def run(w: World) -> Any:
        spec = w.spec("a", solution="a", traits={name: frozenset(values) for name, values in declared.items()})
        w.kernels.register(spec, print)
        direct = [
            attempt(w.selection.spec_matches_traits, spec, asked, require_all_traits=all_) for all_ in (False, True)
        ]
        return [w.chosen(traits=asked), w.chosen(traits=asked), *direct]

    return run


for _label, (_declared, _asked) in TRAITS.items():
    SCENARIOS[f"traits_{_label}"] = _trait_scenario(_declared, _asked)
DIFFERENCES |= {f"traits_{label}": difference for label, difference in TRAIT_DIFFERENCES.items()}


@scenario
def trait_value_is_a_tensor(w: World) -> Any:
    w.kernel("a", traits={"x": frozenset({1})}, priority=15)
    w.kernel("b")
    return w.chosen(traits={"x": w.torch.ones(3)})


# --- signature ------------------------------------------------------------------------------------------------------


@scenario
def signature_names(w: World) -> Any:
    kinds = "FormatSignature ScaleFormat TensorFormat"
    return _missing(w.signature, f"{kinds} dense_tensor_format format_signature format_signatures tensor_format")


@scenario
def signature_of_mxfp8_scales(w: World) -> Any:
    return attempt(lambda: w.signature.MXFP8_BLOCK_SCALE)


@scenario
def signature_sorts_roles(w: World) -> Any:
    dense = w.signature.dense_tensor_format
    one = w.signature.format_signature(b=dense(w.half), a=dense(w.single))
    other = w.signature.format_signature(a=dense(w.single), b=dense(w.half))
    return [one == other, hash(one) == hash(other), [name for name, _ in one.roles], str(one)]


@scenario
def signature_with_a_role_twice(w: World) -> Any:
    dense = w.signature.dense_tensor_format(w.half)
    return attempt(w.signature.FormatSignature, (("a", dense), ("a", dense)))


@scenario
def signature_look_ups(w: World) -> Any:
    return [
        w.asked.format_for("a"),
        w.asked.format_for("z"),
        w.asked.storage_dtype_for("b"),
        w.asked.storage_dtype_for("z"),
    ]


@scenario
def signature_of_nothing(w: World) -> Any:
    empty = w.signature.format_signature()
    return [str(empty), empty.roles, empty == w.signature.FormatSignature(())]


@scenario
def signature_pickles(w: World) -> Any:
    return pickle.loads(pickle.dumps(w.asked)) == w.asked  # noqa: S301 -- written a moment ago


@scenario
def signature_is_frozen(w: World) -> Any:
    return attempt(setattr, w.asked, "roles", ())


@scenario
def tensor_format_fields(w: World) -> Any:
    s = w.signature
    scale = s.ScaleFormat(w.single, "tensor")
    made = s.tensor_format("scaled-fp8", w.torch.float8_e4m3fn, scale=scale)
    return [made.format, made.storage_dtype, made.scale == scale, str(made), str(scale), s.TensorFormat(w.half).format]


@scenario
def tensor_format_called_fp8(w: World) -> Any:
    return _accepted(w.signature.tensor_format, "fp8", w.torch.float8_e4m3fn)


@scenario
def tensor_format_scaled_without_scale(w: World) -> Any:
    return _accepted(w.signature.tensor_format, "scaled-fp8", w.torch.float8_e4m3fn)


@scenario
def scale_format_block_shapes(w: World) -> Any:
    make = w.signature.ScaleFormat
    return [
        attempt(make, w.single, "block", block_shape=[1, 32]),
        attempt(make, w.single, "block", (128, 128)),
        attempt(make, w.single, "block", dynamic_block_shape=True),
        attempt(make, w.single, "block"),
        attempt(make, w.single, "block", block_shape=()),
        attempt(make, w.single, "block", block_shape=(0, 3)),
        attempt(make, w.single, "tensor", block_shape=(1, 3)),
        attempt(make, w.single, "channel", dynamic_block_shape=True),
    ]


@scenario
def scale_format_fixed_and_dynamic(w: World) -> Any:
    return _accepted(w.signature.ScaleFormat, w.single, "block", (1, 32), True)


@scenario
def format_signatures_by_dtype(w: World) -> Any:
    make = w.signature.format_signatures
    scale = w.signature.ScaleFormat(w.single, "token")
    return [
        make("x", "dense", {w.half}),
        make(("a", "b"), "dense", [w.half, w.single]),
        make(["x"], "i8", (w.half,), scale=scale),
    ]


@scenario
def format_signatures_equal_one_by_one(w: World) -> Any:
    return w.signature.format_signatures(("a", "b"), "dense", {w.half}) == frozenset({w.asked})


# --- platform -------------------------------------------------------------------------------------------------------


@scenario
def platform_names(w: World) -> Any:
    names = "ArchVersion CapabilityRequirement PlatformInfo Platform current_platform InterconnectInfo"
    return _missing(w.platform, names)


@differs(["prepare_cuda_toolkit_env", "pdl_enabled"], "set-up of the engine's own kernels")
def platform_names_of_the_engine(w: World) -> Any:
    return _missing(w.platform, "prepare_cuda_toolkit_env pdl_enabled")


@scenario
def arch_versions_compare(w: World) -> Any:
    arch = w.platform.ArchVersion
    pairs = [((9, 0), (8, 9)), ((8, 9), (8, 10)), ((9, 0), (9, 0))]
    orders = [[arch(*a) > arch(*b), arch(*a) >= arch(*b), arch(*a) == arch(*b), arch(*a) < arch(*b)] for a, b in pairs]
    return [orders, str(arch(9, 5)), len({arch(9, 0), arch(9, 0)}), repr(arch(9, 0))]


@scenario
def platform_properties(w: World) -> Any:
    names = [name for name in dir(w.platform.PlatformInfo) if name.startswith("is_")]
    devices: list[Any] = [("nvidia", 8, 0), ("nvidia", 8, 9), ("nvidia", 9, 0), ("nvidia", 10, 0), ("nvidia", 12, 0)]
    devices += [("amd", 9, 4), ("amd", 9, 5), ("amd", 12, 0), ("amd", 12, 5), ("ascend", 9, 1), ("cpu", 0, 0)]
    return [
        [d, w.device(*d).arch, w.device(*d).generation_name, {n: getattr(w.device(*d), n) for n in names}]
        for d in devices
    ]


@scenario
def platform_fields(w: World) -> Any:
    return [[f.name for f in fields(w.platform.PlatformInfo)], w.device() == w.device(), len({w.device(), w.device()})]


@scenario
def platform_override_and_get(w: World) -> Any:
    one = w.device("amd", 9, 5)
    w.platform.Platform.override(one)
    return [w.platform.Platform.get() is one, w.platform.current_platform() is one]


@differs("cpu", "a machine without a GPU is a platform")
def platform_without_a_gpu(w: World) -> Any:
    w.platform.Platform.reset()
    return attempt(lambda: w.platform.current_platform().vendor)


@scenario
def capability_met_or_not(w: World) -> Any:
    needs: list[Any] = [
        {},
        {"vendors": {"nvidia"}},
        {"min_arch_version": (9, 0)},
        {"max_arch_version": (9, 0)},
        {"vendors": {"nvidia", "amd"}, "vendor_min_arch_versions": {"nvidia": (9, 0), "amd": (9, 5)}},
        {"required_features": {"f8"}},
    ]
    nvidia = [("nvidia", 8, 9), ("nvidia", 9, 0, "f8"), ("nvidia", 10, 0)]
    devices: list[Any] = [*nvidia, ("amd", 9, 4), ("amd", 9, 5), ("cpu", 0, 0)]
    return [[w.needs(**one).satisfied_by(w.device(*d)) for d in devices] for one in needs]


@scenario
def capability_missing_features(w: World) -> Any:
    need = w.needs(required_features={"f8", "tma"})
    return [
        need.missing_features(w.device("nvidia", 9, 0, "f8")),
        need.missing_features(w.device("nvidia", 9, 0, "f8", "tma")),
    ]


@scenario
def capability_least_arch(w: World) -> Any:
    both = w.needs(vendors={"nvidia", "amd"}, vendor_min_arch_versions={"nvidia": (9, 0), "amd": (9, 5)})
    return [both.min_arch_version_for(v) for v in ("nvidia", "amd", "cpu")] + [
        w.needs(min_arch_version=(8, 0)).min_arch_version_for("cpu")
    ]


@scenario
def capability_floors_for_other_vendors(w: World) -> Any:
    return [
        attempt(w.needs, vendors={"nvidia"}, vendor_min_arch_versions={"amd": (9, 5)}),
        attempt(w.needs, vendor_min_arch_versions={"amd": (9, 5)}),
    ]


@scenario
def capability_two_kinds_of_floors(w: World) -> Any:
    return _accepted(w.needs, min_arch_version=(8, 0), vendors={"amd"}, vendor_min_arch_versions={"amd": (9, 5)})


@scenario
def capability_of_no_vendor(w: World) -> Any:
    return w.needs(vendors=()).satisfied_by(w.device())


@scenario
def capability_hashes(w: World) -> Any:
    return [len({w.needs(vendors={"amd"}), w.needs(vendors={"amd"})}), str(w.needs(vendors={"amd"}))]


# --- plugins --------------------------------------------------------------------------------------------------------


@scenario
def plugin_names(w: World) -> Any:
    functions = "discover_plugins list_plugins disable_plugin enable_plugin reset_plugins PluginInfo"
    constants = [w.plugins.ENTRY_POINT_GROUP, w.plugins.DISABLE_ENV_VAR]
    return [_missing(w.plugins, functions), constants, [f.name for f in fields(w.plugins.PluginInfo)]]


@scenario
def plugin_loads(w: World) -> Any:
    w.install("p", "kernel('p1', 3)\nkernel('p2', 4)")
    found = w.discover()
    return [found, w.names(), [vars(info) for info in w.plugins.list_plugins()]]


@scenario
def plugin_that_registers_nothing(w: World) -> Any:
    w.install("p")
    w.discover()
    return [vars(info) for info in w.plugins.list_plugins()]


@differs(["my-dist"], "a distribution's name is given as names compare, without parsing its METADATA")
def plugin_distribution_with_capitals(w: World) -> Any:
    w.install("p", distribution="My_Dist")
    w.discover()
    return [info.package for info in w.plugins.list_plugins()]


@scenario
def plugins_load_in_alphabetical_order(w: World) -> Any:
    for number, name in enumerate(("c", "a", "b")):
        w.install(name, f"kernel({name!r}, {number})")
    return [w.discover(), [s.name for s in w.kernels.list_kernels("gemm")]]


@scenario
def plugin_discovered_again(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.discover()
    return [w.names(), [info.name for info in w.plugins.list_plugins()]]


@differs([["p"], ["p"]], "discovery is idempotent: every call returns what is loaded")
def plugin_discovered_again_returns(w: World) -> Any:
    w.install("p")
    return [w.discover(), w.discover()]


@differs([["p"], 1, ["p"]], "what a plugin has is what its latest register() registered")
def plugin_forced_again(w: World) -> Any:
    w.install(
        "p", "import sys\nsys.modules[__name__].__dict__.setdefault('runs', []).append(1)\nkernel(f'p{len(runs)}')"
    )
    w.discover()
    return [w.discover(force=True), len(w.names()), [info.name for info in w.plugins.list_plugins()]]


@differs([["p1"]], "the record of what a plugin owns is kept")
def plugin_forced_again_owns(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.discover(force=True)
    return [info.kernel_names for info in w.plugins.list_plugins()]


@differs(["p1"], "a new registry is noticed, and plugins load into it")
def plugin_after_a_registry_reset(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.registry.KernelRegistry.reset()
    w.discover()
    return w.names()


@scenario
def plugin_forced_after_a_registry_reset(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.registry.KernelRegistry.reset()
    w.discover(force=True)
    return w.names()


@scenario
def plugin_disabled_by_the_environment(w: World) -> Any:
    w.install("p", "kernel('p1', 1)")
    w.install("q", "kernel('q1', 2)")
    w.install("r", "kernel('r1', 3)")
    os.environ["TOKENSPEED_KERNEL_DISABLE_PLUGINS"] = " p , r,,"
    return [w.discover(), w.names()]


@differs([], "plugin names compare as distribution names do")
def plugin_disabled_in_other_letters(w: World) -> Any:
    w.install("my-plugin", "kernel('p1', 1)")
    os.environ["TOKENSPEED_KERNEL_DISABLE_PLUGINS"] = "My_Plugin"
    return w.discover()


@scenario
def plugin_disabled_and_enabled(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.plugins.disable_plugin("p")
    found = [w.discover(), w.names()]
    w.plugins.enable_plugin("p")
    return [*found, w.discover(), w.names()]


@differs([[], []], "a disabled plugin serves no call")
def plugin_disabled_once_loaded(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.plugins.disable_plugin("p")
    return [w.names(), [info.name for info in w.plugins.list_plugins()]]


@scenario
def plugins_reset(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.plugins.reset_plugins()
    return [[info.name for info in w.plugins.list_plugins()], w.discover(), w.names()]


@differs([], "a plugin's kernels go with its record: nobody could withdraw them later")
def plugins_reset_and_kernels(w: World) -> Any:
    w.install("p", "kernel('p1')")
    w.discover()
    w.plugins.reset_plugins()
    return w.names()


@differs([], "a reset forgets what is loaded, not what the user wished")
def plugins_reset_and_disabled_ones(w: World) -> Any:
    w.install("p")
    w.plugins.disable_plugin("p")
    w.plugins.reset_plugins()
    return w.discover()


@scenario
def plugin_that_fails(w: World) -> Any:
    w.install("a", "raise ValueError('no')")
    w.install("b", "kernel('b1')")
    found = w.warned(w.discover)
    return [found, w.names(), [info.name for info in w.plugins.list_plugins()]]


@scenario
def plugin_that_fails_on_import(w: World) -> Any:
    w.install("a", top="import a_module_that_nobody_has")
    w.install("b", "kernel('b1')")
    return [w.warned(w.discover), w.names()]


@scenario
def plugin_without_its_function(w: World) -> Any:
    w.install("a", value="{}:absent")
    w.install("b", top="register_ = 3", value="{}:register_")
    w.install("c", "kernel('c1')")
    return [w.warned(w.discover), w.names()]


@differs([], "a plugin registers all or nothing")
def plugin_that_fails_midway(w: World) -> Any:
    w.install("a", "kernel('a1')\nraise ValueError('no')")
    w.warned(w.discover)
    return w.names()


@scenario
def plugin_that_fails_is_tried_again(w: World) -> Any:
    w.install("a", "runs.append(1)\nif len(runs) == 1: raise ValueError('no')\nkernel('a1')", top="runs = []")
    w.warned(w.discover)
    return [w.discover(), w.names()]


@differs([["b"], ["b1"]], "a plugin must not end the host")
def plugin_that_exits(w: World) -> Any:
    w.install("a", "raise SystemExit(3)")
    w.install("b", "kernel('b1')")
    return [w.warned(w.discover)[0], w.names()]


@scenario
def plugin_with_a_malformed_value(w: World) -> Any:
    w.install("a", value="no such : : thing")
    w.install("b", "kernel('b1')")
    return [w.warned(w.discover)[0], w.names()]


@differs([["b"], ["b1"]], "one broken distribution must not hide the others")
def metadata_that_cannot_be_read(w: World) -> Any:
    w.metadata("broken", b"a = \xff\xfe:register")
    w.install("b", "kernel('b1')")
    return [w.warned(w.discover)[0], w.names()]


@scenario
def plugin_of_equal_priority(w: World) -> Any:
    w.kernel("host")
    w.install("p", "kernel('p1')")
    return [w.warned(w.discover), w.names()]


@scenario
def plugin_of_higher_priority(w: World) -> Any:
    w.kernel("host")
    w.install("p", "kernel('p1', 19)")
    return [w.warned(w.discover), w.chosen(None)]


@scenario
def plugin_replaces_a_kernel_by_name(w: World) -> Any:
    w.kernel("host", priority=5)
    w.install("p", "kernel('host', 7)")
    w.discover()
    return [w.kernels.get_by_name("host").priority, w.kernels.get_impl("host") is print]


@differs([True, [["host"]]], "taking a name over is warned about and recorded")
def plugin_replaces_a_kernel_and_says_so(w: World) -> Any:
    w.kernel("host", priority=5)
    w.install("p", "kernel('host', 7)")
    return [w.warned(w.discover)[1], [info.kernel_names for info in w.plugins.list_plugins()]]


@differs(7, "rank decides, not order of import: the host's is kept aside, with a warning")
def host_registers_late_under_a_plugins_name(w: World) -> Any:
    w.install("p", "kernel('late', 7)")
    w.discover()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w.kernel("late", priority=5)
    return w.kernels.get_by_name("late").priority


@differs([], "which of them is meant has to be said")
def two_distributions_with_one_plugin_name(w: World) -> Any:
    for distribution in ("one", "two"):
        w.install("p", distribution=distribution)
    return w.warned(w.discover)[0]


@scenario
def kernels_registered_while_a_plugin_is_imported(w: World) -> Any:
    w.install("p", top="kernel('p1')")
    w.discover()
    return [w.names(), [info.kernel_names for info in w.plugins.list_plugins()]]


@scenario
def command_line_codes(w: World) -> Any:
    w.install("p", "kernel('p1')")
    with w.only_of_this_scenario():
        return [_command(w, line)[0] for line in (["list"], ["info", "p"], ["info", "q"], ["nonsense"], [])]


@scenario
def command_line_names_kernels(w: World) -> Any:
    w.install("p", "kernel('p1')")
    with w.only_of_this_scenario():
        return [all(part in _command(w, line)[1] for part in ("p", "1.5", "p1")) for line in (["list"], ["info", "p"])]


@differs([1, 1], "a failure stays visible: list shows it, and exits with 1")
def command_line_after_a_failure(w: World) -> Any:
    w.install("p", "raise ValueError('no')")
    with w.only_of_this_scenario():
        return [_command(w, line)[0] for line in (["list"], ["info", "p"])]


def _command(w: World, line: list[str]) -> tuple[Any, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = attempt(w.cli.main, line)
    return code, output.getvalue()


# --- the two listings of the plugin document ------------------------------------------------------------------------


@scenario
def document_plugin(w: World) -> Any:
    body = """
    @register_kernel(
        "attention", "decode", solution="my_custom",
        signatures=format_signatures(("q", "k_cache", "v_cache"), "dense", {torch.bfloat16}),
        capability=CapabilityRequirement(vendors=frozenset({"nvidia"}), min_arch_version=ArchVersion(9, 0)),
        priority=19,
    )
    def my_custom_attn_decode(q, kv_cache, page_table, seq_lens, **kwargs):
        return "decoded"
    """
    top = (
        "import torch\nfrom tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement\n"
        "from tokenspeed_kernel.signature import format_signatures\n"
    )
    w.install("my_plugin", body, top=top, distribution="my-kernels-plugin")
    dense = w.signature.dense_tensor_format(w.half)
    asked = w.signature.format_signature(q=dense, k_cache=dense, v_cache=dense)
    found = w.discover()
    selected = attempt(lambda: w.selection.select_kernel("attention", "decode", asked)(1, 2, 3, 4))
    older = w.device("nvidia", 8, 0)
    refused = attempt(w.selection.select_kernel, "attention", "decode", asked, platform=older)
    return [found, [vars(info) for info in w.plugins.list_plugins()], selected, refused]


@scenario
def document_direct_registration(w: World) -> Any:
    signatures = w.signature.format_signatures(("a", "b"), "dense", {w.half})

    register_kernel = w.registry.register_kernel

    @register_kernel("gemm", "mm", solution="experiment", signatures=signatures, priority=15)  # type: ignore[untyped-decorator]
    def my_experimental_gemm(a: int, b: int, **kwargs: Any) -> int:
        return a * b

    return [w.names(), w.chosen(), w.selection.select_kernel("gemm", "mm", w.asked)(3, 4), my_experimental_gemm(2, 3)]


# --- running and comparing ------------------------------------------------------------------------------------------


def _run(folder: Path, whole: bool, output: Path) -> None:
    """Run every scenario with one implementation and write the results."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        world = World(folder, whole=whole, scratch=Path(scratch))
        for name, function in SCENARIOS.items():
            world.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name] = attempt(function, world)
    output.write_text(json.dumps(results), encoding="utf-8")


def _results(folder: Path, which: str) -> dict[str, Any]:
    """Return every scenario's result with the implementation in ``folder``, from a process of its own."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(_ENVIRONMENT)}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "results.json"
        command = [sys.executable, __file__, "--run", which, "--peer", str(folder.resolve()), "--json", str(output)]
        subprocess.run(command, check=True, env=environ)
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Compare, print a table, and return 0 if nothing differs but what is meant to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="the folder that the published wheel is unpacked in")
    parser.add_argument("--json", type=Path, help="write every scenario's state and results there")
    parser.add_argument("--run", choices=("whole", "modules"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _run(options.peer, options.run == "whole", options.json)
        return 0
    here, there = _results(SOURCE, "whole"), _results(options.peer, "modules")
    table = {name: _compare(name, here[name], there[name]) for name in SCENARIOS}
    width = max(map(len, table))
    for name, (state, detail) in table.items():
        print(f"{name:<{width}}  {state:<12} {detail}".rstrip())
    states = [state for state, _ in table.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in ("same", "intended", "UNEXPECTED")))
    if options.json is not None:
        rows = {n: {"state": table[n][0], "here": here[n], "published": there[n]} for n in SCENARIOS}
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if "UNEXPECTED" in states else 0


def _compare(name: str, here: Any, there: Any) -> tuple[str, str]:
    difference = DIFFERENCES.get(name)
    both = f"here {json.dumps(here)}, published {json.dumps(there)}"
    if difference is None:
        return ("same", "") if here == there else ("UNEXPECTED", both)
    if here == there:
        return "UNEXPECTED", f"said to differ, but both give {json.dumps(here)}"
    if here != difference.here:
        return "UNEXPECTED", f"{both}, said to be {json.dumps(difference.here)} here"
    return "intended", f"{both}: {difference.reason}"


if __name__ == "__main__":
    sys.exit(main())
