# SPDX-License-Identifier: Apache-2.0
"""A slot under torch.compile, torch.export, torch.jit.trace and the ONNX exporters, and modules that hold one."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402 -- after the check for torch

from tokenspeed_kernel import SlotContract, declare_slot, slot  # noqa: E402
from tokenspeed_kernel.selection import kernel_override  # noqa: E402

Kernel = Callable[..., Any]


@torch.library.custom_op("tokenspeed_core_tests::triple", mutates_args=())
def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@_triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_triple.register_autograd(lambda ctx, grad: grad * 3)


def _supports(x: torch.Tensor) -> Any:
    return True if x.dtype == torch.float32 else f"x is {x.dtype}"


@pytest.fixture
def triple(kernel: Kernel) -> Iterator[Any]:
    """Declare a slot with a portable reference, and register an opaque operator that is faster, for float32."""
    handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x + x + x))
    kernel("opaque", _triple, solution="opaque", supports=_supports)
    torch.compiler.reset()
    yield handle
    torch.compiler.reset()


class Tower(torch.nn.Module):
    """Ten calls of one slot."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.op = handle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, ten times tripled and divided by three."""
        for _ in range(10):
            x = self.op(x) / 3
        return x


def _counts(handle: Any, kind: str) -> dict[str, int]:
    return {kernel: counts[kind] for kernel, counts in handle.stats().items()}


def test_compiles_once_without_a_break(triple: Any) -> None:
    """Ten calls make one graph with the kernel in it, and no second one at later calls."""
    counter = CompileCounter()
    module = Tower(triple)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(8)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), module(x))
    assert counter.frame_count == 1
    assert _counts(triple, "traced") == {"opaque": 10, "op:reference": 0}
    assert _counts(triple, "served")["opaque"] == 30


def test_compiling_is_a_process_first_call(triple: Any) -> None:
    """The very first call of a slot may be one that Dynamo traces."""
    assert torch.equal(torch.compile(triple, fullgraph=True, backend="eager")(torch.ones(3)), torch.full((3,), 3.0))
    assert _counts(triple, "traced")["opaque"] == 1


def test_compiling_asks_supports(triple: Any) -> None:
    """What the kernel declines, the graph computes by the reference."""
    compiled = torch.compile(triple, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3, dtype=torch.float64)), torch.full((3,), 3.0, dtype=torch.float64))
    assert _counts(triple, "traced") == {"opaque": 0, "op:reference": 1}


