# SPDX-License-Identifier: Apache-2.0
"""What is simulated, what is skipped, and that everything comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tokenspeed_kernel import slot
from tokenspeed_kernel_simulate import restore, simulate

Anatomy = Callable[[nn.Module], list[Any]]


class OwnForward(nn.Linear):
    """A linear layer that does more than its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice the layer's output."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("activations", [None, "fp8", "int8", "nvfp4", "mxfp4"])
def test_everything_comes_back(
    network: nn.Sequential, images: torch.Tensor, anatomy: Anatomy, activations: str | None
) -> None:
    """After the block classes, attributes, parameters, hooks and results are what they were."""
    network[0].register_forward_hook(lambda *_: None)
    before, expected = anatomy(network), network(images)
    with simulate(network, "int4", activations) as simulation:
        with simulation.calibrate():
            network(images)
        assert not torch.equal(network(images), expected)
    assert anatomy(network) == before
    assert torch.equal(network(images), expected)
    simulation.restore()  # twice is no error
    assert anatomy(network) == before


def test_an_exception_restores_too(network: nn.Sequential, anatomy: Anatomy) -> None:
    """A block that raises leaves the module as it was, and the exception passes."""
    before = anatomy(network)
    with pytest.raises(KeyError, match="mine"), simulate(network, "mxfp4", "fp8"):
        raise KeyError("mine")
    assert anatomy(network) == before


def test_parameters_and_state_stay_while_simulated(network: nn.Sequential) -> None:
    """Names, order and identity of parameters, and the keys of the state dict, do not change."""
    parameters, keys = dict(network.named_parameters()), list(network.state_dict())
    buffers = dict(network.named_buffers())
    with simulate(network, "nvfp4", "nvfp4"):
        assert {name: id(p) for name, p in network.named_parameters()} == {n: id(p) for n, p in parameters.items()}
        assert network[0].weight is parameters["0.weight"]
        assert list(network.state_dict()) == keys
        assert dict(network.named_buffers()) == buffers
        network.load_state_dict(network.state_dict())
        assert isinstance(network[4], nn.Linear)
        assert "weights=nvfp4, activations=nvfp4" in repr(network)


