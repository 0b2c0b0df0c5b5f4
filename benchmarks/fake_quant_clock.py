# SPDX-License-Identifier: Apache-2.0
"""The clocks of ``fake_quant.py``: a GPU's time, the host's time for a call, kernels launched, kernels compiled."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[], object]

_FLUSHED = 256 << 20  # bytes: more than any L2 cache
_AHEAD = 10_000_000  # cycles, about 5 ms: the GPU waits for the host to queue a batch, and never for a single launch


class Clock:
    """Times things on a GPU, or with ``smoke`` on the host, where the figures mean nothing."""

    def __init__(self, *, smoke: bool) -> None:
        self.smoke = smoke
        self.device = "cpu" if smoke else "cuda"
        self._rounds, self._batch = (1, 1) if smoke else (5, 8)
        self._calls, self._repeats = (3, 2) if smoke else (25, 40)
        self._flushed = None if smoke else torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        """Return when the GPU has done everything."""
        if not self.smoke:
            torch.cuda.synchronize()

    def gpu(self, ways: Mapping[str, Callable[[], Run]]) -> dict[str, float]:
        """Return the median microseconds of what each way prepares, with a cold cache.

        The ways take turns, so that a clock that changes hits them alike. They have run before.
        """
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._rounds):
            for name, prepare in ways.items():
                taken[name] += self._batch_on_host(prepare) if self._flushed is None else self._batch_on_gpu(prepare)
        return {name: statistics.median(values) for name, values in taken.items()}

    def _batch_on_gpu(self, prepare: Callable[[], Run]) -> list[float]:
        assert self._flushed is not None
        pairs = []
        torch.cuda._sleep(_AHEAD)
        for _ in range(self._batch):
            run = prepare()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flushed.zero_()
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]

    def _batch_on_host(self, prepare: Callable[[], Run]) -> list[float]:
        taken = []
        for _ in range(self._batch):
            run = prepare()
            started = time.perf_counter()
            run()
            taken.append((time.perf_counter() - started) * 1e6)
        return taken

    def host(self, ways: Mapping[str, Run]) -> dict[str, float]:
        """Return the microseconds that the host spends on a call: the fastest of many loops without a wait.

        A loop can only be slowed down by what else the machine does.
        """
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._repeats):
            for name, run in ways.items():
                self.wait()
                started = time.perf_counter()
                for _ in range(self._calls):
                    run()
                taken[name].append((time.perf_counter() - started) / self._calls * 1e6)
        self.wait()
        return {name: min(values) for name, values in taken.items()}

    def question(self, function: Callable[..., object], arguments: tuple[object, ...]) -> float:
        """Return the microseconds of a call so short that the loop of :meth:`host` and a partial would count in it."""
        timer = timeit.Timer("function(*arguments)", globals={"function": function, "arguments": arguments})
        calls = self._calls * self._repeats
        return min(timer.repeat(self._repeats, calls)) / calls * 1e6

    def first(self, run: Run) -> float:
        """Return the milliseconds of one call and of what it queued."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - started) * 1e3

    def kernels(self, run: Run) -> list[str] | None:
        """Return the names of what a call launched on the GPU, or None where no profiler can tell."""
        activity = torch.profiler.ProfilerActivity
        try:
            with torch.profiler.profile(activities=[activity.CPU if self.smoke else activity.CUDA]) as profile:
                run()
                self.wait()
            on_gpu = torch._C._autograd.DeviceType.CUDA
            return [e.name for e in profile.events() or () if e.device_type == on_gpu]
        except Exception as error:  # noqa: BLE001 -- a machine may forbid profiling, in whatever way
            print(f"no profiler: {type(error).__name__}: {error}", flush=True)
            return None


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Give a list that grows by a name whenever Triton makes a kernel; None in it says that Triton cannot tell."""
    made: list[str] = []
    knobs = _knobs()
    if knobs is None:
        made.append("unknown: this Triton has no hook")
        yield made
        return

    def note(*_: object, **facts: Any) -> bool:
        made.append(str(getattr(facts.get("fn"), "name", facts.get("repr", "a kernel"))))
        return False

    before = knobs.jit_post_compile_hook
    knobs.jit_post_compile_hook = note
    try:
        yield made
    finally:
        knobs.jit_post_compile_hook = before


def _knobs() -> Any:
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime if hasattr(knobs.runtime, "jit_post_compile_hook") else None
