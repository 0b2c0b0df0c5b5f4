# SPDX-License-Identifier: Apache-2.0
"""What ``fake_quant.py`` does in processes of their own: filling the compilers' caches, and first calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_HEAD = """
import sys, time
import torch
sys.path.insert(0, sys.argv[1])
import fake_quant_cases as cases
number, device, peer, shape = int(sys.argv[2]), sys.argv[3], sys.argv[4], [int(n) for n in sys.argv[5].split("x")]
case = cases.CASES[number]
"""
# Every compilation that a run needs, so that it finds them on the disk: the processes do it side by side.
_WARM = """
from pathlib import Path
from fake_quant_ways import Ways
ways = Ways(Path(peer) if peer else None, smoke=device != "cuda")
for dtype in cases.DTYPES.values():
    x = cases.data(shape, dtype, device).requires_grad_()
    ways.working(case, lambda f: torch.autograd.grad(f(x, *case.others(x, 1.0)), x, x.detach()))
    with torch.no_grad():
        ways.working(case, lambda f: f(x, *case.others(x, 1.0)))
for dtype in cases.DTYPES.values():
    for x in cases.new_tensors(dtype, device, cases.WARM_SIZES):
        ways.working(case, lambda f: f(x, *case.others(x, 1.0)), ("ours",))
"""
# The import of torch and the start of the GPU come before the clock. Triton's own start, which hashes its compiler, is
# timed apart: a process pays it once, whosever kernel comes first.
_FIRST_CALL = """
x = cases.data(shape, torch.float32, device)
others = case.others(x, 1.0)
one = torch.ones(128, device=device)
times = [time.perf_counter()]
if device == "cuda":
    from fake_quant_launch import launch
    launch(one, torch.empty_like(one))
    torch.cuda.synchronize()
times.append(time.perf_counter())
from tokenspeed_kernel import slot
import tokenspeed_kernel_triton_fake_quant
tokenspeed_kernel_triton_fake_quant.register()
slot(case.slot)(x, *others)
if device == "cuda":
    torch.cuda.synchronize()
times.append(time.perf_counter())
print(times[1] - times[0], times[2] - times[1])
"""


def warm(numbers: Iterable[int], device: str, peer: Path | None, shape: tuple[int, ...], seconds: float) -> None:
    """Compile, for each case, whatever the run will need, but for no longer than ``seconds``."""
    processes = [_start(_HEAD + _WARM, number, device, peer, shape) for number in numbers]
    end = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=max(end - time.monotonic(), 0.1))
        process.kill()
        process.communicate()


def first_calls(numbers: Iterable[int], device: str, shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return, for each case in a process of its own, the seconds that Triton takes to start, and then its first call.

    One process after the other: side by side they would slow each other down.
    """
    taken = []
    for number in numbers:
        process = _start(_HEAD + _FIRST_CALL, number, device, None, shape)
        out, errors = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"the process that makes a first call failed:\n{errors}")
        triton, call = out.split()[-2:]
        taken.append((float(triton), float(call)))
    return taken


def _start(program: str, number: int, device: str, peer: Path | None, shape: tuple[int, ...]) -> subprocess.Popen[str]:
    arguments = [str(Path(__file__).parent), str(number), device, str(peer or ""), "x".join(map(str, shape))]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
