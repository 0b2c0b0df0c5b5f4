# SPDX-License-Identifier: Apache-2.0
"""fake_quant_int_grouped: the reference against numpy, group by group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
from tensors import assert_same_bits, random_tensor
from tokenspeed_kernel.reference.quant import fake_quant_int_grouped

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def _model(weight: torch.Tensor, bits: int, size: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return what the definition says, for finite weights, one group at a time in numpy."""
    number = np.float64 if weight.dtype == torch.float64 else np.float32
    rows, result = weight.to(torch.float64).numpy().astype(number), []
    largest = 2 ** (bits - 1) - 1
    for n, row in enumerate(rows):
        for m, start in enumerate(range(0, len(row), size)):
            group = row[start : start + size]
            step = np.abs(group).max() / number(largest) if scale is None else number(scale[n, m].item())
            step = max(step, number(1e-12))
            result.append(np.clip(np.rint(group / step), -largest - 1, largest) * step + number(0))
    return torch.from_numpy(np.concatenate(result)).reshape(weight.shape).to(weight.dtype) + 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_the_definition(bits: int, dtype: torch.dtype) -> None:
    """Every width, with groups that fit the row, that leave a short one, and of one element."""
    x = random_tensor((6, 48), dtype)
    for size in (1, 5, 16, 47, 48):
        assert_same_bits(fake_quant_int_grouped(x, bits, size), _model(x, bits, size))


def test_short_last_group_has_its_own_scale() -> None:
    """Ten elements in groups of four: the last two are a group of their own, not dropped (case 17)."""
    x = torch.tensor([[100.0] * 8 + [0.7, 0.3]] * 3)
    actual = fake_quant_int_grouped(x, 4, 4)
    assert_same_bits(actual, _model(x, 4, 4))
    assert bool((actual[:, 8:] > 0).all())


