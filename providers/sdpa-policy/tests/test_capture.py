# SPDX-License-Identifier: Apache-2.0
"""Graph captures: what the gate keeps primitive, and what it leaves alone on purpose."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.jit import TracerWarning

from tokenspeed_kernel_sdpa_policy import attend, manual_attention_required
from tokenspeed_kernel_sdpa_policy.attention import supports

Tensor = torch.Tensor
# Each capture that torch deprecates says so at every call, and the old exporter's own code trips other deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Attention(nn.Module):
    """A self-attention block, as a model has it."""

    fused_attn: bool

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.is_causal = is_causal
        self.fused_attn = True

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, L, 16) for ``x`` of (B, L, 16)."""
        batch, length, width = x.shape  # reshape, as the old ONNX exporter makes constants of what unflatten sees
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return attend(q, k, v, is_causal=self.is_causal).transpose(1, 2).reshape(batch, length, width)


class Masked(nn.Module):
    """Attention with a mask from outside, and with grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return attend's output."""
        return attend(q, k, v, attn_mask=mask, enable_gqa=True)


class CausalBySize(nn.Module):
    """Attention that is causal unless there is one query: a choice from shapes, as decoders make it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attend's output."""
        return attend(q, k, v, is_causal=q.shape[-2] > 1)


def trace(model: Callable[..., Tensor], *example: Tensor) -> Any:
    """Trace once: the tracer's own check compares lengths that it was traced at only."""
    return torch.jit.trace(model, example, check_trace=False)


def masked_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return grouped heads and a mask with a fully masked row."""
    mask = torch.rand(4, 6) > 0.4
    mask[1] = False
    return torch.randn(1, 4, 4, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), mask


def test_gate_is_open_in_eager_code() -> None:
    """Without a capture the fused op may run, and the slot's kernel accepts."""
    q = torch.randn(1, 1, 2, 4)
    assert not manual_attention_required()
    assert supports(q, q, q) is True


def test_slot_declines_in_a_trace() -> None:
    """While a trace runs the kernel declines with a reason, so that the host records its own portable math."""
    seen: list[object] = []

    def call(q: Tensor) -> Tensor:
        seen.append(supports(q, q, q, is_causal=True))
        return q + 1

    trace(call, torch.randn(1, 1, 2, 4))
    assert seen == ["graph capture (torch.jit.trace or ONNX export): the graph keeps primitive ops"]


def test_trace_holds_at_every_length() -> None:
    """Case 82: traced at length 4 without a warning, the graph has no fused op and equals eager at 1 and 7."""
    model = Attention().eval()
    traced = trace(model, torch.randn(2, 4, 16))
    assert "scaled_dot_product_attention" not in str(traced.inlined_graph)
    for length in (1, 4, 7):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-5)


def test_trace_keeps_a_causal_choice_from_sizes() -> None:
    """Case 82: is_causal chosen from shapes is a tensor while tracing; the graph chooses again at each length."""
    traced = trace(CausalBySize(), *(torch.randn(1, 2, n, 8) for n in (4, 6, 6)))
    for queries, keys in ((1, 7), (4, 6), (7, 3)):
        call = [torch.randn(1, 2, n, 8) for n in (queries, keys, keys)]
        torch.testing.assert_close(traced(*call), CausalBySize()(*call), rtol=0, atol=1e-5)


def test_trace_names_no_device() -> None:
    """Case 82: a trace taken on one device runs on another: no size or mask is built on the example's device."""
    traced = trace(CausalBySize(), *(torch.randn(1, 2, n, 8) for n in (4, 6, 6)))
    elsewhere = [torch.empty(1, 2, n, 8, device="meta") for n in (3, 5, 5)]
    assert traced(*elsewhere).device.type == "meta"


def test_trace_of_mask_and_grouped_heads_holds_at_other_sizes() -> None:
    """Case 82: a mask with a fully masked row and grouped heads trace as well."""
    traced = trace(Masked(), *masked_inputs())
    q, k, v, mask = torch.randn(3, 4, 2, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8), torch.rand(2, 9) > 0.4
    mask[0] = False
    torch.testing.assert_close(traced(q, k, v, mask), Masked()(q, k, v, mask), rtol=0, atol=1e-5)


def test_trace_refuses_bad_inputs() -> None:
    """Case 20: keys and values of different length are the same ValueError while tracing."""
    with pytest.raises(ValueError, match="same length"):
        trace(CausalBySize(), *(torch.randn(1, 2, n, 8) for n in (4, 6, 5)))


def test_script_compiles_and_equals_eager() -> None:
    """Case 82: a model that calls attend compiles with torch.jit.script, to primitive ops, and is saved and loaded."""
    model = Masked()
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    buffer.seek(0)
    scripted = torch.jit.load(buffer)
    call = masked_inputs()
    assert "scaled_dot_product_attention" not in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(*call), model(*call), rtol=0, atol=1e-5)


def test_script_refuses_bad_inputs() -> None:
    """Case 20: inside TorchScript the error arrives as torch.jit.Error and names the ValueError."""
    q, k, v, mask = masked_inputs()
    scripted = torch.jit.script(Masked())
    with pytest.raises(torch.jit.Error, match="ValueError: sdpa: k and v must have the same length"):
        scripted(q, k, v[:, :, :5], mask)


