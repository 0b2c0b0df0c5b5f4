# SPDX-License-Identifier: Apache-2.0
"""The attention oracles: known answers, agreement with PyTorch's operators in float64, gradients, refusals."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel.reference.attention import ms_deform_attn, sdpa  # noqa: E402 -- after the check for torch

INFINITY, NAN = float("inf"), float("nan")


def _one_level(
    value: torch.Tensor, size: tuple[int, int], locations: list[tuple[float, float]], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sample a single-head, single-channel level once a query, with weight 1; return the Q answers."""
    points = torch.tensor(locations, dtype=dtype).reshape(1, -1, 1, 1, 1, 2)
    weights = torch.ones(points.shape[:-1], dtype=value.dtype)
    return ms_deform_attn(value.reshape(1, -1, 1, 1), [size], points, weights).flatten()


def _random_inputs(
    levels: list[tuple[int, int]], dtype: torch.dtype = torch.float64, batch: int = 2, queries: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random (value, sampling_locations, attention_weights) that reach past the edges of every level."""
    generator = torch.Generator().manual_seed(0)
    heads, channels, points = 3, 7, 4
    pixels = sum(height * width for height, width in levels)
    value = torch.randn(batch, pixels, heads, channels, generator=generator, dtype=torch.float64)
    locations = torch.rand(batch, queries, heads, len(levels), points, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(batch, queries, heads, len(levels), points, generator=generator, dtype=torch.float64)
    return value.to(dtype), (1.6 * locations - 0.3).to(dtype), weights.to(dtype)


def _grid_sample_attention(
    value: torch.Tensor, levels: list[tuple[int, int]], locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the same attention through ``torch.nn.functional.grid_sample``."""
    batch, _, heads, channels = value.shape
    out = torch.zeros(batch, locations.shape[1], heads, channels, dtype=value.dtype)
    pixels = value.split([height * width for height, width in levels], 1)
    for index, (height, width) in enumerate(levels):
        image = pixels[index].permute(0, 2, 3, 1).reshape(batch * heads, channels, height, width)
        grid = (2 * locations[:, :, :, index] - 1).transpose(1, 2).flatten(0, 1)
        sampled = torch.nn.functional.grid_sample(image, grid, padding_mode="zeros", align_corners=False)
        sampled = sampled.unflatten(0, (batch, heads)).permute(0, 3, 1, 4, 2)
        out = out + (weights[:, :, :, index, :, None] * sampled).sum(3)
    return out.flatten(2)


def test_ms_deform_attn_equals_grid_sample_with_gradients() -> None:
    """Output and all three gradients agree with grid_sample in float64, inside, outside and across the edges."""
    levels = [(5, 7), (3, 2), (1, 1)]
    inputs = [tensor.requires_grad_() for tensor in _random_inputs(levels)]
    actual = ms_deform_attn(inputs[0], levels, *inputs[1:])
    expected = _grid_sample_attention(inputs[0], levels, *inputs[1:])
    grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=str
)
def test_ms_deform_attn_in_narrow_dtypes_stays_within_the_stated_tolerance(
    dtype: torch.dtype, tolerance: float
) -> None:
    """Sums in float32 over the same coordinates agree with sums in float64, and the dtype of value comes back."""
    levels = [(6, 4), (2, 3)]
    value, locations, weights = _random_inputs(levels, dtype)
    actual = ms_deform_attn(value, levels, locations, weights)
    expected = ms_deform_attn(value.double(), levels, locations.float(), weights.double())
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_ms_deform_attn_computes_half_coordinates_in_float32() -> None:
    """A float16 location keeps its fraction on a map 2000 pixels wide (case 2)."""
    actual = _one_level(torch.arange(2000.0), (1, 2000), [(0.7, 0.5)], dtype=torch.float16)
    assert actual.item() == 1399.890625


