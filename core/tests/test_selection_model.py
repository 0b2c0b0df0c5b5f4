# SPDX-License-Identifier: Apache-2.0
"""selection, held to a plain, slow model of its rules: random kernels, machines, requests and sequences of changes."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tokenspeed_kernel import overrides, refresh, selection
from tokenspeed_kernel.platform import ArchVersion, CapabilityRequirement, Platform, PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, registering_owner
from tokenspeed_kernel.rules import Request, trip
from tokenspeed_kernel.selection import (
    NoKernelFoundError,
    SelectionOracle,
    SelectionPolicy,
    SelectionStrategy,
    decide,
    explain_selection,
    kernel_override,
    register_oracle,
    select_kernel,
    set_selection_policy,
)
from tokenspeed_kernel.signature import dense_tensor_format, format_signature
from tokenspeed_kernel.traits import trait_mismatch

# --- what is drawn from: small pools, so that kernels and requests meet ----------------------------------------------

NAMES = ("a", "b", "c", "d")
SOLUTIONS = ("s", "t", "a", "reference")  # one is also a kernel's name: an override of it means both
OPERATORS = (("quant", "op"), ("quant", "other"), ("moe", "op"))
AN_OPERATOR = st.sampled_from((*4 * OPERATORS[:1], *OPERATORS))  # mostly the first, so that kernels have rivals
OWNERS = (None, "plugin@one", "plugin@two")
FEATURES = ("paged", "sink")
SELECTION_VARIABLES = ("TOKENSPEED_KERNEL_SELECTION", "LIBREYOLO_KERNELS", "LIBREYOLO_QUANT_KERNELS")
SINGLE, HALF = dense_tensor_format("float32"), dense_tensor_format("float16")  # type: ignore[arg-type]
SIGNATURES = (format_signature(x=SINGLE), format_signature(x=HALF), format_signature(x=HALF, y=SINGLE))


def _device(vendor: str, major: int, minor: int, *features: str) -> PlatformInfo:
    return PlatformInfo(vendor, ArchVersion(major, minor), vendor, 1, 0, 0.0, 0, 0, 0, frozenset(features))


DEVICES = (
    _device("nvidia", 8, 0),
    _device("nvidia", 9, 0),
    _device("nvidia", 9, 0, "f8"),
    _device("nvidia", 10, 0, "f8", "f4"),
    _device("amd", 9, 0, "f8"),  # an NVIDIA device has the same architecture number
    _device("amd", 9, 5, "f8"),
    _device("cpu", 0, 0),
)


def _wide(m: int, n: int, k: int) -> bool:
    return m > 8


def _deep(m: int, n: int, k: int) -> bool:
    return k > 8


def _broken(m: int, n: int, k: int) -> bool:
    raise ArithmeticError


def _some(pool: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw none, one or several entries of a dict, for each one makes a match rarer."""
    one = st.sampled_from(sorted(pool)).flatmap(lambda name: st.fixed_dictionaries({name: pool[name]}))
    return st.one_of(st.just({}), one, st.fixed_dictionaries({}, optional=dict(pool)))


def _sets(*values: Any) -> st.SearchStrategy[frozenset[Any]]:
    return st.frozensets(st.sampled_from(values), min_size=1, max_size=2)


DECLARED_TRAITS = _some(
    {
        "causal": _sets(True, False),
        "count": _sets(1, 2),
        "head_dim": _sets(64, 128, None),
        "m_align": _sets(8, 3),
        "m_min": _sets(8, 12),
        "m_max": _sets(8, 12),
        "k_max": _sets(8, 16),
        "ispp_alignment": _sets(64, 48),
        "hidden_alignment": _sets(64),
        "mnk_problem_filter": _sets(_wide, _deep, _broken),
    }
)
ASKED: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.sampled_from((True, False, 1)),
    "count": st.sampled_from((1, 1.0, True, 2)),
    "head_dim": st.sampled_from((64, 128, None, [64], {64}, frozenset({64, 128}), frozenset())),
    "m": st.sampled_from((8, 9, 24, True, None)),
    "n": st.just(8),
    "k": st.sampled_from((8, 9)),
    "ispp": st.sampled_from((64, 96, 100)),
    "hidden": st.sampled_from((64, 100)),
    "unheard_of": st.sampled_from((1, "x")),
}
ASKED_TRAITS = _some(ASKED)
OVERRIDES = st.sampled_from((*NAMES, *SOLUTIONS, "nothing", ""))
ARCHS = st.sampled_from([device.arch_version for device in DEVICES])
VENDORS = ("nvidia", "amd", "cpu")