def test_gradients_flow_through_a_compiled_slot(triple: Any) -> None:
    """The kernel's own backward runs, in eager and compiled alike."""
    for call in (triple, torch.compile(triple, fullgraph=True)):
        x = torch.ones(3, requires_grad=True)
        call(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_an_override_takes_effect_after_a_reset(triple: Any) -> None:
    """A graph keeps its kernel; a new one is made after ``torch.compiler.reset()``."""
    compiled = torch.compile(triple, fullgraph=True, backend="eager")
    compiled(torch.ones(3))
    torch.compiler.reset()
    with kernel_override("quant", "op", "reference"):
        compiled(torch.ones(3))
    assert _counts(triple, "traced") == {"opaque": 1, "op:reference": 1}


def _operators(program: Any) -> set[str]:
    return {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("strict", [True, False])
def test_export_records_portable_math(triple: Any, strict: bool) -> None:
    """``torch.export`` holds standard operators only, with the eager numbers; afterwards the kernel runs again."""
    x = torch.randn(8)
    module = Tower(triple)
    program = torch.export.export(module, (x,), strict=strict)
    assert _operators(program) == {"aten"}
    torch.testing.assert_close(program.module()(x), module(x))
    assert _counts(triple, "traced") == {"opaque": 0, "op:reference": 10}
    assert triple.explain(x).chosen == "opaque"


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_trace_records_portable_math(triple: Any) -> None:
    """``torch.jit.trace`` holds standard operators only, right at another size."""
    module = Tower(triple)
    traced = torch.jit.trace(module, (torch.randn(8),))
    assert {node.kind().split("::")[0] for node in traced.graph.nodes()} == {"aten", "prim"}
    assert "tokenspeed" not in str(traced.graph)
    x = torch.randn(3)
    torch.testing.assert_close(traced(x), module(x))


TORCH_COMES_LATER = """
from tokenspeed_kernel import SlotContract, declare_slot
from tokenspeed_kernel.registry import register_kernel

handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x + x + x))
register_kernel("quant", "op", name="opaque", solution="s", signatures=())(lambda x: x.mul(3))
handle.resolve()  # registers the references, which makes the choice stale at once
handle.resolve()

import torch

traced = torch.jit.trace(lambda x: handle(x), (torch.ones(2),))
print("aten::add" in str(traced.graph), "aten::mul" in str(traced.graph))
"""


def test_a_trace_is_noticed_if_torch_came_after_the_first_choice(python: Callable[..., Any]) -> None:
    """A slot that chose its kernel before the process imported torch still records portable math."""
    done = python(TORCH_COMES_LATER)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_records_portable_math(triple: Any, dynamo: bool) -> None:
    """Both ONNX exporters hold standard operators only, and after an export that fails the kernel runs all the same."""
    onnx = pytest.importorskip("onnx")
    x = torch.randn(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the exporters say of themselves
        if dynamo:
            model = torch.onnx.export(Tower(triple), (x,), dynamo=True, verbose=False).model_proto
        else:
            buffer = io.BytesIO()
            torch.onnx.export(Tower(triple), (x,), buffer, dynamo=False)
            model = onnx.load_from_string(buffer.getvalue())
        assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
        with pytest.raises(Exception, match="stop"):
            torch.onnx.export(_Stops(triple), (x,), io.BytesIO(), dynamo=False)
    assert triple.explain(x).chosen == "opaque"
    triple(x)
    assert _counts(triple, "served")["opaque"] == 1


class _Stops(torch.nn.Module):
    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.op = handle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.op(x)
        raise RuntimeError("stop")


def test_a_slot_without_a_reference_leaves_a_capture_to_the_caller(kernel: Kernel) -> None:
    """Under export it returns None, and the caller's own math is what is recorded."""
    handle = declare_slot(SlotContract(name="bare", family="quant", mode="bare"))
    kernel("opaque_bare", _triple, mode="bare")

    class Host(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = handle(x)
            return x * 3 if out is None else out

    x = torch.randn(4)
    for strict in (True, False):
        assert _operators(torch.export.export(Host(), (x,), strict=strict)) == {"aten"}
    assert _counts(handle, "served") == {"opaque_bare": 0}
    assert torch.equal(torch.compile(Host(), fullgraph=True, backend="eager")(x), x * 3)
    assert _counts(handle, "traced") == {"opaque_bare": 1}


def test_a_contract_may_allow_a_capture(kernel: Kernel) -> None:
    """``portable_in`` says which captures record portable math; in the others the kernel is recorded."""
    contract = SlotContract(name="op", family="quant", mode="op", reference=lambda x: x * 3, portable_in=frozenset())
    handle = declare_slot(contract)
    kernel("opaque", _triple)
    assert _operators(torch.export.export(Tower(handle), (torch.ones(2),))) == {"aten", "tokenspeed_core_tests"}


def test_gradients_through_a_fallback(kernel: Kernel) -> None:
    """When a kernel fails in forward, the graph that is differentiated is the reference's."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad launch")

    handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x * 3))
    kernel("a", broken)
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="bad launch"):
        handle(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_a_failing_backward_is_raised_and_chooses_nothing(kernel: Kernel) -> None:
    """Backward is the kernel's alone: its error reaches the caller, and nobody is switched off."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("bad backward")

    handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x * 3))
    kernel("a", Fails.apply)
    x = torch.ones(3, requires_grad=True)
    y = handle(x)
    with pytest.raises(ValueError, match="bad backward"):
        y.sum().backward()
    assert handle.explain(x).chosen == "a"


def test_modules_that_hold_a_slot_are_copied_and_saved_by_name(triple: Any) -> None:
    """Deep copies, pickles and ``torch.save`` keep the name; state_dict keys are unchanged (case 79)."""
    module = torch.nn.Sequential(Tower(triple), torch.nn.Linear(2, 2))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False))
    for twin in copies:
        assert twin[0].op is slot("op")
        assert list(twin.state_dict()) == ["1.weight", "1.bias"]


def test_an_out_of_memory_error_passes_through(kernel: Kernel) -> None:
    """The error of torch reaches the caller, and the kernel is not blamed."""

    def greedy(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = declare_slot(SlotContract(name="op", family="quant", mode="op", reference=lambda x: x * 3))
    kernel("a", greedy)
    with pytest.raises(torch.OutOfMemoryError):
        handle(torch.ones(2))
    assert handle.explain(torch.ones(2)).chosen == "a"