@pytest.mark.parametrize("channels", [1, 5, 30, 71, 1025])
def test_ms_deform_attn_takes_any_head_dimension(channels: int) -> None:
    """Every channel is sampled alone, also where their number is no power of two (case 32)."""
    pixel = torch.arange(4.0)[:, None, None]
    value = (100 * pixel + torch.arange(float(channels))).expand(4, 2, channels)[None].clone().requires_grad_()
    points = torch.tensor([0.6, 0.4]).expand(1, 1, 2, 1, 1, 2)
    out = ms_deform_attn(value, [(2, 2)], points, torch.ones(1, 1, 2, 1, 1))
    expected = (130 + torch.arange(float(channels))).repeat(2)
    torch.testing.assert_close(out.flatten(), expected, rtol=1e-5, atol=1e-3)
    (grad,) = torch.autograd.grad(out.sum(), value)
    shares = torch.tensor([0.21, 0.49, 0.09, 0.21])[:, None, None].expand(4, 2, channels)
    torch.testing.assert_close(grad[0], shares, rtol=1e-4, atol=1e-6)


def test_ms_deform_attn_is_zero_outside_and_where_a_location_is_not_finite() -> None:
    """Far, infinite and NaN locations give exactly zero, whatever the weight, and finite zero gradients (case 34)."""
    points = [(0, 0), (1, 1), (-0.1, 0.5), (1.1, 0.5), (-0.26, 0.5), (-5, 0.5), (0.5, 1.2), (1e20, 0.5)]
    points += [(INFINITY, 0.5), (-INFINITY, 0.5), (NAN, 0.5), (0.5, NAN), (3e38, 3e38)]
    locations = torch.tensor(points).reshape(1, -1, 1, 1, 1, 2).requires_grad_()
    weights = torch.ones(1, len(points), 1, 1, 1)
    weights[0, 8:] = NAN
    weights.requires_grad_()
    out = ms_deform_attn(torch.ones(1, 16, 1, 1), [(4, 4)], locations, weights)
    expected = torch.tensor([0.25, 0.25, 0.1, 0.1] + [0.0] * 9)
    torch.testing.assert_close(out.flatten(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(out.flatten()[4:], torch.zeros(9))
    out.sum().backward()
    assert locations.grad is not None
    assert weights.grad is not None
    assert locations.grad.isfinite().all()
    assert weights.grad.isfinite().all()
    assert not locations.grad[:, 4:].any()
    assert not weights.grad[:, 4:].any()


def test_ms_deform_attn_ignores_a_nan_pixel_that_no_sample_touches() -> None:
    """A NaN in the first pixel does not leak into samples that lie elsewhere or outside."""
    value = torch.tensor([NAN, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert _one_level(value, (1, 6), [(0.75, 0.5), (-3.0, 0.5), (NAN, 0.5)]).tolist() == [4.0, 0.0, 0.0]


def test_ms_deform_attn_has_no_location_gradient_on_the_outer_edge() -> None:
    """One pixel beyond the first and the last pixel centre, where the samples end, the gradient is zero."""
    locations = torch.tensor([(-0.125, 0.5), (1.125, 0.5)]).reshape(1, 2, 1, 1, 1, 2).requires_grad_()
    out = ms_deform_attn(torch.ones(1, 16, 1, 1), [(4, 4)], locations, torch.ones(1, 2, 1, 1, 1))
    (grad,) = torch.autograd.grad(out.sum(), locations)
    assert not out.any()
    assert not grad.any()


def test_ms_deform_attn_treats_every_batch_element_alike() -> None:
    """Three equal maps, shifted by ten, answer alike, with unit gradients spread over four pixels (case 40)."""
    value = (torch.arange(4.0) + 10 * torch.arange(3.0)[:, None]).reshape(3, 4, 1, 1).requires_grad_()
    out = ms_deform_attn(value, [(2, 2)], torch.full((3, 1, 1, 1, 1, 2), 0.5), torch.ones(3, 1, 1, 1, 1))
    assert out.flatten().tolist() == [1.5, 11.5, 21.5]
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert torch.equal(grad, torch.full_like(grad, 0.25))


def test_ms_deform_attn_reads_shapes_as_height_width_and_locations_as_x_y() -> None:
    """The pixel centres of a map 2 high and 3 wide give its pixels in row order (case 62)."""
    centres = [((j + 0.5) / 3, (i + 0.5) / 2) for i in range(2) for j in range(3)]
    actual = _one_level(torch.arange(6.0), (2, 3), centres)
    torch.testing.assert_close(actual, torch.arange(6.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "shapes",
    [[(2, 2), (1, 3)], torch.tensor([[2, 2], [1, 3]]), torch.tensor([[2, 2], [1, 3]], dtype=torch.int32)],
    ids=["pairs", "int64", "int32"],
)
def test_ms_deform_attn_accepts_every_form_of_spatial_shapes(shapes: torch.Tensor | list[tuple[int, int]]) -> None:
    """Pairs, int64 and int32 tensors mean the same levels; the second begins where the first ends (cases 10 and 92)."""
    value = torch.arange(7.0).reshape(1, 7, 1, 1)
    locations = torch.full((1, 2, 1, 2, 1, 2), 0.5)
    weights = torch.tensor([0.5, 0.5, 0.75, 0.25]).reshape(1, 2, 1, 2, 1)
    assert ms_deform_attn(value, shapes, locations, weights).flatten().tolist() == [3.25, 2.375]


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        ([(2, 2), (1, 4)], ValueError, "hold 8 pixels, value has 7"),
        ([(2, 2), (1, -3)], ValueError, "negative"),
        ([(2, 2)], ValueError, "1 levels"),
        ([(2, 2, 1), (1, 3, 1)], ValueError, "pairs"),
        (torch.tensor([2, 2]), ValueError, r"\(2,\)"),
        (torch.tensor([[2.0, 2.0], [1.0, 3.0]]), TypeError, "float32"),
    ],
    ids=["sum", "negative", "levels", "triples", "rank", "dtype"],
)
def test_ms_deform_attn_refuses_wrong_spatial_shapes(
    shapes: torch.Tensor | list[tuple[int, int]], error: type[Exception], words: str
) -> None:
    """Levels that do not fit value or locations are an error that names the values (case 10)."""
    with pytest.raises(error, match=words):
        ms_deform_attn(torch.zeros(1, 7, 1, 1), shapes, torch.zeros(1, 1, 1, 2, 1, 2), torch.zeros(1, 1, 1, 2, 1))


@pytest.mark.parametrize(
    ("changed", "tensor", "error", "words"),
    [
        (0, torch.zeros(1, 4, 1), ValueError, "value must be"),
        (1, torch.zeros(1, 1, 1, 1, 1), ValueError, "sampling_locations must be"),
        (1, torch.zeros(1, 1, 2, 1, 1, 2), ValueError, r"\(1, 1, 2, 1, 1, 2\)"),
        (1, torch.zeros(1, 1, 1, 1, 1, 2, dtype=torch.int64), TypeError, "int64"),
        (1, torch.zeros(1, 1, 1, 1, 1, 2, device="meta"), ValueError, "sampling_locations on meta"),
        (2, torch.zeros(1, 1, 1, 1, 2), ValueError, "attention_weights must be"),
    ],
    ids=["value rank", "locations rank", "heads", "integer locations", "devices", "points"],
)
def test_ms_deform_attn_refuses_inputs_that_disagree(
    changed: int, tensor: torch.Tensor, error: type[Exception], words: str
) -> None:
    """Wrong ranks, sizes, dtypes and mixed devices are errors that name the argument (case 92)."""
    inputs = [torch.zeros(1, 4, 1, 1), torch.zeros(1, 1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1, 1)]
    inputs[changed] = tensor
    with pytest.raises(error, match=words):
        ms_deform_attn(inputs[0], [(2, 2)], inputs[1], inputs[2])


@pytest.mark.parametrize(("batch", "queries"), [(2, 0), (0, 5), (0, 0)])
def test_ms_deform_attn_of_nothing_is_empty_with_zero_gradients(batch: int, queries: int) -> None:
    """No batch or no query gives an empty result and zero-filled gradients (case 115)."""
    inputs = [tensor.requires_grad_() for tensor in _random_inputs([(2, 2)], torch.float32, batch, queries)]
    out = ms_deform_attn(inputs[0], [(2, 2)], inputs[1], inputs[2])
    assert out.shape == (batch, queries, 21)
    out.sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


@pytest.mark.parametrize("empty", [(0, 5), (5, 0), (0, 0)])
def test_ms_deform_attn_of_an_empty_level_contributes_zero(empty: tuple[int, int]) -> None:
    """A level without pixels adds nothing, and its weights get a zero gradient (case 115)."""
    value, locations = torch.arange(4.0).reshape(1, 4, 1, 1), torch.full((1, 1, 1, 2, 1, 2), 0.5)
    weights = torch.full((1, 1, 1, 2, 1), 0.5, requires_grad=True)
    out = ms_deform_attn(value, [(2, 2), empty], locations, weights)
    (grad,) = torch.autograd.grad(out.sum(), weights)
    assert out.item() == 0.75
    assert grad.flatten().tolist() == [1.5, 0.0]


def test_ms_deform_attn_of_only_empty_levels_is_zero_and_differentiable() -> None:
    """Without a single pixel the result is zero and all three gradients are zero (case 115)."""
    inputs = [tensor.requires_grad_() for tensor in _random_inputs([(0, 3)], torch.float32)]
    out = ms_deform_attn(inputs[0], [(0, 3)], inputs[1], inputs[2])
    grads = torch.autograd.grad(out.sum(), inputs)
    assert out.shape == (2, 5, 21)
    assert not out.any()
    assert not any(grad.any() for grad in grads)


def _qkv(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two queries on four keys of size 2; the values are 1, 2, 3, 4."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]], dtype=dtype)
    return q[None, None], k[None, None], torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=dtype)[None, None]


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal", "gqa", "scale", "wide values", "three axes"])
def test_sdpa_equals_pytorch_with_gradients(kind: str) -> None:
    """Output and gradients agree in float64 with PyTorch's operator."""
    generator = torch.Generator().manual_seed(0)
    heads = 2 if kind == "gqa" else 4
    shapes = [(2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 3 if kind == "wide values" else 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if kind == "three axes":
        tensors = [tensor[0] for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in tensors]
    options: dict[str, dict[str, object]] = {
        "bool": {"attn_mask": torch.rand(2, 1, 5, 7, generator=generator) > 0.3},
        "float": {"attn_mask": torch.randn(5, 7, generator=generator, dtype=torch.float64)},
        "causal": {"is_causal": True},
        "gqa": {"enable_gqa": True},
        "scale": {"scale": 0.3},
    }
    actual = sdpa(*inputs, **options.get(kind, {}))  # type: ignore[arg-type]  # a table of keyword arguments
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, **options.get(kind, {}))  # type: ignore[arg-type]
    grad = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_sdpa_in_narrow_dtypes_stays_within_the_stated_tolerance(dtype: torch.dtype, tolerance: float) -> None:
    """The narrow result has q's dtype and agrees with float64 arithmetic on the same inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 16, generator=generator).to(dtype) for _ in range(3))
    actual, expected = sdpa(q, k, v), sdpa(q.double(), k.double(), v.double())
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_sdpa_refuses_keys_and_values_of_different_length() -> None:
    """Five keys with six values are an error, never a read past the end (case 20)."""
    q, k, v = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 6, 8)
    with pytest.raises(ValueError, match="same length"):
        sdpa(q, k, v)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_does_not_overflow_in_half_precision(masked: bool, autocast: bool) -> None:
    """Scores beyond 65504 before scaling stay finite in float16, also with a mask and under autocast (case 29)."""
    q = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16)
    k = torch.cat([q, torch.full_like(q, 39.0)], 2)
    v = torch.tensor([1.0, 2.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    mask = torch.tensor([[True, False]]) if masked else None
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        actual = sdpa(q, k, v, attn_mask=mask)
    assert actual.dtype == torch.float16
    assert actual.item() == 1.0


def test_sdpa_aligns_the_causal_mask_top_left() -> None:
    """The first query sees the first key only, however many keys there are (case 44)."""
    q, k, v = _qkv()
    scale = 1 / math.sqrt(2)
    actual = sdpa(q, k, v, is_causal=True, scale=scale).flatten()
    torch.testing.assert_close(actual, torch.tensor([1.0, 1.669762]), rtol=0, atol=1e-6)
    assert sdpa(q[:, :, :1], k, v, is_causal=True, scale=scale).item() == 1.0


@pytest.mark.parametrize("additive", [False, True])
def test_sdpa_of_a_fully_masked_row_is_zero_with_zero_gradient(additive: bool) -> None:
    """A row without a key gives zero, not NaN, and a finite zero gradient (case 70)."""
    q, k, v = (tensor.requires_grad_() for tensor in _qkv())
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    if additive:
        mask = torch.zeros(2, 4).masked_fill(~mask, -INFINITY)
    out = sdpa(q, k, v, attn_mask=mask, scale=1 / math.sqrt(2))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 0.0]), rtol=0, atol=1e-6)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, 1].any()


def test_sdpa_without_keys_is_zero_with_zero_gradient() -> None:
    """No key at all gives zeros, and zero gradients (case 70)."""
    q = torch.ones(1, 2, 3, 4, requires_grad=True)
    out = sdpa(q, torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 5))
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert out.shape == (1, 2, 3, 5)
    assert not out.any()
    assert not grad.any()


@pytest.mark.parametrize("poisoned", ["keys", "values"])
@pytest.mark.parametrize("additive", [False, True])
def test_sdpa_lets_a_nan_in_masked_keys_or_values_through(poisoned: str, additive: bool) -> None:
    """Masked padding still enters the products, as in PyTorch: callers zero it (case 74)."""
    q, k, v = _qkv()
    (k if poisoned == "keys" else v)[0, 0, 1] = NAN
    mask = torch.tensor([[True, False, True, False]]).expand(2, 4)
    if additive:
        mask = torch.zeros(2, 4).masked_fill(~mask, -INFINITY)
    assert sdpa(q, k, v, attn_mask=mask).isnan().all()


def test_sdpa_of_a_row_at_the_smallest_float_is_uniform() -> None:
    """A row filled with the smallest finite number is not masked: it is the plain mean (case 98)."""
    q, k, v = _qkv()
    low = torch.finfo(torch.float32).min
    actual = sdpa(q, k, v, attn_mask=torch.tensor([[0.0, low, 0.0, low], [low] * 4]), scale=1 / math.sqrt(2))
    torch.testing.assert_close(actual.flatten(), torch.tensor([2.0, 2.5]), rtol=0, atol=1e-6)


def test_sdpa_refuses_a_mask_together_with_is_causal() -> None:
    """Neither of the two is silently dropped (case 103)."""
    with pytest.raises(ValueError, match="exclude each other"):
        sdpa(*_qkv(), attn_mask=torch.ones(2, 4, dtype=torch.bool), is_causal=True)


def test_sdpa_refuses_an_integer_mask() -> None:
    """A mask that is neither bool nor floating point could mean either, so it is an error."""
    with pytest.raises(TypeError, match="int64"):
        sdpa(*_qkv(), attn_mask=torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shapes", "mask", "gqa", "words"),
    [
        (((2, 3), (4, 5), (4, 3)), None, False, "last axis"),
        (((3,), (4, 3), (4, 3)), None, False, "two axes"),
        (((8, 2, 3), (3, 4, 3), (3, 4, 3)), None, False, "broadcast"),
        (((8, 2, 3), (3, 4, 3), (3, 4, 3)), None, True, "divide"),
        (((2, 3), (4, 3), (4, 3)), None, True, "head axis"),
        (((2, 3), (4, 3), (4, 3)), (3, 4), False, r"\(2, 4\)"),
        (((2, 3), (4, 3), (4, 3)), (5, 2, 4), False, r"\(5, 2, 4\)"),
    ],
    ids=["size", "rank", "heads", "gqa heads", "gqa rank", "mask", "mask batch"],
)
def test_sdpa_refuses_shapes_that_disagree(
    shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...] | None, gqa: bool, words: str
) -> None:
    """Sizes that do not fit together are an error that names them."""
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        sdpa(q, k, v, attn_mask=None if mask is None else torch.zeros(mask), enable_gqa=gqa)


def test_sdpa_drops_weights_and_scales_up_the_rest() -> None:
    """Dropout acts on the weights with PyTorch's own draw: with one key the output is zero or doubled."""
    torch.manual_seed(0)
    out = sdpa(torch.zeros(1, 64, 1, 2), torch.zeros(1, 64, 1, 2), torch.ones(1, 64, 1, 1), dropout_p=0.5)
    assert set(out.flatten().tolist()) == {0.0, 2.0}
