# SPDX-License-Identifier: Apache-2.0
"""What graph captures must show: one graph, the same numbers, and only standard ops in what leaves the process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed_kernel.testing.checks import Check, each, raised
from tokenspeed_kernel.testing.grid import Call, Case
from tokenspeed_kernel.testing.parity import largest_finite
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Subject

__all__ = ["CHECKS"]

_STANDARD = frozenset({"aten", "prim", "prims"})
_ONNX_DOMAINS = ("ai.onnx", "pkg.onnxscript.torch_lib")  # the latter's functions are made of the former's operators
_TRACED_AGAIN = frozenset({"_operator", "builtins", "math", "torch"})  # arithmetic on sizes


class _Module(torch.nn.Module):
    """What a host's layer looks like: it calls the slot, and takes as inputs the tensors of the call."""

    def __init__(self, host: Callable[..., torch.Tensor], call: Call) -> None:
        super().__init__()
        self.host = host
        self.others = tuple(
            (isinstance(v, torch.Tensor), None if isinstance(v, torch.Tensor) else v) for v in call.args
        )
        self.options = call.kwargs

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return what the slot returns."""
        rest = iter(tensors)
        return self.host(*(next(rest) if is_input else value for is_input, value in self.others), **self.options)


def _tensors(call: Call) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in call.args if isinstance(value, torch.Tensor))


def _some(subject: Subject) -> list[tuple[Case, Call]]:
    """Return one served call of each kind that a capture may treat in its own way: each costs a compilation."""
    found: dict[str, tuple[Case, Call]] = {}
    for case, call in subject.accepted("dtypes", "channels", "options", differentiable=True):
        # Sizes that a tensor holds are data, which no graph branches on; options are constants of the layer.
        tensors = list(call.tensors())
        are_inputs = all(t.is_floating_point() for t in tensors) and len(_tensors(call)) == len(tensors)
        if call.args[0].numel() > 1 and are_inputs:
            found.setdefault(case.group, (case, call))
    if not found:
        raise NotExamined("it serves no call whose tensors are all inputs of a layer")
    return list(found.values())


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def compiles(subject: Subject) -> list[str]:
    """``torch.compile(fullgraph=True)`` gives eager's results and gradients."""
    calls, before = _some(subject), subject.counts("traced")

    def look(case: Case, call: Call) -> str | None:
        mine, leaves = call.with_gradients(case.gradients)
        theirs, right = call.with_gradients(case.gradients)
        actual = torch.compile(_Module(host, call), fullgraph=True, backend="aot_eager")(*_tensors(mine))
        expected = subject.expected(theirs)
        if found := subject.fault(actual, call, expected):
            return found
        got, wanted = torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), right)
        check, beside = subject.yardstick.check_gradient, largest_finite(*wanted)
        faults = (check(*pair, subject.tolerance, beside) for pair in zip(got, wanted, strict=True))
        return next((f"the gradient: {fault}" for fault in faults if fault), None)

    with _fresh_compiler(), subject.hosted() as host:
        findings = each(calls, look)
    subject.note_who_was_recorded(before)
    return findings


def _exports(subject: Subject, strict: bool) -> list[str]:
    calls, before = _some(subject), subject.counts("traced")

    def look(_: Case, call: Call) -> str | None:
        program = torch.export.export(_Module(host, call), _tensors(call), strict=strict).run_decompositions()
        if names := sorted(set(_foreign_ops(program.graph_module))):
            return f"records {', '.join(names)}"
        return subject.fault(program.module()(*_tensors(call)), call)

    with _fresh_compiler(), subject.hosted() as host:
        findings = each(calls, look)
    subject.note_who_was_recorded(before)
    return findings


def exports_strict(subject: Subject) -> list[str]:
    """``torch.export`` with ``strict=True`` records only standard ops, and the program gives the same results."""
    return _exports(subject, strict=True)


def exports(subject: Subject) -> list[str]:
    """``torch.export`` records only standard ops, and the program gives the same results."""
    return _exports(subject, strict=False)


def _foreign_ops(module: torch.fx.GraphModule) -> Iterator[str]:
    for graph in (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in graph.nodes:
            target = node.target
            if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
                continue
            is_op = isinstance(target, torch._ops.OpOverload)
            if is_op and target.namespace not in _STANDARD:
                yield target.name()
            elif not is_op and getattr(target, "__module__", "") not in _TRACED_AGAIN:
                yield str(target)


def traces(subject: Subject) -> list[str]:
    """``torch.jit.trace`` records only standard ops, and the trace gives the same results."""
    calls, before = _some(subject), subject.counts("traced")

    def look(_: Case, call: Call) -> str | None:
        traced: Any = torch.jit.trace(_Module(host, call), _tensors(call), check_trace=False)
        if names := sorted(set(_foreign_nodes(traced.inlined_graph))):
            return f"records {', '.join(names)}"
        return subject.fault(traced(*_tensors(call)), call)

    with subject.hosted() as host:
        findings = each(calls, look)
    subject.note_who_was_recorded(before)
    return findings


def onnx(subject: Subject) -> list[str]:
    """The ONNX exporter records only operators of ONNX itself."""
    if find_spec("onnxscript") is None:
        raise NotExamined("onnxscript is not installed: pip install onnxscript")
    calls, before = _some(subject)[:1], subject.counts("traced")

    def look(_: Case, call: Call) -> str | None:
        with contextlib.redirect_stdout(io.StringIO()):
            program: Any = torch.onnx.export(_Module(host, call), _tensors(call), dynamo=True, verbose=False)
        nodes = [(node.domain, node.op_type) for node in program.model.graph]
        foreign = {"::".join(node) for node in nodes if node[0] and not node[0].startswith(_ONNX_DOMAINS)}
        return f"records {', '.join(sorted(foreign))}" if foreign else None

    with _fresh_compiler(), subject.hosted() as host:
        findings = each(calls, look)
    subject.note_who_was_recorded(before)
    return findings


def _foreign_nodes(graph: Any) -> Iterator[str]:
    for node in graph.nodes():
        namespace, _, name = node.kind().partition("::")
        if namespace not in _STANDARD or name in ("PythonOp", "CallMethod"):
            yield node.kind()
        for block in node.blocks():
            yield from _foreign_nodes(block)


class _Recorder(TorchDispatchMode):
    """Notes the ops of other namespaces, with the arguments of their first call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.seen: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _STANDARD:
            self.seen.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def opcheck(subject: Subject) -> list[str]:
    """``torch.library.opcheck`` finds nothing in the custom ops that the kernel calls."""
    recorder = _Recorder()
    for _, call in _some(subject):
        with recorder:
            subject.run(call)
    if not recorder.seen:
        raise NotExamined("the kernel calls no op of its own")
    with _fresh_compiler():
        return [fault for op, (args, kwargs) in recorder.seen.items() if (fault := _op_fault(op, args, kwargs))]


def _op_fault(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        torch.library.opcheck(op, args, kwargs)
    except Exception as error:  # noqa: BLE001 -- opcheck raises what it finds
        return f"{op}: {raised(error)}"
    return ""


CHECKS: dict[str, Check] = {
    "compiles": compiles,
    "exports": exports,
    "exports_strict": exports_strict,
    "traces": traces,
    "onnx": onnx,
    "opcheck": opcheck,
}
"""By name, in the order in which they run."""
