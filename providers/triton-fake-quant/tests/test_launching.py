# SPDX-License-Identifier: Apache-2.0
"""How the kernels are launched: streams, devices, captures, processes, compilers; and what a call does not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

Check = Callable[[torch.Tensor, torch.Tensor], None]
PROCESSES = 8
SECONDS = 300
MASKED = ["fake_quant_int8_affine", "fake_quant_int8_per_channel"]
PACKAGE = "tokenspeed_kernel_triton_fake_quant"


class Kernel(Protocol):
    """What the fixture ``kernel`` returns."""

    slot: str
    call: Callable[..., torch.Tensor]
    supports: Callable[..., object]
    reference: Callable[..., torch.Tensor]
    is_masked: bool

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this kernel's result for ``x`` and the reference's."""

    def others(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return what follows the tensor in a usual call."""


def _values(*shape: int, device: str = "cuda", seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _run(program: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    variables = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _said(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return out.strip()


# --- streams, devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [256, 1024])  # a tensor's maximum is found in the kernel, or by one of its own
def test_the_current_stream(kernel: Kernel, rows: int) -> None:
    """A producer that is late on a side stream is waited for, each of 20 times (case 26)."""
    x, stream = torch.zeros(rows, 256, device="cuda"), torch.cuda.Stream()
    three = torch.full_like(x, 3.0)
    others = kernel.others(x)
    expected = kernel.call(three, *others)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            x.zero_()
            torch.cuda._sleep(10_000_000)
            x.fill_(3.0)
            y = kernel.call(x, *others)
        stream.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("kernel", ["fake_quant_nvfp4_dynamic"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maxima_of_calls_that_follow_each_other(kernel: Kernel, dtype: torch.dtype, assert_same_bits: Check) -> None:
    """Each call waits for its own maximum, though its kernel starts earlier, and none sees that of another call."""
    x = _values(2048, 1024).to(dtype)
    scaled = [x * factor for factor in (1.0, 300.0, 0.01, 7.0) * 10]
    torch.cuda.synchronize()
    quantized = [kernel.call(value) for value in scaled]
    for value, result in zip(scaled, quantized, strict=True):
        assert_same_bits(result, kernel.reference(value))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(kernel: Kernel, assert_same_bits: Check) -> None:
    """Forward and backward on cuda:1 while cuda:0 is current, then on cuda:0 again, give the same (case 56)."""
    torch.cuda.set_device(0)
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x = _values(64, 96, device=device).requires_grad_()
        y = kernel.call(x, *kernel.others(x))
        (grad,) = torch.autograd.grad(y, x, _values(64, 96, device=device, seed=1))
        assert {str(y.device), str(grad.device)} == {device}
        assert torch.cuda.current_device() == 0
        results.append((y.detach().cpu(), grad.cpu()))
    for y, grad in results[1:]:
        assert_same_bits(y, results[0][0])
        assert_same_bits(grad, results[0][1])


def test_a_scale_on_another_device_raises() -> None:
    """Past ``supports``, too: a kernel that read it would take down the process."""
    from tokenspeed_kernel_triton_fake_quant.fp8 import fake_quant_fp8

    x = _values(64, 96)
    fake_quant_fp8(x, 0.1)  # compiled: from now on Triton does not look at tensors itself
    for _ in range(2):
        with pytest.raises(ValueError, match="on cuda:0 cannot read a tensor on cpu"):
            fake_quant_fp8(x, torch.tensor(0.1))


def test_a_profilers_hook_hears_of_each_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's hook for launches is called at the first call and at later ones, which go past Triton's own launch."""
    from triton import knobs

    x, heard = _values(64, 96), []
    kernel.call(x, *kernel.others(x))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: heard.append(metadata.get()["name"]))
    kernel.call(x, *kernel.others(x))
    kernel.call(x, *kernel.others(x))
    assert len(heard) == 2
    assert heard[0] == heard[1]
    assert heard[0].endswith("_kernel")