@pytest.mark.parametrize("size", [10, 11, 1000, 2**62])
def test_group_past_the_row_is_the_row(size: int) -> None:
    """A group size past the row length means one group, at no cost in memory."""
    x = random_tensor((3, 10))
    assert_same_bits(fake_quant_int_grouped(x, 4, size), _model(x, 4, 10))
    scale = torch.full((3, 1), 0.3)
    assert_same_bits(fake_quant_int_grouped(x, 4, size, scale), _model(x, 4, 10, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_scales(dtype: torch.dtype) -> None:
    """A scale of each group, of any float dtype and strides, replaces the default."""
    x, scale = (
        random_tensor((5, 39), dtype),
        torch.rand((3, 5), generator=torch.Generator().manual_seed(1)).t() / 5 + 0.01,
    )
    for given in (scale, scale.contiguous(), scale.double(), scale.half()):
        assert_same_bits(fake_quant_int_grouped(x, 3, 16, given), _model(x, 3, 16, given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_scales(dtype: torch.dtype) -> None:
    """A scale below 1e-12 counts as that; NaN gives NaN in its group alone; zeros stay zeros (case 86)."""
    x = torch.tensor([[0.0, -0.0, 1e-5, 0.0, 0.0, 1.0, 1.0, -1.0]], dtype=dtype)
    actual = fake_quant_int_grouped(x, 4, 2, torch.tensor([[0.0, -1.0, NAN, 1.0]]))
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    largest = (7 * torch.tensor(1e-12, dtype=arithmetic)).to(dtype).item()
    assert_same_bits(actual, [[0.0, 0.0, largest, 0.0, NAN, NAN, 1.0, -1.0]])


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_midpoint_and_neighbour(bits: int) -> None:
    """Codes are fixed points, midpoints go to the even code, their neighbours to theirs, what is beyond to the ends."""
    largest = 2 ** (bits - 1) - 1
    codes = torch.arange(-largest - 1.0, largest + 1.0)
    middle = codes[:-1] + 0.5
    above, below = (torch.nextafter(middle, torch.full_like(middle, to)) for to in (INF, -INF))
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    ones = torch.ones(1, 1)
    beyond = torch.tensor([largest + 0.5, largest + 9.0, INF, -largest - 1.5, -largest - 9.0, -INF])
    for x, expected in (
        (codes, codes),
        (middle, even),
        (above, codes[1:]),
        (below, codes[:-1]),
        (beyond, torch.tensor([largest] * 3 + [-largest - 1.0] * 3)),
    ):
        assert_same_bits(fake_quant_int_grouped(x[None], bits, 512, ones), expected[None])


def test_code_is_a_quotient() -> None:
    """It divides, unlike int8 per channel: the reciprocal would make it a tie, and the code -122 (case 95)."""
    x, scale = torch.tensor([[-12.149999618530273]]), torch.tensor([[0.1]])
    assert_same_bits(fake_quant_int_grouped(x, 8, 1, scale), [[np.float32(-121) * np.float32(0.1)]])


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
def test_scales_over_the_whole_range(exponent: int) -> None:
    """Weights of any size are quantized as the definition says, down to the floor of the scale."""
    x = random_tensor((3, 40)) * 10.0**exponent
    assert_same_bits(fake_quant_int_grouped(x, 4, 16), _model(x, 4, 16))


def test_zero_results_are_positive() -> None:
    """What rounds to zero is +0, also where only the last rounding to float16 makes it zero."""
    assert_same_bits(fake_quant_int_grouped(torch.tensor([[-0.1, -0.0, 7.0]]), 4, 3), [[0.0, 0.0, 7.0]])
    assert_same_bits(fake_quant_int_grouped(-torch.ones(1, 1).half(), 4, 1, torch.tensor([[1e-12]])), [[0.0]])


def test_scale_gets_no_gradient() -> None:
    """The gradient for the weight is the identity, beyond the largest code too; the scale has none (case 7)."""
    x, scale = torch.tensor([[0.3, 1.7, 200.0]], requires_grad=True), torch.ones(1, 1, requires_grad=True)
    fake_quant_int_grouped(x, 4, 3, scale).sum().backward()
    assert scale.grad is None
    assert x.grad is not None
    assert_same_bits(x.grad, [[1, 1, 1]])


@pytest.mark.parametrize("bits", [0, 1, 9, -4, 4.0, "4", None])
def test_other_widths_are_refused(bits: Any) -> None:
    """Anything but 2 to 8 is a ValueError with the value."""
    with pytest.raises(ValueError, match=f"fake_quant_int_grouped: bits .*{bits!r}"):
        fake_quant_int_grouped(torch.ones(2, 4), bits, 4)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None])
def test_other_group_sizes_are_refused(size: Any) -> None:
    """Anything but an integer from 1 on is a ValueError with the value."""
    with pytest.raises(ValueError, match=f"fake_quant_int_grouped: group_size .*{size!r}"):
        fake_quant_int_grouped(torch.ones(2, 4), 4, size)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    """Anything but two axes is a ValueError with the shape."""
    with pytest.raises(ValueError, match="fake_quant_int_grouped: weight must have 2 axes") as caught:
        fake_quant_int_grouped(torch.ones(shape), 4, 4)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 4), (1, 3), (3, 2), (2, 3, 1)], ids=str)
def test_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """A scale is [out, groups]; any other is a ValueError with both shapes."""
    with pytest.raises(ValueError, match=r"fake_quant_int_grouped: scale .*\(2, 10\).*\(2, 3\)") as caught:
        fake_quant_int_grouped(torch.ones(2, 10), 4, 4, torch.ones(shape))
    assert str(shape) in str(caught.value)


def test_other_scales_are_refused() -> None:
    """A number and an integer tensor are a TypeError that names the argument."""
    with pytest.raises(TypeError, match=r"fake_quant_int_grouped: scale .*0\.1"):
        fake_quant_int_grouped(torch.ones(2, 4), 4, 4, 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fake_quant_int_grouped: scale .*torch.int64"):
        fake_quant_int_grouped(torch.ones(2, 4), 4, 4, torch.ones(2, 1, dtype=torch.int64))
