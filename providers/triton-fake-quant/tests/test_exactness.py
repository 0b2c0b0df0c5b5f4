# SPDX-License-Identifier: Apache-2.0
"""Bit for bit the reference on the GPU, where rounding is closest: random bits, ties, and hard divisors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel.reference import quant as reference  # noqa: E402 -- after the checks above
from tokenspeed_kernel_triton_fake_quant.fp8 import fake_quant_fp8  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.int8_per_channel import fake_quant_int8_per_channel  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.int_grouped import fake_quant_int_grouped  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.nvfp4 import fake_quant_nvfp4_dynamic, fake_quant_nvfp4_weight  # noqa: E402

pytestmark = pytest.mark.gpu

Check = Callable[[torch.Tensor, torch.Tensor], None]
RandomBits = Callable[..., torch.Tensor]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# What the last bits of a divisor are where quotients come closest to a tie: those at zero in many divisors.
NEAR_ZERO = [*range(-200, 201), *range(-8, 9), *range(-8, 9), *range(-8, 9), *range(-8, 9)]

# Each is of another variant of the kernel that holds a row, or of none.
ROWS = [
    *(37, 1024, 1500, 1792, 2047, 2048, 3000, 3584, 4095, 4096),
    *(7001, 7168, 8191, 8192, 9001, 14336, 16383, 16384, 16400),
]


class Kernel(Protocol):
    """What the fixture ``kernel`` returns."""

    slot: str
    call: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this kernel's result for ``x`` and the reference's."""

    def others(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return what follows the tensor in a usual call."""


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _around(x: torch.Tensor, ulps: int = 2) -> torch.Tensor:
    """Return the neighbours of positive float32 values, up to ``ulps`` away, along a new last axis."""
    return _float(x.view(torch.int32)[..., None] + torch.arange(-ulps, ulps + 1, device=x.device))


def _divisors(last: int, exponents: range, lowest: list[int]) -> torch.Tensor:
    """Return float32 numbers whose last bits, of a mantissa of 23, are near zero or a middle: all that is hard.

    Args:
        last: how many bits are the last ones.
        exponents: of two.
        lowest: what the last bits are.
    """
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(0, 1 << (23 - last), (len(exponents), len(lowest)), generator=generator) << last
    exponent = (torch.tensor(exponents) + 127) << 23
    return _float((exponent[:, None] | upper) + torch.tensor(lowest)).reshape(-1).cuda()


def _e4m3_ties() -> torch.Tensor:
    """Return the middles between neighbouring E4M3 numbers from zero to 448, and the numbers themselves."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.cat([(numbers[1:] + numbers[:-1]) / 2, numbers[1:]]).cuda()


def _e4m3_by_double(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``fake_quant_fp8`` by a division in float64, which rounded to float32 is IEEE's, and torch's own cast."""
    step = scale.clamp(min=1e-12)
    code = (x.double() / step.double()).float().clamp(-448.0, 448.0)
    return code.to(torch.float8_e4m3fn).float() * step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", ROWS)
def test_rows_of_int8_channels(width: int, dtype: torch.dtype, assert_same_bits: Check) -> None:
    """With a gradient, the kernel writes a mask, too."""
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to("cuda", dtype)
    x[1, width // 2] = math.inf  # beyond the grid that it makes
    results = []
    for function in (fake_quant_int8_per_channel, reference.fake_quant_int8_per_channel):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((function(x), y, *torch.autograd.grad(y, leaf, x.flip(0))))
    for ours, right in zip(*results, strict=True):
        assert_same_bits(ours, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5000, 1500), (5000, 2048), (1500, 9001), (1500, 14336)])
def test_more_rows_than_run_at_once(rows: int, width: int, dtype: torch.dtype, assert_same_bits: Check) -> None:
    """Rows that are to be loaded later are read ahead: from an address and in sizes that fit the instruction."""
    flat = torch.randn(rows * width + 1, generator=torch.Generator().manual_seed(width)).to("cuda", dtype)
    for x in (flat[:-1].view(rows, width), flat[1:].view(rows, width)):
        assert_same_bits(fake_quant_int8_per_channel(x), reference.fake_quant_int8_per_channel(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [24, 128])
def test_more_groups_than_run_at_once(size: int, dtype: torch.dtype, assert_same_bits: Check) -> None:
    """Groups are read ahead, too, where they lie one after the other."""
    rows, width = 5000, size * 50
    flat = torch.randn(rows * width + 1, generator=torch.Generator().manual_seed(size)).to("cuda", dtype)
    for x in (flat[:-1].view(rows, width), flat[1:].view(rows, width)):
        assert_same_bits(fake_quant_int_grouped(x, 4, size), reference.fake_quant_int_grouped(x, 4, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1024, 1000, 48, 7])
def test_random_bits(kernel: Kernel, width: int, dtype: torch.dtype, random_bits: RandomBits, assert_same_bits: Check) -> None:  # fmt: skip  # noqa: E501
    """Patterns of every exponent, NaN and infinities among them, in rows that fill tiles and groups and that do not."""
    x = random_bits((2**20 // width, width), dtype)
    assert_same_bits(*kernel.both(x))
    assert_same_bits(*kernel.both(x.t().contiguous().t()))


def test_random_bits_without_the_extremes(kernel: Kernel, random_bits: RandomBits, assert_same_bits: Check) -> None:
    """The same with exponents near zero: where a maximum is finite and small, the other elements have codes, too."""
    bits = random_bits((4096, 512), torch.float32).view(torch.int32)
    x = _float((bits & ~0x7F800000) | (((bits >> 23) % 8 + 122) << 23))
    assert_same_bits(*kernel.both(x))


@pytest.mark.parametrize("scale", [0.0, 1e-13, 1e-12, 0.1, 3.0, 1e30, 3e38, -1.0, math.inf, math.nan])
def test_fp8_of_every_bfloat16(scale: float, assert_same_bits: Check) -> None:
    """Every bfloat16 there is, at scales from below the floor to infinity (cases 25, 83)."""
    x = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    step = torch.tensor(scale, device="cuda")
    for value in (x, x.float()):
        assert_same_bits(fake_quant_fp8(value, step), reference.fake_quant_fp8(value, step))


def test_fp8_by_random_divisors(assert_same_bits: Check) -> None:
    """A scale for each of 16 million elements: the quotient is IEEE's, as a division in float64 finds it (case 95)."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2**12, 2**12)
    scale = torch.exp2(torch.rand(shape, device="cuda", generator=generator) * 120 - 39)  # 2e-12 to 2e24
    x = scale * torch.randn(shape, device="cuda", generator=generator) * 100
    actual = fake_quant_fp8(x, scale)
    assert_same_bits(actual, reference.fake_quant_fp8(x, scale))
    assert_same_bits(actual, _e4m3_by_double(x, scale))


@pytest.mark.parametrize("exponents", [range(-39, -30), range(-4, 5), range(50, 70), range(85, 95), range(100, 118)])
def test_fp8_next_to_ties_under_hard_divisors(exponents: range, assert_same_bits: Check) -> None:
    """Scales whose last 20 bits are almost zero, and values within two ulps of a tie, one scale for a row (case 95).

    A row of one scale, a scale for each element, and a scale for the whole tensor are divided by in different ways.
    """
    scale = _divisors(20, exponents, NEAR_ZERO)[:, None]
    x = _around((_e4m3_ties() * scale).clamp(max=3e38)).flatten(1)
    x = torch.cat([x, -x], 1)[:, :2528]  # whole sixteens
    for step in (scale, scale.expand_as(x).contiguous()):
        actual = fake_quant_fp8(x, step)
        assert_same_bits(actual, reference.fake_quant_fp8(x, step))
        assert_same_bits(actual, _e4m3_by_double(x, step.expand_as(x)))
    for row in range(0, len(scale), 97):
        assert_same_bits(fake_quant_fp8(x[row], scale[row]), reference.fake_quant_fp8(x[row], scale[row]))


def test_fp8_under_random_divisors_next_to_ties(assert_same_bits: Check) -> None:
    """Ties of a hundred thousand random scales."""
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(8):
        scale = torch.exp2(torch.rand(2**14, 1, device="cuda", generator=generator) * 60 - 30)
        x = _around(_e4m3_ties() * scale, 1).flatten(1)
        assert_same_bits(fake_quant_fp8(x, scale), reference.fake_quant_fp8(x, scale))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("exponents", [range(-39, -30), range(-4, 5), range(50, 70), range(100, 118)])
def test_grouped_integers_next_to_ties_under_hard_divisors(
    exponents: range, bits: int, assert_same_bits: Check
) -> None:
    """Given scales with hard last bits, and values within two ulps of half a code, in groups of a row and of 16."""
    scale = _divisors(15, exponents, NEAR_ZERO)[:, None]
    codes = torch.arange(2 ** (bits - 1), device="cuda") + 0.5
    x = _around((codes * scale).clamp(max=3e38)).flatten(1)
    x = torch.cat([x, -x], 1)
    x = torch.cat([x, x[:, : -x.shape[1] % 16]], 1)
    for size in (x.shape[1], 16):
        step = scale.expand(-1, -(-x.shape[1] // size)).contiguous()
        actual = fake_quant_int_grouped(x, bits, size, step)
        assert_same_bits(actual, reference.fake_quant_int_grouped(x, bits, size, step))


def test_grouped_integers_by_random_divisors(assert_same_bits: Check) -> None:
    """A random scale for each of a million groups of 16."""
    generator = torch.Generator("cuda").manual_seed(0)
    step = torch.exp2(torch.rand(2**10, 2**10, device="cuda", generator=generator) * 60 - 30)
    x = torch.randn(2**10, 2**14, device="cuda", generator=generator) * step.repeat_interleave(16, 1) * 50
    actual = fake_quant_int_grouped(x, 8, 16, step)
    assert_same_bits(actual, reference.fake_quant_int_grouped(x, 8, 16, step))


def _blocks_next_to_ties(tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return (blocks, 16): a largest element that makes each E4M3 scale, and elements next to E2M1's ties under it."""
    scales = torch.tensor([m * 2.0**e for e in (-6, -1, 0, 4, 5) for m in range(8, 15)], device="cuda")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cuda")
    step = scales * tensor_scale
    elements = _around(step[:, None] * ties).flatten(1)
    elements = torch.cat([elements, -elements], 1)
    elements = torch.cat([elements, elements[:, : -elements.shape[1] % 15]], 1).unflatten(1, (-1, 15))
    largest = (6.0 * step)[:, None, None].expand(-1, elements.shape[1], 1)
    return torch.cat([largest, elements], 2).flatten(0, 1)


@pytest.mark.parametrize("exponent", [-80, -20, 0, 20, 80])
def test_nvfp4_next_to_ties_under_hard_divisors(exponent: int, assert_same_bits: Check) -> None:
    """Maxima of a tensor whose scale, times what an E4M3 mantissa can be, has last bits near zero.

    One such divisor among the eight of a tensor decides how all its elements are divided.
    """
    tried = 0
    for k in range(8, 16):
        for last in (-130, -129, -66, -65, -64, -63, -3, -1, 0, 1, 2, 63, 64, 65, 66, 128, 129, 200):
            divisor = _float(torch.tensor((((exponent + 130) << 23) | (1 << 22)) + last)).double()
            tensor_scale = (divisor / k).float()
            amax = (tensor_scale.double() * 2688.0).float().cuda()
            tensor_scale = amax / torch.tensor(2688.0, device="cuda")
            x = _blocks_next_to_ties(tensor_scale)
            assert_same_bits(fake_quant_nvfp4_weight(x, amax), reference.fake_quant_nvfp4_weight(x, amax))
            tried += 1
    assert tried == 144


def test_nvfp4_by_random_maxima(assert_same_bits: Check) -> None:
    """Ties of random maxima, given and found: of a small tensor and of one whose maximum takes kernels of its own."""
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(60):
        amax = torch.exp2(torch.rand((), device="cuda", generator=generator) * 40 - 20)
        x = _blocks_next_to_ties(amax / torch.tensor(2688.0, device="cuda"))
        assert_same_bits(fake_quant_nvfp4_weight(x, amax), reference.fake_quant_nvfp4_weight(x, amax))
        x[0, 0] = amax
        for value in (x, x.repeat(2**18 // x.numel() + 1, 1)):
            assert_same_bits(fake_quant_nvfp4_dynamic(value), reference.fake_quant_nvfp4_dynamic(value))


def test_rows_are_independent(assert_same_bits: Check) -> None:
    """With one maximum, rows of 16 give what each gives alone: nothing is packed across rows (case 43)."""
    for shape in ((33, 16), (1, 16)):
        x, amax = torch.randn(shape, device="cuda"), torch.tensor(4.0, device="cuda")
        alone = torch.cat([fake_quant_nvfp4_weight(row[None], amax) for row in x])
        assert_same_bits(fake_quant_nvfp4_weight(x, amax), alone)
        assert_same_bits(alone.cpu(), reference.fake_quant_nvfp4_weight(x.cpu(), amax.cpu()))


@pytest.mark.parametrize("shape", [(5_000_000, 16), (5_000_000, 32), (16, 5_000_000)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
def test_tall_and_wide_tensors(
    kernel: Kernel, shape: tuple[int, int], is_transposed: bool, assert_same_bits: Check
) -> None:
    """Millions of rows, blocks or columns: the first and last are what each gives alone (case 37)."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    x = x.t().contiguous().t() if is_transposed else x
    actual = kernel.call(x, *kernel.others(x))
    assert actual.stride() == x.stride()
    if kernel.slot == "fake_quant_nvfp4_dynamic":  # a row alone has another maximum
        expected, part = fake_quant_nvfp4_weight(x, x.abs().max()), slice(None)
        assert_same_bits(actual[-1:], fake_quant_nvfp4_weight(x[-1:].contiguous(), x.abs().max()))
    else:
        part = slice(-3, None)
        expected = kernel.call(x[part].contiguous(), *kernel.others(x))
        assert_same_bits(actual[:2], kernel.reference(x[:2], *kernel.others(x)))
    assert_same_bits(actual[part], expected)