def test_a_layer_in_two_places_is_quantized_once(images: torch.Tensor) -> None:
    """A shared layer is one simulated layer, and quantizes once a call."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    quantization = slot("fake_quant_mxfp4_weight")
    with simulate(model, "mxfp4") as simulation:
        assert list(simulation.layers) == ["0"]
        before = quantization.stats()["fake_quant_mxfp4_weight:reference"]["served"]
        model(torch.randn(2, 4))
        assert quantization.stats()["fake_quant_mxfp4_weight:reference"]["served"] == before + 2
    assert type(shared) is nn.Linear


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("0", ["2", "4"]),
        (["0", "4"], ["2"]),
        ("[02]", ["4"]),
        (nn.Conv2d, ["2", "4"]),
        ([nn.ConvTranspose2d, "4"], ["0"]),
        (nn.Conv1d, ["0", "2", "4"]),  # a class may be absent
    ],
)
def test_skip(network: nn.Sequential, skip: Any, left: list[str]) -> None:
    """Names, patterns and classes are left alone, and the handle says why."""
    with simulate(network, skip=skip) as simulation:
        assert list(simulation.layers) == left
        assert sorted([*left, *simulation.skipped]) == ["0", "2", "4"]
        assert all(reason.startswith("skip has") for reason in simulation.skipped.values())


def test_skip_takes_a_whole_part_wherever_it_is_used(network: nn.Sequential) -> None:
    """A skipped module is left alone with all in it, also if another part uses it under another name."""
    head = nn.Sequential(network[4], nn.Linear(10, 10))
    model = nn.ModuleDict({"body": network, "head": head})
    with simulate(model, skip="head") as simulation:
        assert list(simulation.layers) == ["body.0", "body.2"]
        assert simulation.skipped == {"body.4": "skip has 'head'", "head.1": "skip has 'head'"}


@pytest.mark.parametrize(
    ("skip", "error", "said"),
    [
        ("haed", ValueError, "skip 'haed' matches no module; did you mean 'head'"),
        ([3], TypeError, "skip has 3"),
        (["head", int], TypeError, "skip has <class 'int'>"),
        ("*", ValueError, "no layer to simulate .*'head': skip has '\\*'"),
    ],
)
def test_a_wrong_skip_is_explained(skip: Any, error: type[Exception], said: str) -> None:
    """A name that nothing has, or an entry of another type, is refused before anything changes."""
    model = nn.ModuleDict({"head": nn.Linear(4, 4)})
    with pytest.raises(error, match=said):
        simulate(model, skip=skip)
    assert type(model["head"]) is nn.Linear


def test_what_cannot_be_simulated_is_skipped_with_the_reason() -> None:
    """Layers that compute in their own way, or have no weight to quantize, stay as they are."""
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]  # what other tools do
    with pytest.warns(UserWarning, match="Lazy modules|zero-element"):
        lazy, empty = nn.LazyLinear(4), nn.Linear(0, 4)
    layers = {"own": OwnForward(4, 4), "patched": patched, "lazy": lazy, "empty": empty, "plain": nn.Linear(4, 4)}
    layers["complex"] = nn.Linear(4, 4, dtype=torch.complex64)
    with simulate(nn.ModuleDict(layers)) as simulation:
        assert list(simulation.layers) == ["plain"]
        assert simulation.skipped.keys() == layers.keys() - {"plain"}
        assert "its forward is not that of torch.nn.Linear" in simulation.skipped["own"]
        assert "its forward is not that of torch.nn.Linear" in simulation.skipped["patched"]
        assert "run a batch" in simulation.skipped["lazy"]
        assert "no elements" in simulation.skipped["empty"]
        assert "torch.complex64" in simulation.skipped["complex"]
        assert "skipped 'own'" in repr(simulation)


def test_a_module_without_layers_is_refused() -> None:
    """Nothing to simulate is an error that says so."""
    with pytest.raises(ValueError, match="Sequential has no layer to simulate"):
        simulate(nn.Sequential(nn.ReLU()))
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got 3"):
        simulate(3)  # type: ignore[arg-type]  # what the test is about


def test_parts_may_be_in_formats_of_their_own(network: nn.Sequential, images: torch.Tensor) -> None:
    """Two simulations of separate parts stand side by side; each restores its own, ``restore`` all."""
    first = simulate(network[0], "mxfp4")
    second = simulate(network[4], "int8")
    with pytest.raises(ValueError, match="layer '0' is simulated already"):
        simulate(network)
    first.restore()
    assert type(network[0]) is nn.Conv2d
    assert type(network[4]) is not nn.Linear
    restore(network)
    assert type(network[4]) is nn.Linear
    second.restore()


def test_gradients_reach_every_parameter(network: nn.Sequential, images: torch.Tensor) -> None:
    """Quantization-aware training lowers a loss: the weights that the layers hold are trained, not the rounded ones."""
    target = torch.randn(2, 10, generator=torch.Generator().manual_seed(2))
    with simulate(network, "int4", "int8", group_size=16) as simulation:
        with torch.inference_mode(), simulation.calibrate():
            network(images)
        optimizer = torch.optim.Adam(network.parameters(), 1e-2)
        losses = []
        for _ in range(20):
            loss = (network(images) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4


def test_the_slot_calls_can_be_explained(network: nn.Sequential, images: torch.Tensor) -> None:
    """A layer hands out the calls that it makes, so that a host can ask who serves them."""
    with simulate(network, "fp8", "nvfp4") as simulation:
        layer = simulation.layers["0"]
        (weight_slot, weight_arguments), (input_slot, input_arguments) = layer.weight_call(), layer.input_call(images)
        assert weight_slot.explain(*weight_arguments).to_dict()["chosen"] == "fake_quant_fp8:reference"
        assert input_slot.name == "fake_quant_nvfp4_dynamic"
        assert input_arguments[0].shape == (2, 8, 8, 3)


def test_a_transformers_model() -> None:
    """A whole model of a library is simulated, calibrated and restored."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    tokens = torch.arange(2 * 7).view(2, 7)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        with simulate(model, "int8", "int8", skip="pooler") as simulation:
            with simulation.calibrate():
                model(tokens)
            actual = model(tokens).last_hidden_state
            assert len(simulation.layers) == 12
        assert 0 < (actual - expected).norm() / expected.norm() < 0.02
        assert torch.equal(model(tokens).last_hidden_state, expected)
