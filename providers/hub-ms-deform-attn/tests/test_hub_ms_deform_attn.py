# SPDX-License-Identifier: Apache-2.0
"""The op around a plain-torch kernel in the Hub's layout: what the conformance kit says of it, and its refusals."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import settings
from tokenspeed_kernel.reference import attention as reference
from tokenspeed_kernel.registry import KernelSpec, Registration
from tokenspeed_kernel.testing import examine_kernel
from tokenspeed_kernel_hub_ms_deform_attn import ms_deform_attn as provider
from tokenspeed_kernel_hub_ms_deform_attn.loading import HubKernel, KernelModule

LEVELS = ((5, 7), (3, 2), (1, 1))
# Those that the kernel written here can stand: it takes no halves, and spreads NaN as grid_sample does.
CHECKS = [
    *("parity_shapes", "parity_strides", "parity_scales", "parity_options"),
    *("gradients", "inputs_unchanged", "same_bits_twice", "catches_mutants"),
]

_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def module(write_repository: Callable[..., Path], offline: list[object], kernel: HubKernel) -> KernelModule:
    """Return the kernel that is written in the Hub's layout, loaded by the real client without a network."""
    write_repository()
    loaded = kernel.load()
    assert loaded is not None
    assert offline == []
    return loaded


def _inputs(
    levels: tuple[tuple[int, int], ...] = LEVELS, batch: int = 3, queries: int = 5, channels: int = 7
) -> _Inputs:
    """Random float32 (value, sampling_locations, attention_weights) that reach past every edge."""
    generator = torch.Generator().manual_seed(0)
    heads, points = 2, 4
    pixels = sum(height * width for height, width in levels)
    value = torch.randn(batch, pixels, heads, channels, generator=generator)
    locations = 1.6 * torch.rand(batch, queries, heads, len(levels), points, 2, generator=generator) - 0.3
    return value, locations, torch.rand(batch, queries, heads, len(levels), points, generator=generator)