@st.composite
def _capabilities(draw: st.DrawFn) -> CapabilityRequirement:
    kind = draw(st.sampled_from(("none", "none", "one range", "by vendor")))
    features = draw(st.sampled_from((frozenset[str](), frozenset({"f8"}), frozenset({"f8", "f4"}))))
    vendors = draw(st.frozensets(st.sampled_from(VENDORS), min_size=1))
    if kind == "by vendor":
        least = {vendor: draw(ARCHS) for vendor in vendors}
        return CapabilityRequirement(vendors=vendors, vendor_min_arch_versions=least, required_features=features)
    if kind == "one range":
        low, high = draw(st.none() | ARCHS), draw(st.none() | ARCHS)
        only = draw(st.sampled_from((None, vendors)))
        return CapabilityRequirement(low, high, features, only)
    return CapabilityRequirement()


@dataclass(frozen=True)
class Kernel:
    """What a kernel declares, as the test knows it."""

    name: str
    operator: tuple[str, str]
    solution: str
    priority: int
    capability: CapabilityRequirement
    signatures: frozenset[Any]
    features: frozenset[str]
    traits: Mapping[str, frozenset[Any]]
    asks_whether_present: bool
    probe: object
    """What the probe answers; "raises" if it raises."""
    imports: bool
    """Whether its implementation can be imported."""


_RESTRICTED_KERNELS = st.builds(
    Kernel,
    name=st.sampled_from(NAMES),
    operator=AN_OPERATOR,
    solution=st.sampled_from(SOLUTIONS),
    priority=st.sampled_from((0, 4, 10, 10, 19)),
    capability=_capabilities(),
    signatures=st.sampled_from((frozenset(), frozenset(), frozenset(SIGNATURES[:2]), frozenset(SIGNATURES[1:]))),
    features=st.sampled_from((frozenset(FEATURES), frozenset(FEATURES), frozenset({"paged"}), frozenset())),
    traits=DECLARED_TRAITS,
    asks_whether_present=st.sampled_from((True, True, False)),
    probe=st.sampled_from((*9 * (True,), "no compiler", False, "raises")),
    imports=st.sampled_from((*9 * (True,), False)),
)


RESTRICTIONS = (
    "capability",
    "signatures",
    "features",
    "probe",
    "imports",
    *2 * ("traits",),
    *3 * ("asks_whether_present",),
)


def _free(kernel: Kernel) -> Kernel:
    """Return a kernel that serves whatever is asked."""
    return Kernel(
        kernel.name,
        kernel.operator,
        kernel.solution,
        kernel.priority,
        capability=CapabilityRequirement(),
        signatures=frozenset(),
        features=frozenset(FEATURES),
        traits={},
        asks_whether_present=False,
        probe=True,
        imports=True,
    )


@st.composite
def _open_kernels(draw: st.DrawFn) -> Kernel:
    """Draw a kernel that is restricted in one respect at most, so that rank often decides."""
    drawn = draw(_RESTRICTED_KERNELS)
    respect = draw(st.none() | st.sampled_from(RESTRICTIONS))
    return _free(drawn) if respect is None else replace(_free(drawn), **{respect: getattr(drawn, respect)})


KERNELS = _RESTRICTED_KERNELS | _open_kernels() | _open_kernels()
FOUR = st.lists(KERNELS, min_size=4, max_size=4, unique_by=lambda kernel: kernel.name)


@dataclass(frozen=True)
class Asked:
    """The arguments of one selection."""

    operator: tuple[str, str]
    signature: Any
    features: frozenset[str] | None
    platform: PlatformInfo | None
    traits: dict[str, Any] | None
    solution: str | None
    override: str | None


