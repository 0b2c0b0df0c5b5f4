# SPDX-License-Identifier: Apache-2.0
"""The rules that every quantization reference keeps: sizes, dtypes, layouts, NaN, gradients, captures, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
from tensors import assert_same_bits, random_tensor
from tokenspeed_kernel import references
from tokenspeed_kernel.reference import quant
from tokenspeed_kernel.reference.quant import (
    fake_quant_fp8,
    fake_quant_int8_affine,
    fake_quant_int8_per_channel,
    fake_quant_int_grouped,
    fake_quant_mxfp4_dynamic,
    fake_quant_mxfp4_weight,
    fake_quant_nvfp4_dynamic,
    fake_quant_nvfp4_weight,
)

Quantize = Callable[[Any], Any]

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SLOTS: dict[str, Quantize] = {
    "fake_quant_fp8": lambda x: fake_quant_fp8(x, 0.3),
    "fake_quant_int8_per_channel": fake_quant_int8_per_channel,
    "fake_quant_int8_affine": lambda x: fake_quant_int8_affine(x, -400.0, 500.0),
    "fake_quant_int_grouped": lambda x: fake_quant_int_grouped(x, 4, 16),
    "fake_quant_nvfp4_weight": lambda x: fake_quant_nvfp4_weight(x, 400.0),
    "fake_quant_nvfp4_dynamic": fake_quant_nvfp4_dynamic,
    "fake_quant_mxfp4_weight": fake_quant_mxfp4_weight,
    "fake_quant_mxfp4_dynamic": fake_quant_mxfp4_dynamic,
}
INTEGERS = {"fake_quant_int8_per_channel", "fake_quant_int8_affine", "fake_quant_int_grouped"}
MASKED = INTEGERS - {"fake_quant_int_grouped"}
OWN_TENSOR_MAXIMUM = "fake_quant_nvfp4_dynamic"
every_slot = pytest.mark.parametrize("slot", SLOTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


_random = partial(random_tensor, spread=100.0)


def _gradient(quantize: Quantize, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(quantize(leaf), leaf, cotangent)
    return gradient


def test_every_contract_has_its_reference() -> None:
    """The slots of the family are those of ``reference.quant``, by name, and each summary begins with the call."""
    contracts = {name: contract for name, contract in references.contracts.items() if contract.family == "quant"}
    assert sorted(contracts) == sorted(quant.__all__) == sorted(SLOTS)
    for name, contract in contracts.items():
        assert (contract.mode, contract.reference) == (name, f"tokenspeed_kernel.reference.quant:{name}")
        assert contract.summary.startswith(f"{name}(")


@every_slot
@every_dtype
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0), (1, 1), (1, 16), (3, 37)], ids=str)
def test_shape_and_dtype_are_kept(slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The result and the gradient have the shape and dtype of the input, without elements as well (case 5)."""
    x = _random(shape, dtype).requires_grad_()
    actual = SLOTS[slot](x)
    assert (actual.shape, actual.dtype) == (x.shape, dtype)
    (gradient,) = torch.autograd.grad(actual, x, torch.ones(shape, dtype=dtype))
    assert (gradient.shape, gradient.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("slot", sorted(set(SLOTS) - {"fake_quant_int_grouped"}))
@pytest.mark.parametrize("shape", [(0,), (1,), (16,), (2, 3, 0), (2, 0, 3), (2, 3, 5, 7)], ids=str)
def test_other_ranks(slot: str, shape: tuple[int, ...]) -> None:
    """One axis and more than two are taken (case 5)."""
    x = _random(shape)
    actual = SLOTS[slot](x)
    assert actual.shape == shape
    assert bool(actual.isfinite().all())


@pytest.mark.parametrize("slot", ["fake_quant_fp8", "fake_quant_int8_affine"])
@every_dtype
def test_single_number(slot: str, dtype: torch.dtype) -> None:
    """A 0-d input gives the value that it has in a row, 0-d (case 5)."""
    x = torch.tensor(17.3, dtype=dtype)
    assert_same_bits(SLOTS[slot](x), SLOTS[slot](x.reshape(1)).reshape(()))


@pytest.mark.parametrize("slot", sorted(set(SLOTS) - {"fake_quant_fp8", "fake_quant_int8_affine"}))
def test_number_without_an_axis_is_refused(slot: str) -> None:
    """Blocks, groups and channels need an axis: no crash, but an error that names slot, argument and shape (case 5)."""
    error = IndexError if slot == "fake_quant_int8_per_channel" else ValueError
    with pytest.raises(error, match=rf"{slot}: (x|weight|ch_axis 0) .*shape \(\)"):
        SLOTS[slot](torch.tensor(1.0))


@every_slot
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(slot: str, dtype: torch.dtype) -> None:
    """Integers, flags and complex numbers are a TypeError with slot, argument and dtype."""
    with pytest.raises(TypeError, match=rf"{slot}: (x|weight) .*{dtype}"):
        SLOTS[slot](torch.ones(2, 16, dtype=dtype))


@every_slot
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_output_is_rounded_once(slot: str, dtype: torch.dtype) -> None:
    """The float32 value of the same input is rounded to the dtype at the end, and nowhere before."""
    x = _random((40, 50), dtype)
    assert_same_bits(SLOTS[slot](x), SLOTS[slot](x.float()).to(dtype))


def _strided(slot: str) -> dict[str, torch.Tensor]:
    wide = _random((12, 50))
    two = {
        "transposed": wide.t(),
        "sliced": wide[::2, 1:40],
        "stepped": wide[:, ::3],
        "expanded": wide[:1].expand(5, 50),
        "flipped": wide.flip(1),
        "negated": torch._neg_view(wide),
    }
    if slot == "fake_quant_int_grouped":
        return two
    deep = _random((3, 8, 4, 37))
    return {
        **two,
        "channels-last": deep.contiguous(memory_format=torch.channels_last),
        "permuted": deep.permute(2, 0, 3, 1),
        "outer axis last": deep.transpose(0, 3),
    }


@every_slot
@every_dtype
def test_strides_do_not_matter(slot: str, dtype: torch.dtype) -> None:
    """Any strides give the values of contiguous memory; a dense input keeps its memory format; none is written."""
    for name, strided in _strided(slot).items():
        x = strided if dtype == torch.float32 else strided.to(dtype)  # preserves the strides
        before = x.clone()
        actual = SLOTS[slot](x)
        assert_same_bits(actual, SLOTS[slot](x.contiguous()))
        assert torch.equal(x, before), name
        if torch.ops.aten.is_non_overlapping_and_dense(x):
            assert actual.stride() == x.stride(), name


@every_slot
@every_dtype
def test_zeros_stay_zeros(slot: str, dtype: torch.dtype) -> None:
    """Zeros give zeros, with the gradient of ones: no 0/0 (case 86). Integers have one zero, floats keep the sign."""
    x = torch.tensor([[0.0, -0.0] * 16] * 4, dtype=dtype)
    assert_same_bits(SLOTS[slot](x), torch.zeros_like(x) if slot in INTEGERS else x)
    assert_same_bits(_gradient(SLOTS[slot], x, torch.ones_like(x)), torch.ones_like(x))


@every_slot
@every_dtype
def test_nan_stays_in_its_element(slot: str, dtype: torch.dtype) -> None:
    """NaN is NaN, and every other element is what it is without it (case 65)."""
    x = torch.ones(2, 32, dtype=dtype)
    expected = SLOTS[slot](x).clone()
    x[0, 3] = expected[0, 3] = NAN
    assert_same_bits(SLOTS[slot](x), expected)


@every_slot
def test_all_nan(slot: str) -> None:
    """Nothing but NaN has the maximum 0, and stays NaN."""
    x = torch.full((2, 40), NAN)
    assert bool(SLOTS[slot](x).isnan().all())
    cotangent = _random((2, 40))
    assert_same_bits(_gradient(SLOTS[slot], x, cotangent), torch.zeros(2, 40) if slot in MASKED else cotangent)


@every_slot
@every_dtype
def test_infinity_saturates(slot: str, dtype: torch.dtype) -> None:
    """An infinity is the largest code, never NaN, and nor are its neighbours (case 112)."""
    x = torch.ones(3, 32, dtype=dtype)
    x[0, 0], x[1, 1] = INF, -INF
    actual = SLOTS[slot](x)
    assert not bool(actual.isnan().any())
    assert bool((actual[0, 0] > 64) & (actual[1, 1] < -64))


@every_slot
@every_dtype
def test_infinite_maximum_counts_as_the_largest_finite(slot: str, dtype: torch.dtype) -> None:
    """Infinity and the dtype's largest value give the same codes everywhere (case 112)."""
    x = _random((3, 40), dtype)
    infinite, finite = x.clone(), x.clone()
    infinite[1, 5], finite[1, 5] = INF, torch.finfo(dtype).max
    assert_same_bits(SLOTS[slot](infinite), SLOTS[slot](finite))


@pytest.mark.parametrize("slot", sorted(set(SLOTS) - MASKED))
@every_dtype
def test_gradient_is_the_identity(slot: str, dtype: torch.dtype) -> None:
    """Every element's gradient passes, the maximum's too: nothing leaks through a scale (case 31)."""
    cotangent = _random((4, 64), dtype, seed=1)
    two_maxima = _random((4, 64), dtype)
    two_maxima[:, 7], two_maxima[:, 11] = 1000.0, -1000.0
    for x in (_random((4, 64), dtype), torch.full((4, 64), 3.0, dtype=dtype), two_maxima):
        assert_same_bits(_gradient(SLOTS[slot], x, cotangent), cotangent)


def test_gradient_of_a_dynamic_channel_maximum_is_the_identity() -> None:
    """With its own scale every weight is in range, and the maximum's gradient passes unchanged (case 31)."""
    x, cotangent = _random((4, 64)), _random((4, 64), seed=1)
    assert_same_bits(_gradient(fake_quant_int8_per_channel, x, cotangent), cotangent)


@every_slot
def test_result_shares_no_memory(slot: str) -> None:
    """Writing to the result changes no input, though every value may be a code."""
    x = torch.ones(2, 32, requires_grad=True)
    actual = SLOTS[slot](x)
    actual.add_(1.0)  # in place, as a host may do it
    assert bool((x == 1).all())
    assert not SLOTS[slot](x.detach()).requires_grad


@every_slot
def test_same_bits_in_every_batch_position(slot: str) -> None:
    """A row gives the same bits alone, in a batch and on a second run, for any number of rows (case 43)."""
    x = _random((33, 16 if "nvfp4" in slot else 257))
    whole = SLOTS[slot](x)
    assert_same_bits(SLOTS[slot](x), whole)
    if slot != OWN_TENSOR_MAXIMUM:
        assert_same_bits(torch.cat([SLOTS[slot](row) for row in x.split(1)]), whole)


@every_slot
def test_compiled_function_equals_eager(slot: str) -> None:
    """torch.compile sees one graph without breaks, with the same bits and gradient (case 13)."""
    torch.compiler.reset()
    x, cotangent = _random((4, 40)), _random((4, 40), seed=1)
    compiled = torch.compile(SLOTS[slot], fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x.clone().requires_grad_()), SLOTS[slot](x))
    assert_same_bits(_gradient(compiled, x, cotangent), _gradient(SLOTS[slot], x, cotangent))


