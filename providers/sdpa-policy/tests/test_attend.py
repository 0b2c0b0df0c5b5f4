# SPDX-License-Identifier: Apache-2.0
"""attend: the manual path against the float64 oracle, and both paths against each other.

The fused path is what the conformance kit examines as the plugin's kernel; here it is asked what the kit does not ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

from tokenspeed_kernel.reference.attention import sdpa as oracle
from tokenspeed_kernel_sdpa_policy import attend, attention_weights
from tokenspeed_kernel_sdpa_policy import attention as policy

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["fused", "manual"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the policy: the second by a gate that is always shut."""
    if request.param == "manual":
        monkeypatch.setattr(policy, "manual_attention_required", lambda: True)
    return str(request.param)


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way of the policy alone."""
    monkeypatch.setattr(policy, "manual_attention_required", lambda: True)


def small() -> tuple[Tensor, Tensor, Tensor]:
    """Return two queries, four keys and the values 1 to 4: small enough to be computed by hand."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
    return q, k, torch.tensor([[1.0], [2.0], [3.0], [4.0]])


def assert_close_to(actual: Tensor, expected: list[float]) -> None:
    """Compare the first column with numbers computed by hand."""
    torch.testing.assert_close(actual[..., 0].float(), torch.tensor(expected), rtol=0, atol=1e-5)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "rank2": ((5, 8), (7, 8), (7, 8)),
    "rank3": ((2, 1, 8), (2, 7, 8), (2, 7, 8)),
    "rank4": ((2, 3, 17, 16), (2, 3, 33, 16), (2, 3, 33, 4)),
    "rank5": ((2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 8)),
    "broadcast": ((2, 3, 5, 8), (1, 1, 7, 8), (3, 7, 8)),
    "no_queries": ((1, 2, 0, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "no_keys": ((1, 2, 5, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "no_batch": ((0, 2, 5, 8), (0, 2, 7, 8), (0, 2, 7, 8)),
    "no_features": ((1, 2, 5, 0), (1, 2, 7, 0), (1, 2, 7, 3)),
}
VARIANTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "plain": lambda lq, lk: {},
    "causal": lambda lq, lk: {"is_causal": True},
    "scale": lambda lq, lk: {"scale": 0.3},
    "bool_mask": lambda lq, lk: {"attn_mask": torch.rand(lq, lk) > 0.4},
    "key_mask": lambda lq, lk: {"attn_mask": torch.rand(lk) > 0.4},
    "float_mask": lambda lq, lk: {"attn_mask": torch.randn(lq, lk)},
    "half_mask": lambda lq, lk: {"attn_mask": torch.randn(lq, lk).half()},
    "double_mask": lambda lq, lk: {"attn_mask": torch.randn(lq, lk).double()},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("manual")
def test_manual_output_is_the_oracles(shape: str, variant: str, dtype: torch.dtype) -> None:
    """The manual path computes the documented meaning, at every rank, size and dtype, in the inputs' dtype."""
    _assert_output_is_the_oracles(shape, variant, dtype)


@pytest.mark.parametrize("variant", ["plain", "key_mask", "half_mask", "double_mask"])
@pytest.mark.parametrize("shape", ["rank4", "rank5", "broadcast", "no_features"])
def test_fused_output_is_the_oracles(shape: str, variant: str) -> None:
    """So does the fused path, at the ranks and with the masks that the conformance kit does not ask for."""
    _assert_output_is_the_oracles(shape, variant, torch.float32)


def _assert_output_is_the_oracles(shape: str, variant: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(s, dtype=dtype) for s in SHAPES[shape])
    keywords = VARIANTS[variant](q.shape[-2], k.shape[-2])
    actual = attend(q, k, v, **keywords)
    expected = oracle(q.double(), k.double(), v.double(), **keywords)
    assert actual.dtype == dtype
    bound = TOLERANCE[dtype] * max(expected.abs().max().item() if expected.numel() else 1.0, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("variant", ["plain", "causal", "bool_mask", "float_mask"])
@pytest.mark.usefixtures("manual")
def test_manual_gradient_is_the_oracles(variant: str) -> None:
    """The gradient of every operand is the oracle's, for a random cotangent, also with non-contiguous operands."""
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_() for n in (5, 7, 7))
    keywords = VARIANTS[variant](5, 7)
    cotangent = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    actual = torch.autograd.grad(attend(q, k, v, **keywords), (q, k, v), cotangent)
    expected = torch.autograd.grad(oracle(q, k, v, **keywords), (q, k, v), cotangent)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("path")
def test_learned_bias_gets_its_gradient() -> None:
    """A float mask that requires a gradient gets the oracle's, with a fully masked row in it."""
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    bias = torch.randn(5, 7, dtype=torch.float64)
    bias[2] = -INF
    bias.requires_grad_()
    cotangent = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    (actual,) = torch.autograd.grad(attend(q, k, v, attn_mask=bias), bias, cotangent)
    (expected,) = torch.autograd.grad(oracle(q, k, v, attn_mask=bias), bias, cotangent)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.usefixtures("path")
def test_grouped_heads(kv_heads: int) -> None:
    """enable_gqa lets each key head serve the query heads next to each other."""
    q = torch.randn(2, 6, 5, 8)
    k, v = (torch.randn(2, kv_heads, 7, 8) for _ in "kv")
    repeated = (x.repeat_interleave(6 // kv_heads, dim=1) for x in (k, v))
    expected = oracle(q, *repeated, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, is_causal=True, enable_gqa=True), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("manual")
def test_inputs_stay_as_they_are() -> None:
    """Nothing is written to the operands or to the mask."""
    operands = q, k, v, mask = (*(torch.randn(1, 2, n, 8) for n in (5, 7, 7)), torch.randn(5, 7))
    before = [x.clone() for x in operands]
    attend(q, k, v, attn_mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "k_v_length": (ValueError, "same length", {"v": torch.randn(1, 1, 6, 8)}),
    "head_size": (ValueError, "head size", {"q": torch.randn(1, 1, 3, 4)}),
    "rank": (ValueError, "rank", {"q": torch.randn(8)}),
    "batch": (ValueError, "broadcast", {"q": torch.randn(2, 3, 3, 8), "k": torch.randn(2, 2, 5, 8)}),
    "mask_and_causal": (ValueError, "exclude", {"attn_mask": torch.ones(3, 5, dtype=torch.bool), "is_causal": True}),
    "mask_size": (ValueError, "broadcast", {"attn_mask": torch.ones(4, 5, dtype=torch.bool)}),
    "mask_enlarges": (ValueError, "enlarge", {"attn_mask": torch.ones(2, 1, 3, 5, dtype=torch.bool)}),
    "mask_int": (TypeError, "attn_mask", {"attn_mask": torch.ones(3, 5, dtype=torch.int64)}),
    "mask_uint8": (TypeError, "attn_mask", {"attn_mask": torch.ones(3, 5, dtype=torch.uint8)}),
    "ints": (TypeError, "floating", {"q": torch.ones(1, 1, 3, 8, dtype=torch.int64)}),
    "dtypes": (TypeError, "one dtype", {"k": torch.randn(1, 1, 5, 8).half()}),
    "devices": (ValueError, "device", {"k": torch.randn(1, 1, 5, 8, device="meta")}),
    "dropout": (ValueError, "dropout_p", {"dropout_p": 1.5}),
    "dropout_negative": (ValueError, "dropout_p", {"dropout_p": -0.1}),
    "heads": (ValueError, "divide", {"k": torch.randn(1, 3, 5, 8), "v": torch.randn(1, 3, 5, 8), "enable_gqa": True}),
    "head_axis": (
        ValueError,
        "head axis",
        {"q": torch.randn(3, 8), "k": torch.randn(5, 8), "v": torch.randn(5, 8), "enable_gqa": True},
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.usefixtures("path")
def test_bad_inputs_are_refused_on_every_path(bad: str) -> None:
    """Case 20, case 103: bad inputs raise the same error on both paths, never a wrong answer from one."""
    error, message, changes = BAD[bad]
    call: dict[str, Any] = {"q": torch.randn(1, 1, 3, 8), "k": torch.randn(1, 1, 5, 8), "v": torch.randn(1, 1, 5, 8)}
    with pytest.raises(error, match=message):
        attend(**{**call, **changes})


@pytest.mark.usefixtures("path")
def test_large_half_scores_do_not_overflow() -> None:
    """Case 29: scores of 12800 and 12480 whose unscaled products pass float16's range; a bool mask under autocast."""
    q = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16)
    k = torch.cat([torch.full((1, 1, 1, 64), 40.0), torch.full((1, 1, 1, 64), 39.0)], dim=2).half()
    v = torch.tensor([1.0, 2.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    assert attend(q, k, v).item() == 1.0
    with torch.autocast("cpu", dtype=torch.float16):
        assert attend(q.float(), k.float(), v.float(), attn_mask=torch.tensor([[True, False]])).item() == 1.0


def test_both_paths_agree_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast gives both paths its own dtype, operands of different dtypes included."""
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8).bfloat16(), torch.randn(1, 2, 7, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = attend(q, k, v)
        monkeypatch.setattr(policy, "manual_attention_required", lambda: True)
        manual = attend(q, k, v)
    assert fused.dtype == manual.dtype == torch.bfloat16
    torch.testing.assert_close(manual, fused, rtol=0, atol=4e-2)


@pytest.mark.usefixtures("path")
def test_causal_is_aligned_top_left() -> None:
    """Case 44: with two queries, or one, and four keys the first query sees the first key only."""
    q, k, v = small()
    assert_close_to(attend(q, k, v, is_causal=True), [1.0, 1.669762])
    assert_close_to(attend(q[:1], k, v, is_causal=True), [1.0])


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.usefixtures("path")
def test_fully_masked_row_gives_zeros_and_zero_gradient(kind: str) -> None:
    """Case 70: a row without a key is zeros on both paths, and its gradient is zero, not NaN."""
    q, k, v = (x.requires_grad_() for x in small())
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    if kind == "additive":
        mask = torch.zeros(2, 4).masked_fill(~mask, -INF)
    out = attend(q, k, v, attn_mask=mask)
    assert_close_to(out.detach(), [2.0, 0.0])
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn(2, 1))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.usefixtures("path")
def test_fully_masked_row_is_zero_whatever_kernel_torch_takes(
    rank: int, kind: str, requires_grad: bool, dtype: torch.dtype
) -> None:
    """Case 70: rank, dtype and a wanted gradient pick another kernel inside torch, and none gives NaN."""
    lead = (2,) * (rank - 2)
    q, k, v = (torch.randn(*lead, n, 8, dtype=dtype, requires_grad=requires_grad) for n in (5, 9, 9))
    mask = torch.rand(5, 9) > 0.5
    mask[2] = False
    out = attend(q, k, v, attn_mask=mask if kind == "bool" else torch.zeros(5, 9, dtype=dtype).masked_fill(~mask, -INF))
    assert out.isfinite().all()
    assert out[..., 2, :].eq(0).all()
    if requires_grad:
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert all(g.isfinite().all() for g in gradients)
        assert gradients[0][..., 2, :].eq(0).all()


@pytest.mark.parametrize("where", ["value", "key"])
@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.usefixtures("path")
def test_nan_in_a_masked_position_shows_on_both_paths(poison: float, where: str) -> None:
    """Case 74: what is masked still enters as 0 * NaN, as in torch; neither path hides it."""
    q, k, v = small()
    (v if where == "value" else k)[1] = poison
    out = attend(q, k, v, attn_mask=torch.tensor([[True, False, True, False], [True, False, True, True]]))
    assert out.isnan().all()


@pytest.mark.usefixtures("path")
def test_nan_in_a_later_key_stays_out_of_causal_rows() -> None:
    """Case 74: under is_causal both paths keep a NaN of a later key out of the rows before it."""
    q, k, v = (x[None, None] for x in small())
    v = v.repeat(1, 1, 1, 2)  # as wide as k: where it is not, torch takes its math kernel, which adds -inf to the NaN
    k[..., 1, :] = NAN
    out = attend(q, k, v, is_causal=True)
    assert out[0, 0, 0].eq(1.0).all()
    assert out[0, 0, 1].isnan().all()


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("path")
def test_row_of_the_dtype_minimum_is_uniform(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """Case 98: a row filled with the mask dtype's minimum is the mean of v: it is not fully masked."""
    q, k, v = (x.to(dtype) for x in small())
    low = torch.finfo(mask_dtype).min
    mask = torch.tensor([[0.0, low, 0.0, low], [low] * 4], dtype=mask_dtype)
    assert_close_to(attend(q, k, v, attn_mask=mask), [2.0, 2.5])


def test_weights_come_with_the_causal_mask() -> None:
    """Case 68: the weights of a causal call, whose product with v is what the fused op returned."""
    q, k, v = small()
    weights = attention_weights(q, k, is_causal=True)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0, 0, 0], [0.330238, 0.669762, 0, 0]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights @ v, attend(q, k, v, is_causal=True), rtol=0, atol=1e-6)


def test_weights_refuse_what_attend_refuses() -> None:
    """Case 103: the weights of mask and is_causal together are an error, not the weights of one of them."""
    q, k, _ = small()
    with pytest.raises(ValueError, match="exclude"):
        attention_weights(q, k, attn_mask=torch.ones(2, 4, dtype=torch.bool), is_causal=True)


@pytest.mark.usefixtures("path")
def test_dropout_is_what_the_caller_passes() -> None:
    """Case 47: with 0 two calls are bit-equal; with 0.5 they differ, kept weights are doubled, and 1 leaves nothing."""
    q, k, v = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8), torch.ones(1, 2, 16, 1)
    assert torch.equal(attend(q, k, v), attend(q, k, v, dropout_p=0.0))
    assert not torch.equal(attend(q, k, v, dropout_p=0.5), attend(q, k, v, dropout_p=0.5))
    mean = torch.stack([attend(q, k, v, dropout_p=0.5).mean() for _ in range(50)]).mean()
    assert abs(mean.item() - 1.0) < 0.05
    assert attend(q, k, v, dropout_p=1.0).eq(0).all()


def test_fused_path_is_the_stock_operator() -> None:
    """Outside a capture the result is the operator's own, to the bit."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (17, 33, 33))
    assert torch.equal(attend(q, k, v), functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["DEFAULT", "MATH", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("kind", ["bool", "additive", "additive float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_masks_on_a_gpu(dtype: torch.dtype, kind: str, backend: str) -> None:
    """Each GPU kernel that takes a mask agrees with the oracle, gives zeros where all is masked, and no bad gradient.

    Case 70: the last row is fully masked.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "CUDNN_ATTENTION" and dtype == torch.float32:
        pytest.skip("cuDNN has no float32 kernel")
    q, k, v = (torch.randn(2, 2, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (32, 64, 64))
    mask = torch.rand(2, 1, 32, 64, device="cuda") > 0.5
    mask[:, :, -1] = False
    if kind == "bool":
        bias = mask
    else:
        bias = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -INF)
        bias = bias if kind == "additive float32" else bias.to(dtype)
    with nullcontext() if backend == "DEFAULT" else sdpa_kernel(getattr(SDPBackend, backend)):
        out = attend(q, k, v, attn_mask=bias)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    expected = oracle(*(t.detach().double() for t in (q, k, v)), attn_mask=mask)
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert out[:, :, -1].eq(0).all()
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][:, :, -1].eq(0).all()


def test_tensors_are_moved_to_where_kernels_can_read_them() -> None:
    """What does not start at 16 bytes is copied there, with its strides, values and gradient; the rest is not."""
    room = torch.randn(2 * 3 * 5 * 8 + 1, requires_grad=True)
    q = room[1:].view(2, 5, 3, 8).transpose(1, 2)
    moved = policy._aligned(q)
    assert (q.data_ptr() % 16, moved.data_ptr() % 16) == (4, 0)
    assert moved.stride() == q.stride()
    assert torch.equal(moved, q)
    moved.sum().backward()
    assert float(room.grad.sum()) == q.numel()
    assert policy._aligned(moved) is moved


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tensors_at_any_address_on_a_gpu(dtype: torch.dtype) -> None:
    """Queries, keys, values and masks that start between two multiples of 16 bytes give what aligned ones give."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)
        room[1:] = tensor.reshape(-1)
        return room[1:].view(tensor.shape)

    q, k, v = (torch.randn(2, 2, n, 64, device="cuda", dtype=dtype) for n in (32, 64, 64))
    mask = torch.rand(2, 1, 32, 64, device="cuda").to(dtype)
    for one in (None, mask):
        expected = attend(q, k, v, attn_mask=one)
        actual = attend(moved(q), moved(k), moved(v), attn_mask=None if one is None else moved(one))
        assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_very_long_masked_sequence_is_finite_or_refused() -> None:
    """Case 67: above 2**31 mask entries the answer is finite or a clear refusal, never 8.6 GB of scores unasked."""
    length = 46345
    q, k, v = (torch.randn(1, 1, length, 16, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv")
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        gradients = torch.autograd.grad(attend(q, k, v, attn_mask=mask).sum(), (q, k, v))
    except RuntimeError as error:
        assert "illegal memory access" not in str(error)  # noqa: PT017
    else:
        assert all(g.isfinite().all() for g in gradients)
    assert torch.cuda.max_memory_allocated() - before < 4 * length * length
