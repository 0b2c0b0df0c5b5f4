# SPDX-License-Identifier: Apache-2.0
"""Simulation on a GPU: the CPU's roundings, whoever serves them, and nothing left behind on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenspeed_kernel_simulate import simulate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activations", [None, "fp8", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4", "nvfp4", "mxfp4"])
def test_a_module_is_calibrated_on_the_cpu_and_moved(
    network: nn.Sequential, images: torch.Tensor, weights: str, activations: str | None
) -> None:
    """Weight and input of a layer are rounded to the bits of the CPU, with the range that was found there."""
    layer, moved = network[0], images.cuda()
    with simulate(layer, weights, activations) as simulation:
        with simulation.calibrate():
            layer(images)
        expected = [call[0](*call[1]) for call in (layer.weight_call(), layer.input_call(images)) if call]
        layer.cuda()
        calls = [call for call in (layer.weight_call(), layer.input_call(moved)) if call]
        given = [value for _, arguments in calls for value in arguments if isinstance(value, torch.Tensor)]
        assert all(value.is_cuda for value in given)
        for call, value in zip(calls, expected, strict=True):
            assert torch.equal(call[0](*call[1]).cpu(), value)


def test_a_graph_holds_the_quantization(network: nn.Sequential, images: torch.Tensor) -> None:
    """A CUDA graph of a simulated module gives eager's bits: no forward waits for the device."""
    network, images = network.cuda().requires_grad_(False), images.cuda()
    with simulate(network, "nvfp4", "int8") as simulation:
        with simulation.calibrate():
            network(images)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = network(images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = network(images)
        graph.replay()
        assert torch.equal(actual, expected)
