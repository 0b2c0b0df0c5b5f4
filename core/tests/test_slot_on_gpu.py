# SPDX-License-Identifier: Apache-2.0
"""What a slot does with CUDA graphs, with a launch that fails, and with a device context that is beyond use."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel import SlotContract, declare_slot  # noqa: E402 -- after the check for torch

pytestmark = pytest.mark.gpu

Kernel = Callable[..., Any]


def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.fixture
def triple() -> Any:
    """Declare a slot whose reference triples."""
    return declare_slot(SlotContract(name="op", family="quant", mode="op", reference=_triple))


def test_a_captured_call_replays(triple: Any, kernel: Kernel) -> None:
    """A CUDA graph holds the chosen kernel and computes anew at a replay; the call is counted once."""
    kernel("a", lambda x: torch.add(x, x, alpha=2))
    x = torch.ones(4, device="cuda")
    triple(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = triple(x)
    x.fill_(5.0)
    for _ in range(3):
        graph.replay()
    assert bool((y == 15.0).all())
    assert triple.stats()["a"]["served"] == 2


CAPTURED = """
import torch
from tokenspeed_kernel import SlotContract, declare_slot
from tokenspeed_kernel.registry import register_kernel

handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x * 3))
fails = []

def fragile(x):
    if fails:
        raise ValueError("bad launch")
    return x * 3

register_kernel("quant", "op", name="fragile", solution="s", signatures=())(fragile)
x = torch.ones(4, device="cuda")
handle(x)
fails.append(1)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        handle(x)
except RuntimeError as error:
    print("fragile" in str(error), "CUDA graph" in str(error), type(error.__cause__).__name__)
print(handle.explain(x).chosen)
"""


def test_a_failure_under_capture_is_not_run_again(python: Callable[..., Any]) -> None:
    """The error names the kernel, and nobody is switched off: the graph is the host's to decide about."""
    done = python(CAPTURED)
    assert done.stdout.splitlines() == ["True True ValueError", "fragile"], done.stderr


POISONED = """
import torch
from tokenspeed_kernel import SlotContract, declare_slot, report
from tokenspeed_kernel.registry import register_kernel

calls = []
def reference(x):
    calls.append(1)
    return x * 3

def faults(x):
    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]  # a device-side assert
    torch.cuda.synchronize()

handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=reference))
register_kernel("quant", "op", name="faults", solution="s", signatures=())(faults)
try:
    handle(torch.ones(4, device="cuda"))
except Exception as error:
    print(type(error).__name__, "device-side assert" in str(error))
print(calls, handle.explain().chosen, report().slots["op"]["kernels"]["faults"]["failed"])
"""


def test_a_poisoned_context_is_nobodys_fault(python: Callable[..., Any]) -> None:
    """The error reaches the caller at once: no other kernel is run on a device that cannot run any, and none is off."""
    done = python(POISONED)
    first, second = done.stdout.splitlines()
    assert first in ("AcceleratorError True", "RuntimeError True"), done.stderr
    assert second == "[] faults 1"


def test_out_of_memory_passes_through(triple: Any, kernel: Kernel) -> None:
    """A real out-of-memory error of the device is raised, the kernel stays on, and the next call is served."""

    def greedy(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 4:
            torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
        return x * 3

    kernel("greedy", greedy)
    with pytest.raises(torch.OutOfMemoryError):
        triple(torch.ones(5, device="cuda"))
    triple(torch.ones(4, device="cuda"))
    assert triple.stats()["greedy"]["served"] == 1


def test_a_launch_that_fails_falls_back(triple: Any, kernel: Kernel) -> None:
    """An error that leaves the device usable is the kernel's: the reference serves, and the kernel is off."""
    triton = pytest.importorskip("triton")

    def too_much(x: torch.Tensor) -> torch.Tensor:
        raise triton.runtime.errors.OutOfResources(1 << 20, 1 << 17, "shared memory")

    kernel("too_much", too_much)
    x = torch.ones(4, device="cuda")
    with pytest.warns(RuntimeWarning, match="shared memory"):
        assert bool((triple(x) == 3.0).all())
    assert triple.explain(x).chosen == "op:reference"
