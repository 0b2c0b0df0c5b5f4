# SPDX-License-Identifier: Apache-2.0
"""What the kernels do not serve: declined with the reason, or an error that names the slot and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel import slot  # noqa: E402 -- after the checks above
from tokenspeed_kernel_triton_fake_quant.doors import is_plain  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.fp8 import fake_quant_fp8  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.int8_affine import fake_quant_int8_affine  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.int8_per_channel import fake_quant_int8_per_channel  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.int_grouped import fake_quant_int_grouped  # noqa: E402
from tokenspeed_kernel_triton_fake_quant.nvfp4 import fake_quant_nvfp4_weight  # noqa: E402


class Kernel(Protocol):
    """What the fixture ``kernel`` returns."""

    slot: str
    call: Callable[..., torch.Tensor]
    supports: Callable[..., object]

    def others(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return what follows the tensor in a usual call."""


class _Subclass(torch.Tensor):
    pass


def _reason(kernel: Kernel, x: torch.Tensor, *others: Any) -> str:
    said = kernel.supports(x, *(others or kernel.others(x)))
    assert isinstance(said, str)
    return said


def test_a_cpu_tensor(kernel: Kernel) -> None:
    """A tensor on the CPU is declined by device, before anything else."""
    for x in (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.float64), torch.ones((), dtype=torch.int64)):
        assert _reason(kernel, x).endswith(" is on cpu, the kernel runs on CUDA devices")


@pytest.mark.gpu
def test_tensors_of_other_kinds(kernel: Kernel) -> None:
    """Float64, integers, subclasses and sparse tensors are declined, and plain ones and parameters are not."""
    x = torch.ones(4, 32, device="cuda")
    assert "torch.float64, the kernel serves float32, float16 and bfloat16" in _reason(kernel, x.double())
    assert "torch.int64" in _reason(kernel, x.long())
    assert "_Subclass, the kernel serves plain tensors" in _reason(kernel, x.as_subclass(_Subclass))
    assert "layout torch.sparse_coo" in _reason(kernel, x.to_sparse(), *kernel.others(x))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kernel.supports(x.to(dtype), *kernel.others(x)) is True
    assert kernel.supports(torch.nn.Parameter(x), *kernel.others(x)) is True


@pytest.mark.gpu
def test_strides_are_no_reason(kernel: Kernel) -> None:
    """Transposed, sliced, expanded, negated and empty tensors are served."""
    x = torch.ones(32, 32, device="cuda")
    for served in (x.t(), x[:, ::2], x[:, 1:], x[:1].expand(32, 32), torch._neg_view(x), x[:0]):
        assert kernel.supports(served, *kernel.others(served)) is True