def _assert_parity(
    attend: Callable[..., torch.Tensor], inputs: _Inputs, levels: tuple[tuple[int, int], ...] = LEVELS
) -> None:
    """Compare output and gradients with the oracle in float64 sums, relative to the largest: 1e-5 and 1e-4."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    actual = attend(leaves[0], levels, leaves[1], leaves[2])
    value, weights = (leaves[index].detach().double().requires_grad_() for index in (0, 2))
    locations = leaves[1].detach().clone().requires_grad_()
    expected = reference.ms_deform_attn(value, levels, locations, weights)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(value.device)
    got = torch.autograd.grad(actual, leaves, grad)
    wanted = torch.autograd.grad(expected, (value, locations, weights), grad.double())
    for tensor, truth, tolerance in [
        (actual, expected, 1e-5),
        *((a, b, 1e-4) for a, b in zip(got, wanted, strict=True)),
    ]:
        assert tensor.shape == truth.shape
        assert (tensor.double() - truth.double()).abs().max() <= tolerance * truth.double().abs().max()


def _attend_with(module: KernelModule) -> Callable[..., torch.Tensor]:
    return lambda value, levels, locations, weights: provider._attend(module, value, levels, locations, weights)


@pytest.mark.parametrize("batch", [1, 3, 65])
def test_output_and_gradients_equal_the_oracle(module: KernelModule, batch: int) -> None:
    """Forward and compiled backward agree with the oracle for any batch: the step divides it (case 40)."""
    _assert_parity(_attend_with(module), _inputs(batch=batch))


def test_an_expanded_gradient_is_accepted(module: KernelModule) -> None:
    """The gradient of a sum has no strides; the kernel gets a contiguous one."""
    value, locations, weights = _inputs()
    value.requires_grad_()
    (grad,) = torch.autograd.grad(provider._attend(module, value, LEVELS, locations, weights).sum(), value)
    (expected,) = torch.autograd.grad(reference.ms_deform_attn(value, LEVELS, locations, weights).sum(), value)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_locations_that_are_not_finite_give_zero(module: KernelModule) -> None:
    """Inf and NaN locations add nothing, and their gradients are zero and finite (case 34)."""
    points = [(0.0, 0.0), (1.1, 0.5), (-5.0, 0.5), (1e20, 0.5), (float("inf"), 0.5), (float("nan"), 0.5)]
    locations = torch.tensor(points).reshape(1, -1, 1, 1, 1, 2).requires_grad_()
    out = provider._attend(module, torch.ones(1, 16, 1, 1), ((4, 4),), locations, torch.ones(1, 6, 1, 1, 1))
    (grad,) = torch.autograd.grad(out.sum(), locations)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.25, 0.1, 0, 0, 0, 0]), rtol=1e-5, atol=1e-6)
    assert grad.isfinite().all()
    assert not grad[:, 2:].any()


@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_nothing_is_launched_for_nothing(module: KernelModule, batch: int, queries: int) -> None:
    """No batch or no query gives an empty result and zero gradients without a launch (case 115)."""
    leaves = [tensor.requires_grad_() for tensor in _inputs(batch=batch, queries=queries)]
    out = provider._attend(module, leaves[0], LEVELS, leaves[1], leaves[2])
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (batch, queries, 14)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    assert not any(grad.any() for grad in grads)


def test_an_empty_level_adds_nothing_whatever_its_weight(module: KernelModule) -> None:
    """Levels without pixels are left out before the launch, so a NaN weight there counts as zero (case 115)."""
    value, locations = torch.arange(4.0).reshape(1, 4, 1, 1), torch.full((1, 1, 1, 2, 1, 2), 0.5)
    weights = torch.tensor([0.5, float("nan")]).reshape(1, 1, 1, 2, 1).requires_grad_()
    out = provider._attend(module, value, ((2, 2), (0, 5)), locations, weights)
    (grad,) = torch.autograd.grad(out.sum(), weights)
    assert out.item() == 0.75
    assert grad.flatten().tolist() == [1.5, 0.0]


def test_inference_mode_first_does_not_spoil_training_later(module: KernelModule) -> None:
    """The level tables made under inference mode can still be saved for a backward."""
    levels = ((2, 9),)
    inputs = _inputs(levels)
    with torch.inference_mode():
        provider._attend(module, inputs[0], levels, *inputs[1:])
    _assert_parity(_attend_with(module), inputs, levels)


def test_a_second_derivative_is_an_error_not_a_wrong_number(module: KernelModule) -> None:
    """The compiled backward cannot be differentiated, and says so."""
    value, locations, weights = _inputs()
    weights.requires_grad_()
    out = provider._attend(module, value, LEVELS, locations, weights)
    (grad,) = torch.autograd.grad((out**2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "shapes", [[(2, 2), (1, 3)], [[2, 2], [1, 3]], torch.tensor([[2, 2], [1, 3]]), torch.tensor([[2, 2], [1, 3]]).int()]
)
def test_every_form_of_spatial_shapes_means_the_same_levels(shapes: object) -> None:
    """Pairs, lists, int64 and int32 become pairs of ints (case 10)."""
    assert provider._levels(shapes, is_capturing=False) == ((2, 2), (1, 3))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(2, -2)], "negative"),
        (torch.tensor([[-1, 4]]), "negative"),
        (torch.tensor([2, 2]), "(L, 2)"),
        (torch.tensor([[2.0, 2.0]]), "float32"),
        ([(2, 2, 2)], "pairs"),
        (None, "pairs"),
    ],
)
def test_spatial_shapes_that_are_none_are_named(shapes: object, words: str) -> None:
    """Anything else gives the reason, with the value (case 10)."""
    assert words in str(provider._levels(shapes, is_capturing=False))


def test_sizes_start_indices_and_their_order_are_computed_here() -> None:
    """The kernel gets int64 sizes and starts on the device of value, made once for each set of levels (case 10)."""
    shapes, starts = provider._tables_on(torch.device("cpu"), LEVELS)
    assert shapes.dtype == starts.dtype == torch.int64
    assert shapes.tolist() == [list(level) for level in LEVELS]
    assert starts.tolist() == [0, 35, 41]
    assert provider._tables_on(torch.device("cpu"), LEVELS)[0] is shapes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"levels": ((5, 7), (3, 2), (1, 2))}, "hold 43 pixels, value has 42"),
        ({"levels": ((5, 7), (7, 1))}, "for 2 levels"),
        ({"value": torch.zeros(3, 42, 14)}, "value must be (N, S, M, D)"),
        ({"locations": torch.zeros(3, 5, 2, 3, 8)}, "sampling_locations must be"),
        ({"locations": torch.zeros(3, 5, 1, 3, 4, 2)}, "sampling_locations must be (3, 5, 2, 3, 4, 2)"),
        ({"weights": torch.zeros(3, 5, 2, 3, 3)}, "attention_weights must be (3, 5, 2, 3, 4)"),
    ],
    ids=["sum", "levels", "value rank", "locations rank", "heads", "points"],
)
def test_sizes_that_do_not_fit_together_are_refused(change: dict[str, Any], words: str) -> None:
    """The kernel believes whatever it is told, so every size is compared before a launch (case 10)."""
    value, locations, weights = _inputs()
    given = {"value": value, "levels": LEVELS, "locations": locations, "weights": weights, **change}
    assert words in str(provider._size_reason(**given))


def test_tensors_beyond_the_offsets_of_the_kernel_are_refused() -> None:
    """2**31 elements would overflow its C int."""
    value = torch.empty(1, 2**20, 32, 64, device="meta")
    locations, weights = torch.empty(1, 1, 32, 1, 1, 2, device="meta"), torch.empty(1, 1, 32, 1, 1, device="meta")
    assert "32-bit" in str(provider._size_reason(value, ((1024, 1024),), locations, weights))
    assert provider._size_reason(value[..., :63], ((1024, 1024),), locations, weights) is None


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("index", "changed", "words"),
    [
        (0, None, "only CUDA"),
        (0, torch.zeros(3, 42, 2, 7, dtype=torch.float16), "value is torch.float16"),
        (2, torch.zeros(3, 5, 2, 3, 4, dtype=torch.float64), "attention_weights is torch.float64"),
        (1, torch.zeros(3, 5, 2, 3, 4, 2, dtype=torch.int64), "integer-index sampling"),
        (1, [torch.zeros(3, 5, 2, 4, 2), torch.zeros(3, 5, 2, 8, 2)], "point count that varies"),
        (1, torch.zeros(3, 5, 2, 3, 4, 2, device="meta"), "sampling_locations on meta"),
        (0, torch.zeros(3, 42, 2, 7).as_subclass(_Subclass), "_Subclass"),
        (2, None, "only CUDA"),
    ],
    ids=["cpu", "half", "double", "integer", "varying points", "devices", "subclass", "cpu weights"],
)
def test_supports_names_what_it_does_not_take(index: int, changed: Any, words: str) -> None:
    """CPU, other dtypes, varying point counts, integer locations and mixed devices decline with a reason (case 92)."""
    inputs: list[Any] = list(_inputs())
    if changed is not None:
        inputs[index] = changed
    assert words in str(provider.supports(inputs[0], LEVELS, inputs[1], inputs[2]))
    with pytest.raises(ValueError, match=words):
        provider.ms_deform_attn(inputs[0], LEVELS, inputs[1], inputs[2])


@pytest.fixture
def cuda_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass the device check, so that what follows it can be seen without a GPU."""
    monkeypatch.setattr(provider, "_tensor_reason", lambda *tensors: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance_around_a_plain_kernel(module: KernelModule, cuda_like: None, check: str) -> None:
    """What the op does before and after the compiled kernel passes the kit where that kernel cannot run."""
    spec = KernelSpec("hub_ms_deform_attn", "attention", "ms_deform_attn", supports=provider.supports)
    registration = Registration(spec=spec, implementation=provider.ms_deform_attn, owner=None, order=0)
    (result,) = examine_kernel(registration, checks=[check])
    assert result.outcome == "passed", result.findings


def test_the_public_op_loads_on_its_first_call(
    write_repository: Callable[..., Path], offline: list[object], kernel: HubKernel, cuda_like: None
) -> None:
    """Asking supports loads nothing; the call loads, and answers as the oracle does."""
    write_repository()
    value, locations, weights = _inputs()
    assert provider.supports(value, LEVELS, locations, weights) is True
    was_loaded = kernel.is_loaded
    _assert_parity(provider.ms_deform_attn, (value, locations, weights))
    assert (was_loaded, kernel.is_loaded) == (False, True)
    assert offline == []


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        (torch.compiler, "is_compiling", "torch.compile"),
        (torch.compiler, "is_exporting", "torch.export"),
        (torch.jit, "is_tracing", "torch.jit.trace"),
        (torch.onnx, "is_in_onnx_export", "ONNX"),
    ],
    ids=["compile", "export", "trace", "onnx"],
)
def test_every_kind_of_graph_declines(
    cuda_like: None, monkeypatch: pytest.MonkeyPatch, where: types.ModuleType, name: str, words: str
) -> None:
    """While a graph is built the portable path is recorded, and afterwards the kernel runs again (case 23)."""
    value, locations, weights = _inputs()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, lambda: True, raising=False)
        assert words in str(provider.supports(value, LEVELS, locations, weights))
    assert provider.supports(value, LEVELS, locations, weights) is True


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # deprecated, and still what many exporters go through
def test_a_real_trace_and_a_real_transform_decline(cuda_like: None) -> None:
    """torch.jit.trace, torch.func.grad and a dispatch mode are noticed where they run (case 23)."""
    from torch.utils.flop_counter import FlopCounterMode

    value, locations, weights = _inputs()
    said: list[bool | str] = []

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        said.append(provider.supports(value, LEVELS, locations, weights))
        return tensor.sum()

    torch.jit.trace(ask, (value,), check_trace=False)
    torch.func.grad(ask)(value)
    with FlopCounterMode(display=False):
        ask(value)
    ask(value)
    assert ["trace" in str(said[0]), "torch.func" in str(said[1]), "dispatch mode" in str(said[2])] == [True] * 3
    assert said[3:] == [True]