_FULL_REQUESTS = st.builds(
    Asked,
    operator=AN_OPERATOR,
    signature=st.sampled_from((None, None, None, *SIGNATURES)),
    features=st.sampled_from((None, None, frozenset[str](), frozenset({"paged"}), frozenset(FEATURES))),
    platform=st.sampled_from((*7 * (None,), *DEVICES)),
    traits=st.none() | ASKED_TRAITS,
    solution=st.sampled_from((*8 * (None,), *SOLUTIONS)),
    override=st.sampled_from((*8 * (None,), *NAMES, *SOLUTIONS, "nothing", "")),
)
REQUESTS = _FULL_REQUESTS | st.builds(Asked, AN_OPERATOR, *map(st.just, (None, None, None, None, None, None)))


VARIED = ("values", "names", "machine", "machine", "traits", *(argument.name for argument in fields(Asked)))


@st.composite
def _variations(draw: st.DrawFn, asked: Asked, what: tuple[str, ...] = VARIED) -> Asked:
    """Draw a request that differs from another in one argument: what is remembered of one must not serve the other."""
    changed = draw(st.sampled_from(what))
    traits = asked.traits or {}
    if changed == "values":
        return replace(asked, traits={name: _twin(value) for name, value in traits.items()})
    if changed == "machine":
        return replace(asked, platform=draw(st.sampled_from(DEVICES)))
    if changed == "names":
        names = draw(st.permutations(sorted(ASKED)))
        return replace(asked, traits=dict(zip(names, traits.values(), strict=False)))
    return replace(asked, **{changed: getattr(draw(_FULL_REQUESTS), changed)})


def _twin(value: Any) -> Any:
    """Return a value that is equal and hashes alike, but is of another type, where there is one."""
    return (1 if isinstance(value, bool) else True) if isinstance(value, int) and value == 1 else value


# --- the model: the rules as the documentation has them, one after the other, with nothing remembered ----------------


@dataclass(eq=False)
class Entry:
    """One registration."""

    kernel: Kernel
    owner: str | None
    order: int
    tripped: bool = False


