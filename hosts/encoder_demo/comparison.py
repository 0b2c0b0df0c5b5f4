# SPDX-License-Identifier: Apache-2.0
"""Run the encoder over a text in float32 and in every format, and collect what there is to report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from agreement import bit_equal, neighbours
from attention import SlotAttention
from encoder import load_model, load_tokenizer, tokenize, vocabulary_size
from errors import DemoError
from formats import FORMATS
from measurement import Measurement, Operand, measure, timed
from tokenspeed_kernel import __version__, active, discover_plugins, slot
from tokenspeed_kernel.plugins import plugin_records
from tokenspeed_kernel.reference import quant
from weights import WEIGHTS, model_folder, read_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Choice", "Facts", "compare"]

_REPORTED = ("torch", "triton", "transformers")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who runs a slot for the inputs named by ``role``, and how it compares with the reference."""

    slot: str
    role: str
    shape: tuple[int, ...]
    chosen: str | None
    is_reference: bool
    bit_equal: bool | None  # None: the slot has no reference
    explanation: dict[str, Any]
    text: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that one run found; ``dataclasses.asdict`` gives what --json writes. Times are seconds."""

    versions: dict[str, str | None]
    device: str
    sentences: int
    plugins: list[dict[str, Any]]
    choices: list[Choice]
    uncalled: dict[str, str]  # slots that this model does not call -> who would run them
    formats: list[Measurement]
    stats: dict[str, dict[str, Any]]  # of all runs of all formats
    calls: dict[str, int]  # that the host made in the same time
    portable_calls: int
    nearest: tuple[str, str]  # in float32
    float32_seconds: float
    parity: bool


def compare(sentences: Sequence[str], model: Path | None, weights: Path | None, device_name: str) -> Facts:
    """Return the facts of one run over ``sentences``.

    Raises:
        DemoError: no CUDA device, or a model folder or weights that cannot serve this text.
    """
    discover_plugins()
    device = _device(device_name)
    folder = model_folder(model)
    tokenizer = load_tokenizer(folder)
    batches = tokenize(tokenizer, sentences, device)
    state, rows = read_state(weights or folder / WEIGHTS, vocabulary_size(folder))
    _require_rows(rows, batches)

    calibration = tokenize(tokenizer, sentences[: -(-len(sentences) // 4)], device)
    expected, plain_seconds, _ = timed(load_model(folder, state, "sdpa", device), batches, "float32")

    attention = SlotAttention()
    attention.register()
    model = load_model(folder, state, attention.NAME, device)
    formats: list[Measurement] = []
    operands: dict[tuple[str, str], Operand] = {}  # the first of each slot and role
    for wanted in FORMATS:
        measured, found = measure(model, wanted, batches, calibration, expected)
        formats.append(measured)
        operands = {(operand.slot.name, operand.role): operand for operand in found} | operands
    if attention.first is None:
        raise DemoError(
            f"transformers {metadata.version('transformers')} ignored the registered attention; install 5.0 or newer"
        )
    calls = sum((Counter(measured.calls) for measured in formats), Counter(sdpa=attention.calls))
    stats = {name: slot(name).stats() for name in calls}  # before the check adds calls

    choices = [_checked(operand) for _, operand in sorted(operands.items())]
    inputs, options = attention.first
    choices.append(_choice(attention.slot.explain(*inputs, **options), "attention", inputs[0], None))
    near = int(neighbours(expected)[0])
    return Facts(
        versions={"tokenspeed-kernel": __version__, **{name: _version(name) for name in _REPORTED}},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        sentences=len(sentences),
        plugins=[_plugin(record) for record in plugin_records()],
        choices=choices,
        uncalled={name: str(slot(name).explain()) for name in active() if name not in stats},
        formats=formats,
        stats=stats,
        calls=dict(calls),
        portable_calls=attention.portable,
        nearest=(sentences[0], sentences[near]),
        float32_seconds=plain_seconds,
        parity=all(choice.bit_equal is not False for choice in choices),
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device 'cuda': torch sees no CUDA device; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _require_rows(rows: torch.Tensor | None, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    if rows is None:
        return
    used = torch.unique(torch.cat([batch["input_ids"].flatten() for batch in batches])).cpu()
    absent = used[~torch.isin(used, rows)]
    if len(absent):  # their rows would be zeros: wrong embeddings without a word
        raise DemoError(f"the packed weights lack {len(absent)} tokens of this text; run pack.py with this very text")


@torch.inference_mode()
def _checked(operand: Operand) -> Choice:
    reference = getattr(quant, operand.slot.name)
    same = bit_equal(operand.slot(*operand.arguments), reference(*operand.arguments))
    return _choice(operand.slot.explain(*operand.arguments), operand.role, operand.arguments[0], same)


def _choice(explanation: Any, role: str, x: torch.Tensor, equal: bool | None) -> Choice:
    facts = explanation.to_dict()
    return Choice(
        slot=facts["slot"],
        role=role,
        shape=tuple(x.shape),
        chosen=facts["chosen"],
        is_reference=any(one["chosen"] and one["solution"] == "reference" for one in facts["candidates"]),
        bit_equal=equal,
        explanation=facts,
        text=str(explanation),
    )


def _plugin(record: Any) -> dict[str, Any]:
    fields = ("name", "state", "package", "version", "reason", "milliseconds")
    return {**{field: getattr(record, field) for field in fields}, "kernel_names": list(record.kernel_names)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
