# SPDX-License-Identifier: Apache-2.0
"""fake_quant_fp8: the reference against NUMERICS.md, ml_dtypes and exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
from tensors import assert_same_bits, random_tensor
from tokenspeed_kernel.reference.quant import fake_quant_fp8

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NARROW = [torch.float16, torch.bfloat16]
# Every non-negative E4M3 number (OFP8 1.0, table 1): subnormals m/8 * 2^-6, normals (1 + m/8) * 2^(e-7) up to 448.
CODES = sorted(
    {Fraction(m, 512) for m in range(8)}
    | {(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)


def _exact(value: float) -> float:
    """Return the E4M3 number nearest to ``value``, ties to the even code, by exact rational arithmetic."""
    if math.isnan(value):
        return NAN
    magnitude = min(Fraction(abs(value)), CODES[-1]) if math.isfinite(value) else CODES[-1]
    above = next(n for n, code in enumerate(CODES) if code >= magnitude)
    below = max(above - 1, 0) if CODES[above] != magnitude else above
    low, high = magnitude - CODES[below], CODES[above] - magnitude
    nearest = below if low < high or (low == high and below % 2 == 0) else above
    return math.copysign(float(CODES[nearest]), value)


_random = partial(random_tensor, spread=100.0)


def _critical_points(dtype: torch.dtype) -> torch.Tensor:
    """Every code, every midpoint of neighbours, and what lies next to both in ``dtype``; both signs."""
    points = [float(code) for code in CODES] + [float((a + b) / 2) for a, b in pairwise(CODES)]
    middle = torch.tensor(points, dtype=dtype)
    near = [torch.nextafter(middle, torch.tensor(to, dtype=dtype)) for to in (INF, -INF)]
    positive = torch.cat([middle, *near])
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_code_and_midpoint_is_rounded_exactly(dtype: torch.dtype) -> None:
    """Codes, midpoints and their neighbours in the dtype go where exact arithmetic puts them."""
    x = _critical_points(dtype)
    assert_same_bits(fake_quant_fp8(x, 1.0), [_exact(value) for value in x.tolist()])


def test_float32_agrees_with_ml_dtypes() -> None:
    """After the clamp the rounding is ml_dtypes' (its raw cast does not saturate, so it is no judge beyond 448)."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = torch.cat([_critical_points(torch.float32), _random((100_000,))])
    expected = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype("float32")
    assert_same_bits(fake_quant_fp8(x, 1.0), torch.from_numpy(expected))


def test_float64_does_not_pass_through_float32() -> None:
    """A float64 just above a midpoint, which float32 cannot tell from it, is rounded up."""
    x = torch.tensor([17 + 2.0**-40, 17 - 2.0**-40, 17.0, 19 - 2.0**-40], dtype=torch.float64)
    assert_same_bits(fake_quant_fp8(x, 1.0), [18, 16, 16, 18])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_saturation(dtype: torch.dtype) -> None:
    """Beyond 448, and infinity, become 448; NaN stays (case 25)."""
    x = torch.tensor([448, 464, 465, 480, 1000, -1000, INF, -INF, NAN], dtype=dtype)
    assert_same_bits(fake_quant_fp8(x, 1.0), [448, 448, 448, 448, 448, -448, 448, -448, NAN])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_the_identity(dtype: torch.dtype) -> None:
    """The gradient passes through unchanged, also where the value saturates (case 50)."""
    x = torch.tensor([440, 448, 448.5, 463.9, 464, 470, -500, INF], dtype=dtype, requires_grad=True)
    cotangent = _random((8,), dtype)
    (gradient,) = torch.autograd.grad(fake_quant_fp8(x, torch.tensor(1.0)), x, cotangent)
    assert_same_bits(gradient, cotangent)


def test_gradient_at_nan_stays_in_its_element() -> None:
    """A NaN element spoils no other element's gradient (case 50)."""
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    fake_quant_fp8(x, 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad[[0, 2]].tolist() == [1, 1]


def test_scale_gets_no_gradient() -> None:
    """``scale.grad`` is None, not a silent zero (case 7)."""
    x = torch.tensor([0.3, 1.7, 200.0], requires_grad=True)
    scale = torch.tensor([1.0], requires_grad=True)
    fake_quant_fp8(x, scale).sum().backward()
    assert scale.grad is None
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def test_no_gradient_is_recorded_without_need() -> None:
    """Where only the scale requires a gradient the result requires none."""
    assert not fake_quant_fp8(torch.ones(3), torch.tensor(1.0, requires_grad=True)).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0,), (), (1,), (16,)], ids=str)