@dataclass
class Model:
    """All that a choice depends on."""

    platform: PlatformInfo
    stacks: dict[str, list[Entry]] = field(default_factory=dict)
    """By name; the last is active."""
    orders: int = 0
    present: dict[str, object] = field(default_factory=dict)
    """What each kernel's predicate answers; "raises" if it raises."""
    oracles: list[tuple[str, str | None, dict[str, object]]] = field(default_factory=list)
    """Family, owner and scores by kernel, oldest first."""
    setting: str | None = None
    variables: dict[tuple[str, str], str] = field(default_factory=dict)
    contexts: list[tuple[tuple[str, str], str]] = field(default_factory=list)

    # What changes it.

    def register(self, kernel: Kernel, owner: str | None) -> None:
        """Put a kernel on top of its name; the host's goes below those of plugins, its owner's older one goes."""
        self.orders += 1
        new = Entry(kernel, owner, self.orders)
        others = [entry for entry in self.stacks.get(kernel.name, []) if entry.owner != owner]
        self.stacks[kernel.name] = [new, *others] if owner is None else [*others, new]

    def unload(self, owner: str) -> None:
        """Withdraw what a plugin registered."""
        for name, stack in list(self.stacks.items()):
            self.stacks[name] = [entry for entry in stack if entry.owner != owner]
        self.stacks = {name: stack for name, stack in self.stacks.items() if stack}
        self.oracles = [oracle for oracle in self.oracles if oracle[1] != owner]

    def set_oracle(self, family: str, owner: str | None, scores: dict[str, object]) -> None:
        """Make an oracle the family's; it replaces its owner's older one."""
        self.oracles = [oracle for oracle in self.oracles if oracle[:2] != (family, owner)]
        self.oracles.append((family, owner, scores))

    # What is chosen.

    def candidates(self, operator: tuple[str, str]) -> list[Entry]:
        """Return the active kernels of an operator."""
        return [stack[-1] for stack in self.stacks.values() if stack[-1].kernel.operator == operator]

    def forced(self, asked: Asked, contexts: list[tuple[tuple[str, str], str]]) -> str | None:
        """Return what the strongest override names. Raises LookupError if nothing has the name."""
        known = {n for entry in self.candidates(asked.operator) for n in (entry.kernel.name, entry.kernel.solution)}
        variable = self.variables.get(asked.operator, "").strip()
        if variable in known:
            return variable
        context = next((name for operator, name in reversed(contexts) if operator == asked.operator), None)
        wanted = context or asked.override
        if wanted and wanted not in known:
            raise LookupError
        return wanted or None

    def refusal(self, entry: Entry, asked: Asked, forced: str | None) -> str | None:
        """Return the first stage that refuses a kernel, or None."""
        kernel, platform = entry.kernel, asked.platform or self.platform
        if entry.tripped:
            return "enabled"
        if self.setting is not None and forced is None and kernel.solution not in (self.setting, "reference"):
            return "enabled"
        if not _is_capable(kernel.capability, platform):
            return "capable"
        if forced is not None and forced not in (kernel.name, kernel.solution):
            return "matching"
        if asked.solution is not None and forced is None and kernel.solution != asked.solution:
            return "matching"
        if not (asked.features or frozenset()) <= kernel.features:
            return "matching"
        if forced is None:
            if asked.signature is not None and kernel.signatures and asked.signature not in kernel.signatures:
                return "matching"
            if asked.traits and not _serves(kernel.traits, asked.traits):
                return "matching"
        if kernel.asks_whether_present and self.present[kernel.name] is not True:
            return "available"
        return None

    def rank(self, entries: list[Entry], asked: Asked) -> list[Entry]:
        """Sort by oracle score, then priority, then newest first."""
        oracles = [scores for family, _, scores in self.oracles if family == asked.operator[0]]

        def score(entry: Entry) -> tuple[int, int, int]:
            given = oracles[-1].get(entry.kernel.name, NEUTRAL) if oracles else NEUTRAL
            is_score = isinstance(given, int) and not isinstance(given, bool)
            return (given if is_score else NEUTRAL), entry.kernel.priority, entry.order  # type: ignore[return-value]

        return sorted(entries, key=score, reverse=True)

    def decide(self, asked: Asked, forced: str | None) -> tuple[list[Entry], dict[str, str]]:
        """Return who may run, best first, and the stage that refused each other one."""
        stages = {entry.kernel.name: self.refusal(entry, asked, forced) for entry in self.candidates(asked.operator)}
        accepted = [entry for entry in self.candidates(asked.operator) if stages[entry.kernel.name] is None]
        return self.rank(accepted, asked), {name: stage for name, stage in stages.items() if stage is not None}

    def winner(self, asked: Asked, contexts: list[tuple[tuple[str, str], str]]) -> str | None:
        """Return the kernel that is selected, or None; one whose import fails on the way is off from then on."""
        try:
            ranked, _ = self.decide(asked, self.forced(asked, contexts))
        except LookupError:
            return None
        for entry in ranked:
            if entry.kernel.probe is True:
                if entry.kernel.imports:
                    return entry.kernel.name
                entry.tripped = True
        return None


NEUTRAL = SelectionOracle().adjust(KernelSpec("x", "f", "m"), DEVICES[0], None)


def _is_capable(need: CapabilityRequirement, platform: PlatformInfo) -> bool:
    if need.vendors is not None and platform.vendor not in need.vendors:
        return False
    arch = (platform.arch_version.major, platform.arch_version.minor)
    floors = need.vendor_min_arch_versions
    least = floors[platform.vendor] if floors else need.min_arch_version
    most = need.max_arch_version
    if least is not None and arch < (least.major, least.minor):
        return False
    if most is not None and arch > (most.major, most.minor):
        return False
    return all(feature in platform.sm_features for feature in need.required_features)


