# SPDX-License-Identifier: Apache-2.0
"""``fake_quant_fp8`` in Triton: bit for bit the reference, forward and backward, on the GPU."""

import math
from collections.abc import Callable
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel.reference import quant as reference  # noqa: E402 -- after the checks above
from tokenspeed_kernel_triton_fake_quant import fp8  # noqa: E402

Check = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(), (1,), (0,), (4, 0), (7,), (1023,), (1024,), (1025,), (3, 129), (2, 3, 5, 7), (512, 4096)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the op allocates with NaN, so that an element it does not write shows."""
    original = torch.empty_like
    monkeypatch.setattr(fp8.torch, "empty_like", lambda x: original(x).fill_(math.nan))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference_per_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    size: float,
    make_input: Callable[..., torch.Tensor],
    assert_same_bits: Check,
) -> None:
    """One scale for the tensor gives the reference's bits at every shape, dtype and magnitude (cases 5, 25, 83)."""
    x, scale = make_input(shape, dtype, "cuda", size), torch.tensor([size], device="cuda")
    assert fp8.supports(x, scale) is True
    assert_same_bits(fp8.fake_quant_fp8(x, scale), reference.fake_quant_fp8(x, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", range(4))
def test_equals_the_reference_per_channel(
    axis: int, dtype: torch.dtype, make_input: Callable[..., torch.Tensor], assert_same_bits: Check
) -> None:
    """One scale per channel of any axis gives the reference's bits, zero and NaN scales included (case 86)."""
    shape = (5, 33, 7, 65)
    x = make_input(shape, dtype, "cuda")
    scale = torch.rand(shape[axis], generator=torch.Generator().manual_seed(1)) + 0.01
    scale[:2] = torch.tensor([0.0, math.nan])
    scale = scale.cuda().reshape([-1 if i == axis else 1 for i in range(4)])
    assert fp8.supports(x, scale) is True
    assert_same_bits(fp8.fake_quant_fp8(x, scale), reference.fake_quant_fp8(x, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 1e-13, 1e-12, 0.1, 3.0, 1e30, -1.0, math.inf, math.nan])
def test_equals_the_reference_on_every_bfloat16(scale: float, assert_same_bits: Check) -> None:
    """Every bfloat16 there is, at scales from below the floor to infinity, gives the reference's bits."""
    x = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    step = torch.tensor(scale, device="cuda")
    for value in (x, x.float()):
        assert_same_bits(fp8.fake_quant_fp8(value, step), reference.fake_quant_fp8(value, step))


@pytest.mark.gpu
def test_random_bits_equal_the_reference(assert_same_bits: Check) -> None:
    """Random float32 bit patterns, and random normal values, under a scale that divides unevenly, give its bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**25,), device="cuda", dtype=torch.int64, generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    step = torch.tensor(0.1, device="cuda")
    for value in (x, torch.randn(2**25, device="cuda", generator=generator) * 20):
        assert_same_bits(fp8.fake_quant_fp8(value, step), reference.fake_quant_fp8(value, step))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_the_cotangent(dtype: torch.dtype) -> None:
    """The gradient is the cotangent itself, saturated values included, and the scale has none (cases 7, 50)."""
    x = torch.tensor([440, 448, 448.5, 463.9, 464, 470, -500, math.nan], device="cuda", dtype=dtype, requires_grad=True)
    scale = torch.ones(1, device="cuda", requires_grad=True)
    cotangent = torch.randn(8, device="cuda").to(dtype)
    fp8.fake_quant_fp8(x, scale).backward(cotangent)
    assert torch.equal(x.grad, cotangent)
    assert scale.grad is None


@pytest.mark.gpu
def test_is_a_well_formed_op() -> None:
    """``torch.library.opcheck`` finds nothing: schema, fake implementation, autograd and compilation agree."""
    x = torch.randn(33, 65, device="cuda", requires_grad=True)
    torch.library.opcheck(fp8._fake_quant_fp8, (x, torch.rand(33, device="cuda"), 33, 65))


@pytest.mark.gpu
def test_compiles_into_one_graph(assert_same_bits: Check) -> None:
    """``torch.compile(fullgraph=True)`` gives the eager bits and the straight-through gradient."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    scale = torch.tensor(0.1, device="cuda")
    y = torch.compile(fp8.fake_quant_fp8, fullgraph=True)(x, scale)
    assert_same_bits(y.detach(), reference.fake_quant_fp8(x, scale).detach())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    """A producer that is late on a side stream is waited for (case 26)."""
    x, scale, stream = torch.zeros(1 << 16, device="cuda"), torch.ones((), device="cuda"), torch.cuda.Stream()
    fp8.fake_quant_fp8(x, scale)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            x.zero_()
            torch.cuda._sleep(10_000_000)
            x.fill_(3.0)
            y = fp8.fake_quant_fp8(x, scale)
        stream.synchronize()
        assert bool((y == 3.0).all())


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(assert_same_bits: Check) -> None:
    """A captured call computes anew from what its inputs hold at the replay (case 94, after one warm-up)."""
    x, scale = torch.randn(1000, device="cuda"), torch.tensor([0.1], device="cuda")
    fp8.fake_quant_fp8(x, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8.fake_quant_fp8(x, scale)
    x.copy_(torch.randn(1000, device="cuda") * 50)
    scale.fill_(0.7)
    graph.replay()
    assert_same_bits(y, reference.fake_quant_fp8(x, scale))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(assert_same_bits: Check) -> None:
    """The last elements of a tensor past 2**31 elements are right (case 37)."""
    x = torch.full((2**31 + 4097,), 3.3, device="cuda", dtype=torch.bfloat16)
    x[-3:] = torch.tensor([17.0, -500.0, 0.01])
    scale = torch.ones((), device="cuda")
    y = fp8.fake_quant_fp8(x, scale)
    assert_same_bits(y[-5000:], reference.fake_quant_fp8(x[-5000:], scale))
    assert_same_bits(y[2**31 - 5000 : 2**31 + 1], reference.fake_quant_fp8(x[2**31 - 5000 : 2**31 + 1], scale))


@pytest.mark.gpu
def test_inputs_are_not_written() -> None:
    """Neither argument changes."""
    x, scale = torch.randn(3000, device="cuda"), torch.rand(1, device="cuda")
    before = x.clone(), scale.clone()
    fp8.fake_quant_fp8(x, scale)
    assert torch.equal(x, before[0])
    assert torch.equal(scale, before[1])


@pytest.mark.gpu
def test_declines_what_it_does_not_serve() -> None:
    """Every refusal on the GPU gives its reason (case 28)."""
    cuda = partial(torch.ones, device="cuda")
    one, x = cuda(1), cuda(4, 6)
    assert "float64" in fp8.supports(x.double(), one)
    assert "strides" in fp8.supports(x.t(), one)
    assert "scale is on cpu" in fp8.supports(x, torch.ones(1))
    assert "number" in fp8.supports(x, 1.0)
    assert "torch.int64" in fp8.supports(x, cuda(1, dtype=torch.int64))
    assert "(2, 6)" in fp8.supports(x, cuda(2, 6))
    with pytest.raises(ValueError, match=r"scale of shape \(5,\)"):
        fp8.fake_quant_fp8(x, cuda(5))


@pytest.mark.gpu
def test_declines_under_functorch() -> None:
    """Inside ``vmap`` it declines: the batched value has no rule for this op."""
    reasons: list[object] = []

    def ask(row: torch.Tensor) -> torch.Tensor:
        reasons.append(fp8.supports(row, torch.ones(1, device="cuda")))
        return row

    torch.func.vmap(ask)(torch.ones(4, 6, device="cuda"))
    assert reasons == ["a functorch transform is active"]


def test_declines_a_cpu_tensor() -> None:
    """A tensor on the CPU is declined by device, before anything else."""
    assert fp8.supports(torch.ones(3), torch.ones(1)) == "x is on cpu, the kernel runs on CUDA devices"
