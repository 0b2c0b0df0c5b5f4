# SPDX-License-Identifier: Apache-2.0
"""The one fixture of these tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)
