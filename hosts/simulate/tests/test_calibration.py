# SPDX-License-Identifier: Apache-2.0
"""Observing inputs and fixing ranges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tokenspeed_kernel.reference import quant
from tokenspeed_kernel_simulate import simulate


@pytest.fixture
def layer() -> nn.Linear:
    """Return a layer that gives its input, quantized: weights are left alone."""
    layer = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
    return layer


def test_the_range_is_that_of_all_batches(layer: nn.Linear) -> None:
    """The smallest and the largest value of several batches make the range; an empty batch says nothing."""
    x = torch.tensor([[0.3, -0.7, 2.9]])
    with simulate(layer, None, "int8") as simulation:
        with simulation.calibrate():
            layer(torch.tensor([[0.0, 3.0, 1.0]]))
            layer(torch.empty(0, 3))
            layer(torch.tensor([[-1.0, 0.5, 1.0]]))
        assert torch.equal(layer(x), quant.fake_quant_int8_affine(x, -1.0, 3.0))


def test_fp8_takes_the_largest_magnitude(layer: nn.Linear) -> None:
    """The scale of fp8 comes from the end of the range that is farther from zero."""
    x = torch.tensor([[0.3, -0.7, 2.9]])
    with simulate(layer, None, "fp8") as simulation:
        with simulation.calibrate():
            layer(torch.tensor([[-5.0, 3.0, 1.0]]))
        assert torch.equal(layer(x), quant.fake_quant_fp8(x, torch.tensor(5.0) / torch.tensor(448.0)))


@pytest.mark.parametrize("activations", [None, "fp8", "int8", "nvfp4", "mxfp4"])
def test_the_module_computes_as_before_inside(
    network: nn.Sequential, images: torch.Tensor, activations: str | None
) -> None:
    """While it is calibrated, a module gives the results it gave before it was simulated."""
    expected = network(images)
    with simulate(network, "int4", activations) as simulation:
        with simulation.calibrate():
            assert torch.equal(network(images), expected)
        assert not torch.equal(network(images), expected)


def test_a_layer_without_a_range_says_what_to_do(network: nn.Sequential, images: torch.Tensor) -> None:
    """A forward before calibration is an error that names the layer."""
    with simulate(network, "fp8", "int8"), pytest.raises(RuntimeError, match=r"layer '0' is not calibrated.*calibrate"):
        network(images)


def test_a_layer_that_saw_nothing_is_named(network: nn.Sequential, images: torch.Tensor) -> None:
    """A layer that the data never reached is an error, and no layer gets a range."""
    model = nn.ModuleDict({"used": network, "unused": nn.Linear(2, 2)})
    with simulate(model, "fp8", "fp8") as simulation:
        with pytest.raises(ValueError, match="1 layers saw no data in calibration: 'unused'"), simulation.calibrate():
            model["used"](images)
        with pytest.raises(RuntimeError, match="not calibrated"):
            model["used"](images)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(layer: nn.Linear, value: float) -> None:
    """A range from NaN or infinity would be of no use."""
    with (
        simulate(layer, None, "fp8") as simulation,
        pytest.raises(ValueError, match="1 layers saw NaN or infinity"),
        simulation.calibrate(),
    ):
        layer(torch.tensor([[value, 1.0, 2.0]]))


def test_a_calibration_that_raises_changes_nothing(layer: nn.Linear) -> None:
    """The ranges from before hold, and the layer quantizes again."""
    x = torch.tensor([[0.3, -0.7, 0.9]])

    def run_and_raise() -> None:
        layer(100 * x)
        raise KeyError("after a batch")

    with simulate(layer, None, "fp8") as simulation:
        with simulation.calibrate():
            layer(x)
        expected = layer(x)
        with pytest.raises(KeyError, match="after a batch"), simulation.calibrate():
            run_and_raise()
        assert torch.equal(layer(x), expected)
        with simulation.calibrate():
            layer(100 * x)
        assert not torch.equal(layer(x), expected)


def test_the_range_moves_with_the_module_and_keeps_its_dtype(layer: nn.Linear) -> None:
    """half() does not round the range, and a copy has a range of its own."""
    x = torch.tensor([[0.3, -0.7, 0.9]])
    with simulate(layer, None, "int8") as simulation:
        with simulation.calibrate():
            layer(x)
        other = copy.deepcopy(layer).half()
        expected = quant.fake_quant_int8_affine(x.half(), torch.tensor(-0.7), torch.tensor(0.9))
        assert torch.equal(other(x.half()), expected)
        assert layer(x).dtype == torch.float32
        assert layer.to("meta")(x.to("meta")).device.type == "meta"
