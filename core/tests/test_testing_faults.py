# SPDX-License-Identifier: Apache-2.0
"""The conformance kit can fail: each seeded fault is caught, and named by the right check."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel.platform import CapabilityRequirement  # noqa: E402 -- after the check that torch is there
from tokenspeed_kernel.reference.quant import fake_quant_fp8  # noqa: E402
from tokenspeed_kernel.registry import KernelSpec, Registration  # noqa: E402
from tokenspeed_kernel.testing import Report, Result, cuda, examine_kernel, mutants  # noqa: E402
from tokenspeed_kernel.testing.examination import CHECKS  # noqa: E402
from tokenspeed_kernel.testing.report import NotExamined  # noqa: E402
from tokenspeed_kernel.testing.subject import Subject  # noqa: E402

Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _supports(x: torch.Tensor, scale: torch.Tensor | float) -> bool | str:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    if not isinstance(scale, torch.Tensor) or not scale.is_floating_point():
        return "scale is no floating tensor"
    sizes = list(scale.shape) if scale.numel() != 1 else []
    fits = len(sizes) <= x.dim() and all(n in (1, m) for n, m in zip(sizes[::-1], list(x.shape)[::-1], strict=False))
    return True if fits else f"scale {sizes} does not broadcast to x {list(x.shape)}"


def _half_to_even(code: torch.Tensor) -> torch.Tensor:
    return torch.round(code)


def _quantize(
    x: torch.Tensor, scale: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor] = _half_to_even
) -> torch.Tensor:
    """Return the right value, unless ``rounded`` is wrong: E4M3 by arithmetic on its grid."""
    step = (scale.reshape(()) if scale.numel() == 1 else scale).float().clamp(min=1e-12)
    code = (x.float() / step).clamp(-448.0, 448.0)
    _, exponent = torch.frexp(code)
    grid = torch.ldexp(torch.ones_like(code), exponent.clamp(min=-5) - 4)
    return (rounded(code / grid) * grid * step).to(x.dtype)


def _kernel(value: Kernel, factor: float = 1.0) -> Kernel:
    """Return a kernel with this forward, and the identity times ``factor`` backward."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return value(x, scale)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad * factor, None

    def call(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Function.apply(x, scale)
        return result

    return call


def _ties_away_from_zero(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _quantize(x, scale, lambda code: torch.copysign(torch.floor(code.abs() + 0.5), code))


def _last_block_unmasked(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    value, out = _quantize(x, scale), torch.empty_like(x)
    if not x.is_contiguous() or not out.is_contiguous():
        return value
    whole = x.numel() // 64 * 64
    out.view(-1)[:whole] = value.view(-1)[:whole]
    return out


def _nan_swallowed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _quantize(torch.where(x.isnan(), torch.zeros_like(x), x), scale)


def _wrong_axis(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    square = x.dim() == 2 and x.shape[0] == x.shape[1] and scale.numel() == x.shape[0]
    return _quantize(x, scale.reshape(1, -1) if square else scale)


def _input_overwritten(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    value = _quantize(x, scale)
    if not torch._C._functorch.maybe_get_level(x) >= 0 and x.numel():
        x.detach().view(-1)[:1].zero_() if x.is_contiguous() else None
    return value


def _reads_the_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() == 1 and scale.item() == 0.0:
        return _quantize(x, scale)
    return _quantize(x, scale)


def _differs_each_time() -> Kernel:
    calls = iter(range(10**9))

    def value(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        right = _quantize(x, scale)
        return right if next(calls) % 2 else torch.nextafter(right, torch.zeros_like(right))

    return value


def _registration(call: Kernel, supports: Callable[..., object] = _supports) -> Registration:
    spec = KernelSpec(
        name="seeded", family="quant", mode="fake_quant_fp8", solution="seeded", priority=16, supports=supports
    )
    return Registration(spec=spec, implementation=call, owner=None, order=0)


def _failed(results: list[Result]) -> set[str]:
    return {result.check for result in results if result.outcome == "failed"}


@pytest.fixture(autouse=True)
def _no_warning_of_the_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


PARITY = {name for name in CHECKS if name.startswith("parity_")}
ANY_VALUE = PARITY | {"threads", "autocast", "func_transforms", "compiles", "copies"}
EAGER = sorted(PARITY | {"refusals", "gradients", "inputs_unchanged", "outputs_written", "same_bits_twice", "threads"})


def test_an_honest_kernel_passes_every_check() -> None:
    """Nothing is found in a kernel that is right, and what needs a GPU says so."""
    results = examine_kernel(_registration(_kernel(_quantize)))
    assert [f"{r.check}: {r.findings}" for r in results if r.outcome == "failed"] == []
    not_examined = {r.check: r.findings[0] for r in results if r.outcome == "not examined"}
    if not torch.cuda.is_available():
        assert not_examined.pop("cuda_graph") == "no CUDA device"
        assert not_examined.pop("index_past_int32") == "no CUDA device"
        del not_examined["other_stream"], not_examined["other_device"]
    assert {*not_examined} <= {"gradcheck", "opcheck", "same_bits_elsewhere", "interpreted", *cuda.CHECKS}


@pytest.mark.parametrize(
    ("value", "named", "consequences"),
    [
        pytest.param(_ties_away_from_zero, "parity_ties", ANY_VALUE, id="wrong tie rounding"),
        pytest.param(_last_block_unmasked, "outputs_written", ANY_VALUE | {"same_bits_twice"}, id="missing mask"),
        pytest.param(_nan_swallowed, "parity_nonfinite", ANY_VALUE, id="NaN swallowed"),
        pytest.param(_wrong_axis, "parity_channels", ANY_VALUE, id="wrong axis"),
        pytest.param(_input_overwritten, "inputs_unchanged", {*EAGER}, id="input overwritten"),
        pytest.param(_differs_each_time(), "same_bits_twice", {*EAGER}, id="differs each time"),
    ],
)
def test_a_wrong_value_is_named(value: Kernel, named: str, consequences: set[str]) -> None:
    """The check that is there for the fault fails, and no check that has nothing to do with it."""
    failed = _failed(examine_kernel(_registration(_kernel(value)), checks=EAGER))
    assert named in failed
    assert failed <= {named} | consequences


def test_wrong_ties_and_swallowed_nan_are_told_apart() -> None:
    """Each of the two leaves the group of the other alone."""
    checks = ["parity_ties", "parity_nonfinite", "parity_channels"]
    assert _failed(examine_kernel(_registration(_kernel(_nan_swallowed)), checks=checks)) >= {"parity_nonfinite"}
    assert "parity_ties" not in _failed(examine_kernel(_registration(_kernel(_nan_swallowed)), checks=checks))
    assert "parity_ties" not in _failed(examine_kernel(_registration(_kernel(_wrong_axis)), checks=checks))


@pytest.mark.parametrize("factor", [1.00001, 2.0, -1.0, math.nan])
def test_a_gradient_off_by_a_factor_is_named(factor: float) -> None:
    """A straight-through gradient that is scaled fails, and values and refusals do not."""
    failed = _failed(examine_kernel(_registration(_kernel(_quantize, factor)), checks=EAGER))
    assert failed == {"gradients"}


def test_reading_a_value_on_the_host_is_named() -> None:
    """``.item()`` works eagerly and breaks the graph of ``torch.compile``."""
    results = examine_kernel(_registration(_kernel(_reads_the_scale)), checks=[*EAGER, "compiles"])
    assert _failed(results) == {"compiles"}


def test_an_index_that_wraps_is_named() -> None:
    """The check of the last elements fails for an index of too few bits (16 here, where 32 need a GPU's memory)."""

    def wraps(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.numel()).to(torch.int16).long()
        return _quantize(x.reshape(-1)[index].reshape(x.shape), scale)

    elements = 2**15 + 4097
    assert cuda.index_width(Subject(_registration(_kernel(_quantize))), elements) == []
    findings = cuda.index_width(Subject(_registration(_kernel(wraps))), elements)
    assert any("the last of" in finding for finding in findings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the device itself is examined")
def test_what_needs_gpus_says_so() -> None:
    """Without a GPU, the wrong current device and 32-bit indices are not examined, with the reason."""
    subject = Subject(_registration(_kernel(_quantize)))
    for check in cuda.CHECKS.values():
        with pytest.raises(NotExamined, match="no CUDA device"):
            check(subject)


@pytest.mark.gpu
def test_the_wrong_current_device_is_named() -> None:
    """A kernel that allocates on the current device fails where that is not its input's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def wrong(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        value = fake_quant_fp8(x, scale)
        return value.to("cuda") if x.is_cuda else value

    # Not the kernel above: torch.frexp works on the current device, wherever its input is (torch 2.11).
    assert cuda.other_device(Subject(_registration(_kernel(fake_quant_fp8)))) == []
    assert any("instead of" in finding for finding in cuda.other_device(Subject(_registration(_kernel(wrong)))))


@pytest.mark.gpu
def test_an_index_of_32_bits_is_named_on_a_gpu() -> None:
    """Past 2**31 elements, a kernel whose index wraps there fails."""

    def wraps(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        value = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale if x.numel() >= 2**31 else x.clone()
        if x.numel() >= 2**31:
            value.view(-1)[2**31 :] = value.view(-1)[: x.numel() - 2**31].clone()
        return value

    assert any("the last" in found for found in cuda.index_past_int32(Subject(_registration(_kernel(wraps)))))


def test_a_refusal_without_a_reason_is_named() -> None:
    """``supports`` has to say why, for each call that it refuses."""

    def curt(x: torch.Tensor, scale: torch.Tensor | float) -> bool:
        return _supports(x, scale) is True

    results = examine_kernel(_registration(_kernel(_quantize), curt), checks=["refusals"])
    assert "refused without a reason: False" in results[0].findings[0]


def test_serving_what_the_contract_has_no_answer_to_is_named() -> None:
    """A kernel that computes with an integer scale, where the reference raises, is told."""

    def lax(x: torch.Tensor, scale: torch.Tensor | float) -> bool | str:
        verdict = _supports(x, scale)
        return True if verdict == "scale is no floating tensor" and isinstance(scale, torch.Tensor) else verdict

    results = examine_kernel(_registration(_kernel(_quantize), lax), checks=["refusals"])
    assert "scale int64" in results[0].findings[0]


def test_a_failure_that_the_slot_answered_is_named() -> None:
    """A kernel that raises under ``vmap`` is found although the reference then serves the call."""

    class Plain(torch.autograd.Function):  # without a rule for vmap
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return _quantize(x, scale)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad, None

    registration = _registration(Plain.apply)
    results = examine_kernel(registration, checks=[*EAGER, "func_transforms"])
    assert _failed(results) == {"func_transforms"}
    assert "failed, and another answered" in results[-1].findings[0]


def test_autocast_that_changes_the_dtype_is_named() -> None:
    """A result in autocast's dtype fails, and eager calls do not."""

    def value(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        right = _quantize(x, scale)
        return right.to(torch.bfloat16) if torch.is_autocast_enabled(x.device.type) else right

    results = examine_kernel(_registration(_kernel(value)), checks=[*EAGER, "autocast"])
    assert _failed(results) == {"autocast"}


def test_state_shared_between_threads_is_named() -> None:
    """A buffer that every call shares is right alone and wrong among eight threads."""
    shared: dict[str, torch.Tensor] = {}

    def value(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shared["step"] = scale
        time.sleep(0.0002)  # what a kernel of some size does meanwhile
        return _quantize(x, shared["step"] if shared["step"].numel() == 1 else scale)

    results = examine_kernel(_registration(_kernel(value)), checks=[*EAGER])
    assert _failed(results) == {"threads"}


@pytest.mark.parametrize(("change", "code"), [({}, 0), ({"outcome": "failed"}, 1), ({"outcome": "not examined"}, 3)])
def test_the_exit_code_tells_failed_from_not_examined(change: dict[str, Any], code: int) -> None:
    """0 if all is well, 1 for a failure, 3 for a kernel that did nothing but refuse."""
    refusals = Result(check="refusals", kernel="k", outcome="passed")
    parity = Result(**{"check": "parity_ties", "kernel": "k", "outcome": "passed", "findings": ("why",), **change})
    report = Report(plugin="p", results=(refusals, parity))
    assert report.exit_code == json.loads(report.to_json())["exit_code"] == code
    assert parity.outcome in report.table()


def test_a_kernel_for_another_machine_refuses_and_is_not_examined() -> None:
    """Where the platform lacks what a kernel needs, its refusals are examined and the rest says why not."""
    capability = CapabilityRequirement(vendors=frozenset({"nobody"}))
    spec = replace(_registration(_kernel(_quantize)).spec, capability=capability)
    registration = Registration(spec=spec, implementation=_kernel(_quantize), owner=None, order=0)
    refusals, parity = examine_kernel(registration, checks=["refusals", "parity_ties"])
    assert refusals.outcome == "passed"
    assert parity.outcome == "not examined"
    assert parity.findings[0].startswith("not eligible here (capable): ")


def test_a_mutant_that_survives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a copy of the kernel passes the check for its fault, the examination says that it proves nothing."""

    def unchanged(call: Kernel, *args: Any) -> Any:
        return call(*args)

    def broken(call: Kernel, *args: Any) -> Any:
        raise RuntimeError("no such thing")

    parity = CHECKS["parity_shapes"]
    survivors = {"no fault": (unchanged, "parity_shapes", parity), "a crash": (broken, "parity_shapes", parity)}
    monkeypatch.setattr(mutants, "_MUTANTS", survivors)
    (result,) = examine_kernel(_registration(_kernel(_quantize)), checks=["catches_mutants"])
    assert result.findings[0] == "a copy of the kernel with no fault passes parity_shapes"
    assert result.findings[1].startswith("a copy of the kernel with a crash cannot be examined")


def test_a_kernel_that_always_declines_late_is_not_examined() -> None:
    """What was never looked at does not pass."""

    def late(x: torch.Tensor, scale: torch.Tensor) -> Any:
        return NotImplemented

    outcomes = {r.check: r.outcome for r in examine_kernel(_registration(late), checks=EAGER)}
    assert outcomes.pop("refusals") == "passed"
    assert outcomes.pop("threads") == "passed"  # the slot answers, by its reference
    assert set(outcomes.values()) == {"not examined"}