def test_small_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Empty gives empty and 0-d gives 0-d, with dtype and gradient (case 5)."""
    x = torch.full(shape, 17.0, dtype=dtype, requires_grad=True)
    actual = fake_quant_fp8(x, torch.tensor([1.0]))
    assert_same_bits(actual, torch.full(shape, 16.0, dtype=dtype))
    (gradient,) = torch.autograd.grad(actual, x, torch.ones(shape, dtype=dtype))
    assert_same_bits(gradient, torch.ones(shape, dtype=dtype))


def test_narrow_values_are_not_rounded_twice() -> None:
    """float32 input does not pass through bfloat16 (case 83)."""
    assert_same_bits(fake_quant_fp8(torch.tensor([17.00001, 17.0625, 16.99]), 1.0), [18, 18, 16])


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.tensor([0.0]), torch.zeros(4, 1)], ids=str)
def test_zeros_stay_zeros(scale: Any) -> None:
    """Zeros under a zero scale are zeros, with the gradient of ones (case 86)."""
    x = torch.zeros(4, 32, requires_grad=True)
    actual = fake_quant_fp8(x, scale)
    assert_same_bits(actual, torch.zeros(4, 32))
    actual.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_floored(dtype: torch.dtype) -> None:
    """A scale below 1e-12 counts as 1e-12, rounded to the arithmetic type."""
    x = torch.tensor([1.0, 3e-7, -3e-7], dtype=dtype)
    for scale in (0.0, -5.0, 1e-13, 1e-30):
        assert_same_bits(fake_quant_fp8(x, scale), fake_quant_fp8(x, 1e-12))
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    floor = torch.tensor(1e-12, dtype=arithmetic)
    assert_same_bits(fake_quant_fp8(x, 0.0)[0], (448 * floor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent", [-11, -6, -1, 0, 3, 12, 24, 30])
def test_scales_over_the_whole_range(exponent: int, dtype: torch.dtype) -> None:
    """Division, rounding and product are each rounded to the arithmetic type once, whatever the scale."""
    x, scale = _random((200,), dtype) * 10.0**exponent, torch.tensor(1.1 * 10.0**exponent, dtype=dtype)
    codes = torch.tensor([_exact(value) for value in (x / scale).tolist()], dtype=dtype)
    assert_same_bits(fake_quant_fp8(x, scale), codes * scale)


def test_tiny_scale_gives_the_floor_s_value() -> None:
    """Scales from 1e-30 on are finite and never NaN for finite inputs."""
    x = torch.tensor([1e30, 1.0, 0.0, -1e-30])
    for exponent in range(-30, 31, 5):
        assert bool(fake_quant_fp8(x, 10.0**exponent).isfinite().all()), exponent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_scale_gives_nan(dtype: torch.dtype) -> None:
    """A NaN scale spoils what it scales, and nothing else."""
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=dtype)
    actual = fake_quant_fp8(x, torch.tensor([[1.0], [NAN]]))
    assert_same_bits(actual, [[1.0, 2.0], [NAN, NAN]])
    assert bool(fake_quant_fp8(x, NAN).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sign_of_zero_is_kept(dtype: torch.dtype) -> None:
    """Zeros, and what rounds to zero, keep their sign."""
    x = torch.tensor([0.0, -0.0, 2.0**-11, -(2.0**-11), 2.0**-10, -(2.0**-10)], dtype=dtype)
    assert_same_bits(fake_quant_fp8(x, 1.0), [0.0, -0.0, 0.0, -0.0, 0.0, -0.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_codes_are_kept(dtype: torch.dtype) -> None:
    """The grid goes down to 2^-9; half of that is a tie to zero, anything above it is not."""
    x = torch.tensor([2.0**-9, 3 * 2.0**-9, 1.5 * 2.0**-9, 2.5 * 2.0**-9, 1.01 * 2.0**-10], dtype=dtype)
    assert_same_bits(fake_quant_fp8(x, 1.0), [2.0**-9, 3 * 2.0**-9, 2 * 2.0**-9, 2 * 2.0**-9, 2.0**-9])


def test_subnormal_results_are_not_flushed() -> None:
    """A product with the scale that is subnormal in the output's dtype is kept."""
    scale = torch.tensor(2.0**-20)
    actual = fake_quant_fp8(torch.tensor([2.0**-24, 3 * 2.0**-24], dtype=torch.float16), scale)
    assert_same_bits(actual, [2.0**-24, 3 * 2.0**-24])
    assert_same_bits(fake_quant_fp8(torch.tensor([2.0**-130]), 1e-12), [0.0])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_output_is_rounded_once(dtype: torch.dtype) -> None:
    """The float32 value of the same input is rounded to the dtype at the end, and nowhere before."""
    x, scale = _random((5000,), dtype), torch.tensor(0.37)
    assert_same_bits(fake_quant_fp8(x, scale), fake_quant_fp8(x.float(), scale).to(dtype))


