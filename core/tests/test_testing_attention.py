# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on the attention slots: the oracles pass it, and what differs from them is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenspeed_kernel.reference import attention  # noqa: E402 -- after the check that torch is there
from tokenspeed_kernel.registry import KernelSpec, Registration  # noqa: E402
from tokenspeed_kernel.testing import examine_kernel  # noqa: E402
from tokenspeed_kernel.testing.examination import CHECKS  # noqa: E402

VALUES = [name for name in CHECKS if name.startswith("parity_") and name not in ("parity_ties", "parity_tiny")]


def _registration(mode: str, call: Callable[..., Any]) -> Registration:
    spec = KernelSpec(name="seeded", family="attention", mode=mode, solution="seeded", priority=16)
    return Registration(spec=spec, implementation=call, owner=None, order=0)


def _failed(mode: str, call: Callable[..., Any], *checks: str, tolerance: float | None = None) -> set[str]:
    results = examine_kernel(_registration(mode, call), checks=checks or None, tolerance=tolerance)
    return {result.check for result in results if result.outcome == "failed"}


@pytest.mark.parametrize("slot", ["sdpa", "ms_deform_attn"])
def test_the_oracle_passes_as_a_kernel(slot: str) -> None:
    """The portable function, which computes in the call's own precision, is found to be right in every check."""
    assert _failed(slot, getattr(attention, slot)) == set()


def _mask_ignored(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attention.sdpa(q, k, v, **{**options, "attn_mask": None})


def _causal_aligned_to_the_end(q: Any, k: Any, v: Any, **options: Any) -> Any:
    if not options.get("is_causal"):
        return attention.sdpa(q, k, v, **options)
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
    return attention.sdpa(q, k, v, **{**options, "is_causal": False, "attn_mask": mask})


def _masked_rows_are_nan(q: Any, k: Any, v: Any, **options: Any) -> Any:
    mask = options.get("attn_mask")
    result = attention.sdpa(q, k, v, **options)
    if mask is not None and mask.dtype == torch.bool:
        return result.masked_fill(~mask.any(-1, keepdim=True), float("nan"))
    return result


@pytest.mark.parametrize("call", [_mask_ignored, _causal_aligned_to_the_end, _masked_rows_are_nan])
def test_a_wrong_option_of_sdpa_is_named(call: Callable[..., Any]) -> None:
    """A mask that is ignored, causality aligned to the end, and a masked row of NaN fail among the options."""
    assert _failed("sdpa", call, *VALUES) == {"parity_options"}


def test_half_scores_that_overflow_are_named() -> None:
    """Scores computed in float16 overflow, where the slot's contract computes them in float32."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if q.dtype != torch.float16 or options.get("scale") != 1.0:
            return attention.sdpa(q, k, v, **options)
        return ((q * options["scale"]) @ k.transpose(-1, -2)).softmax(-1) @ v

    assert _failed("sdpa", call, *VALUES) == {"parity_scales"}


def _coordinates_swapped(value: Any, shapes: Any, locations: Any, weights: Any) -> Any:
    return attention.ms_deform_attn(value, shapes, locations.flip(-1), weights)


def _last_point_lost(value: Any, shapes: Any, locations: Any, weights: Any) -> Any:
    kept = torch.ones_like(weights)
    kept[..., -1:] = 0.0
    return attention.ms_deform_attn(value, shapes, locations, weights * kept)


@pytest.mark.parametrize("call", [_coordinates_swapped, _last_point_lost])
def test_a_wrong_sample_of_ms_deform_attn_is_named(call: Callable[..., Any]) -> None:
    """Swapped coordinates and a point that is lost fail."""
    assert {"parity_shapes", "parity_dtypes"} <= _failed("ms_deform_attn", call, *VALUES)


def test_a_nan_weight_off_the_map_is_named() -> None:
    """Samples that multiply zero by their weight let a NaN weight through where the location is not finite."""

    def call(value: Any, shapes: Any, locations: Any, weights: Any) -> Any:
        right = attention.ms_deform_attn(value, shapes, locations, weights)
        leak = (weights * 0.0).sum((3, 4)).repeat_interleave(value.shape[-1], -1)
        return right + leak.to(right.dtype)

    assert _failed("ms_deform_attn", call, *VALUES) == {"parity_nonfinite"}


def test_an_op_of_its_own_in_an_export_is_named() -> None:
    """``torch.export`` of ``sdpa`` records the kernel, so it has to be made of standard ops."""
    with torch.library._scoped_library("tokenspeed_kit_test", "FRAGMENT") as library:
        library.define("attend(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.impl("attend", attention.sdpa, "CompositeExplicitAutograd")
        library._register_fake("attend", lambda q, k, v: torch.empty_like(q))

        def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
            if options or q.shape != k.shape or v.shape != q.shape:
                return attention.sdpa(q, k, v, **options)
            return torch.ops.tokenspeed_kit_test.attend(q, k, v)

        results = {
            r.check: r for r in examine_kernel(_registration("sdpa", call), checks=["exports", "exports_strict"])
        }
    assert "records tokenspeed_kit_test::attend" in results["exports"].findings[0]
    assert "records tokenspeed_kit_test::attend" in results["exports_strict"].findings[0]


def test_a_provider_may_only_tighten_the_tolerance() -> None:
    """A tolerance that is smaller than the contract's counts, one that is larger does not."""

    def off(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention.sdpa(q, k, v, **options) * (1 + 3e-6)

    def far_off(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention.sdpa(q, k, v, **options) * (1 + 1e-3)

    assert _failed("sdpa", off, "parity_shapes") == set()
    assert _failed("sdpa", off, "parity_shapes", tolerance=1e-6) == {"parity_shapes"}
    assert _failed("sdpa", far_off, "parity_shapes", tolerance=0.1) == {"parity_shapes"}


def test_a_slot_without_calls_is_not_examined() -> None:
    """A kernel of an operator that the kit has no calls for says so in every check, and does not pass."""
    results = examine_kernel(_registration("decode", lambda *args: args[0]), checks=["refusals", "compiles"])
    assert [r.outcome for r in results] == ["not examined"] * 2
    assert results[0].findings == ("the kit has no calls for 'attention.decode'",)


class _RoundedGradient(torch.autograd.Function):
    """The identity, whose gradient is off by ``error`` times the cotangent: what another order of sums leaves."""

    @staticmethod
    def forward(ctx: Any, q: Any, error: float) -> Any:
        ctx.error = error
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        return grad + ctx.error, None


@pytest.mark.parametrize(("error", "failed"), [(4e-7, set()), (1e-2, {"gradients"})])
def test_a_gradient_that_vanishes_is_held_against_the_others(error: float, failed: set[str]) -> None:
    """Queries that see one key have no gradient, so nothing is relative to it: rounding passes, and an error does not.

    On a GPU, PyTorch's fused attention leaves 4e-7 there.
    """

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention.sdpa(_RoundedGradient.apply(q, error), k, v, **options)

    assert _failed("sdpa", call, "gradients") == failed