def _serves(declared: Mapping[str, frozenset[Any]], asked: dict[str, Any]) -> bool:
    """Return whether what a kernel declares of traits covers what is asked, which is something."""
    for name, value in asked.items():
        wanted = value if isinstance(value, (set, frozenset)) else [value]
        if name in declared and not all(any(_same(one, other) for other in declared[name]) for one in wanted):
            return False
    if any(name in declared and name not in asked for name in ("batch", "m", "n", "k", "ispp", "hidden")):
        return False
    for name in ("ispp", "hidden"):
        bounds = declared.get(f"{name}_alignment")
        if bounds and name in asked:
            size = asked[name]
            if type(size) is not int or not any(size % bound == 0 for bound in bounds):
                return False
    for suffix, is_met in (("_align", _is_multiple), ("_min", _is_at_least), ("_max", _is_at_most)):
        for name, bounds in declared.items():
            if name.endswith(suffix):
                size = asked.get(name[: -len(suffix)])
                if type(size) is not int or not any(is_met(size, bound) for bound in bounds):
                    return False
    filters = declared.get("mnk_problem_filter")
    if filters is not None:
        sizes = [asked.get(name) for name in ("m", "n", "k")]
        if not all(isinstance(size, int) for size in sizes):
            return False
        return any(accepts is not _broken and accepts(*sizes) for accepts in filters)
    return True


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_multiple(size: int, bound: int) -> bool:
    return size % bound == 0


def _is_at_least(size: int, bound: int) -> bool:
    return size >= bound


def _is_at_most(size: int, bound: int) -> bool:
    return size <= bound


# --- the machine: do the same to both, then compare ------------------------------------------------------------------


class _Scores(SelectionOracle):
    """Scores by kernel name, some of them no scores."""

    def __init__(self, scores: dict[str, object]) -> None:
        self.scores = scores

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: dict[str, Any] | None) -> int:
        score = self.scores.get(spec.name, NEUTRAL)
        if score == "raises":
            raise ArithmeticError
        return score  # type: ignore[return-value]


def _answering(answer: Callable[[], object]) -> Callable[[], object]:
    def ask() -> object:
        given = answer()
        if given == "raises":
            raise ArithmeticError
        return given

    return ask


def _owned(owner: str | None, action: Callable[[], None]) -> None:
    token = registering_owner.set(owner)
    try:
        action()
    finally:
        registering_owner.reset(token)


