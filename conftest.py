# SPDX-License-Identifier: Apache-2.0
"""The one place that knows what a machine without a GPU leaves out."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not _has_cuda():
        pytest.skip("no CUDA device")
