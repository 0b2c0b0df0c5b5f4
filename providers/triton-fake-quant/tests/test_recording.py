# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` gets to see of a kernel's arguments, without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tokenspeed_kernel_triton_fake_quant import fp8, int8, int8_per_channel, int_grouped, mxfp4, nvfp4  # noqa: E402

ONE = torch.tensor(0.5)


@pytest.mark.parametrize("shape", [(4, 64), (4, 4096), (4, 9008), (4, 16400), (512, 512)], ids=str)
def test_no_result_is_passed_twice(shape: tuple[int, int]) -> None:
    """Where torch cannot tell what a kernel writes, it copies all arguments back, the unwritten ones too."""
    x, groups = torch.ones(shape), torch.ones(shape[0], -(-shape[1] // 16))
    inputs = {id(t) for t in (x, groups, ONE)}
    starts = []

    def start(kernel: object, grid: object, tensors: tuple[torch.Tensor, ...], *_: object) -> None:
        starts.append([id(t) for t in tensors if id(t) not in inputs])

    fp8.quantize(x, ONE, start)
    for kind, second in ((int8.SCALE, None), (int8.RANGE, ONE)):
        int8.quantize(x, int8.Grid(kind, ONE, second), start)
    int8.on_grid(x, int8.Grid(int8.NUMBERS, -1.0, 1.0), start, with_mask=True)
    for axis in (0, 1):
        int8_per_channel.dynamic(x, axis, start)
        int8_per_channel.dynamic(x, axis, start, with_mask=True)
        int8_per_channel.dynamic(x, axis, start, with_amax=False)
    int_grouped.quantize(x, 4, 16, None, start)
    int_grouped.quantize(x, 4, 16, groups, start)
    mxfp4.quantize(x, start)
    nvfp4.quantize(x, None, start)
    nvfp4.quantize(x, ONE, start)
    assert len(starts) >= 14
    assert [results for results in starts if len(results) != len(set(results)) or not results] == []