def test_last_rounding_may_overflow() -> None:
    """A product beyond the output's range is infinite, as IEEE gives it."""
    x = torch.tensor([INF, -INF, 65504.0], dtype=torch.float16)
    assert_same_bits(fake_quant_fp8(x, 1000.0), [INF, -INF, 64000.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_dtype_is_converted_first(dtype: torch.dtype) -> None:
    """A scale of any float dtype counts as its value in the arithmetic type."""
    x = _random((64,), dtype)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    for other in DTYPES:
        scale = torch.tensor(0.3, dtype=other)
        assert_same_bits(fake_quant_fp8(x, scale), fake_quant_fp8(x, scale.to(arithmetic)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_is_a_scale(dtype: torch.dtype) -> None:
    """A Python number, int or float, is the tensor of that value."""
    x = _random((64,), dtype)
    for number in (0.3, 2):
        assert_same_bits(fake_quant_fp8(x, number), fake_quant_fp8(x, torch.tensor(float(number), dtype=torch.float64)))


def _strided() -> dict[str, torch.Tensor]:
    base = _random((6, 8, 4, 5))
    return {
        "contiguous": base,
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "sliced": base[::2, 1:7, :, ::3],
        "expanded": base[:, :1].expand(6, 8, 4, 5),
        "flipped": base.flip(1),
        "0-d view": base[0, 0, 0, 0],
    }


@pytest.mark.parametrize("name", _strided())
def test_strides_do_not_matter(name: str) -> None:
    """Any strides give the same values as contiguous memory, a dense input keeps its memory format, none is written."""
    x = _strided()[name]
    before = x.clone()
    actual = fake_quant_fp8(x, torch.tensor(0.7))
    assert_same_bits(actual, fake_quant_fp8(x.contiguous(), torch.tensor(0.7)))
    assert torch.equal(x, before)
    if name not in ("sliced", "expanded"):
        assert actual.stride() == x.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", range(4))
def test_memory_format_is_kept_with_a_channel_scale(axis: int, dtype: torch.dtype) -> None:
    """A scale per channel does not change the layout of the result."""
    x = _random((6, 8, 4, 5), dtype).contiguous(memory_format=torch.channels_last)
    shape = [1, 1, 1, 1]
    shape[axis] = x.shape[axis]
    actual = fake_quant_fp8(x, torch.rand(shape) + 0.5)
    assert actual.stride() == x.stride()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1, 1)], ids=str)
def test_one_element_scales_of_any_rank(shape: tuple[int, ...]) -> None:
    """One element is one scale whatever its rank, for 0-d inputs too, and does not enlarge the result."""
    for x in (_random((3, 4)), torch.tensor(17.3), _random((0, 4))):
        assert_same_bits(fake_quant_fp8(x, torch.full(shape, 0.3)), fake_quant_fp8(x, torch.tensor(0.3)))


@pytest.mark.parametrize("axis", range(3))
def test_scale_per_channel_on_any_axis(axis: int) -> None:
    """Each channel is quantized by its own scale."""
    x, scales = _random((3, 4, 5)), [0.1, 0.3, 0.7, 1.1, 1.3][: (3, 4, 5)[axis]]
    shape = [1, 1, 1]
    shape[axis] = len(scales)
    actual = fake_quant_fp8(x, torch.tensor(scales).reshape(shape))
    for n, scale in enumerate(scales):
        assert_same_bits(actual.select(axis, n), fake_quant_fp8(x.select(axis, n), scale))


def test_scale_per_block_through_a_view() -> None:
    """A block format is a view with one scale per block."""
    x, scale = _random((4, 64)), torch.rand(4, 2, 1) + 0.1
    actual = fake_quant_fp8(x.view(4, 2, 32), scale).view(4, 64)
    assert_same_bits(actual, fake_quant_fp8(x, scale.expand(4, 2, 32).reshape(4, 64)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Integers, flags and complex numbers are a TypeError with slot, argument and dtype."""
    wrong = torch.ones(3, dtype=dtype)
    with pytest.raises(TypeError, match=rf"fake_quant_fp8: x .*{dtype}"):
        fake_quant_fp8(wrong, 1.0)
    with pytest.raises(TypeError, match=rf"fake_quant_fp8: scale .*{dtype}"):
        fake_quant_fp8(torch.ones(3), wrong)


def test_complex_number_is_no_scale() -> None:
    """A complex Python number is a TypeError too."""
    with pytest.raises(TypeError, match="fake_quant_fp8: scale"):
        fake_quant_fp8(torch.ones(3), 1j)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        ((3,), (2,)),
        ((3, 4), (3,)),
        ((1,), (3,)),
        ((), (2,)),
        ((3, 4), (1, 3, 4)),
        ((3, 4), (2, 3, 4)),
        ((0,), (2,)),
        ((3,), (0,)),
    ],
    ids=str,
)
def test_scale_that_does_not_fit_is_refused(x: tuple[int, ...], scale: tuple[int, ...]) -> None:
    """A scale that does not broadcast, or that would enlarge the result, is a ValueError with both shapes."""
    with pytest.raises(ValueError, match="fake_quant_fp8") as caught:
        fake_quant_fp8(torch.ones(x), torch.ones(scale))
    assert str(x) in str(caught.value)
    assert str(scale) in str(caught.value)


def test_inputs_are_not_written() -> None:
    """Neither x nor scale changes, and the result shares no memory with x, though every value is a code."""
    x, scale = torch.tensor([1.0, 2.0, NAN]), torch.tensor([1.0, 1e-20, 1.0])
    copies = x.clone(), scale.clone()
    actual = fake_quant_fp8(x, scale)
    actual.zero_()
    torch.testing.assert_close((x, scale), copies, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_is_a_fixed_point(dtype: torch.dtype) -> None:
    """Quantizing a quantized tensor changes nothing, for a scale that is a power of two."""
    once = fake_quant_fp8(_random((1000,), dtype), 0.25)
    assert_same_bits(fake_quant_fp8(once, 0.25), once)


def test_compiled_function_equals_eager() -> None:
    """torch.compile sees one graph without breaks, with the same bits and gradient (case 13)."""
    x, scale = _random((64,)).requires_grad_(), torch.tensor(0.3)
    compiled = torch.compile(fake_quant_fp8, fullgraph=True, backend="eager")
    actual = compiled(x, scale)
    assert_same_bits(actual.detach(), fake_quant_fp8(x, scale).detach())
    cotangent = _random((64,), seed=1)
    assert_same_bits(torch.autograd.grad(actual, x, cotangent)[0], cotangent)


def test_functional_gradient_is_ones() -> None:
    """``torch.func.grad`` works (case 13)."""
    gradient = torch.func.grad(lambda x: fake_quant_fp8(x, torch.tensor(1.0)).sum())(torch.tensor([1.0, 500.0]))
    assert gradient.tolist() == [1, 1]


def test_vmap_takes_a_scale_per_sample() -> None:
    """``torch.func.vmap`` equals the Python loop (case 13)."""
    x, scale = torch.tensor([[17.0, 19.0], [17.0, 19.0]]), torch.tensor([1.0, 2.0])
    actual = torch.func.vmap(fake_quant_fp8)(x, scale)
    assert_same_bits(actual, [[16.0, 20.0], [16.0, 20.0]])
    assert_same_bits(actual, torch.stack([fake_quant_fp8(row, s) for row, s in zip(x, scale, strict=True)]))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trace_records_plain_operators(dtype: torch.dtype) -> None:
    """torch.jit.trace records no autograd function, and the trace serves other shapes with the same bits."""
    traced = torch.jit.trace(fake_quant_fp8, (_random((4, 8), dtype), torch.tensor(0.3, dtype=dtype)))
    kinds = {node.kind() for node in traced.graph.nodes()}
    assert not {kind for kind in kinds if "Python" in kind or not kind.startswith(("aten::", "prim::"))}
    x, scale = _random((2, 5), dtype, seed=1), torch.tensor([[0.1], [0.7]], dtype=dtype)
    assert_same_bits(traced(x, scale), fake_quant_fp8(x, scale))


def test_same_bits_in_every_batch_position() -> None:
    """A row gives the same bits alone, in a batch, and on a second run."""
    x, scale = _random((33, 257)), torch.tensor(0.013)
    whole = fake_quant_fp8(x, scale)
    assert_same_bits(fake_quant_fp8(x, scale), whole)
    assert_same_bits(torch.stack([fake_quant_fp8(row, scale) for row in x]), whole)