class SelectionMachine(RuleBasedStateMachine):
    """Changes the world and the model alike; after each change every request must be answered as the model does."""

    def __init__(self) -> None:
        super().__init__()
        _forget()
        Platform.override(DEVICES[1])
        self.model = Model(DEVICES[1], present=dict.fromkeys(NAMES, True))
        self.requests: list[Asked] = []
        self.open = ExitStack()
        self.quiet = warnings.catch_warnings()  # what is warned about is other tests' business
        self.quiet.__enter__()
        warnings.simplefilter("ignore")

    def teardown(self) -> None:
        """Leave nothing behind."""
        self.quiet.__exit__(None, None, None)
        self.open.close()
        _forget()

    @initialize(kernels=FOUR, asked=REQUESTS, data=st.data())
    def begin(self, kernels: list[Kernel], asked: Asked, data: st.DataObject) -> None:
        """Start with kernels of the host, and the requests that are made again after every change."""
        self.requests = [asked, *(data.draw(_variations(asked)) for _ in range(3))]
        for kernel in kernels:
            self.register(kernel, None)

    @rule(kernel=KERNELS, owner=st.sampled_from(OWNERS))
    def register(self, kernel: Kernel, owner: str | None) -> None:
        """Register a kernel, be its name taken or not."""
        name = kernel.name
        predicate = _answering(lambda: self.model.present[name]) if kernel.asks_whether_present else None
        spec = KernelSpec(
            name,
            *kernel.operator,
            features=kernel.features,
            solution=kernel.solution,
            capability=kernel.capability,
            format_signatures=kernel.signatures,
            traits=kernel.traits,
            priority=kernel.priority,
            predicate=predicate,
            probe=None if kernel.probe is True else _answering(lambda: kernel.probe),
        )
        implementation = (lambda: kernel) if kernel.imports else "a_module_that_nobody_has:kernel"
        _owned(owner, lambda: KernelRegistry.get().register(spec, implementation))
        self.model.register(kernel, owner)

    @precondition(lambda self: self.model.stacks)
    @rule(kernel=_open_kernels(), data=st.data())
    def take_name(self, kernel: Kernel, data: st.DataObject) -> None:
        """Have everybody register a kernel under one name, in any order."""
        name = data.draw(st.sampled_from(sorted(self.model.stacks)))
        for owner in data.draw(st.permutations(OWNERS)):
            self.register(replace(kernel, name=name, priority=data.draw(st.sampled_from((4, 10, 19)))), owner)

    @rule(owner=st.sampled_from(OWNERS[1:]))
    def unload(self, owner: str) -> None:
        """Withdraw everything that a plugin registered."""
        registry = KernelRegistry.get()
        registry.remove(registry.owned_by(owner))
        selection.withdraw_oracles(owner)
        self.model.unload(owner)

    @precondition(lambda self: self.model.stacks)
    @rule(data=st.data())
    def remove_one(self, data: st.DataObject) -> None:
        """Withdraw one active kernel; what it displaced is back."""
        name = data.draw(st.sampled_from(sorted(self.model.stacks)))
        registry = KernelRegistry.get()
        registry.remove(r for r in [registry.registration(name)] if r is not None)
        self.model.stacks[name].pop()
        if not self.model.stacks[name]:
            del self.model.stacks[name]

    @precondition(lambda self: any(not stack[-1].tripped for stack in self.model.stacks.values()))
    @rule(data=st.data())
    def trip(self, data: st.DataObject) -> None:
        """Switch an active kernel off, as after a failure."""
        name = data.draw(st.sampled_from(sorted(self.model.stacks)))
        registration = KernelRegistry.get().registration(name)
        assert registration is not None
        trip(KernelRegistry.get(), registration, ArithmeticError())
        self.model.stacks[name][-1].tripped = True

    @rule(kernels=st.just([]) | FOUR)
    def new_registry(self, kernels: list[Kernel]) -> None:
        """Drop every kernel and register others; oracles stay."""
        KernelRegistry.reset()
        self.model.stacks.clear()
        for kernel in kernels:
            self.register(kernel, None)

    @rule(asked=REQUESTS, data=st.data())
    def request(self, asked: Asked, data: st.DataObject) -> None:
        """Make other requests from now on."""
        self.requests = [asked, *(data.draw(_variations(asked)) for _ in range(3))]

    @rule(
        family=st.sampled_from(("quant", "moe")),
        owner=st.sampled_from(OWNERS),
        scores=st.dictionaries(
            st.sampled_from(NAMES), st.sampled_from((0, 5, 15, 19, True, True, None, "raises", 2.5))
        ),
    )
    def oracle(self, family: str, owner: str | None, scores: dict[str, object]) -> None:
        """Rank a family by an oracle, which may be faulty."""
        _owned(owner, lambda: register_oracle(family, _Scores(scores)))
        self.model.set_oracle(family, owner, scores)

    @precondition(lambda self: any(stack[-1].kernel.asks_whether_present for stack in self.model.stacks.values()))
    @rule(data=st.data(), answer=st.sampled_from((False, "no package", 1, "raises")), by_registering=st.booleans())
    def presence(self, data: st.DataObject, answer: object, by_registering: bool) -> None:
        """Change what a predicate answers; a refresh or any registration has it asked again."""
        asking = [name for name, stack in self.model.stacks.items() if stack[-1].kernel.asks_whether_present]
        name = data.draw(st.sampled_from(sorted(asking)))
        answer = answer if self.model.present[name] is True else True
        self.model.present[name] = answer
        if by_registering:
            KernelRegistry.get().register(KernelSpec("elsewhere", "elsewhere", "op"), print)
        else:
            refresh()

    @rule(variable=st.sampled_from(SELECTION_VARIABLES), value=st.sampled_from((*4 * ("auto",), "off", "s", "t")))
    def setting(self, variable: str, value: str) -> None:
        """Set the selection setting by one of its variables."""
        for name in SELECTION_VARIABLES:
            os.environ.pop(name, None)
        os.environ[variable] = value
        refresh()
        self.model.setting = {"auto": None, "off": "reference"}.get(value, value)

    @rule(operator=AN_OPERATOR, value=st.sampled_from((None, None, *NAMES, *NAMES, *SOLUTIONS, "nothing", "")))
    def variable(self, operator: tuple[str, str], value: str | None) -> None:
        """Set or unset an override variable; a selection reads it without a refresh."""
        name = f"TOKENSPEED_KERNEL_OVERRIDE_{'_'.join(operator).upper()}"
        if value is None:
            os.environ.pop(name, None)
            self.model.variables.pop(operator, None)
        else:
            os.environ[name] = self.model.variables[operator] = f" {value}"

    @precondition(lambda self: len(self.model.contexts) < 3)
    @rule(operator=AN_OPERATOR, value=OVERRIDES)
    def enter(self, operator: tuple[str, str], value: str) -> None:
        """Open an override context."""
        self.open.enter_context(kernel_override(*operator, value))
        self.model.contexts.append((operator, value))

    @precondition(lambda self: self.model.contexts)
    @rule()
    def leave(self) -> None:
        """Leave all override contexts."""
        self.open.close()
        self.model.contexts.clear()

    @rule(device=st.sampled_from(DEVICES))
    def platform(self, device: PlatformInfo) -> None:
        """Select for another machine from now on."""
        Platform.override(device)
        self.model.platform = device

    @rule(strategy=st.sampled_from(SelectionStrategy))
    def policy(self, strategy: SelectionStrategy) -> None:
        """Set a policy; without inputs there is nothing to measure, so it decides nothing."""
        set_selection_policy(SelectionPolicy(strategy))

    @invariant()
    def answers_as_the_model_does(self) -> None:
        """Every request: the same winner, twice, in this thread and another; the same ranking; the same refusals."""
        for asked in self.requests:
            winner = self.model.winner(asked, self.model.contexts)
            assert _selected(asked) == winner
            assert _selected(asked) == winner
            self._compare_decision(asked)
            self._compare_explanation(asked)
        for asked in self.requests[:1]:
            assert _selected_in_another_thread(asked) == self.model.winner(asked, [])

    def _compare_decision(self, asked: Asked) -> None:
        try:
            forced = self.model.forced(asked, self.model.contexts)
        except LookupError:
            return
        ranked, refused = self.model.decide(asked, forced)
        family, mode = asked.operator
        request = Request(
            family=family,
            mode=mode,
            platform=asked.platform or Platform.get(),
            signature=asked.signature,
            features=asked.features or frozenset(),
            traits=asked.traits or {},
            solution=asked.solution,
            forced=forced,
        )
        decision = decide(KernelRegistry.get(), request)
        assert [r.spec.name for r in decision.ranked] == [entry.kernel.name for entry in ranked]
        assert {reason.kernel: reason.stage for reason in decision.refused} == refused
        assert sorted(r.spec.name for r in decision.others) == sorted(refused)

    def _compare_explanation(self, asked: Asked) -> None:
        asked = replace(asked, override=None)  # an explanation has no such argument
        try:
            ranked, refused = self.model.decide(asked, self.model.forced(asked, self.model.contexts))
        except LookupError:
            assert _explained(asked) is None
            return
        expected = dict(refused)
        chosen = next((entry.kernel.name for entry in ranked if entry.kernel.probe is True), None)
        for entry in ranked:
            expected[entry.kernel.name] = "rank" if entry.kernel.probe is True else "buildable"
        if chosen is not None:
            expected[chosen] = "chosen"
        assert _explained(asked) == (chosen, expected)