# --- what a call does not do --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(kernel: Kernel) -> None:
    """Neither forward nor backward reads anything back from the device, which torch is told to take for an error."""
    tensors = [_values(64, 96).requires_grad_(), _values(512, 1024).requires_grad_()]
    others = kernel.others(tensors[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in tensors:
            for value in (x, x.t().contiguous().t()):
                torch.autograd.grad(kernel.call(value, *others), x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="synchronizing"):
            tensors[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _launches(run: Callable[[], object]) -> list[str]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler about its own cycles
def test_kernels_of_a_backward(kernel: Kernel) -> None:
    """The straight-through gradient is the cotangent itself, and launches nothing; a masked one is one kernel."""
    x = _values(64, 96).requires_grad_()
    cotangent = torch.randn_like(x)
    y = kernel.call(x, *kernel.others(x))
    torch.autograd.grad(y, x, cotangent, retain_graph=True)
    if not _launches(lambda: kernel.call(x, *kernel.others(x))):
        pytest.skip("the profiler sees no kernels here")
    launched = _launches(lambda: torch.autograd.grad(y, x, cotangent, retain_graph=True))
    assert len(launched) == (1 if kernel.is_masked else 0), launched


def _compiled_so_far() -> int:
    """Return how many compiled kernels this provider keeps."""
    from tokenspeed_kernel_triton_fake_quant.doors import Kernel as Launcher

    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{PACKAGE}.")]
    launchers = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, Launcher)}
    return sum(len(launcher._compiled) for launcher in launchers.values())


# Rows and columns below and above those of a tile, or of a group's place, that divide by 16 and that do not.
WARM = [
    *((8, 16), (8, 96), (8, 640), (7, 17), (7, 99), (7, 641), (1, 640), (1, 7)),
    *((96, 8), (97, 7), (640, 8), (641, 7)),
]


def _tensors(rows: int, columns: int) -> list[torch.Tensor]:
    """Return contiguous, transposed and cut tensors of a size, all of which start at 16 bytes."""
    return [_values(rows, columns), _values(columns, rows).t(), _values(rows, columns + 8)[:, :columns]]


def test_a_new_shape_compiles_nothing(kernel: Kernel) -> None:
    """After shapes of each kind no other one compiles, whatever its sizes; rows count by the power of two above."""
    for rows, columns in WARM:
        for x in _tensors(rows, columns):
            kernel.call(x, *kernel.others(x))
    before = _compiled_so_far()
    assert before > 0
    for rows, columns in ((9, 19), (160, 704), (33, 1023), (1, 1), (1, 900), (257, 80), (31, 111), (64, 992)):
        for x in _tensors(rows, columns):
            kernel.call(x, *kernel.others(x))
    assert _compiled_so_far() == before


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", MASKED, indirect=True)
def test_cotangents_of_any_strides(kernel: Kernel) -> None:
    """Expanded, transposed, sliced and lazily negated cotangents give the reference's gradient (cases 1, 7)."""
    cotangent = _values(64, 64, seed=1)
    for given in (
        torch.ones((), device="cuda").expand(64, 64),
        cotangent.t(),
        _values(64, 128)[:, ::2],
        torch._neg_view(cotangent),
    ):
        for x in (_values(64, 64), _values(64, 64).t(), torch._neg_view(_values(64, 64))):
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(kernel.call(leaf, *kernel.others(x)), leaf, given)
            (expected,) = torch.autograd.grad(kernel.reference(leaf, *kernel.others(x)), leaf, given)
            assert torch.equal(grad, expected)


def test_gradients_of_gradients(kernel: Kernel) -> None:
    """The gradient is linear in the cotangent: its own gradient is the mask again, and nothing flows to the input."""
    x = _values(32, 48).requires_grad_()
    second = []
    for function in (kernel.call, kernel.reference):
        cotangent = _values(32, 48, seed=1).requires_grad_()
        (grad,) = torch.autograd.grad(function(x, *kernel.others(x)), x, cotangent, create_graph=True)
        third = torch.autograd.grad(grad, (cotangent, x), _values(32, 48, seed=2), allow_unused=True)
        assert third[1] is None or not third[1].any()
        second.append(third[0])
    assert torch.equal(*second)


def test_forward_mode_is_declined(kernel: Kernel) -> None:
    """A dual number would lose its tangent."""
    from torch.autograd import forward_ad

    x = _values(32, 48)
    with forward_ad.dual_level():
        said = kernel.supports(forward_ad.make_dual(x, torch.ones_like(x)), *kernel.others(x))
    assert "forward-mode" in str(said)


# --- compilers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    """Forget what was compiled, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler: advice about matrix products, and its own deprecations
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["marked", "second shape", "dynamic"])
def test_compiles_with_dynamic_shapes(kernel: Kernel, how: str, backend: str, assert_same_bits: Check) -> None:
    """One graph without a break serves other shapes, by a marked axis, by a second shape, and by asking for it."""
    if backend == "inductor" and how != "marked":
        pytest.skip("inductor is slow, and what it gets does not depend on this")
    compiled = torch.compile(kernel.call, fullgraph=True, backend=backend, dynamic=True if how == "dynamic" else None)
    for number, rows in enumerate((24, 40, 57)):
        x = _values(rows, 48, seed=rows).requires_grad_()
        if how == "marked" and number == 0:
            torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x, *kernel.others(x))
        expected = kernel.reference(x, *kernel.others(x))
        assert_same_bits(y, expected)
        cotangent = _values(rows, 48, seed=1)
        grads = [torch.autograd.grad(result, x, cotangent)[0] for result in (y, expected)]
        assert torch.equal(*grads)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        ("fake_quant_int8_per_channel", ((33, 4096), (24, 9008), (40, 12001), (57, 16384))),
        ("fake_quant_nvfp4_dynamic", ((513, 1024), (700, 1000), (1024, 2048))),
    ],
    indirect=["kernel"],
)
def test_compiles_long_rows_and_large_tensors(
    kernel: Kernel, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, assert_same_bits: Check
) -> None:
    """They have kernels of their own, whose eager launch does what a compiler would not understand."""
    compiled = torch.compile(kernel.call, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in shapes:
        x = _values(*shape).to(dtype)
        assert_same_bits(compiled(x), kernel.reference(x))


# --- captures and processes ---------------------------------------------------------------------------------------

COLD = """
import sys, torch
from importlib import import_module
from tokenspeed_kernel.reference import quant
module, slot = sys.argv[1:]
call, reference = getattr(import_module(f"tokenspeed_kernel_triton_fake_quant.{module}"), slot), getattr(quant, slot)
x = torch.randn(64, 96, device="cuda")
others = {"fake_quant_fp8": (torch.tensor(0.1, device="cuda"),)}.get(slot, ())
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        y = call(x, *others)
except Exception as error:
    print("raised", type(error).__name__, str(error).splitlines()[0])
else:
    for factor in (7.0, 0.01):
        x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, reference(x, *others)), "after a replay"
    print("captured")
torch.cuda.synchronize()
assert torch.equal(call(x, *others), reference(x, *others)), "after the capture"
print("usable")
"""


@pytest.mark.parametrize(
    ("module", "slot"),
    [
        ("fp8", "fake_quant_fp8"),
        ("int8_per_channel", "fake_quant_int8_per_channel"),
        ("mxfp4", "fake_quant_mxfp4_dynamic"),
        ("nvfp4", "fake_quant_nvfp4_dynamic"),
    ],
)
def test_a_first_call_inside_a_capture(module: str, slot: str, tmp_path: Path) -> None:
    """The cold capture works, replays with other maxima included, or says why not; the process stays usable.

    Case 94.
    """
    captured, usable = _said(_run(COLD, tmp_path, module, slot)).splitlines()
    assert re.fullmatch(r"captured|raised \w+ .+", captured)
    assert usable == "usable"


def test_replays_compute_maxima_anew(kernel: Kernel, assert_same_bits: Check) -> None:
    """After a warm-up a captured call computes from what the input holds at the replay, large or small (case 94)."""
    for shape in ((64, 96), (512, 1024)):  # a tensor's maximum is found in the kernel, or by one of its own
        x = _values(*shape)
        others = kernel.others(x)
        kernel.call(x, *others)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.call(x, *others)
        for factor in (50.0, 1e-4):
            x.copy_(_values(*shape, seed=1) * factor)
            graph.replay()
            assert_same_bits(y, kernel.reference(x, *others))


FIRST_CALL = """
import hashlib, sys, time, torch
from pathlib import Path
from tokenspeed_kernel_triton_fake_quant.nvfp4 import fake_quant_nvfp4_dynamic
x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).cuda()
torch.cuda.synchronize()
folder, mine, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / mine).touch()
give_up = time.monotonic() + 120
while len(list(folder.iterdir())) < processes:
    assert time.monotonic() < give_up, "the others did not come"
    time.sleep(0.001)
y = fake_quant_nvfp4_dynamic(x)
print(hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest())
"""


def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    """Eight processes with one empty cache, whose first calls come together, compute the same (case 80)."""
    cache, barrier = tmp_path / "cache", tmp_path / "barrier"
    barrier.mkdir()
    processes = [_run(FIRST_CALL, cache, str(barrier), str(i), str(PROCESSES)) for i in range(PROCESSES)]
    digests = {_said(process) for process in processes}
    assert len(digests) == 1


def test_a_process_killed_while_it_compiles(tmp_path: Path) -> None:
    """What it left in the cache neither stops nor misleads the next one (case 80)."""
    cache = tmp_path / "cache"
    barriers = [tmp_path / name for name in ("killed", "next", "without")]
    for barrier in barriers:
        barrier.mkdir()
    killed = _run(FIRST_CALL, cache, str(barriers[0]), "0", "1")
    while killed.poll() is None and not (cache.exists() and any(cache.iterdir())):
        time.sleep(0.001)  # until it has written something
    killed.kill()
    killed.communicate(timeout=SECONDS)
    after = _said(_run(FIRST_CALL, cache, str(barriers[1]), "0", "1"))
    assert after == _said(_run(FIRST_CALL, tmp_path / "another", str(barriers[2]), "0", "1"))
