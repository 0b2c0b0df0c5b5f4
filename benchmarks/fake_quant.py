# SPDX-License-Identifier: Apache-2.0
"""What simulated quantization costs on a GPU: our kernels, the eager reference, the compiled one, and the peer's.

    python benchmarks/fake_quant.py [--peer FOLDER] [--json FILE]           the GPU's time, bits, new shapes
    python benchmarks/fake_quant.py --host [--peer FOLDER] [--json FILE]    the host's time: calls, first calls
    python benchmarks/fake_quant.py --smoke    both, tiny and without a GPU: shows that they run, measures nothing

FOLDER is where the peer lies: ``pip install --no-deps --target FOLDER libreyolo==1.6.0``; it needs torch and Triton.
Triton compiles into a folder that is new at each run, so that a run does not profit from one before.
The table comes last; then the bars that were not met. The exit code is 0 if everything could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from fake_quant_cases import (
    CASES,
    DTYPES,
    FIRST_CALL_BAR,
    NEW_SIZES,
    SHAPES,
    SMOKE_SHAPES,
    SUPPORTS_BAR,
    UNITS,
    WARM_SIZES,
    Case,
    call_bar,
    data,
    differing,
    new_tensors,
    share_bar,
)
from fake_quant_clock import Clock, compilations
from fake_quant_processes import first_calls, warm
from fake_quant_report import not_met, print_report
from fake_quant_ways import WAYS, Function, Ways

from tokenspeed_kernel import slot


class Bench:
    """One run: what it measures goes into :attr:`result`, and what failed too."""

    def __init__(self, peer: Path | None, *, smoke: bool, json_file: Path | None) -> None:
        self._started = time.perf_counter()
        self._json_file = json_file
        self.clock = Clock(smoke=smoke)
        self.device = self.clock.device
        self.shapes = SMOKE_SHAPES if smoke else SHAPES
        self.ways = Ways(peer, smoke=smoke)
        self.rows: list[dict[str, Any]] = []
        self.exactness: list[dict[str, Any]] = []
        self.new_shapes: list[dict[str, Any]] = []
        self.first_calls: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self._calls: dict[tuple[Case, str, str], dict[str, Any]] = {}

    def run(self) -> None:
        """Measure the GPU's part. What each row is for comes first, in case that patience with the others runs out."""
        self.clock.kernels(lambda: torch.ones(1, device=self.device))  # a profiler's first session may miss kernels
        self._each("warm", self._warm, [()])
        homes = [(case, dtype, case.home) for case in CASES for dtype in DTYPES]
        others = [(c, dtype, "activation" if home == "weight" else "weight") for c, dtype, home in homes]
        self._each("forward", self._forward, homes)
        self._each("backward", self._backward, homes)
        pairs = [(case, dtype) for case in CASES for dtype in DTYPES]
        self._each("new shapes", self._new_shapes, pairs)
        self._each("forward", self._forward, others)
        self._each("exactness", self._exactness, pairs)

    def run_host(self) -> None:
        """Measure the host's part. A machine has busy moments: everything has several turns, and the fastest counts."""
        calls = [(case, dtype, what) for case in CASES for dtype in DTYPES for what in ("call", "call with grad")]
        for _ in range(6):
            self._each("call", self._call, calls)
            calls.reverse()  # such a moment often is a turn's beginning
        for _ in range(2):
            self._each("first calls", self._first_calls, [()])

    def _each(self, phase: str, measure: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        started = time.perf_counter()
        for values in arguments:
            try:
                measure(*values)
            except Exception:  # noqa: BLE001 -- the rest is still worth measuring, and this becomes a line of the report
                name = " ".join(v.label if isinstance(v, Case) else str(v) for v in values)
                self.errors[f"{phase} {name}"] = traceback.format_exc()
            if self.device == "cuda":
                torch.cuda.empty_cache()
        print(f"{phase}: {time.perf_counter() - started:.0f} s", flush=True)
        if self._json_file is not None:  # after each phase: a run that is cut off has not been for nothing
            self._json_file.write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")

    def result(self) -> dict[str, Any]:
        """Return what is measured so far, as JSON-able data."""
        result: dict[str, Any] = {
            "machine": _machine(),
            "peer": "libreyolo 1.6.0",
            "smoke": self.clock.smoke,
            "seconds": round(time.perf_counter() - self._started),
            "rows": self.rows,
            "exactness": self.exactness,
            "new_shapes": self.new_shapes,
            "first_calls": self.first_calls,
            "errors": self.errors,
        }
        return {**result, "not_met": not_met(result)}

    def _row(self, case: Case, dtype: str, place: str, what: str, causes: dict[str, str]) -> dict[str, Any]:
        row = {
            "slot": case.slot, "form": case.form, "dtype": dtype, "place": place, "shape": list(self.shapes[place]),
            "what": what, "us": {}, "causes": causes, "met": False,
        }  # fmt: skip
        self.rows.append(row)
        return row

    def _forward(self, case: Case, dtype: str, place: str) -> None:
        x = data(self.shapes[place], DTYPES[dtype], self.device)
        others = case.others(x, 1.0)
        # The compiled one for the shape that the slot is for: its compilations take most of a run.
        names = WAYS if place == case.home else ("ours", "reference", "peer")
        functions, causes = self.ways.working(case, lambda function: function(x, *others), names)
        if len(names) < len(WAYS):
            causes["compiled"] = "not measured at this shape"
        if no := self.ways.why_not_ours(case, x, *others):
            causes["ours"] = no
        runs: dict[str, Callable[[], object]] = {n: partial(f, x, *others) for n, f in functions.items()}
        row = self._row(case, dtype, place, "forward", causes)
        row["differing"] = _all_differing(functions, lambda f: f(x, *others))
        self._shares(row, case, {"clone": partial(torch.clone, x), **runs}, {})

    def _shares(
        self, row: dict[str, Any], case: Case, runs: dict[str, Callable[[], object]], ready: dict[str, Any]
    ) -> None:
        taken = self.clock.gpu({name: lambda run=run: run for name, run in runs.items()} | ready)
        row["clone_us"] = taken.pop("clone")
        row["us"] = taken
        row["share"] = {name: row["clone_us"] / us for name, us in taken.items()}
        row["bar"] = share_bar(case, row["dtype"], tuple(row["shape"]), row["what"])
        row["met"] = "ours" not in row["causes"] and row["share"].get("ours", 0.0) >= row["bar"]

    def _backward(self, case: Case, dtype: str, place: str) -> None:
        x = data(self.shapes[place], DTYPES[dtype], self.device).requires_grad_()
        others = case.others(x, 1.0)
        cotangent = x.detach().flip(0)

        def prepare(function: Function) -> Callable[[], torch.Tensor]:
            y = function(x, *others)
            return lambda: torch.autograd.grad(y, x, cotangent)[0]

        functions, causes = self.ways.working(case, lambda function: prepare(function)())
        if no := self.ways.why_not_ours(case, x, *others):
            causes["ours"] = no
        row = self._row(case, dtype, place, "backward", causes)
        ready = {name: partial(prepare, function) for name, function in functions.items()}
        self._shares(row, case, {"clone": partial(torch.clone, cotangent)}, ready)
        row["differing"] = _all_differing(functions, lambda function: prepare(function)())
        # Whatever a forward keeps for its backward costs time there.
        row["forward_us"] = self.clock.gpu({n: lambda f=f: partial(f, x, *others) for n, f in functions.items()})
        if "ours" not in functions:
            return
        ours = prepare(functions["ours"])
        row["kernels"] = self.clock.kernels(ours)
        row["the cotangent itself"] = prepare(functions["ours"])().data_ptr() == cotangent.data_ptr()
        launched = len(row["kernels"]) if row["kernels"] is not None else 0 if row["the cotangent itself"] else None
        if case.masked:
            row["met"] = row["met"] and (launched == 1 or self.clock.smoke)
        else:
            row["bar"] = 0  # kernels
            row["met"] = launched == 0 and "ours" not in causes

    def _call(self, case: Case, dtype: str, what: str) -> None:
        x = data(self.shapes["small"], DTYPES[dtype], self.device).requires_grad_(what == "call with grad")
        arguments = (x, *case.others(x, 1.0))
        trial = partial(_apply, arguments=arguments)
        functions, causes = self.ways.working(case, trial, ("ours", "reference", "peer"))
        causes["compiled"] = "not measured at this shape"
        if no := self.ways.why_not_ours(case, *arguments):
            causes["ours"] = no
        runs: dict[str, Callable[[], object]] = {name: partial(f, *arguments) for name, f in functions.items()}
        if not self.clock.smoke:  # the floor of every call, and a part of one
            runs["launch"] = self._bare_launch()
        taken = self.clock.host(runs)
        if not self.clock.smoke:
            taken["supports"] = self.clock.question(self.ways.asking(case), arguments)
        key = (case, dtype, what)
        row = self._calls.get(key) or self._row(case, dtype, "small", what, causes)
        self._calls[key] = row
        for part in ("supports", "launch"):
            if part in taken:
                us = taken.pop(part)
                row[f"{part}_us"] = min(us, row.get(f"{part}_us", us))
        row["us"] = {name: min(us, row["us"].get(name, us)) for name, us in taken.items()}
        row["bar"] = call_bar(what)
        row["supports_bar"] = SUPPORTS_BAR
        row["met"] = "ours" not in causes and row["us"].get("ours", float("inf")) <= row["bar"]

    def _warm(self) -> None:
        numbers = range(2 if self.clock.smoke else len(CASES))
        warm(numbers, self.device, self.ways.peer, self.shapes["weight"], seconds=75.0)

    def _first_calls(self) -> None:
        numbers = [n for n, case in enumerate(CASES) if not case.form or case.channels][: 2 if self.clock.smoke else 99]
        before = {(record["slot"], record["form"]): record for record in self.first_calls}
        self.first_calls = []
        taken = first_calls(numbers, self.device, self.shapes["small"])
        for number, (triton, seconds) in zip(numbers, taken, strict=True):
            case = CASES[number]
            record = {"slot": case.slot, "form": case.form, "triton": triton, "seconds": seconds, "bar": FIRST_CALL_BAR}
            record["met"] = seconds <= FIRST_CALL_BAR or self.clock.smoke
            other = before.get((case.slot, case.form), record)
            self.first_calls.append(min(record, other, key=lambda one: float(one["seconds"])))

    def _bare_launch(self) -> Callable[[], object]:
        from fake_quant_launch import launch

        x = torch.ones(128, device=self.device)
        return partial(launch, x, torch.empty_like(x))

    def _new_shapes(self, case: Case, dtype: str) -> None:
        for x in new_tensors(DTYPES[dtype], self.device, WARM_SIZES[:2] if self.clock.smoke else WARM_SIZES):
            slot(case.slot)(x, *case.others(x, 1.0))
        new = [(x, *case.others(x, 1.0)) for x in new_tensors(DTYPES[dtype], self.device, NEW_SIZES)]
        declined = {no for arguments in new if (no := self.ways.why_not_ours(case, *arguments))}
        with compilations() as compiled:
            taken = [self.clock.first(partial(slot(case.slot), *arguments)) for arguments in new]
        record = {
            "slot": case.slot, "form": case.form, "dtype": dtype, "shapes": len(new), "slowest_ms": max(taken),
            "compiled": compiled, "declined": sorted(declined), "met": not compiled,
        }  # fmt: skip
        self.new_shapes.append(record)
        if dtype == "fp32":  # the peer has no other kernels; each of its new shapes is compiled and tuned
            peers: list[float] = []
            with compilations() as compiled:
                _, causes = self.ways.working(
                    case,
                    lambda f: peers.extend(self.clock.first(partial(f, *new[n])) for n in (0, 10)),
                    ("peer",),
                )
            record["peer"] = causes.get("peer") or {"shapes": 2, "slowest_ms": max(peers), "compiled": len(compiled)}

    def _exactness(self, case: Case, dtype: str) -> None:
        def tensor(unit: float, *, odd: bool) -> torch.Tensor:
            return data(self.shapes["exactness"], DTYPES[dtype], self.device, unit, odd)

        x = tensor(1.0, odd=False)
        functions, causes = self.ways.working(case, lambda function: function(x, *case.others(x, 1.0)))
        counts: dict[str, dict[str, int | str]] = {}
        for unit in UNITS:
            for odd in (False, True):
                x = tensor(unit, odd=odd)
                arguments = (x, *case.others(x, unit))
                name = f"{unit:.0e}{', with NaN and Inf' if odd else ''}"
                counts[name] = _all_differing(functions, partial(_apply, arguments=arguments))
                if no := self.ways.why_not_ours(case, *arguments):
                    causes["ours"] = no
        exact = all(count.get("ours") == 0 for count in counts.values())
        self.exactness.append(
            {
                "slot": case.slot, "form": case.form, "dtype": dtype, "elements": x.numel(), "differing": counts,
                "causes": causes, "met": exact and "ours" not in causes,
            }
        )  # fmt: skip


def _apply(function: Function, arguments: tuple[Any, ...]) -> torch.Tensor:
    return function(*arguments)


def _all_differing(functions: dict[str, Function], compute: Callable[[Function], torch.Tensor]) -> dict[str, int | str]:
    """Return for each way but the reference how many elements have other bits than the reference's."""
    expected = compute(functions["reference"])
    counts: dict[str, int | str] = {}
    for name, function in functions.items():
        if name != "reference":
            try:
                actual = compute(function)
                same_kind = actual.dtype == expected.dtype and actual.shape == expected.shape
                counts[name] = differing(actual, expected) if same_kind else f"returns {actual.dtype}"
            except Exception as error:  # noqa: BLE001 -- it survived one call, and may still refuse other data
                counts[name] = f"raises {type(error).__name__}"
    return counts


def _machine() -> dict[str, Any]:
    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("torch", "triton")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def main() -> int:
    """Measure, write the JSON, print the table, and return 0 if everything could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="the folder with the published libreyolo")
    parser.add_argument("--json", type=Path, help="write it there")
    parser.add_argument("--host", action="store_true", help="measure what calls cost the host, not the GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny, without a GPU: the references stand in for kernels")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --smoke runs without one")
    if options.json is None and (out := os.environ.get("OUT")):
        options.json = Path(out, "fake-quant-host.json" if options.host else "fake-quant.json")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        bench = Bench(options.peer, smoke=options.smoke, json_file=options.json)
        if not options.host:
            bench.run()
        if options.host or options.smoke:
            bench.run_host()
    result = bench.result()
    print_report(result)
    return 1 if bench.errors else 0


if __name__ == "__main__":
    sys.exit(main())
