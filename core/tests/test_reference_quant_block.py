# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and MXFP4: the references against ml_dtypes, exact rational arithmetic and numpy, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
from tensors import assert_same_bits, random_tensor
from tokenspeed_kernel.reference.quant import (
    fake_quant_mxfp4_dynamic,
    fake_quant_mxfp4_weight,
    fake_quant_nvfp4_dynamic,
    fake_quant_nvfp4_weight,
)

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
UNIT = 448 * 6.0  # the tensor's maximum that makes its scale 1
E2M1 = [Fraction(code) for code in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]  # OCP MX 1.0, table 5
E4M3 = sorted(
    {Fraction(m, 512) for m in range(8)}
    | {(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)
mxfp4 = pytest.mark.parametrize("quantize", [fake_quant_mxfp4_weight, fake_quant_mxfp4_dynamic])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _nearest(codes: list[Fraction], value: float) -> float:
    """Return the code nearest to ``value``, ties to the even one, with the sign of ``value``."""
    if math.isnan(value):
        return NAN
    magnitude = min(Fraction(abs(value)), codes[-1]) if math.isfinite(value) else codes[-1]
    above = next(n for n, code in enumerate(codes) if code >= magnitude)
    below = max(above - 1, 0)
    low, high = magnitude - codes[below], codes[above] - magnitude
    nearest = below if low < high or (low == high and below % 2 == 0) else above
    return math.copysign(float(codes[nearest]), value)


def _by_blocks(x: torch.Tensor, size: int, quantize: Callable[[Any], list[Any]]) -> torch.Tensor:
    """Return what ``quantize`` makes of each block of a row, in ``x``'s dtype."""
    number = np.float64 if x.dtype == torch.float64 else np.float32
    rows = x.to(torch.float64).numpy().astype(number).reshape(-1, x.shape[-1])
    values = [value for row in rows for n in range(0, len(row), size) for value in quantize(row[n : n + size])]
    return torch.from_numpy(np.array(values, dtype=number)).reshape(x.shape).to(x.dtype)


def _mxfp4_model(x: torch.Tensor) -> torch.Tensor:
    """MXFP4 of finite values and NaN, exactly: in double precision no product with these powers of two is rounded."""

    def quantize(block: Any) -> list[Any]:
        amax = max((abs(float(value)) for value in block if not np.isnan(value)), default=0.0)
        exponent = max(-127, min(math.frexp(amax)[1] - 1 - 2, 127)) if amax else -127
        return [math.ldexp(_nearest(E2M1, math.ldexp(float(value), -exponent)), exponent) for value in block]

    return _by_blocks(x, 32, quantize)


def _nvfp4_model(x: torch.Tensor, tensor_amax: float) -> torch.Tensor:
    """NVFP4 of finite values, in numpy's float32, or float64 for float64."""
    number = np.float64 if x.dtype == torch.float64 else np.float32
    tensor_scale = number(tensor_amax) / number(UNIT)

    def quantize(block: Any) -> list[Any]:
        with np.errstate(all="ignore"):
            quotient = np.abs(block).max() / (number(6) * tensor_scale)
            step = number(_nearest(E4M3, float(quotient))) * tensor_scale
            if not step > 0:
                return [np.copysign(number(0), value) for value in block]
            return [number(_nearest(E2M1, float(value / step))) * step for value in block]

    return _by_blocks(x, 16, quantize)


def _critical_points(dtype: torch.dtype) -> torch.Tensor:
    """Every E2M1 number, every midpoint, what lies next to both and beyond the largest; both signs."""
    points = [float(code) for code in E2M1] + [float((a + b) / 2) for a, b in pairwise(E2M1)]
    middle = torch.tensor(points, dtype=dtype)
    near = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (INF, -INF)]
    positive = torch.cat([middle, *near, torch.tensor([6.5, 7.0, 7.9], dtype=dtype)])
    return torch.cat([positive, -positive])


def _unit_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return one value a block, beside a 6 that makes the block's scale 1."""
    x = torch.zeros(len(values), size, dtype=values.dtype)
    x[:, 0], x[:, 1] = 6.0, values
    return x


@every_dtype
def test_elements_are_rounded_exactly(dtype: torch.dtype) -> None:
    """Codes survive, midpoints go to the even code, their neighbours to the nearest: by exact arithmetic (case 89)."""
    values = _critical_points(dtype)
    expected = torch.tensor([_nearest(E2M1, value) for value in values.tolist()], dtype=dtype)
    assert_same_bits(fake_quant_mxfp4_dynamic(_unit_blocks(values, 32))[:, 1], expected)
    inside = values.abs() <= 6  # a larger one would change the scale
    assert_same_bits(fake_quant_nvfp4_weight(_unit_blocks(values[inside], 16), UNIT)[:, 1], expected[inside])


def test_elements_agree_with_ml_dtypes() -> None:
    """The rounding is that of ml_dtypes' float4_e2m1fn."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = torch.cat([_critical_points(torch.float32), 3 * random_tensor((5000,))]).clamp(-7.9, 7.9)
    expected = values.numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32")
    assert_same_bits(fake_quant_mxfp4_weight(_unit_blocks(values, 32))[:, 1], torch.from_numpy(expected))


@mxfp4
@every_dtype
def test_mxfp4_equals_the_definition(quantize: Any, dtype: torch.dtype) -> None:
    """Blocks of 32 with a short last one, of any shape, by exact arithmetic."""
    for shape in ((4, 64), (3, 33), (5, 31), (2, 3, 40), (16,), (1,)):
        x = random_tensor(shape, dtype)
        assert_same_bits(quantize(x), _mxfp4_model(x))


@pytest.mark.parametrize("exponent", range(-45, 39, 3))
def test_mxfp4_of_any_size(exponent: int) -> None:
    """From subnormal to the largest: no overflow, nothing flushed."""
    x = random_tensor((4, 64)) * 10.0**exponent
    assert_same_bits(fake_quant_mxfp4_dynamic(x), _mxfp4_model(x))


@pytest.mark.parametrize("exponent", [-300, -45, -38, 0, 37, 38, 39, 45, 300])
def test_mxfp4_exponents_are_clamped(exponent: int) -> None:
    """A float64 may need an exponent beyond ±127: the element is then zero, or the largest."""
    x = random_tensor((4, 64), torch.float64) * 10.0**exponent
    assert_same_bits(fake_quant_mxfp4_weight(x), _mxfp4_model(x))


def test_mxfp4_exponent_at_every_power_of_two() -> None:
    """At each power of two of float32, just below it and just above it, the exponent is that of the float's bits."""
    powers = torch.tensor([math.ldexp(1.0, n) for n in range(-149, 128)])
    near = [torch.nextafter(powers, torch.full_like(powers, to)) for to in (INF, 0.0)]
    x = torch.cat([powers, *near])[:, None] * torch.tensor([1.0, -0.5, 0.25])
    assert_same_bits(fake_quant_mxfp4_dynamic(x), _mxfp4_model(x))


@mxfp4
def test_mxfp4_tiny_blocks(quantize: Any) -> None:
    """The scale 2**-127 is subnormal, and neither flushed nor inverted (case 76)."""
    for value, expected in ((6 * 2.0**-127, 6 * 2.0**-127), (2.0**-128, 2.0**-128), (2.0**-149, 0.0)):
        x = torch.zeros(1, 32)
        x[0, 0] = value
        assert_same_bits(quantize(x)[0, 0], expected)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 5.7176e-35, 5.7176e-35 / 4
    assert_same_bits(quantize(x)[0, :2], [4 * 2.0**-116, 2.0**-116])


@mxfp4
def test_mxfp4_saturates(quantize: Any) -> None:
    """The floor rule puts the largest of a block beyond the grid: it becomes 6 * 2**e (case 58)."""
    assert_same_bits(quantize(torch.tensor([127.99999, 32.0])), [96.0, 32.0])
    assert_same_bits(quantize(torch.tensor([3.4e38, 8.5e37])), [6 * 2.0**125, 2.0**126])
    assert_same_bits(quantize(torch.tensor([957.0, 902.4, 960.0, 832.0])), [768.0] * 4)


def test_tail_block_has_its_own_scale() -> None:
    """The last block may be short, is quantized, and has its own scale (case 17)."""
    assert_same_bits(fake_quant_mxfp4_dynamic(torch.arange(1.0, 34.0)[None])[0, 30:], [32.0] * 3)
    x = torch.arange(1.0, 21.0)[None]
    actual = fake_quant_nvfp4_dynamic(x)
    assert_same_bits(actual, _nvfp4_model(x, 20.0))
    torch.testing.assert_close(actual[0, :4], torch.tensor([1.3095, 2.6190, 2.6190, 3.9286]), rtol=0, atol=1e-4)
    torch.testing.assert_close(actual[0, 16:], torch.full((4,), 20.0))


@every_dtype
def test_nvfp4_equals_the_definition(dtype: torch.dtype) -> None:
    """Blocks of 16 with a short last one, of any shape, under the tensor's own maximum and others."""
    for shape in ((4, 64), (33, 16), (1, 16), (5, 31), (2, 3, 20), (7,), (1,)):
        x = random_tensor(shape, dtype)
        x[..., :1] *= 100  # so that the blocks' scales differ
        amax = float(x.abs().max())
        assert_same_bits(fake_quant_nvfp4_dynamic(x), _nvfp4_model(x, amax))
        for given in (amax, amax / 7, amax * 1000, 1e30):
            assert_same_bits(fake_quant_nvfp4_weight(x, given), _nvfp4_model(x, given))


@pytest.mark.parametrize("exponent", range(-45, 39, 3))
def test_nvfp4_of_any_size(exponent: int) -> None:
    """From subnormal to the largest, the tensor's scale may be subnormal or zero."""
    x = random_tensor((4, 48)) * 10.0**exponent
    assert_same_bits(fake_quant_nvfp4_dynamic(x), _nvfp4_model(x, float(x.abs().max())))


def test_nvfp4_block_scales() -> None:
    """A block's scale is rounded to E4M3, ties to even, and is at most 448 (case 85)."""
    x = torch.zeros(4, 16)
    for n, size in enumerate((17.0, 19.0, 464.0, 500.0)):
        x[n, 0], x[n, 1] = 6 * size, 3 * size
    expected = [[96, 48], [120, 60], [2688, 1344], [2688, 1344]]
    assert_same_bits(fake_quant_nvfp4_weight(x, UNIT)[:, :2], expected)


def test_nvfp4_block_scale_that_underflows() -> None:
    """A block too small for an E4M3 scale gives zeros of its elements' signs; its NaN stays (case 46)."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1] = UNIT, 0.005
    x[1, 1], x[1, 2], x[1, 3] = -0.005, NAN, -0.0
    assert_same_bits(fake_quant_nvfp4_weight(x, UNIT)[1], [0.0, -0.0, NAN, -0.0] + [0.0] * 12)
    assert_same_bits(fake_quant_nvfp4_dynamic(x)[1], [0.0, -0.0, NAN, -0.0] + [0.0] * 12)


@pytest.mark.parametrize("amax", [0.0, -0.0, -1.0, NAN, 1e-45, torch.tensor(-INF), torch.tensor([NAN])], ids=str)
def test_nvfp4_without_a_tensor_scale(amax: Any) -> None:
    """A maximum that is zero, negative or NaN, or whose scale underflows, gives signed zeros, never NaN (case 86)."""
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, INF, -INF, NAN])
    assert_same_bits(fake_quant_nvfp4_weight(x, amax), [0.0, -0.0, 0.0, -0.0, 0.0, -0.0, NAN])


@every_dtype
def test_nvfp4_infinite_maximum(dtype: torch.dtype) -> None:
    """An infinite tensor maximum counts as the largest finite value of the weight's dtype."""
    x = random_tensor((4, 40), dtype)
    x[0] = x[0] * 1e4
    for given in (INF, torch.tensor(INF), torch.tensor([INF], dtype=torch.float16)):
        largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
        assert_same_bits(fake_quant_nvfp4_weight(x, given), fake_quant_nvfp4_weight(x, largest))


@pytest.mark.parametrize("quantize", [fake_quant_nvfp4_dynamic, lambda x: fake_quant_nvfp4_weight(x, 6e-7)])
def test_small_tensors_are_not_flattened(quantize: Any) -> None:
    """No absolute epsilon: tensors of 1e-7 keep every element, to the rounding of the scale (case 53)."""
    codes = torch.tensor([6.0, -6, 3, 1.5, 1, 0.5, 4, 2] + [0.0] * 8)
    x = (1e-7 * codes)[None]
    torch.testing.assert_close(quantize(x), x, rtol=3e-7, atol=0)
    tiny = 2.0**-40 * codes[None]
    assert_same_bits(fake_quant_mxfp4_dynamic(tiny), tiny)


def test_infinity_leaves_other_blocks_alone() -> None:
    """Small neighbours in the infinity's block become zeros, under a given tensor maximum no other does (case 112)."""
    x = torch.ones(1, 64)
    x[0, 0] = INF
    assert_same_bits(fake_quant_mxfp4_dynamic(x), [[6 * 2.0**125] + [0.0] * 31 + [1.0] * 32])
    assert_same_bits(fake_quant_nvfp4_weight(x, UNIT)[0, :16], [UNIT] + [0.0] * 15)
    assert_same_bits(fake_quant_nvfp4_weight(x, UNIT)[0, 16:], fake_quant_nvfp4_weight(torch.ones(48), UNIT))


@pytest.mark.parametrize("quantize", [fake_quant_mxfp4_dynamic, lambda x: fake_quant_nvfp4_weight(x, 50.0)])
def test_nan_is_ignored_by_its_block(quantize: Any) -> None:
    """NaN stays in its element, also as the first or the only one of a block (case 65)."""
    x = random_tensor((3, 70))
    for index in (0, 5, 69):
        with_nan, with_zero = x.clone(), x.clone()
        with_nan[:, index], with_zero[:, index] = NAN, 0.0
        expected = quantize(with_zero)
        expected[:, index] = NAN
        assert_same_bits(quantize(with_nan), expected)


@every_dtype
def test_tensor_maximum_of_any_kind(dtype: torch.dtype) -> None:
    """A number and a tensor of one element, of any rank and dtype, are the same maximum; it gets no gradient."""
    x = random_tensor((3, 20), dtype).requires_grad_()
    expected = fake_quant_nvfp4_weight(x, 2.5)
    for shape in ((), (1,), (1, 1, 1)):
        for other in DTYPES:
            amax = torch.full(shape, 2.5, dtype=other, requires_grad=True)
            actual = fake_quant_nvfp4_weight(x, amax)
            assert_same_bits(actual, expected)
            actual.sum().backward()
            assert amax.grad is None


def test_other_tensor_maxima_are_refused() -> None:
    """Several elements are a ValueError, integers and complex numbers a TypeError, with slot, argument and value."""
    for shape in ((2,), (0,), (3, 1)):
        with pytest.raises(ValueError, match="fake_quant_nvfp4_weight: tensor_amax must have one element") as caught:
            fake_quant_nvfp4_weight(torch.ones(3, 20), torch.ones(shape))
        assert str(shape) in str(caught.value)
        assert "(3, 20)" in str(caught.value)
    with pytest.raises(TypeError, match=r"fake_quant_nvfp4_weight: tensor_amax .*torch.int64"):
        fake_quant_nvfp4_weight(torch.ones(3, 20), torch.ones(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"fake_quant_nvfp4_weight: tensor_amax .*1j"):
        fake_quant_nvfp4_weight(torch.ones(3, 20), 1j)  # type: ignore[arg-type]
