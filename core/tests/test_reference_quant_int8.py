# SPDX-License-Identifier: Apache-2.0
"""The int8 references: against torch's own operators where the bits are the same, and exact arithmetic elsewhere."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
from tensors import assert_same_bits, random_tensor
from tokenspeed_kernel.reference.quant import fake_quant_int8_affine, fake_quant_int8_per_channel

INF, NAN = math.inf, math.nan
FLOAT32_MAX = float(np.finfo(np.float32).max)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SINGLE = DTYPES[:3]  # computed in float32, as torch's operators do
TIES = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 128, -127.5, -128.5, -129]
# The ranges with scale 1: zero point z spans -128 - z to 127 - z.
UNIT = (-128.0, 127.0)


def _gradient(y: torch.Tensor, x: torch.Tensor, cotangent: Any = None) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y) if cotangent is None else cotangent)
    return gradient


def _operator_per_channel(x: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Return torch's own answer, with zeros as the slot has them."""
    zero = torch.zeros(scale.shape, dtype=torch.int32)
    y = torch.fake_quantize_per_channel_affine(x.float(), scale, zero, axis, -128, 127).to(x.dtype)
    return torch.where(y == 0, torch.zeros_like(y), y)


def _operator_affine(x: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """Return torch's own answer for scale and zero point computed in numpy's float32."""
    low, high = np.float32(min(lo, 0.0)), np.float32(max(hi, 0.0))
    scale = np.maximum((high - low) / np.float32(255), np.float32(1e-12))
    zero = int(np.clip(np.rint(np.float32(-128) - low / scale), -128, 127))
    y = torch.fake_quantize_per_tensor_affine(x.float(), float(scale), zero, -128, 127).to(x.dtype)
    return torch.where(y == 0, torch.zeros_like(y), y)


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
def test_ties_go_to_even(dtype: torch.dtype) -> None:
    """Halves are rounded to even codes, the range is -128 to 127 (case 16)."""
    x = torch.tensor([TIES], dtype=dtype)
    assert_same_bits(fake_quant_int8_per_channel(x, 0, 1.0), [[0, 2, 2, 0, -2, -2, 126, 127, 127, -128, -128, -128]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_kept_and_every_midpoint_rounded_to_even(dtype: torch.dtype) -> None:
    """Codes are fixed points; a midpoint goes to the even one, its neighbours to theirs."""
    codes = torch.arange(-128, 128, dtype=dtype)
    assert_same_bits(fake_quant_int8_per_channel(codes[None], 0, 1.0), codes[None])
    middle = codes[:-1] + 0.5
    above, below = (torch.nextafter(middle, torch.full_like(middle, to)) for to in (INF, -INF))
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert_same_bits(fake_quant_int8_per_channel(middle[None], 0, 1.0), even[None])
    assert_same_bits(fake_quant_int8_per_channel(above[None], 0, 1.0), codes[None, 1:])
    assert_same_bits(fake_quant_int8_per_channel(below[None], 0, 1.0), codes[None, :-1])


def test_code_is_a_product_with_the_reciprocal() -> None:
    """Where division and product differ, the product rules, as in torch (case 95)."""
    x, scale = torch.tensor([[-12.149999618530273]]), torch.tensor([0.1])
    assert_same_bits(fake_quant_int8_per_channel(x, 0, scale), [[np.float32(-122) * np.float32(0.1)]])
    assert_same_bits(fake_quant_int8_per_channel(x, 0, scale), _operator_per_channel(x, scale, 0))


def test_float64_multiplies_by_its_own_reciprocal() -> None:
    """Float64 inputs are computed in float64 (in float32 the code would be -122)."""
    x = torch.tensor([[-12.149999618530273]], dtype=torch.float64)
    assert_same_bits(fake_quant_int8_per_channel(x, 0, 0.1), [[-121 * 0.1]])
    x = random_tensor((5, 200), torch.float64)
    scale = np.abs(x.numpy()).max(1, keepdims=True) / 127
    expected = np.clip(np.rint(x.numpy() * (1 / scale)), -128, 127) * scale
    assert_same_bits(fake_quant_int8_per_channel(x), torch.from_numpy(expected) + 0.0)


def test_arithmetic_is_float32_for_narrow_inputs() -> None:
    """A bfloat16 code is not computed in bfloat16 (case 100)."""
    x = torch.tensor([[-1.5703125]], dtype=torch.bfloat16)
    assert_same_bits(fake_quant_int8_per_channel(x, 0, torch.tensor([0.0123291015625])), [[-1.5625]])


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_equals_the_operator_on_every_axis(axis: int, dtype: torch.dtype) -> None:
    """The default and a given scale have the bits of torch.fake_quantize_per_channel_affine."""
    x = 3 * random_tensor((5, 7, 11), dtype)
    others = [n for n in range(3) if n != axis % 3]
    default = (x.abs().float().amax(others) / torch.tensor(127.0)).clamp(min=1e-12)
    assert_same_bits(fake_quant_int8_per_channel(x, axis), _operator_per_channel(x, default, axis % 3))
    given = torch.rand(default.shape, generator=torch.Generator().manual_seed(1)) / 50
    assert_same_bits(fake_quant_int8_per_channel(x, axis, given), _operator_per_channel(x, given, axis % 3))


@pytest.mark.parametrize("exponent", range(-30, 31, 4))
def test_scales_over_the_whole_range(exponent: int) -> None:
    """Weights and scales of any size have the operator's bits, down to the floor of the scale."""
    x = random_tensor((3, 99)) * 10.0**exponent
    default = (x.abs().amax(1) / torch.tensor(127.0)).clamp(min=1e-12)
    assert_same_bits(fake_quant_int8_per_channel(x), _operator_per_channel(x, default, 0))
    given = torch.full((3,), 1.1 * 10.0**exponent)
    assert_same_bits(fake_quant_int8_per_channel(x, 0, given), _operator_per_channel(x, given.clamp(min=1e-12), 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_shapes(dtype: torch.dtype) -> None:
    """One per channel, one that broadcasts, one element of any rank and a number mean what they say."""
    x, scales = 3 * random_tensor((4, 6), dtype), torch.rand(4, generator=torch.Generator().manual_seed(1)) / 50 + 0.01
    expected = torch.stack([fake_quant_int8_per_channel(x[n : n + 1], 0, scales[n])[0] for n in range(4)])
    for given in (scales, scales[:, None], scales[:, None].expand(4, 6), scales.double()):
        assert_same_bits(fake_quant_int8_per_channel(x, 0, given), expected)
    assert_same_bits(fake_quant_int8_per_channel(x.t(), 1, scales), expected.t())
    once = fake_quant_int8_per_channel(x, 0, torch.tensor(0.03, dtype=torch.float64))
    for number in (0.03, torch.full((1,), 0.03, dtype=torch.float64), torch.full((1, 1, 1), 0.03, dtype=torch.float64)):
        assert_same_bits(fake_quant_int8_per_channel(x, 0, number), once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_scales(dtype: torch.dtype) -> None:
    """A scale below 1e-12 counts as that, NaN gives NaN in its channel, zeros stay zeros under any other (case 86)."""
    x = torch.tensor([[0.0, -0.0], [1e-5, 0.0], [0.0, 0.0]], dtype=dtype)
    actual = fake_quant_int8_per_channel(x, 0, torch.tensor([0.0, -1.0, NAN]))
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    largest = (127 * torch.tensor(1e-12, dtype=arithmetic)).to(dtype)
    assert_same_bits(actual, torch.tensor([[0.0, 0.0], [largest.item(), 0.0], [NAN, NAN]], dtype=dtype))


def test_zero_results_are_positive() -> None:
    """What rounds to zero is +0, also where only the last rounding to float16 makes it zero."""
    assert_same_bits(fake_quant_int8_per_channel(torch.tensor([[-0.4, -0.0, 0.4]]), 0, 1.0), [[0.0, 0.0, 0.0]])
    assert_same_bits(fake_quant_int8_per_channel(torch.tensor([[-1.0]], dtype=torch.float16), 0, 1e-12), [[0.0]])
    assert_same_bits(fake_quant_int8_affine(torch.tensor([-0.4, -0.0, 0.4]), *UNIT), [0.0, 0.0, 0.0])


def test_codes_beyond_integers_saturate() -> None:
    """The code is clamped as a float: past 2**63, and at infinity, it is the largest."""
    x = torch.tensor([[3e38, -3e38, INF, -INF, NAN]])
    assert_same_bits(fake_quant_int8_per_channel(x, 0, 1.0), [[127, -128, 127, -128, NAN]])
    assert_same_bits(fake_quant_int8_affine(x, *UNIT), [[127, -128, 127, -128, NAN]])


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
@pytest.mark.parametrize(
    ("lo", "hi"),
    [(-3.0, 5.0), (0.1, 7.0), (-7.0, -0.3), (-1e-20, 1e-20), (-1e30, 3e30), (0.0, 0.0), (5.0, 3.0), (-0.7, 1e-9)],
    ids=str,
)
def test_affine_equals_the_operator(lo: float, hi: float, dtype: torch.dtype) -> None:
    """The bits of torch.fake_quantize_per_tensor_affine, for ranges that begin above 0, end below it, or are empty."""
    x = (random_tensor((4000,)) * max(abs(lo), abs(hi), 1.0)).to(dtype)
    x = x[x.isfinite()]
    expected = _operator_affine(x, lo, hi)
    for ends in ((lo, hi), (torch.tensor(lo), torch.tensor([hi])), (torch.tensor(lo, dtype=torch.float64), hi)):
        assert_same_bits(fake_quant_int8_affine(x, *ends), expected)


def test_affine_in_float64() -> None:
    """Float64 inputs are computed in float64."""
    x = 4 * random_tensor((4000,), torch.float64)
    scale = (5.0 - -3.1) / 255
    zero = round(-128 - -3.1 / scale)
    codes = np.clip(np.rint(x.numpy() * (1 / scale)) + zero, -128, 127)
    assert_same_bits(fake_quant_int8_affine(x, -3.1, 5.0), torch.from_numpy((codes - zero) * scale) + 0.0)


def test_zero_point_is_added_after_rounding() -> None:
    """An odd zero point does not turn the ties around (case 101)."""
    assert_same_bits(fake_quant_int8_affine(torch.tensor([0.5, 1.5, 2.5, -0.5]), -129.0, 126.0), [0, 2, 2, 0])


@pytest.mark.parametrize(
    ("ends", "finite"),
    [
        ((-INF, 0.0), (-FLOAT32_MAX, 0.0)),
        ((0.0, INF), (0.0, FLOAT32_MAX)),
        ((-1e300, 1.0), (-FLOAT32_MAX, 1.0)),
    ],
    ids=str,
)
def test_infinite_ends_count_as_the_largest_float32(ends: tuple[float, float], finite: tuple[float, float]) -> None:
    """An infinite end is the largest finite one, as a number and as a tensor."""
    x = torch.tensor([-3e38, -1e37, 0.0, 1e36, 3e38])
    expected = fake_quant_int8_affine(x, *finite)
    assert bool(expected.isfinite().all())
    assert_same_bits(fake_quant_int8_affine(x, *ends), expected)
    assert_same_bits(fake_quant_int8_affine(x, *(torch.tensor(end) for end in ends)), expected)


def test_range_that_overflows_counts_as_the_largest_float32() -> None:
    """The scale is the largest float32 divided by 255, and the zero point follows from it and the lower end."""
    scale = np.float32(FLOAT32_MAX) / np.float32(255)
    x = torch.tensor([0.0, -scale, 100 * -scale, 3e38])
    assert_same_bits(fake_quant_int8_affine(x, -INF, INF), [0.0, -scale, 100 * -scale, 0.0])  # z = 127
    assert_same_bits(fake_quant_int8_affine(x, -3e38, 3e38), [0.0, -scale, 100 * -scale, 30 * scale])  # z = 97


@pytest.mark.parametrize("ends", [(NAN, 1.0), (-1.0, NAN), (NAN, NAN)], ids=str)
def test_nan_range_gives_nan(ends: tuple[float, float]) -> None:
    """A NaN in the range is not hidden by the widening to 0."""
    assert bool(fake_quant_int8_affine(torch.tensor([0.0, 1.0]), *ends).isnan().all())


def test_affine_mask_is_that_of_the_rounded_code() -> None:
    """The gradient passes where the unclamped code is in the range, ends included (case 1)."""
    x = torch.tensor([-128.6, -128.5, -128.4, -128, 127, 127.4, 127.5, 127.6, 130, NAN, INF], requires_grad=True)
    mask = [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert_same_bits(_gradient(fake_quant_int8_affine(x, *UNIT), x), mask)
    rows = x.detach()[None].requires_grad_()
    assert_same_bits(_gradient(fake_quant_int8_per_channel(rows, 0, 1.0), rows), [mask])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_masked_and_not_scaled(dtype: torch.dtype) -> None:
    """The cotangent passes unchanged or not at all, an infinite one too."""
    x, cotangent = random_tensor((300,), dtype).requires_grad_(), random_tensor((300,), dtype, seed=1)
    cotangent[::7] = INF
    inside = (x.double() * 100).round().abs() < 100
    actual = _gradient(fake_quant_int8_affine(x, -1.28, 1.27), x, cotangent)
    outside = (x.double() * 100).round().abs() > 129
    assert_same_bits(actual[inside], cotangent[inside])
    assert_same_bits(actual[outside], torch.zeros_like(cotangent[outside]))


def test_range_and_scale_get_no_gradient() -> None:
    """``scale.grad`` is None, not a silent zero (case 7)."""
    x = torch.tensor([[0.3, 1.7, 200.0]], requires_grad=True)
    lo, hi, scale = (torch.tensor([end], requires_grad=True) for end in (*UNIT, 1.0))
    (fake_quant_int8_affine(x, lo, hi) + fake_quant_int8_per_channel(x, 0, scale)).sum().backward()
    assert (lo.grad, hi.grad, scale.grad) == (None, None, None)
    assert x.grad is not None
    assert_same_bits(x.grad, [[2, 2, 0]])


def test_refusals() -> None:
    """A wrong axis, shape or dtype is an error of its kind that names slot, argument and value."""
    x = torch.ones(3, 4)
    for axis in (2, -3):
        with pytest.raises(IndexError, match=rf"fake_quant_int8_per_channel: ch_axis {axis} .*\(3, 4\)"):
            fake_quant_int8_per_channel(x, axis)
    for shape in ((2,), (3, 3), (2, 3, 4), (0,)):
        with pytest.raises(ValueError, match="fake_quant_int8_per_channel: scale") as caught:
            fake_quant_int8_per_channel(x, 0, torch.ones(shape))
        assert str(shape) in str(caught.value)
        assert "(3, 4)" in str(caught.value)
    with pytest.raises(TypeError, match=r"fake_quant_int8_per_channel: scale .*torch.int64"):
        fake_quant_int8_per_channel(x, 0, torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"fake_quant_int8_affine: lo .*1j"):
        fake_quant_int8_affine(x, 1j, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fake_quant_int8_affine: hi .*\(3,\).*\(3, 4\)"):
        fake_quant_int8_affine(x, 0.0, torch.ones(3))
    with pytest.raises(ValueError, match=r"fake_quant_int8_affine: hi must have one element, got shape \(4,\)"):
        fake_quant_int8_affine(x, 0.0, torch.ones(4), scalars=True)


class _PerChannel(torch.nn.Module):
    def __init__(self, axis: int, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quant_int8_per_channel(x, self.axis, self.scale)


class _Affine(torch.nn.Module):
    def __init__(self, lo: torch.Tensor | float, hi: torch.Tensor | float) -> None:
        super().__init__()
        self.ends = lo, hi

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quant_int8_affine(x, *self.ends, scalars=True)


def _trace(module: torch.nn.Module, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        return torch.jit.trace(module, (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", ["default", "[C]", "[C, 1]", "[1]", "[C, n]"])
def test_captures_record_the_operator_per_channel(scale: str, dtype: torch.dtype) -> None:
    """Exports and traces hold torch.fake_quantize_per_channel_affine, with the eager bits; float64, its own math."""
    torch.compiler.reset()
    x, steps = random_tensor((5, 40), dtype), torch.rand(5, generator=torch.Generator().manual_seed(1)) / 50
    given = {
        "default": None,
        "[C]": steps,
        "[C, 1]": steps[:, None],
        "[1]": steps[:1],
        "[C, n]": steps[:, None] + 0 * x,
    }
    module = _PerChannel(0, given[scale].float() if given[scale] is not None else None)
    has_operator = dtype != torch.float64 and scale != "[C, n]"
    traced = _trace(module, x)
    assert ("aten::fake_quantize_per_channel_affine" in str(traced.graph)) == has_operator
    assert_same_bits(traced(x) + 0.0, module(x))
    for strict in (True, False):
        program = torch.export.export(module, (x,), strict=strict)
        assert ("fake_quantize_per_channel_affine" in str(program.graph)) == has_operator
        assert_same_bits(program.module()(x) + 0.0, module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", [(-1.1, 1.7), (0.3, 2.0), (-3e38, 3e38), (-1.0, INF), (0.0, 0.0)], ids=str)
def test_scalars_are_recorded_as_numbers(ends: tuple[float, float], dtype: torch.dtype) -> None:
    """With ``scalars`` the graph holds one operator with two numbers, the same as eager; float64, its own math."""
    torch.compiler.reset()
    x = random_tensor((5, 40), dtype)
    modules = _Affine(*ends), _Affine(torch.tensor(ends[0]), torch.tensor([ends[1]]))
    for module in modules:
        traced = _trace(module, x)
        assert ("aten::fake_quantize_per_tensor_affine" in str(traced.graph)) == (dtype != torch.float64)
        assert_same_bits(traced(x) + 0.0, module(x))
    for strict in (True, False):
        program = torch.export.export(modules[0], (x,), strict=strict)
        calls = [n for n in program.graph.nodes if "fake_quantize_per_tensor_affine" in str(n.target)]
        assert [type(argument) for call in calls for argument in call.args[1:]] == [float, int, int, int] * len(calls)
        assert len(calls) == (dtype != torch.float64)
        assert_same_bits(program.module()(x) + 0.0, modules[0](x))


def test_torch_export_records_tensors_that_it_cannot_read() -> None:
    """Where ``lo`` and ``hi`` are inputs, the operator is recorded with tensors."""
    lo, hi, x = torch.tensor(-1.1), torch.tensor(1.7), random_tensor((5, 40))

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
            return fake_quant_int8_affine(x, lo, hi, scalars=True)

    program = torch.export.export(Module(), (x, lo, hi))
    assert "fake_quantize_per_tensor_affine.tensor_qparams" in str(program.graph)
    assert_same_bits(program.module()(x, lo, hi) + 0.0, fake_quant_int8_affine(x, lo, hi))


def test_scalars_change_nothing_in_eager() -> None:
    """Without a capture ``scalars`` has no effect, NaN and infinities included."""
    x = torch.cat([random_tensor((100,)), torch.tensor([NAN, INF, -INF, -0.0])])
    assert_same_bits(fake_quant_int8_affine(x, -1.1, 1.7, scalars=True), fake_quant_int8_affine(x, -1.1, 1.7))
