# SPDX-License-Identifier: Apache-2.0
"""A small kernel repository, written here in the Hub's cache layout, and a process that cannot reach any network."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenspeed_kernel import settings
from tokenspeed_kernel_hub_ms_deform_attn import loading, ms_deform_attn

# The kernel's interface in plain torch, through grid_sample, so that it shares no code with the oracle. It insists on
# what the compiled one insists on or silently relies on.
KERNEL_SOURCE = """
import torch

def _attend(value, shapes, starts, locations, weights):
    batch, _, heads, channels = value.shape
    out = value.new_zeros(batch, locations.shape[1], heads, channels)
    for index, ((height, width), start) in enumerate(zip(shapes.tolist(), starts.tolist())):
        image = value[:, start : start + height * width].permute(0, 2, 3, 1)
        image = image.reshape(batch * heads, channels, height, width)
        size = torch.tensor([width, height], dtype=value.dtype, device=value.device)
        pixel = locations[:, :, :, index] * size - 0.5
        inside = ((pixel > -1) & (pixel < size)).all(-1)
        pixel = torch.where(inside[..., None], pixel, 0.0)
        grid = (2 * (pixel + 0.5) / size - 1).transpose(1, 2).flatten(0, 1)
        sampled = torch.nn.functional.grid_sample(image, grid, align_corners=False)
        sampled = sampled.unflatten(0, (batch, heads)).permute(0, 3, 1, 4, 2)
        out = out + (torch.where(inside, weights[:, :, :, index], 0.0)[..., None] * sampled).sum(3)
    return out.flatten(2)

def _check(value, shapes, starts, *others, im2col_step):
    tensors = (value, shapes, starts, *others)
    assert all(tensor.is_contiguous() and tensor.device == value.device for tensor in tensors)
    assert all(tensor.numel() for tensor in tensors)
    assert shapes.dtype == starts.dtype == torch.int64
    assert value.shape[0] % min(value.shape[0], im2col_step) == 0

def ms_deform_attn_forward(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step):
    _check(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step=im2col_step)
    return _attend(value, spatial_shapes, level_start_index, sampling_loc, attn_weight)

def ms_deform_attn_backward(
    value, spatial_shapes, level_start_index, sampling_loc, attn_weight, grad_output, im2col_step
):
    _check(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, grad_output, im2col_step=im2col_step)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (value, sampling_loc, attn_weight)]
        out = _attend(inputs[0], spatial_shapes, level_start_index, inputs[1], inputs[2])
        return list(torch.autograd.grad(out, inputs, grad_output))
"""

WriteRepository = Callable[..., Path]


@pytest.fixture
def write_repository(tmp_path: Path) -> WriteRepository:
    """Return a function that writes the repository into a cache below ``tmp_path`` and returns the variant folder."""

    def write(revision: str = loading.REVISION, variant: str = "torch-universal", source: str = KERNEL_SOURCE) -> Path:
        snapshot = tmp_path / "hub" / "kernels--kernels-community--deformable-detr" / "snapshots" / revision
        folder = snapshot / "build" / variant
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        metadata = {
            "version": 1,
            "name": "deformable-detr",
            "id": f"deformable_detr_{abs(hash(str(tmp_path)))}",
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": variant.removeprefix("torch-")} if variant != "torch-universal" else {"type": "cpu"},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata))
        return folder

    return write


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start every test with the Hub allowed, and forget afterwards what the test's environment said."""
    for name in ("TOKENSPEED_KERNEL_HUB", "LIBREYOLO_HUB_KERNELS", "LOCAL_KERNELS", "KERNELS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    settings.refresh()
    yield
    monkeypatch.undo()
    settings.refresh()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Refuse every connection and name look-up, and return the list of those that were tried."""
    tried: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connections: list[object]) -> list[object]:
    """Use the cache below ``tmp_path``, offline; return the connections tried. Set after the client's import."""
    resolver = pytest.importorskip("kernels.resolver")
    monkeypatch.setattr(resolver, "CACHE_DIR", str(tmp_path / "hub"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return connections


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> loading.HubKernel:
    """Put a fresh, unloaded kernel in the place of the process's own, and return it."""
    fresh = loading.HubKernel(loading.REPOSITORY, loading.REVISION)
    monkeypatch.setattr(ms_deform_attn, "DEFORMABLE_DETR", fresh)
    return fresh
