# SPDX-License-Identifier: Apache-2.0
"""Run the float32 and the simulated encoder over a text, and collect what there is to report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from agreement import bit_equal, cosines, neighbours
from attention import SlotAttention
from encoder import embed, load_model, load_tokenizer, tokenize, vocabulary_size
from errors import DemoError
from fp8 import FAKE_QUANT, SLOT_CALLS, calibrate, simulate_fp8
from tokenspeed_kernel import __version__, active, discover_plugins, slot
from tokenspeed_kernel.plugins import plugin_records
from tokenspeed_kernel.reference.quant import fake_quant_fp8
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
    stats: dict[str, dict[str, Any]]  # of the first batch, the warm-up and the timed run
    calls: dict[str, int]  # that the host made in the same time
    portable_calls: int
    cosine_mean: float
    cosine_worst: float
    top1_agreement_percent: float
    nearest: tuple[str, str]
    seconds: dict[str, float]
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

    baseline = load_model(folder, state, "sdpa", device)
    peaks = calibrate(baseline, tokenize(tokenizer, sentences[: -(-len(sentences) // 4)], device))
    expected, plain_seconds = _timed(baseline, batches, "float32")

    attention = SlotAttention()
    attention.register()
    simulated = load_model(folder, state, attention.NAME, device)
    layers = simulate_fp8(simulated, peaks)
    seen: list[torch.Tensor] = []
    hook = layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    embed(simulated, batches[:1], "first batch")
    hook.remove()
    if attention.first is None:
        raise DemoError(
            f"transformers {metadata.version('transformers')} ignored the registered attention; install 5.0 or newer"
        )
    actual, simulated_seconds = _timed(simulated, batches, "simulated fp8")

    stats = {"fake_quant_fp8": FAKE_QUANT.stats(), "sdpa": attention.slot.stats()}  # before the check adds calls
    quantized = (("activation", seen[0], layers[0].input_scale), ("weight", layers[0].weight, layers[0].weight_scale))
    choices = [_checked(role, x, scale) for role, x, scale in quantized]
    inputs, options = attention.first
    choices.append(_choice(attention.slot.explain(*inputs, **options), "attention", inputs[0], None))
    similarity = cosines(actual, expected)
    near = neighbours(actual)
    return Facts(
        versions={"tokenspeed-kernel": __version__, **{name: _version(name) for name in _REPORTED}},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        sentences=len(sentences),
        plugins=[_plugin(record) for record in plugin_records()],
        choices=choices,
        uncalled={name: str(slot(name).explain()) for name in active() if name not in stats},
        stats=stats,
        calls={"fake_quant_fp8": SLOT_CALLS * len(layers) * (1 + 2 * len(batches)), "sdpa": attention.calls},
        portable_calls=attention.portable,
        cosine_mean=float(similarity.mean()),
        cosine_worst=float(similarity.min()),
        top1_agreement_percent=100.0 * float((near == neighbours(expected)).double().mean()),
        nearest=(sentences[0], sentences[int(near[0])]),
        seconds={"float32": plain_seconds, "simulated": simulated_seconds},
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


def _timed(model: Any, batches: Sequence[dict[str, torch.Tensor]], label: str) -> tuple[torch.Tensor, float]:
    device = embed(model, batches, f"{label}, warm-up").device  # kernels are compiled for all shapes here
    _synchronize(device)
    start = time.perf_counter()
    vectors = embed(model, batches, label)
    _synchronize(device)
    return vectors, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _checked(role: str, x: torch.Tensor, scale: torch.Tensor) -> Choice:
    explanation = FAKE_QUANT.explain(x, scale)
    return _choice(explanation, role, x, bit_equal(FAKE_QUANT(x, scale), fake_quant_fp8(x, scale)))


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