def test_compile_sees_one_fused_op_at_two_lengths() -> None:
    """Case 82: torch.compile is outside the gate: the fused op, right at other lengths and either is_causal."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(CausalBySize(), fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in ((4, 6), (7, 9), (1, 9)):
        call = [torch.randn(1, 2, n, 8) for n in (queries, keys, keys)]
        torch.testing.assert_close(compiled(*call), CausalBySize()(*call), rtol=0, atol=1e-6)
    assert all("scaled_dot_product_attention" in code for code in graphs)
    torch._dynamo.reset()  # a leftover cache would count against another test's recompiles


@pytest.mark.parametrize("strict", [False, True])
def test_export_holds_the_fused_op_and_decomposes_it(strict: bool) -> None:
    """torch.export is outside the gate: the program has the operator, and run_decompositions leaves none of it."""
    model, x = Attention(is_causal=False).eval(), torch.randn(2, 4, 16)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},), strict=strict)
    assert "aten.scaled_dot_product_attention" in str(program.graph)
    decomposed = program.run_decompositions()
    targets = [str(node.target) for node in decomposed.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" not in targets
    y = torch.randn(2, 7, 16)
    torch.testing.assert_close(decomposed.module()(y), model(y), rtol=0, atol=1e-5)


def export(model: nn.Module, inputs: tuple[Tensor, ...], path: Path, **keywords: Any) -> onnx.ModelProto:
    """Export with only the exporter's own warnings silenced: the tracer's would be ours."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("error", TracerWarning)
        torch.onnx.export(model, inputs, str(path), **keywords)
    return onnx.load(str(path))


def operators(proto: onnx.ModelProto) -> set[str]:
    """Return the operators of a model and of the functions in it."""
    return {node.op_type for part in (proto.graph, *proto.functions) for node in part.node}


ONNX_EXPORTS: dict[str, dict[str, Any]] = {
    "old_13": {"dynamo": False, "opset_version": 13},
    "old_17": {"dynamo": False, "opset_version": 17},
    "dynamo": {"dynamo": True, "verbose": False},
}


@pytest.mark.parametrize("how", ONNX_EXPORTS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["plain", "causal"])
def test_onnx_export_is_primitive_and_equals_eager(how: str, is_causal: bool, tmp_path: Path) -> None:
    """Case 97: no attention node in the graph, numbers as eager, and the normal forward after it as before."""
    model, x = Attention(is_causal).eval(), torch.randn(2, 4, 16)
    expected = model(x)
    proto = export(model, (x,), tmp_path / "model.onnx", **ONNX_EXPORTS[how])
    assert not {name for name in operators(proto) if "attention" in name.lower()}
    (actual,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=1e-5)
    assert not manual_attention_required()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("how", ["old_13", "old_17"])
def test_onnx_graph_holds_at_other_lengths(how: str, tmp_path: Path) -> None:
    """Case 82, case 97: with dynamic axes the causal graph is right at lengths that it was not exported at."""
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {1: "length"}}}
    model = Attention().eval()
    proto = export(model, (torch.randn(2, 4, 16),), tmp_path / "model.onnx", **axes, **ONNX_EXPORTS[how])
    for length in (1, 7):
        x = torch.randn(2, length, 16)
        (actual,) = ReferenceEvaluator(proto).run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["old_13", "old_17"])
def test_onnx_graph_of_mask_and_grouped_heads_holds_at_other_lengths(how: str, tmp_path: Path) -> None:
    """Case 82, case 97: so is the graph with a mask and grouped heads."""
    axes = {"q": {2: "queries"}, "k": {2: "keys"}, "v": {2: "keys"}, "mask": {0: "queries", 1: "keys"}}
    names = {"input_names": list(axes), "dynamic_axes": axes}
    proto = export(Masked(), masked_inputs(), tmp_path / "model.onnx", **names, **ONNX_EXPORTS[how])
    call = (torch.randn(1, 4, 2, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.rand(2, 9) > 0.4)
    (actual,) = ReferenceEvaluator(proto).run(None, {name: x.numpy() for name, x in zip(axes, call, strict=True)})
    torch.testing.assert_close(torch.from_numpy(actual), Masked()(*call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ONNX_EXPORTS)
def test_onnx_export_of_a_fully_masked_row(how: str, tmp_path: Path) -> None:
    """Case 70, case 97: a mask with a fully masked row and grouped heads export too, and give zeros, not NaN."""
    call = masked_inputs()
    proto = export(Masked(), call, tmp_path / "model.onnx", **ONNX_EXPORTS[how])
    feeds = {value.name: x.numpy() for value, x in zip(proto.graph.input, call, strict=True)}
    (actual,) = ReferenceEvaluator(proto).run(None, feeds)
    torch.testing.assert_close(torch.from_numpy(actual), Masked()(*call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ONNX_EXPORTS)
def test_failed_onnx_export_leaves_the_gate_open(how: str, tmp_path: Path) -> None:
    """Case 97: after an export that raised, flags and the gate are as before and the fused op runs."""

    class Broken(Attention):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("broken on purpose")

    model = Broken()
    with pytest.raises(Exception, match="broken on purpose"):
        export(model, (torch.randn(2, 4, 16),), tmp_path / "model.onnx", **ONNX_EXPORTS[how])
    assert model.fused_attn is True
    assert not manual_attention_required()