def _forget() -> None:
    for name in list(os.environ):
        if name.startswith(("TOKENSPEED_KERNEL_", "LIBREYOLO_")):
            del os.environ[name]
    KernelRegistry.reset()
    selection._oracles.clear()
    overrides._said.clear()
    set_selection_policy(SelectionPolicy())
    refresh()


def _selected(asked: Asked) -> str | None:
    arguments = {name: value for name, value in vars(asked).items() if name not in ("operator", "signature")}
    try:
        return select_kernel(*asked.operator, asked.signature, **arguments).name
    except NoKernelFoundError:
        return None


def _explained(asked: Asked) -> tuple[str | None, dict[str, str]] | None:
    """Return whom the explanation names as the winner, and for each kernel its stage or "chosen"."""
    omitted = ("operator", "signature", "override")
    arguments = {name: value for name, value in vars(asked).items() if name not in omitted}
    try:
        head, *lines = explain_selection(*asked.operator, asked.signature, **arguments).splitlines()
    except NoKernelFoundError:
        return None
    winner = head.rpartition(": ")[2]
    words = [line.split() for line in lines if not line.startswith("  nothing is registered")]
    return (None if winner == "no kernel" else winner), {name: stage.rstrip(":") for name, _, _, stage, *_ in words}


def _selected_in_another_thread(asked: Asked) -> str | None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_selected(asked)))
    thread.start()
    thread.join()
    return found[0]


