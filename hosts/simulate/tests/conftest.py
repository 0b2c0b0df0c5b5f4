# SPDX-License-Identifier: Apache-2.0
"""Small modules with seeded weights, and what a module is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def network() -> nn.Sequential:
    """Return a network with a layer of three kinds, for inputs (batch, 3, 8, 8)."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(256, 10)
    return nn.Sequential(*layers)


@pytest.fixture
def images() -> torch.Tensor:
    """Return an input of ``network``."""
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def anatomy() -> Callable[[nn.Module], list[Any]]:
    """Return a function that lists all that makes up a module, down to the identity of its parameters and hooks."""

    def describe(module: nn.Module) -> list[Any]:
        parts: list[Any] = [list(module.state_dict()), [(n, id(p)) for n, p in module.named_parameters()]]
        for name, part in module.named_modules():
            own = vars(part).items()
            attributes = [(key, list(value) if isinstance(value, dict) else repr(value)) for key, value in own]
            parts.append((name, type(part), attributes))
        return parts

    return describe
