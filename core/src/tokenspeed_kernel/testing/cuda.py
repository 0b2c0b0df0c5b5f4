# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: graphs, streams, other devices, more elements than 32 bits count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.testing import elsewhere
from tokenspeed_kernel.testing.checks import Check, each, raised, short
from tokenspeed_kernel.testing.grid import Call, Case
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Declined, Subject

__all__ = ["CHECKS", "capture_and_replay", "index_width"]

_PAST_INT32 = 2**31 + 4097
_WIDTH = 4096  # of a row: whole blocks and groups of every slot
_LARGEST = 500.0
_ARGUMENTS_OF_LARGE: Mapping[str, tuple[float, ...]] = {
    "fake_quant_fp8": (1.0,),
    "fake_quant_int8_affine": (-128.0, 127.0),
    "fake_quant_int8_per_channel": (),
    "fake_quant_int_grouped": (4, 128),
    "fake_quant_mxfp4_dynamic": (),
    "fake_quant_mxfp4_weight": (),
    "fake_quant_nvfp4_dynamic": (),
    "fake_quant_nvfp4_weight": (_LARGEST,),
}
"""What follows the tensor in a call of more elements than 32 bits count; floating numbers are given as tensors."""


def _on_gpu(subject: Subject) -> None:
    if not torch.cuda.is_available():
        raise NotExamined("no CUDA device")
    if subject.device != "cuda":
        raise NotExamined("the kernel serves nothing on CUDA")


def _some(subject: Subject) -> list[tuple[Case, Call]]:
    found: dict[str, tuple[Case, Call]] = {}
    for case, call in subject.accepted("dtypes", "channels", "options"):
        if call.args[0].numel() > 1 and call.args[0].dtype != torch.float64:
            found.setdefault(case.group, (case, call))
    return list(found.values())


def cuda_graph(subject: Subject) -> list[str]:
    """A captured call computes anew from what its inputs hold at the replay. Runs in a process of its own."""
    _on_gpu(subject)  # a failed capture leaves torch's generator unusable for the rest of its process
    return elsewhere.ask(subject, "capture")


def capture_and_replay(subject: Subject) -> list[str]:
    """Capture calls in CUDA graphs and replay them on new data, in this process."""
    findings: list[str] = []
    replayed = 0
    for case, call in _some(subject):
        other = Call(tuple(_changed(value) for value in call.args), call.kwargs)
        expected = subject.expected(other)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # what a kernel does once, it may do before the capture
                subject.run(call)
        except Declined:
            continue
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        result: object = None
        try:
            with torch.cuda.graph(graph):
                if subject.verdict(call) is True:
                    result = subject.run(call)
        except Declined:
            continue
        except Exception as error:  # noqa: BLE001 -- whatever a capture makes of a third party's kernel
            return [*findings, f"{case.name}: the capture {raised(error)}"]
        if result is None:
            continue
        replayed += 1
        for value, new in zip(call.args, other.args, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        if found := subject.fault(result, call, expected):
            findings.append(f"{case.name}: after the replay on new data: {found}")
    if not replayed:
        raise NotExamined("declines each call, or each under capture")
    return short(findings)


def _changed(value: Any) -> Any:
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    return value.flip(0).contiguous() * 0.75 if value.dim() else value * 0.75


def other_stream(subject: Subject) -> list[str]:
    """On a stream that is not the default one, a late producer is waited for."""
    _on_gpu(subject)

    def look(_: Case, call: Call) -> str | None:
        expected = subject.expected(call)
        late = torch.zeros_like(call.args[0])
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(call.args[0])
            result = subject.run(Call((late, *call.args[1:]), call.kwargs))
        stream.synchronize()
        return subject.fault(result, call, expected)

    return each(_some(subject), look)


def other_device(subject: Subject) -> list[str]:
    """On a device that is not the current one, the result lies there and is right, and the current one stays."""
    _on_gpu(subject)
    if torch.cuda.device_count() < 2:
        raise NotExamined("needs two GPUs")

    def look(case: Case, _: Call) -> str | None:
        call = case.build("cuda:1")
        with torch.cuda.device(0):
            if subject.verdict(call) is not True:
                raise Declined
            found = subject.fault(subject.run(call), call)
            current = torch.cuda.current_device()
        return found if current == 0 else f"left device {current} current"

    return each(_some(subject), look)


def index_past_int32(subject: Subject) -> list[str]:
    """With more elements than a 32-bit index counts, the last ones are right."""
    _on_gpu(subject)
    if subject.slot_name not in _ARGUMENTS_OF_LARGE:
        raise NotExamined("the slot has no call of that size")
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * _PAST_INT32:
        raise NotExamined(f"needs {12 * _PAST_INT32 >> 30} GiB of free GPU memory")
    try:
        return index_width(subject, _PAST_INT32)
    except torch.OutOfMemoryError as error:
        raise NotExamined(f"out of memory: {error}") from None
    finally:
        torch.cuda.empty_cache()


def index_width(subject: Subject, elements: int) -> list[str]:
    """Quantize rows of bfloat16, ``elements`` less a part of a row, and look at both ends and the middle."""
    rows = elements // _WIDTH
    x = torch.full((rows, _WIDTH), 3.3, device=subject.device, dtype=torch.bfloat16)
    ramp = torch.linspace(-_LARGEST, 400.0, _WIDTH)
    looked_at = {"the first": 0, "the middle": rows // 2, "the last": rows - 1}
    for shift, row in enumerate(looked_at.values()):
        x[row] = ramp.roll(1000 * shift)  # each with the tensor's maximum in it: alone it has the same scales
    numbers = _ARGUMENTS_OF_LARGE[subject.slot_name]
    others = tuple(torch.tensor(n, device=subject.device) if isinstance(n, float) else n for n in numbers)
    if (verdict := subject.verdict(Call((x, *others)))) is not True:
        raise NotExamined(f"declines: {verdict}")
    result = subject.run(Call((x, *others)))
    if getattr(result, "shape", None) != x.shape:
        return [f"returned {result!r:.80} instead of a tensor of shape {tuple(x.shape)}"]
    findings = []
    for name, row in looked_at.items():
        part = slice(row, row + 1)
        if found := subject.fault(result[part], Call((x[part], *others))):
            findings.append(f"{name} of {rows} rows of {_WIDTH} elements: {found}")
    return findings


CHECKS: dict[str, Check] = {
    "cuda_graph": cuda_graph,
    "other_stream": other_stream,
    "other_device": other_device,
    "index_past_int32": index_past_int32,
}
"""By name, in the order in which they run."""