def _settings(examples: int) -> hypothesis_settings:
    return hypothesis_settings(
        derandomize=True, deadline=None, database=None, max_examples=examples, stateful_step_count=20
    )


def test_selection_follows_the_model() -> None:
    """Whatever is registered, withdrawn, switched off or overridden in whatever order, the rules alone decide."""
    run_state_machine_as_test(SelectionMachine, settings=_settings(45))


@_settings(90)
@given(kernels=FOUR, asked=REQUESTS, devices=st.permutations(DEVICES), data=st.data())
def test_requests_in_a_row_follow_the_model(
    kernels: list[Kernel], asked: Asked, devices: list[PlatformInfo], data: st.DataObject
) -> None:
    """A request is answered as if it were the first, however little the one before it, or its machine, differed."""
    requests = [asked, *(data.draw(_variations(asked)) for _ in range(4))]
    _answer_in_a_row([replace(kernel, operator=asked.operator) for kernel in kernels], requests, devices[:2])


@_settings(120)
@given(kernel=_RESTRICTED_KERNELS, fallback=_RESTRICTED_KERNELS, data=st.data())
def test_traits_in_a_row_follow_the_model(kernel: Kernel, fallback: Kernel, data: st.DataObject) -> None:
    """Nor does a request answer for one whose traits have equal values of another type, or under other names."""
    kernels = [
        replace(_free(fallback), name="b", operator=OPERATORS[0], priority=4),
        replace(_free(kernel), name="a", operator=OPERATORS[0], priority=10, traits=kernel.traits),
    ]
    bounded = {name.rpartition("_")[0] or name for name in kernel.traits} | set(kernel.traits)
    pool = {name: ASKED[name] for name in sorted(bounded) if name in ASKED}
    asked = Asked(OPERATORS[0], None, None, None, data.draw(st.fixed_dictionaries(pool)), None, None)
    requests = [asked, *(data.draw(_variations(asked, ("values", "names"))) for _ in range(3))]
    _answer_in_a_row(kernels, requests, DEVICES[:1])


def _answer_in_a_row(kernels: list[Kernel], requests: list[Asked], devices: Iterable[PlatformInfo]) -> None:
    machine = SelectionMachine()
    try:
        machine.requests = requests
        for kernel in kernels:
            machine.register(kernel, None)
        for device in devices:
            machine.platform(device)
            machine.answers_as_the_model_does()
    finally:
        machine.teardown()


@_settings(800)
@given(declared=DECLARED_TRAITS, asked=ASKED_TRAITS)
@example(declared={"m_max": frozenset({8})}, asked={"m": True})
def test_traits_follow_the_model(declared: dict[str, frozenset[Any]], asked: dict[str, Any]) -> None:
    """Each kind of trait alone and beside others: what is asked is served or refused as the model does."""
    spec = KernelSpec("a", "quant", "op", traits=declared)
    assert (trait_mismatch(spec, asked) is None) == (not asked or _serves(declared, asked))