@pytest.mark.gpu
def test_functorch(kernel: Kernel) -> None:
    """Inside ``vmap`` and ``torch.func.grad`` a kernel declines: a batched or wrapped value has no memory."""
    x = torch.ones(2, 4, 32, device="cuda")
    said: list[object] = []

    def ask(row: torch.Tensor) -> torch.Tensor:
        said.append(kernel.supports(row, *kernel.others(x)))
        return row.sum()

    torch.func.vmap(ask)(x)
    torch.func.grad(ask)(x[0])
    assert said == ["a functorch transform is active"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "name"),
    [("fake_quant_fp8", "scale"), ("fake_quant_int8_affine", "lo"), ("fake_quant_nvfp4_weight", "tensor_amax")],
    indirect=["kernel"],
)
def test_the_tensor_beside(kernel: Kernel, name: str) -> None:
    """On another device, of an integer dtype, a subclass or no number at all is declined by name (case 28)."""
    x = torch.ones(4, 32, device="cuda")
    rest = kernel.others(x)[1:]
    assert _reason(kernel, x, torch.ones(()), *rest) == f"{name} is on cpu, the tensor to quantize on cuda:0"
    assert f"{name} is torch.int64" in _reason(kernel, x, torch.ones((), device="cuda", dtype=torch.int64), *rest)
    assert "_Subclass" in _reason(kernel, x, torch.ones((), device="cuda").as_subclass(_Subclass), *rest)
    assert f"{name} is 'a', neither a tensor nor a number" in _reason(kernel, x, "a", *rest)
    for value in (1, 0.5, torch.ones(1, 1, 1, device="cuda"), torch.ones((), device="cuda", dtype=torch.float64)):
        assert kernel.supports(x, value, *rest) is True


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_fp8"], indirect=True)
def test_fp8_scales_broadcast(kernel: Kernel) -> None:
    """What broadcasts is served; what does not, or would enlarge the tensor, is declined with both shapes."""
    x = torch.ones(4, 6, device="cuda")
    for shape in ((6,), (4, 1), (1, 6), (4, 6)):
        assert kernel.supports(x, torch.ones(shape, device="cuda")) is True
    for shape in ((2, 6), (5,), (2, 4, 6)):
        assert f"{shape} does not broadcast to (4, 6)" in _reason(kernel, x, torch.ones(shape, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_int8_affine"], indirect=True)
def test_ranges_of_more_elements(kernel: Kernel) -> None:
    """A range per element is the reference's."""
    x, one = torch.ones(4, 6, device="cuda"), torch.ones((), device="cuda")
    assert _reason(kernel, x, x, one) == "lo has 24 elements, the kernel takes one"
    assert _reason(kernel, x, one, x) == "hi has 24 elements, the kernel takes one"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_int8_per_channel"], indirect=True)
def test_channels_that_are_not_there(kernel: Kernel) -> None:
    """An axis that the weight has not, and a scale of another size, are declined."""
    weight = torch.ones(4, 6, device="cuda")
    assert _reason(kernel, weight, 2) == "ch_axis 2 is no axis of a tensor of 2 axes"
    assert _reason(kernel, weight[0, 0], 0) == "ch_axis 0 is no axis of a tensor of 0 axes"
    assert _reason(kernel, weight, 2, torch.ones(4, device="cuda")) == "ch_axis 2 is no axis of a tensor of 2 axes"
    assert "does not broadcast" in _reason(kernel, weight, 0, torch.ones(5, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_int8_per_channel"], indirect=True)
def test_the_scale_of_channels(kernel: Kernel) -> None:
    """A number, one element, one a channel and what broadcasts are served; the rest is declined by name."""
    weight = torch.ones(4, 6, device="cuda")
    for shape in ((), (1,), (4,), (6,), (4, 1), (1, 6), (4, 6)):
        assert kernel.supports(weight, -2, torch.ones(shape, device="cuda")) is True
    assert kernel.supports(weight, 1, 0.5) is True
    scale = torch.ones(4, device="cuda")
    assert _reason(kernel, weight, 0, scale.cpu()) == "scale is on cpu, the tensor to quantize on cuda:0"
    assert "scale is torch.int64" in _reason(kernel, weight, 0, scale.long())
    assert "_Subclass" in _reason(kernel, weight, 0, scale.as_subclass(_Subclass))
    assert _reason(kernel, weight, 0, "a") == "scale is 'a', neither a tensor nor a number"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_int_grouped"], indirect=True)
def test_groups_that_are_none(kernel: Kernel) -> None:
    """Rank, bits, group size and the shape of a scale are declined by name, with the value."""
    weight = torch.ones(4, 6, device="cuda")
    assert _reason(kernel, weight[0], 4, 2) == "weight has 1 axes, not 2"
    assert _reason(kernel, weight, 9, 2) == "bits is 9, not an integer from 2 to 8"
    assert _reason(kernel, weight, 4, 0) == "group_size is 0, not an integer from 1 on"
    assert _reason(kernel, weight, 4, 4, torch.ones(4, 3, device="cuda")) == "scale is of shape (4, 3), not (4, 2)"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fake_quant_int_grouped"], indirect=True)
def test_the_scale_of_groups(kernel: Kernel) -> None:
    """One element a group is served, a short last group's too; the rest is declined by name."""
    weight, scale = torch.ones(4, 6, device="cuda"), torch.ones(4, 3, device="cuda")
    assert kernel.supports(weight, 4, 2, scale) is True
    assert kernel.supports(weight, 4, 8, scale[:, :1]) is True
    assert _reason(kernel, weight, 4, 2, scale.cpu()) == "scale is on cpu, the tensor to quantize on cuda:0"
    assert "scale is torch.int64" in _reason(kernel, weight, 4, 2, scale.long())
    assert "_Subclass" in _reason(kernel, weight, 4, 2, scale.as_subclass(_Subclass))
    assert _reason(kernel, weight, 4, 2, 0.5) == "scale is 0.5, not a tensor"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel",
    ["fake_quant_mxfp4_dynamic", "fake_quant_mxfp4_weight", "fake_quant_nvfp4_dynamic", "fake_quant_nvfp4_weight"],
    indirect=True,
)
def test_blocks_need_an_axis(kernel: Kernel) -> None:
    """A tensor of rank 0 has no block (case 5); one of rank 1 has."""
    one = torch.ones((), device="cuda")
    assert "has no axis" in _reason(kernel, one)
    assert kernel.supports(one.reshape(1), *kernel.others(one)) is True


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, r"fake_quant_fp8: scale of shape \(5,\)", lambda x: fake_quant_fp8(x, torch.ones(5))),
        (ValueError, "lo must be a number or have one element", lambda x: fake_quant_int8_affine(x, x, x)),
        (IndexError, "ch_axis 3 is no axis", lambda x: fake_quant_int8_per_channel(x, 3)),
        (ValueError, r"scale of shape \(5, 1\)", lambda x: fake_quant_int8_per_channel(x, 0, torch.ones(5, 1))),
        (ValueError, "fake_quant_int_grouped: bits is 9", lambda x: fake_quant_int_grouped(x, 9, 2)),
        (ValueError, "tensor_amax must be a number or have one", lambda x: fake_quant_nvfp4_weight(x, torch.ones(6))),
    ],
    ids=["fp8", "affine", "axis", "per channel", "grouped", "nvfp4"],
)
def test_a_call_that_was_not_asked_for_raises(
    error: type[Exception], words: str, call: Callable[[torch.Tensor], object]
) -> None:
    """Who calls a kernel past ``supports`` gets the error, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(4, 6))


def test_what_watches_a_call_keeps_it_off_the_short_way() -> None:
    """Subclasses, lazy negations, dispatch modes, transforms and dual numbers go through ``torch.library``."""
    from torch.autograd import forward_ad
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(3)
    said: list[bool] = []

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        said.append(is_plain(x))
        return tensor.sum()

    torch.func.grad(ask)(x)
    with FlopCounterMode(display=False):
        ask(x)
    with forward_ad.dual_level():
        ask(x)
    said += [is_plain(x, x.as_subclass(_Subclass)), is_plain(torch._neg_view(x))]
    assert said == [False] * 5
    assert is_plain(x, torch.nn.Parameter(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch.func.jvp uses it
def test_no_tangent_is_lost(kernel: Kernel) -> None:
    """Under forward-mode differentiation a kernel declines; called all the same it raises, and so does its slot."""
    from torch.autograd import forward_ad

    x, tangent = torch.ones(4, 32), torch.ones(4, 32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            kernel.call(dual, *kernel.others(x))
        with pytest.raises(NotImplementedError, match="forward mode"):
            slot(kernel.slot)(dual, *kernel.others(x))
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        torch.func.jvp(lambda value: kernel.call(value, *kernel.others(x)), (x,), (tangent,))
