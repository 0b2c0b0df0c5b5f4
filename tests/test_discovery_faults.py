# SPDX-License-Identifier: Apache-2.0
"""Every fault of ``discovery_cases``, in a fresh interpreter: counted, and none may harm the host or the innocent."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from discovery_cases import CASES, Case
from environments import Environment, Site

HOST = """
import json, logging, sys, warnings
RECORD, said = True, []
class Log(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("tokenspeed_kernel").addHandler(Log())
exec(sys.argv[1])
from dataclasses import asdict
from tokenspeed_kernel import registry, selection
from tokenspeed_kernel.overrides import context_override
from tokenspeed_kernel.plugins import discover_plugins, plugin_records
registry.register_kernel("quant", "op", name="host_kernel", solution="s", signatures=(), priority=1)(print)
whole = [dict(vars(x)) for x in (registry, registry.KernelRegistry)]
if RECORD:
    show = warnings.showwarning
    warnings.showwarning = lambda message, *a, **k: said.append(str(message))
if not sys.warnoptions:
    warnings.simplefilter("always")
loaded = discover_plugins()
owners = {r.spec.name: r.owner for s in registry.KernelRegistry.get()._by_name.values() for r in s[-1:]}
now = [vars(x) for x in (registry, registry.KernelRegistry)]
same = [all(after.get(k) is v for k, v in before.items()) for after, before in zip(now, whole)]
print(json.dumps({
    "loaded": [info.name for info in loaded],
    "records": [asdict(record) for record in plugin_records()],
    "owners": owners,
    "scorers": [owner for entries in selection._oracles.values() for owner, _ in entries],
    "override": context_override("quant", "op"),
    "same": same,
    "said": said,
}))
"""
INNOCENT = {"a_good": "a_kernel", "z_good": "z_kernel"}


@dataclass(frozen=True)
class Outcome:
    """What one case did."""

    escaped: str
    """How the host died, if it did."""
    lost: tuple[str, ...]
    """Innocent kernels that are not there, or not their owner's."""
    left: tuple[str, ...]
    """What a plugin that is not loaded left behind."""
    silent: str
    """What was expected to be said, and was not."""
    states: dict[str, str]
    kernels: tuple[str, ...]
    said: tuple[str, ...]


def _run(case: Case, environment: Environment) -> Outcome:
    with Site(environment) as site:
        for index, (name, kernel) in enumerate(INNOCENT.items()):
            call = f"register_kernel('quant', 'op', name={kernel!r}, solution='s', signatures=(), priority={3 + index})"
            source = f"def register():\n    from tokenspeed_kernel.registry import register_kernel\n    {call}(print)\n"
            site.plugin(name, source)
        case.install(site)
        done = environment.run(*case.arguments, "-c", HOST, case.before, variables=case.variables)
    if done.returncode or not done.stdout:
        return Outcome(done.stderr or f"exit code {done.returncode}", (), (), "", {}, (), ())
    return _judge(case, json.loads(done.stdout.splitlines()[-1]), done.stderr)


def _judge(case: Case, seen: dict[str, Any], stderr: str) -> Outcome:
    owners: dict[str, str | None] = seen["owners"]
    loaded = {f"{r['name']}@{r['package']}" for r in seen["records"] if r["state"] == "loaded"}
    names = {record["name"] for record in seen["records"] if record["state"] == "loaded"}
    expected = {kernel: f"{name}@{name.replace('_', '-')}-dist" for name, kernel in INNOCENT.items()}
    taken = {"host_kernel"} & set(case.kernels)
    lost = [kernel for kernel, owner in expected.items() if owners.get(kernel) != owner or owner not in loaded]
    lost += [] if taken or owners.get("host_kernel", "") is None else ["host_kernel"]
    left = [name for name, owner in owners.items() if owner is not None and owner not in loaded]
    left += [owner for owner in seen["scorers"] if owner not in loaded]
    of_host = (name for name, owner in owners.items() if owner is None)
    left += [name for name in of_host if name != "host_kernel" and not name.endswith(":reference")]
    left += ["an override"] if seen["override"] else []
    left += [] if all(seen["same"]) else ["a patch"]
    messages = (*seen["said"], *re.split(r"\n(?=\S)", stderr))
    silent = "" if any(all(part in text for part in case.said) for text in messages) else " / ".join(case.said)
    bad = [record for record in seen["records"] if record["name"] not in INNOCENT]
    if not case.said and seen["said"]:
        silent = f"nothing was to be said, but: {seen['said']}"
    return Outcome(
        escaped="" if names == set(seen["loaded"]) else "the list and the records differ",
        lost=tuple(lost),
        left=tuple(left),
        silent=silent,
        states={record["name"]: record["state"] for record in bad},
        kernels=tuple(sorted({name for record in bad for name in record["kernel_names"]})),
        said=tuple(seen["said"]),
    )


@pytest.fixture(scope="session")
def outcome(shared_environment: Environment) -> Callable[[str], Outcome]:
    """Return what a case does; each runs once."""
    return functools.cache(lambda name: _run(CASES[name], shared_environment))


@pytest.mark.parametrize("name", CASES)
def test_fault_is_contained(outcome: Callable[[str], Outcome], name: str) -> None:
    """The host lives, the innocent load, nothing stays behind, it is said, and the record has the right state."""
    case, actual = CASES[name], outcome(name)
    assert actual.escaped == ""
    assert (actual.lost, actual.left, actual.silent) == ((), (), ""), actual.said
    assert actual.states == case.states, actual.said
    assert actual.kernels == tuple(sorted(case.kernels))


def test_counts_are_as_documented(outcome: Callable[[str], Outcome]) -> None:
    """Over all inputs no escape, no innocent plugin lost, no leftover and no silent failure, as the page says."""
    outcomes = [outcome(name) for name in CASES]
    counts = {
        "inputs tried": len(outcomes),
        "escapes": sum(bool(o.escaped) for o in outcomes),
        "innocent plugins lost": sum(len(o.lost) for o in outcomes),
        "leftovers": sum(len(o.left) for o in outcomes),
        "silent failures": sum(bool(o.silent) for o in outcomes),
    }
    page = (Path(__file__).parents[1] / "docs" / "discovery.md").read_text(encoding="utf-8")
    documented = {what: int(n) for what, n in re.findall(r"^\| (.+?) \| (\d+) \|$", page, re.MULTILINE)}
    assert counts == documented
    assert list(counts.values())[1:] == [0, 0, 0, 0]