def test_deterministic_training_declines(cuda_like: None) -> None:
    """With deterministic algorithms asked for only calls without a gradient are taken."""
    value, locations, weights = _inputs()
    torch.use_deterministic_algorithms(True)
    try:
        without = provider.supports(value, LEVELS, locations, weights)
        reason = provider.supports(value.requires_grad_(), LEVELS, locations, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert without is True
    assert "deterministic" in str(reason)


def test_a_capture_needs_a_loaded_kernel_and_known_levels(
    write_repository: Callable[..., Path],
    offline: list[object],
    kernel: HubKernel,
    cuda_like: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under CUDA-graph capture a kernel that is not loaded, or new levels, decline instead of breaking the capture."""
    levels = ((2, 11),)
    write_repository()
    value, locations, weights = _inputs(levels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    said = [provider.supports(value, levels, locations, weights)]
    assert kernel.load() is not None
    said.append(provider.supports(value, levels, locations, weights))
    provider._tables_on(value.device, levels)
    said.append(provider.supports(value, levels, locations, weights))
    assert "not loaded yet" in str(said[0])
    assert "not on the device yet" in str(said[1])
    assert said[2] is True
    assert offline == []


def test_supports_follows_the_switch(cuda_like: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching the Hub off and on again changes the answer at the next refresh."""
    inputs = _inputs()
    monkeypatch.setenv("TOKENSPEED_KERNEL_HUB", "off")
    settings.refresh()
    off = provider.supports(inputs[0], LEVELS, inputs[1], inputs[2])
    monkeypatch.delenv("TOKENSPEED_KERNEL_HUB")
    settings.refresh()
    assert "switched off" in str(off)
    assert provider.supports(inputs[0], LEVELS, inputs[1], inputs[2]) is True


def _on_gpu(inputs: _Inputs, device: str = "cuda") -> _Inputs:
    return inputs[0].to(device), inputs[1].to(device), inputs[2].to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["pairs", "cpu", "cuda", "int32"])
def test_cuda_output_and_gradients_equal_the_oracle(module: KernelModule, form: str) -> None:
    """Through the public op on CUDA tensors, with every form of spatial_shapes (cases 10, 40)."""
    table = torch.tensor(LEVELS)
    shapes: Any = {"pairs": LEVELS, "cpu": table, "cuda": table.cuda(), "int32": table.cuda().int()}[form]
    value, locations, weights = _on_gpu(_inputs(batch=65))
    assert provider.supports(value, shapes, locations, weights) is True
    _assert_parity(lambda v, _, loc, w: provider.ms_deform_attn(v, shapes, loc, w), (value, locations, weights))


@pytest.mark.gpu
def test_cuda_shapes_changed_in_place_are_read_again(module: KernelModule) -> None:
    """What was read from a device tensor is remembered for its version only, and not at all for inference tensors."""
    for context in (nullcontext(), torch.inference_mode()):
        with context:
            shapes = torch.tensor([[2, 3]], device="cuda")
            assert provider._levels(shapes, is_capturing=False) == ((2, 3),)
            shapes[0, 0] = 4
            assert provider._levels(shapes, is_capturing=False) == ((4, 3),)


@pytest.mark.gpu
def test_cuda_shapes_that_were_not_read_decline_under_capture(module: KernelModule) -> None:
    """A device tensor cannot be read during a capture; one that was read before can be used."""
    shapes = torch.tensor([[2, 3]], device="cuda")
    assert "pass pairs" in str(provider._levels(shapes, is_capturing=True))
    provider._levels(shapes, is_capturing=False)
    assert provider._levels(shapes, is_capturing=True) == ((2, 3),)


@pytest.mark.gpu
def test_mixed_devices_are_refused_by_name(module: KernelModule) -> None:
    """Value on CUDA with locations on the CPU is an error that names both (case 92)."""
    value, locations, weights = _inputs()
    with pytest.raises(ValueError, match="value on cuda:0, sampling_locations on cpu"):
        provider.ms_deform_attn(value.cuda(), LEVELS, locations, weights)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_kernel_runs_on_the_device_of_value(module: KernelModule) -> None:
    """With device 0 current and tensors on cuda:1 forward and backward are right, and 0 stays current (case 11)."""
    torch.cuda.set_device(0)
    levels = ((128, 128), (64, 64), (32, 32), (16, 16))
    value = torch.ones(1, 21760, 8, 32, device="cuda:1", requires_grad=True)
    locations = torch.ones(1, 4, 8, 4, 4, 2, device="cuda:1")
    out = provider.ms_deform_attn(value, levels, locations, torch.full((1, 4, 8, 4, 4), 0.0625, device="cuda:1"))
    out.sum().backward()
    assert torch.equal(out, torch.full_like(out, 0.25))
    assert value.grad is not None
    assert value.grad.sum().item() == pytest.approx(out.sum().item())
    assert torch.cuda.current_device() == 0