@pytest.mark.parametrize("slot", ["fake_quant_int_grouped", "fake_quant_mxfp4_dynamic"])
def test_inductor_keeps_a_short_last_group(slot: str) -> None:
    """The default backend has the eager bits where the row is no multiple of the group (case 17)."""
    torch.compiler.reset()
    x = _random((5, 40))
    assert_same_bits(torch.compile(SLOTS[slot], fullgraph=True)(x), SLOTS[slot](x))


@every_slot
def test_functional_transforms(slot: str) -> None:
    """``torch.func.grad`` and ``vmap`` equal autograd and the Python loop (case 13)."""
    batch, cotangent = _random((3, 4, 40)), _random((4, 40), seed=1)
    gradient = torch.func.grad(lambda x: (SLOTS[slot](x) * cotangent).sum())
    expected = torch.stack([_gradient(SLOTS[slot], x, cotangent) for x in batch])
    assert_same_bits(gradient(batch[0]), expected[0])
    assert_same_bits(torch.func.vmap(SLOTS[slot])(batch), torch.stack([SLOTS[slot](x) for x in batch]))
    assert_same_bits(torch.func.vmap(gradient)(batch), expected)


class _Module(torch.nn.Module):
    """A slot as a module, for exporters."""

    def __init__(self, quantize: Quantize) -> None:
        super().__init__()
        self.quantize = quantize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the quantized input."""
        result: torch.Tensor = self.quantize(x)
        return result


@every_slot
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_export_records_plain_operators(slot: str, strict: bool, dtype: torch.dtype) -> None:
    """torch.export holds standard operators only, with the eager bits."""
    torch.compiler.reset()
    x = _random((4, 40), dtype)
    program = torch.export.export(_Module(SLOTS[slot]), (x,), strict=strict)
    nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert {target.split(".")[0] for target in nodes} == {"aten"}
    assert_same_bits(program.module()(x), SLOTS[slot](x))


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::DeprecationWarning:torch")
@every_slot
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_trace_records_plain_operators(slot: str, dtype: torch.dtype) -> None:
    """torch.jit.trace records no autograd function, and the trace serves other shapes with the same bits."""
    traced = torch.jit.trace(_Module(SLOTS[slot]), (_random((4, 40), dtype),))
    assert {node.kind().split("::")[0] for node in traced.graph.nodes()} == {"aten", "prim"}
    assert "PythonOp" not in str(traced.graph)
    x = _random((5, 71), dtype, seed=1)
    assert_same_bits(traced(x), SLOTS[slot](x))
