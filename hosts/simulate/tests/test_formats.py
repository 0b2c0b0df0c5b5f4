# SPDX-License-Identifier: Apache-2.0
"""What each format does to weights and inputs, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tokenspeed_kernel.reference import quant
from tokenspeed_kernel_simulate import simulate


def _amax(rows: torch.Tensor, *axes: int) -> torch.Tensor:
    return rows.abs().amax(axes, keepdim=bool(axes))


WEIGHTS = {
    "fp8": lambda rows: quant.fake_quant_fp8(rows, _amax(rows, 1) / torch.tensor(448.0)),
    "int8": quant.fake_quant_int8_per_channel,
    "int4": lambda rows: quant.fake_quant_int_grouped(rows, 4, 128),
    "int2": lambda rows: quant.fake_quant_int_grouped(rows, 2, 128),
    "nvfp4": lambda rows: quant.fake_quant_nvfp4_weight(rows, _amax(rows)),
    "mxfp4": quant.fake_quant_mxfp4_weight,
}
ACTIVATIONS = {
    "fp8": lambda x: quant.fake_quant_fp8(x, _amax(x) / torch.tensor(448.0)),
    "int8": lambda x: quant.fake_quant_int8_affine(x, x.min(), x.max()),
    "nvfp4": quant.fake_quant_nvfp4_dynamic,
    "mxfp4": quant.fake_quant_mxfp4_dynamic,
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_linear_layer_computes_with_the_quantized_weight(weights: str) -> None:
    """The output is that of the reference's weight, to the bit; scales and blocks lie along the rows."""
    torch.manual_seed(0)
    layer, x = nn.Linear(200, 7), torch.randn(5, 200)
    expected = functional.linear(x, WEIGHTS[weights](layer.weight), layer.bias)
    with simulate(layer, weights):
        actual = layer(x)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_linear_layer_computes_with_the_quantized_input(activations: str) -> None:
    """The output is that of the reference's input, to the bit, in the range that calibration saw."""
    torch.manual_seed(0)
    layer, x = nn.Linear(200, 7), torch.randn(5, 200)
    expected = functional.linear(ACTIVATIONS[activations](x), layer.weight, layer.bias)
    with simulate(layer, None, activations) as simulation:
        with simulation.calibrate():
            layer(x)
        actual = layer(x)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("activations", [None, "nvfp4", "int8"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_convolution_is_a_matrix_with_a_row_per_output_channel(
    axes: int, groups: int, weights: str, activations: str | None
) -> None:
    """Weights are quantized as (out, in / groups * kernel), blocks of inputs lie along the channels."""
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](20, 6, 3, groups=groups, padding=1, padding_mode="circular")
    x = torch.randn(2, 20, *[4] * axes)
    reference = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](20, 6, 3, groups=groups, padding=1, padding_mode="circular")
    with torch.no_grad():
        reference.weight.copy_(WEIGHTS[weights](layer.weight.flatten(1)).view_as(layer.weight))
        reference.bias.copy_(layer.bias)
    quantized = x
    if activations is not None:
        quantized = ACTIVATIONS[activations](x.movedim(1, -1)).movedim(-1, 1)
    with simulate(layer, weights, activations) as simulation:
        with simulation.calibrate():
            layer(x)
        actual, unbatched = layer(x), layer(x[0]) if activations != "nvfp4" else None
    torch.testing.assert_close(actual, reference(quantized))
    if unbatched is not None:  # nvfp4 takes the largest magnitude of what it gets
        torch.testing.assert_close(unbatched, actual[0])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_transposed_convolution_gathers_its_rows(axes: int, groups: int, weights: str) -> None:
    """Its weight lies as (in, out / groups, kernel): what each output channel sums over is a row all the same."""
    torch.manual_seed(0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    layer = kind(20, 6, 3, groups=groups, stride=2)
    x, size = torch.randn(2, 20, *[3] * axes), [8] * axes
    expected = kind(20, 6, 3, groups=groups, stride=2)
    with torch.no_grad():
        expected.bias.copy_(layer.bias)
        for group in range(groups):
            part = slice(group * 20 // groups, (group + 1) * 20 // groups)
            for out in range(6 // groups):
                row = layer.weight[part, out].flatten()[None]
                if weights == "nvfp4":
                    row = quant.fake_quant_nvfp4_weight(row, layer.weight.abs().max())
                else:
                    row = WEIGHTS[weights](row)
                expected.weight[part, out] = row.view_as(layer.weight[part, out])
    with simulate(layer, weights):
        actual, larger = layer(x), layer(x, output_size=size)
    torch.testing.assert_close(actual, expected(x))
    torch.testing.assert_close(larger, expected(x, output_size=size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_other_dtypes_stay(weights: str, dtype: torch.dtype) -> None:
    """A layer of another dtype gives that dtype, and its scale is not rounded to a narrow one."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 7, dtype=dtype), torch.randn(5, 64, dtype=dtype)
    rows = layer.weight
    wanted = WEIGHTS[weights](rows) if weights != "fp8" else None
    if wanted is None:
        scale = _amax(rows, 1).to(torch.promote_types(dtype, torch.float32))
        wanted = quant.fake_quant_fp8(rows, scale / torch.full_like(scale, 448))
    expected = functional.linear(x, wanted, layer.bias)
    with simulate(layer, weights):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("weights", "group_size", "bits"),
    [
        ("fp8", None, 8 + 32 / 100),
        ("int8", None, 8 + 32 / 100),
        ("int8", 50, 8 + 32 / 50),
        ("int4", None, 4 + 32 / 100),
        ("int4", 32, 4 + 4 * 32 / 100),  # the fourth group is short
        ("int3", 10, 3 + 32 / 10),
        ("nvfp4", None, 4 + 7 * 8 / 100 + 32 / 1000),
        ("mxfp4", None, 4 + 4 * 8 / 100),
    ],
)
def test_bits_count_the_scales(weights: str, group_size: int | None, bits: float) -> None:
    """Bits per weight are those of the code and of the scales, a short last block included."""
    with simulate(nn.Linear(100, 10), weights, group_size=group_size) as simulation:
        assert simulation.weight_bits == pytest.approx(bits)
        assert simulation.activation_bits == 32


@pytest.mark.parametrize(("activations", "bits"), [("fp8", 8), ("int8", 8), ("nvfp4", 4.5), ("mxfp4", 4.25)])
def test_bits_of_activations(activations: str, bits: float) -> None:
    """Bits per activation have the scales of blocks; those of a whole tensor are shared by too many to count."""
    with simulate(nn.Linear(96, 10, dtype=torch.bfloat16), None, activations) as simulation:
        assert simulation.activation_bits == bits
        assert simulation.weight_bits == 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"weights": "fp4"}, "weights 'fp4' is no format; use one of 'fp8', 'int8', 'int7'"),
        ({"activations": "int4"}, "activations 'int4' is no format; use one of 'fp8', 'int8', 'nvfp4', 'mxfp4'"),
        ({"weights": None}, "both None"),
        ({"weights": "fp8", "group_size": 32}, "group_size 32 does not go with weights 'fp8'"),
        ({"weights": "int4", "group_size": 0}, "group_size must be an integer, 1 or more, got 0"),
        ({"weights": "int4", "group_size": 2.5}, "got 2.5"),
    ],
)
def test_a_wrong_format_is_explained(arguments: dict[str, Any], said: str) -> None:
    """The message has the value and what may stand in its place, and the module is untouched."""
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=said):
        simulate(layer, **arguments)
    assert type(layer) is nn.Linear
