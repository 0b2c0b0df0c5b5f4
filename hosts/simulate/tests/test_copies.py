# SPDX-License-Identifier: Apache-2.0
"""Copies, pickles and compiled forms of a simulated module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tokenspeed_kernel_simulate import restore, simulate

FORMATS = [("fp8", "fp8"), ("int8", "int8"), ("int4", None), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")]


def _saved(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle protocol 0": lambda module: pickle.loads(pickle.dumps(module, protocol=0)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_a_copy_is_simulated_and_can_be_restored(
    network: nn.Sequential, images: torch.Tensor, weights: str, activations: str | None, how: str
) -> None:
    """It gives the same bits as the module, ranges included; ``restore`` makes a plain module of it alone."""
    plain = network(images)
    with simulate(network, weights, activations) as simulation:
        with simulation.calibrate():
            network(images)
        expected = network(images)
        other = COPIES[how](network)
        assert torch.equal(other(images), expected)
        restore(other)
        assert [type(layer) for layer in other] == [nn.Conv2d, nn.ReLU, nn.ConvTranspose2d, nn.Flatten, nn.Linear]
        assert torch.equal(other(images), plain)
        assert torch.equal(network(images), expected)


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo of torch 2.11 itself
def test_compiles_into_one_graph(
    network: nn.Sequential, images: torch.Tensor, weights: str, activations: str | None
) -> None:
    """One graph without a break gives eager's outputs and gradients, and follows simulation and restoration."""
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    plain = network(images)
    assert torch.equal(compiled(images), plain)
    with simulate(network, weights, activations) as simulation:
        with simulation.calibrate():
            network(images)
        grad = torch.randn(2, 10, generator=torch.Generator().manual_seed(3))
        results = [model(images) for model in (network, compiled)]
        expected, actual = (torch.autograd.grad(result, list(network.parameters()), grad) for result in results)
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(actual, expected)
        assert not torch.equal(results[1], plain)
    assert torch.equal(compiled(images), plain)


def test_exports() -> None:
    """torch.export records the quantization with the layer."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 64)
    with simulate(model, "int8", "nvfp4"):
        exported = torch.export.export(model, (x,)).module()
        assert torch.equal(exported(x), model(x))


def test_a_parametrized_layer_keeps_its_parametrization() -> None:
    """The weight that a parametrization computes is what is quantized, and gradients reach its parameters."""
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 8))
    kind, x = type(layer), torch.randn(3, 64)
    with simulate(layer, "mxfp4"):
        layer(x).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    assert type(layer) is kind
