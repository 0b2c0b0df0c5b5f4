# SPDX-License-Identifier: Apache-2.0
"""set_fused_attention on real networks with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from tokenspeed_kernel_sdpa_policy import set_fused_attention

NETWORKS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
}
MODULES = {"vit_tiny_patch16_224": 2, "swin_tiny_patch4_window7_224": 4}


def network(name: str, **keywords: Any) -> nn.Module:
    """Return a small network of that architecture, all attention modules fused, in eval mode."""
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **NETWORKS[name], **keywords)
    set_fused_attention(model, True)
    return model.eval()


def images(name: str) -> torch.Tensor:
    """Return two images of the network's size."""
    size = NETWORKS[name]["img_size"]
    return torch.randn(2, 3, size, size)


class Flagged(nn.Module):
    """The least module that says it has both ways."""

    def __init__(self, fused_attn: object = False) -> None:
        super().__init__()
        self.fused_attn = fused_attn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice ``x``: the path does not matter here."""
        return 2 * x


@pytest.mark.parametrize("name", NETWORKS)
def test_fused_and_manual_agree(name: str) -> None:
    """Switched off and on again, a network gives the same numbers within rounding, and all its modules are counted."""
    model, x = network(name), images(name)
    fused = model(x)
    assert set_fused_attention(model, False) == MODULES[name]
    torch.testing.assert_close(model(x), fused, rtol=0, atol=1e-5)
    assert set_fused_attention(model) == MODULES[name]
    assert torch.equal(model(x), fused)


@pytest.mark.parametrize("name", NETWORKS)
def test_dropout_is_inactive_in_eval_on_both_paths(name: str) -> None:
    """Case 47: with attn_drop 0.5 eval is bit-equal to itself and to 0 on either path; train is not."""
    rate = {"attn_drop_rate": 0.5}
    model, plain, x = network(name, **rate), network(name), images(name)
    plain.load_state_dict(model.state_dict())
    for enabled in (True, False):
        for m in (model, plain):
            set_fused_attention(m, enabled)
        assert torch.equal(model.eval()(x), model(x))
        assert torch.equal(model(x), plain(x))
        model.train()
        assert not torch.equal(model(x), model(x))


def test_switching_off_lets_a_hook_see_the_weights() -> None:
    """Case 68: the fused path has no weights for a hook to see; after the switch it sees rows that sum to 1."""
    model, x = network("vit_tiny_patch16_224"), images("vit_tiny_patch16_224")
    seen: list[torch.Tensor] = []
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(output))  # type: ignore[union-attr, index]
    fused = model(x)
    assert seen == []
    set_fused_attention(model, False)
    torch.testing.assert_close(model(x), fused, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(seen[0].shape[:-1]))


def test_only_what_changed_is_counted() -> None:
    """A module that is at the wanted value already did not switch: the second call returns 0."""
    model = nn.Sequential(Flagged(False), Flagged(True), nn.Linear(2, 2))
    assert set_fused_attention(model) == 1
    assert set_fused_attention(model) == 0
    assert [m.fused_attn for m in model[:2]] == [True, True]


def test_shared_module_counts_once() -> None:
    """A module that the model holds twice is one module."""
    shared = Flagged()
    assert set_fused_attention(nn.Sequential(shared, shared, nn.Sequential(shared))) == 1


def test_the_root_itself_may_carry_the_flag() -> None:
    """An attention module alone is a model too, also with the flag on its class only."""

    class OnTheClass(nn.Module):
        fused_attn = False

    module = OnTheClass()
    assert set_fused_attention(module) == 1
    assert module.fused_attn is True
    assert OnTheClass.fused_attn is False


@pytest.mark.parametrize("value", [None, 1, "yes", torch.tensor(False)], ids=["none", "int", "str", "tensor"])
def test_flag_that_is_no_bool_is_left_alone(value: object) -> None:
    """Somebody else's attribute of that name keeps its value."""
    module = Flagged(value)
    assert set_fused_attention(module) == 0
    assert module.fused_attn is value


def test_wrappers_are_looked_through() -> None:
    """DataParallel and torch.compile change neither the count nor what is switched."""
    wrappers: tuple[Any, ...] = (nn.DataParallel, torch.compile)
    for wrap in wrappers:
        for module in (inner := Flagged(), nn.Sequential(inner)):
            inner.fused_attn = False
            assert set_fused_attention(wrap(module)) == 1  # torch.compile's shows the inner flag as its own
            assert inner.fused_attn is True


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_torchscript_module_is_left_alone() -> None:
    """A traced module has its path in its code: nothing to switch, and no error."""
    traced = torch.jit.trace(Flagged(True), torch.randn(2))
    assert set_fused_attention(traced, False) == 0


def test_state_dict_is_untouched() -> None:
    """The flag is configuration: keys and values of the state are as before, whichever way it stands."""
    model = network("swin_tiny_patch4_window7_224")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    set_fused_attention(model, False)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("model", [None, "vit", torch.zeros(2), nn.Linear], ids=["none", "str", "tensor", "class"])
def test_what_is_no_module_is_refused(model: Any) -> None:
    """The message says what was given and what to give."""
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got \w+: pass the network"):
        set_fused_attention(model)


@pytest.mark.parametrize("enabled", ["false", 0, None])
def test_enabled_that_is_no_bool_is_refused(enabled: Any) -> None:
    """The word "false" is true to Python: only a bool is taken, and nothing is switched."""
    module = Flagged(True)
    with pytest.raises(TypeError, match="enabled must be True or False"):
        set_fused_attention(module, enabled)
    assert module.fused_attn is True
