# SPDX-License-Identifier: Apache-2.0
"""torch's own attention and transformer layers, which read weights without calling the layers that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tokenspeed_kernel_simulate import simulate


def test_attention_is_skipped_with_the_reason() -> None:
    """MultiheadAttention never calls its out_proj: the handle says that neither is simulated."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model, x = nn.ModuleDict({"attention": attention, "head": nn.Linear(8, 8)}), torch.randn(2, 5, 8)
    expected = attention(x, x, x)[0]
    with simulate(model, "mxfp4", "fp8") as simulation:
        assert list(simulation.layers) == ["head"]
        assert simulation.skipped.keys() == {"attention", "attention.out_proj"}
        assert all("MultiheadAttention computes with its weights itself" in why for why in simulation.skipped.values())
        assert torch.equal(attention(x, x, x)[0], expected)
    with pytest.raises(ValueError, match=r"no layer to simulate.*MultiheadAttention"):
        simulate(attention)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the module as it was
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_path_of_an_encoder_is_left(masked: bool, anatomy: Callable[[nn.Module], list[Any]]) -> None:
    """In evaluation without gradients torch would compute from the weights alone; simulated layers are called."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), None
    if masked:
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected, before = model(x, src_key_padding_mask=padding), anatomy(model)
        with simulate(model, "mxfp4") as simulation:
            assert list(simulation.layers) == [f"layers.{n}.linear{k}" for n in (0, 1) for k in (1, 2)]
            inference = model(x, src_key_padding_mask=padding)
            with torch.enable_grad():  # never fused
                training = model(x, src_key_padding_mask=padding)
        attended = torch.ones(2, 5, dtype=torch.bool) if padding is None else ~padding
        torch.testing.assert_close(inference[attended], training[attended])
        assert (inference - expected)[attended].abs().max() > 1e-3
        assert anatomy(model) == before
        assert torch.equal(model(x, src_key_padding_mask=padding), expected)


def test_the_fused_path_is_left_while_any_layer_is_simulated() -> None:
    """Of two simulations in one encoder layer the first to end does not bring it back; the second does."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = layer(x)
        first, second = simulate(layer, "mxfp4", skip="linear2"), simulate(layer, "mxfp4", skip="linear1*")
        first.restore()
        assert type(layer.linear1) is nn.Linear
        assert (layer(x) - expected).abs().max() > 1e-3
        second.restore()
        assert type(layer) is nn.TransformerEncoderLayer
        assert torch.equal(layer(x), expected)
