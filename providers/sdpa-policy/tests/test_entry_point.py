# SPDX-License-Identifier: Apache-2.0
"""The package as a host meets it: its names, its registration, and what it serves through the slot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tokenspeed_kernel_sdpa_policy as package
from tokenspeed_kernel import slot
from tokenspeed_kernel.registry import KernelRegistry
from tokenspeed_kernel_sdpa_policy import attend


@pytest.fixture
def _registered() -> Iterator[None]:
    """Register the kernel alone, and leave nothing behind."""
    KernelRegistry.reset()
    package.register()
    yield
    KernelRegistry.reset()


def test_public_names() -> None:
    """The public names are exactly these, and each can be had."""
    assert package.__all__ == [
        "attend",
        "attention_weights",
        "manual_attention_required",
        "register",
        "set_fused_attention",
    ]
    assert dir(package) == package.__all__
    assert all(callable(getattr(package, name)) for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


@pytest.mark.usefixtures("_registered")
def test_kernel_is_registered_as_declared() -> None:
    """One kernel, with the name, solution and priority that the README gives."""
    (spec,) = KernelRegistry.get().get_for_operator("attention", "sdpa")
    assert (spec.name, spec.solution, spec.priority) == ("sdpa_policy", "sdpa", 10)


@pytest.mark.usefixtures("_registered")
def test_slot_returns_what_attend_returns() -> None:
    """The slot runs attend, keywords included, and counts the call."""
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    mask = torch.rand(5, 7) > 0.4
    sdpa = slot("sdpa")
    before = sdpa.stats().get("sdpa_policy", {}).get("served", 0)
    assert torch.equal(
        sdpa(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True),
        attend(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True),
    )
    assert torch.equal(
        sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True).isnan(), torch.zeros(q.shape).bool()
    )
    assert sdpa.stats()["sdpa_policy"]["served"] == before + 2


@pytest.mark.usefixtures("_registered")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_slot_gives_none_in_a_trace() -> None:
    """Case 82, case 97: in a capture the slot has nothing, with the reason, so that the host's own math is recorded."""
    answers: list[object] = []

    def host(q: torch.Tensor) -> torch.Tensor:
        answers.append(slot("sdpa")(q, q, q, is_causal=True))
        return q + 1

    torch.jit.trace(host, torch.randn(1, 2, 4, 8), check_trace=False)
    assert answers == [None]


@pytest.mark.usefixtures("_registered")
def test_bad_inputs_raise_through_the_slot_and_trip_nobody() -> None:
    """Case 20, case 103: the caller's mistake is the caller's error, and the next good call is served."""
    q, k, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 6, 8)
    sdpa = slot("sdpa")
    with pytest.raises(ValueError, match="same length"):
        sdpa(q, k, v)
    with pytest.raises(ValueError, match="exclude"):
        sdpa(q, k, k, attn_mask=torch.ones(3, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(TypeError, match="attn_mask"):
        sdpa(q, k, k, attn_mask=torch.ones(3, 5, dtype=torch.int64))
    assert torch.equal(sdpa(q, k, k), attend(q, k, k))
