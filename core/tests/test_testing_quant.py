# SPDX-License-Identifier: Apache-2.0
"""The conformance kit can fail for each quantization slot: a seeded fault is caught, and named by the right check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel.reference import quant  # noqa: E402 -- after the check that torch is there
from tokenspeed_kernel.registry import KernelSpec, Registration  # noqa: E402
from tokenspeed_kernel.testing import Result, cuda, examine_kernel  # noqa: E402
from tokenspeed_kernel.testing.examination import CHECKS  # noqa: E402
from tokenspeed_kernel.testing.grid import grid_of  # noqa: E402
from tokenspeed_kernel.testing.subject import Subject  # noqa: E402


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last axis: NaN is ignored, infinity is the largest of the dtype."""
    magnitudes = torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.finfo(x.dtype).max)
    return torch.nn.functional.pad(magnitudes, (0, 1)).amax(-1, keepdim=True).float()


def _straight_through(gradient: torch.Tensor, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(inside, gradient, 0.0)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a kernel is made of; the defaults are right, and each fault exchanges one."""

    rounded: Callable[[torch.Tensor], torch.Tensor] = torch.round
    largest: Callable[[torch.Tensor], torch.Tensor] = _largest
    divides_otherwise: bool = False
    """Multiplies by the reciprocal where the slot divides, and the reverse."""
    saturates: bool = True
    block_added: int = 0
    """What is wrong with the size of a block."""
    axis_from: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    """Exchanges axes before and after."""
    finished: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda x, y: y
    """Makes of the input and the right answer what is returned."""
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = _straight_through
    """Makes the gradient of that of the output, the input, and where the code was within its range."""

    def codes(self, x: torch.Tensor, step: torch.Tensor, *, divides: bool) -> torch.Tensor:
        """Return the quotient."""
        return x.float() / step if divides != self.divides_otherwise else x.float() * torch.reciprocal(step)


_Value = tuple[torch.Tensor, torch.Tensor]


def _integers(
    parts: Parts, x: torch.Tensor, step: torch.Tensor, low: int, high: int, zero: Any = 0.0, *, divides: bool
) -> _Value:
    code = parts.rounded(parts.codes(x, step, divides=divides)) + zero
    inside = (code >= low) & (code <= high)
    if parts.saturates:
        code = code.clamp(low, high)
    return ((code - zero) * step).to(x.dtype) + 0.0, inside  # + 0.0: no negative zero, of the last rounding either


def _int8_per_channel(parts: Parts, weight: torch.Tensor, ch_axis: int = 0, scale: Any = None) -> _Value:
    x = parts.axis_from(weight)
    sizes = [1] * x.dim()
    sizes[ch_axis] = x.shape[ch_axis]
    if scale is None:
        scale = parts.largest(x.movedim(ch_axis, 0).unsqueeze(-1).flatten(1)) / torch.tensor(127.0)
        scale = scale.reshape(sizes)
    elif isinstance(scale, torch.Tensor) and scale.dim() == 1 and scale.numel() == x.shape[ch_axis]:
        scale = scale.reshape(sizes)
    elif isinstance(scale, torch.Tensor) and scale.numel() == 1:
        scale = scale.reshape(())
    step = torch.as_tensor(scale, dtype=torch.float32).clamp(min=1e-12)
    value, inside = _integers(parts, x, step, -128, 127, divides=False)
    return parts.axis_from(value), parts.axis_from(inside)


def _int8_affine(parts: Parts, x: torch.Tensor, lo: Any, hi: Any, scalars: bool = False) -> _Value:
    ends = [torch.as_tensor(end, dtype=torch.float32) for end in (lo, hi)]
    ends = [end.reshape(()) if end.numel() == 1 else end for end in ends]
    most = torch.finfo(torch.float32).max
    low, high = (torch.nan_to_num(end, nan=math.nan, posinf=most, neginf=-most) for end in ends)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    step = ((high - low).clamp(max=most) / torch.tensor(255.0)).clamp(min=1e-12)
    zero = torch.round(-128 - low / step).clamp(-128, 127)
    return _integers(parts, x, step, -128, 127, zero, divides=False)


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x in blocks of its last axis, (..., blocks, size), the last one filled with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    return padded.unflatten(-1, (padded.shape[-1] // size, size))


def _unblocked(blocks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(-2)[..., : x.shape[-1]]


def _int_grouped(parts: Parts, weight: torch.Tensor, bits: int, group_size: int, scale: Any = None) -> _Value:
    x = parts.axis_from(weight) if scale is None else weight
    most = 2 ** (bits - 1) - 1
    blocks = _blocks(x, min(group_size, max(x.shape[1], 1)) + (parts.block_added if scale is None else 0))
    step = parts.largest(blocks) / torch.tensor(float(most)) if scale is None else scale.float()[..., None]
    value, _ = _integers(parts, blocks, step.clamp(min=1e-12), -most - 1, most, divides=True)
    value = _unblocked(value, x)
    return (parts.axis_from(value) if scale is None else value), torch.ones_like(weight, dtype=torch.bool)


def _e2m1(parts: Parts, code: torch.Tensor) -> torch.Tensor:
    size = code.abs()
    grid = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, torch.where(size < 8, 2.0, 4.0)))
    value = torch.copysign(parts.rounded(code / grid) * grid, code)
    return value.clamp(-6, 6) if parts.saturates else value


def _mxfp4(parts: Parts, weight: torch.Tensor) -> _Value:
    x = parts.axis_from(weight)
    blocks = _blocks(x, 32 + parts.block_added)
    largest = parts.largest(blocks)
    exponent = torch.frexp(largest.double())[1] - 3  # frexp's fraction lies in [0.5, 1)
    exponent = torch.where(largest > 0, exponent, -127).clamp(-127, 127)
    step = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), exponent).float()
    step = torch.where(largest.isnan(), largest, step)
    value = (_e2m1(parts, parts.codes(blocks, step, divides=True)) * step).to(x.dtype)
    value = parts.axis_from(_unblocked(value, x))
    return value, torch.ones_like(value, dtype=torch.bool)


def _nvfp4(parts: Parts, weight: torch.Tensor, tensor_amax: Any = None) -> _Value:
    x = parts.axis_from(weight)
    blocks = _blocks(x, 16 + parts.block_added)
    if tensor_amax is None:
        maximum = parts.largest(x.reshape(1, -1)).reshape(())
    else:
        maximum = torch.as_tensor(tensor_amax).to(torch.float32).reshape(())
        maximum = torch.nan_to_num(maximum, nan=0.0, posinf=torch.finfo(x.dtype).max).clamp(min=0)
    scale = maximum / torch.tensor(2688.0)
    wanted = parts.largest(blocks) / (6 * scale)
    wanted = (wanted.clamp(max=448.0) if parts.saturates else wanted).to(torch.float8_e4m3fn).float()
    step = torch.where(scale > 0, wanted * scale, 0.0) if not scale.isnan() else scale.expand(wanted.shape)
    codes = _e2m1(parts, parts.codes(blocks, torch.where(step == 0, 1.0, step), divides=True))
    value = parts.axis_from(_unblocked((codes * step).to(x.dtype), x))
    return value, torch.ones_like(value, dtype=torch.bool)


_VALUES: dict[str, Callable[..., _Value]] = {
    "fake_quant_int8_affine": _int8_affine,
    "fake_quant_int8_per_channel": _int8_per_channel,
    "fake_quant_int_grouped": _int_grouped,
    "fake_quant_mxfp4_dynamic": _mxfp4,
    "fake_quant_mxfp4_weight": _mxfp4,
    "fake_quant_nvfp4_dynamic": _nvfp4,
    "fake_quant_nvfp4_weight": _nvfp4,
}


def _registration(slot: str, parts: Parts) -> Registration:
    """Return a kernel of the slot made of these parts, which serves all but float64, as a provider registers it."""

    def supports(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool | str:
        if x.dtype == torch.float64:
            return "x is float64"
        try:
            getattr(quant, slot)(x, *args, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            return str(error)
        return True

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, options: dict[str, Any], *args: Any) -> torch.Tensor:
            value, inside = _VALUES[slot](parts, x, *args, **options)
            ctx.save_for_backward(x, inside)
            return parts.finished(x, torch.empty_like(x).copy_(value))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return parts.backward(gradients[0], *ctx.saved_tensors), *[None] * 8

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = Function.apply(x, kwargs, *args)
        return result

    spec = KernelSpec(name="seeded", family="quant", mode=slot, solution="seeded", priority=16, supports=supports)
    return Registration(spec=spec, implementation=call, owner=None, order=0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: on a busy machine many small calls wait for the others longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _failed(results: list[Result]) -> set[str]:
    return {result.check for result in results if result.outcome == "failed"}


# --- faults ---------------------------------------------------------------------------------------------------------


def _away_from_zero(code: torch.Tensor) -> torch.Tensor:
    return torch.copysign(torch.floor(code.abs() + 0.5), code)


def _nan_swallowed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, y)


def _flushed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, y * 0, y)


def _last_block_copied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = x.shape[-1] // 16 * 16 if x.dim() else 1
    return y if x.dim() == 0 or whole == x.shape[-1] else torch.cat([y[..., :whole], x[..., whole:]], -1)


def _with_nan(x: torch.Tensor) -> torch.Tensor:
    finite = x.abs().clamp(max=torch.finfo(x.dtype).max)  # keeps NaN
    return torch.nn.functional.pad(finite, (0, 1)).amax(-1, keepdim=True).float()


def _infinite(x: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.where(x.isnan(), 0.0, x.abs())
    return torch.nn.functional.pad(magnitudes, (0, 1)).amax(-1, keepdim=True).float()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t() if x.dim() == 2 else x


def _square_transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t() if x.dim() == 2 and x.shape[0] == x.shape[1] else x


def _through_the_maximum(gradient: torch.Tensor, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() == _largest(x), 2.0, 1.0) * gradient * inside


def _everywhere(gradient: torch.Tensor, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return gradient


def _not_at_nan(gradient: torch.Tensor, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(inside | x.isnan(), gradient, 0.0)


def _not_at_zero(gradient: torch.Tensor, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(inside & (x != 0.0), gradient, 0.0)


INT8 = ("fake_quant_int8_affine", "fake_quant_int8_per_channel")
NVFP4 = ("fake_quant_nvfp4_dynamic", "fake_quant_nvfp4_weight")
MXFP4 = ("fake_quant_mxfp4_dynamic", "fake_quant_mxfp4_weight")
GROUPED = ("fake_quant_int_grouped",)
BLOCKS = (*GROUPED, *MXFP4, *NVFP4)
SLOTS = (*INT8, *BLOCKS)
FAULTS: dict[str, tuple[Parts, str, tuple[str, ...]]] = {
    "ties away from zero": (Parts(rounded=_away_from_zero), "parity_ties", SLOTS),
    "NaN swallowed": (Parts(finished=_nan_swallowed), "parity_nonfinite", SLOTS),
    "channels on the other axis": (Parts(axis_from=_square_transposed), "parity_channels", INT8[1:]),
    "blocks on the other axis": (Parts(axis_from=_transposed), "parity_shapes", BLOCKS),
    "no saturation": (Parts(saturates=False), "parity_saturation", SLOTS),
    "last block copied": (Parts(finished=_last_block_copied), "parity_shapes", SLOTS),
    "blocks one too long": (Parts(block_added=1), "parity_shapes", BLOCKS),
    "subnormals flushed": (Parts(finished=_flushed), "parity_tiny", SLOTS),
    "a maximum of NaN": (Parts(largest=_with_nan), "parity_nonfinite", SLOTS[1:]),
    "a maximum of infinity": (Parts(largest=_infinite), "parity_nonfinite", SLOTS[1:]),
    "reciprocal and division exchanged": (Parts(divides_otherwise=True), "parity_ties", (*INT8, *GROUPED, *NVFP4)),
    "a gradient through the maximum": (Parts(backward=_through_the_maximum), "gradients", SLOTS[1:]),
    "a gradient that misses its mask": (Parts(backward=_everywhere), "gradients", INT8),
    "a gradient at NaN": (Parts(backward=_not_at_nan), "gradients", INT8),
    "no gradient at zero": (Parts(backward=_not_at_zero), "gradients", SLOTS),
}
PARITY = {name for name in CHECKS if name.startswith("parity_")}
LEFT_ALONE = {  # by the check that names a fault: what such a fault may not be found by
    "parity_ties": {"refusals"},
    "parity_nonfinite": {"parity_ties", "parity_saturation", "parity_tiny"},
    "parity_channels": {"refusals"},
    "parity_shapes": {"refusals"},
    "parity_saturation": {"refusals"},
    "parity_tiny": {"parity_shapes", "parity_nonfinite"},
    "gradients": {"parity_shapes", "parity_ties", "parity_nonfinite"},
}


@pytest.mark.parametrize("slot", SLOTS)
def test_an_honest_kernel_passes_the_eager_checks(slot: str) -> None:
    """Nothing is found in a kernel that is right, and copies of it with a fault are caught."""
    names = ["refusals", *sorted(PARITY), "gradients", "inputs_unchanged", "outputs_written", "catches_mutants"]
    results = examine_kernel(_registration(slot, Parts()), checks=names)
    assert [f"{r.check}: {r.findings}" for r in results if r.outcome == "failed"] == []
    assert {r.check for r in results if r.outcome == "not examined"} <= {"parity_channels", "parity_options"}


@pytest.mark.parametrize(
    ("slot", "fault"),
    [pytest.param(slot, fault, id=f"{slot}-{fault}") for fault, (_, _, slots) in FAULTS.items() for slot in slots],
)
def test_a_fault_is_named(slot: str, fault: str) -> None:
    """The check that is there for the fault fails, and no check that has nothing to do with it."""
    parts, named, _ = FAULTS[fault]
    failed = _failed(examine_kernel(_registration(slot, parts), checks=[named, *sorted(LEFT_ALONE[named])]))
    assert failed == {named}


@pytest.mark.parametrize("slot", SLOTS)
def test_an_index_that_wraps_is_named(slot: str) -> None:
    """The check of the last elements fails for an index of too few bits (16 here, where 32 need a GPU's memory)."""

    def wraps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.numel()).to(torch.int16).long()
        return y.reshape(-1)[index].reshape(y.shape) if x.numel() > 2**15 else y

    elements = 2**15 + 4097
    assert cuda.index_width(Subject(_registration(slot, Parts())), elements) == []
    findings = cuda.index_width(Subject(_registration(slot, Parts(finished=wraps))), elements)
    assert any("the last of" in finding for finding in findings)


@pytest.mark.parametrize("slot", SLOTS)
def test_the_reference_raises_for_each_malformed_call(slot: str) -> None:
    """What the grid calls malformed has no answer: the reference names the slot and raises."""
    malformed = [case for case in grid_of(slot) if case.malformed]
    assert malformed
    for case in malformed:
        call = case.build("cpu")
        with pytest.raises((TypeError, ValueError, IndexError), match=slot):
            getattr(quant, slot)(*call.args, **call.kwargs)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_case_has_its_name_and_the_same_values_every_time(slot: str) -> None:
    """No two cases of a group share a name; one that is built twice gives equal arguments in memory of their own."""
    cases = grid_of(slot)
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    for case in cases:
        first, second = case.build("cpu"), case.build("cpu")
        for one, other in zip(first.tensors(), second.tensors(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert one.numel() == 0 or one.data_ptr() != other.data_ptr()


def test_a_layer_may_give_none_for_a_scale() -> None:
    """Captures take an argument that is None as a constant, and not for a tensor that the layer is called with."""
    (result,) = examine_kernel(_registration("fake_quant_int8_per_channel", Parts()), checks=["traces"])
    assert (result.outcome, result.findings) == ("passed", ())
