# SPDX-License-Identifier: Apache-2.0
"""Make the page and the plot of simulated quantization from what ``fake_quant.py`` wrote into ``docs/benchmarks``.

``fake-quant.json`` has the GPU's part; ``fake-quant-host.json`` and ``fake-quant-host-slower.json`` have the host's,
from two hosts.

python benchmarks/render_fake_quant.py
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from fake_quant_report import name_of, shape_of, why_missed

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"

_SLOWER_HOST = (
    "The bare launch, the reference and the peer took longer, too: in bare launches a call costs what it does on the "
    "other host. Of whether a call is served, the loop that timed it is a part there."
)
_CAUSES = {
    "int8_per_channel, dynamic fp32 backward": "The peer's gradient under dynamic scales is the identity, for "
    "infinities too.",
}
"""Why a row misses its bar or is slower than another, by how the row's line in the list begins."""
_DRAWN = {"ours": "#1b6ca8", "compiled": "#e0912f", "peer": "#8a8f98"}
_LEGEND = {"ours": "ours", "compiled": "compiled reference", "peer": "peer"}
_LEFT, _WIDE, _RIGHT = 230, 520, 130  # of the bars: the labels, the bars, the figures
_TOP, _BAR, _GROUP = 70, 12, 48
_NOISE = 0.98  # of our time: what is faster than that is faster


def main() -> None:
    """Write the page and the plot."""
    result, host, slower = (
        json.loads((FOLDER / f"fake-quant{part}.json").read_text(encoding="utf-8"))
        for part in ("", "-host", "-host-slower")
    )
    (FOLDER / "fake-quant.md").write_text("\n".join(page(result, host, slower)) + "\n", encoding="utf-8")
    (FOLDER / "fake-quant.svg").write_text("\n".join(plot(result)) + "\n", encoding="utf-8")


def page(result: dict[str, Any], host: dict[str, Any], slower: dict[str, Any]) -> list[str]:
    """Return the lines of the page, from what the GPU's part found, and the host's part on two hosts."""
    machine, rows = result["machine"], result["rows"]
    forward = [row for row in rows if row["what"] == "forward"]
    backward = [row for row in rows if row["what"] == "backward"]
    return [
        "# Simulated quantization",
        "",
        f"On an {machine['card']}, {machine['date']}: Python {machine['python']}, CUDA {machine['cuda']}, "
        f"torch {machine['torch']}, triton {machine['triton']}.",
        "Made by `benchmarks/render_fake_quant.py` from [fake-quant.json](fake-quant.json), "
        "which `benchmarks/fake_quant.py` wrote in one run, and for what calls cost the host from "
        "[fake-quant-host.json](fake-quant-host.json) and [fake-quant-host-slower.json](fake-quant-host-slower.json), "
        "which it wrote in two others.",
        "",
        "Each slot was called in four ways: through the slot with our Triton kernels, as the eager reference, "
        f"as that reference under `torch.compile`, and with the kernels of the peer, {result['peer']}.",
        "The bar is `torch.clone` of the same tensor in the same run: it reads and writes each element once.",
        "A share of 98% means that clone needs 98% of the time.",
        "A time is the GPU's, by events, the median of 40 with a cold cache; the ways take turns.",
        "",
        "![The share of the bandwidth of clone that each slot reaches](fake-quant.svg)",
        "",
        "## Forward",
        "",
        "Microseconds. A tensor whose overall maximum comes first may be read twice, and a smaller share does.",
        "",
        *_table("slot", "shape", "ours", "of clone", "at least", "reference", "compiled", "peer", "met"),
        *(_line(_slot(row), shape_of(row), *_times(row), _yes(row)) for row in forward),
        "",
        "## Backward",
        "",
        "Microseconds of the slot's backward alone.",
        "Where the gradient is the identity, no kernel may run; where values out of range get none, one may, "
        "which reads the gradient and a bit an element, and writes a gradient.",
        "The last columns are the forward before it, which keeps what the backward needs: ours writes the bits.",
        "",
        *_table("slot", "kernels", "ours", "of clone", "at least", "reference", "compiled", "peer", "met",
                "forward: ours", "compiled", "peer"),
        *(_line(_slot(row), _launched(row), *_times(row), _yes(row), *_forwards(row)) for row in backward),
        "",
        "## A call of a small tensor",
        "",
        "Microseconds that the host spends on one eager call, not waiting for the GPU: without a gradient, with one.",
        "Such times go with the speed of the host, which is not the same on all machines with this card: so the same "
        "time in bare launches through Triton, each measured beside the call, follows. "
        "The bars, which go by microseconds, were set where a bare launch took 13: 1.54 and 2.31 of it.",
        "",
        *_calls(host),
        "",
        f"The same on a slower host, {slower['machine']['date']}, before the code found values ahead of autograd's "
        "call.",
        "",
        *_calls(slower),
        "",
        "## New shapes and new processes",
        "",
        "Of tensors with new shapes, strides and alignments, after others had been served: the slowest first call, "
        "and how many kernels were compiled.",
        "Then the first call in a new process with what was compiled on the disk, in seconds: what Triton takes to "
        "start, which is to import itself and to hash its compiler, whoever's kernel is the first; and what our core, "
        f"plugin and kernel take after that, at most {' or '.join({str(c['bar']) for c in host['first_calls']})}.",
        "The import of torch comes before both.",
        "",
        *_table("slot", "new tensors", "slowest, ms", "compiled", "peer: slowest, ms", "peer: compiled", "Triton, s",
                "first call, s"),
        *_new_lines(result, host),
        "",
        "## Bits",
        "",
        "How many elements differ from the eager reference on the GPU: normal data of deviation 1e-30, 1 and 1e30, "
        "each plain and with NaN and infinities.",
        "The peer has rules of its own for tiny scales, NaN and the sign of zero: what differs there is no fault.",
        "",
        *_table("slot", "elements", "ours", "compiled", "peer"),
        *(_exact_line(record) for record in result["exactness"]),
        "",
        "## What misses a bar, or is slower than another",
        "",
        *(_shortfalls([*rows, *host["rows"]], [*result["not_met"], *host["not_met"]], _CAUSES) or ["Nothing."]),
        "### On the slower host",
        "",
        *(_shortfalls(slower["rows"], slower["not_met"], {"": _SLOWER_HOST}) or ["Nothing."]),
        "",
        "## What could not be measured",
        "",
        *(_unmeasured(result, host, slower) or ["Nothing."]),
    ]  # fmt: skip


def _table(*columns: str) -> list[str]:
    return [_line(*columns), "|---" * len(columns) + "|"]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _slot(row: dict[str, Any]) -> str:
    name, dtype = name_of(row).rsplit(" ", 1)
    return f"`{name}` {dtype}"


def _us(row: dict[str, Any], way: str) -> str:
    return f"{row['us'][way]:.1f}" if way in row["us"] else "-"


def _yes(row: dict[str, Any]) -> str:
    return "yes" if row["met"] else "NO"


def _times(row: dict[str, Any]) -> list[str]:
    share = f"{row['share']['ours']:.1%}" if row["bar"] and "ours" in row["share"] else "-"
    asked = f"{row['bar']:.1%}" if row["bar"] else "no kernel"
    return [_us(row, "ours"), share, asked, *(_us(row, way) for way in ("reference", "compiled", "peer"))]


def _launched(row: dict[str, Any]) -> str:
    launched = row.get("kernels")
    return "unknown" if launched is None else str(len(launched))


def _forwards(row: dict[str, Any]) -> list[str]:
    times = row["forward_us"]
    return [f"{times[way]:.1f}" if way in times else "-" for way in ("ours", "compiled", "peer")]


def _calls(host: dict[str, Any]) -> list[str]:
    without, with_grad = ([row for row in host["rows"] if row["what"] == what] for what in ("call", "call with grad"))
    return [
        *_table("slot", "ours", "at most", "in bare launches", "a bare launch", "reference", "peer", "met",
                "of it: whether it is served"),
        *(_call_line(*pair) for pair in zip(without, with_grad, strict=True)),
    ]  # fmt: skip


def _call_line(*rows: dict[str, Any]) -> str:
    both = ", ".join
    return _line(
        _slot(rows[0]),
        both(_us(row, "ours") for row in rows),
        both(f"{row['bar']:.0f}" for row in rows),
        both(f"{row['us']['ours'] / row['launch_us']:.2f}" for row in rows),
        both(f"{row['launch_us']:.1f}" for row in rows),
        both(_us(row, "reference") for row in rows),
        both(_us(row, "peer") for row in rows),
        both(map(_yes, rows)),
        both(f"{row['supports_us']:.2f}" for row in rows),
    )


def _new_lines(result: dict[str, Any], host: dict[str, Any]) -> list[str]:
    seconds = {
        (call["slot"], call["form"]): (f"{call['triton']:.2f}", f"{call['seconds']:.2f}")
        for call in host["first_calls"]
    }
    lines = []
    for record in result["new_shapes"]:
        peer = record.get("peer")
        known = (
            [f"{peer['slowest_ms']:.0f}", f"{peer['compiled']} for {peer['shapes']}"]
            if isinstance(peer, dict)
            else ["-", "-"]
        )
        made = record["compiled"][0] if _unknown(record) else str(len(record["compiled"]))
        process = seconds.get((record["slot"], record["form"]), ("-", "-")) if record["dtype"] == "fp32" else ("", "")
        lines.append(_line(_slot(record), str(record["shapes"]), f"{record['slowest_ms']:.1f}", made, *known, *process))
    return lines


def _unknown(record: dict[str, Any]) -> bool:
    return bool(record["compiled"]) and record["compiled"][0].startswith("unknown")


def _exact_line(record: dict[str, Any]) -> str:
    runs = list(record["differing"].values())

    def total(way: str) -> str:
        counts = [run[way] for run in runs if way in run]
        words = sorted({count for count in counts if isinstance(count, str)})
        return ", ".join(words) or (str(sum(counts)) if counts else "-")

    return _line(_slot(record), str(record["elements"] * len(runs)), *map(total, ("ours", "compiled", "peer")))


def _shortfalls(rows: list[dict[str, Any]], not_met: list[str], causes: dict[str, str]) -> list[str]:
    by_cause: dict[str, list[str]] = {}
    for row in rows:
        name = f"{name_of(row)} {row['what']} {shape_of(row)}"
        faults = [] if row["met"] else [why_missed(row)]
        if "ours" in row["us"] and row["bar"]:  # else nothing runs, and only launches would compare
            own = row["us"]["ours"]
            faults += [
                f"{_LEGEND.get(way, way)} needs {us / own:.0%} of our time"
                for way, us in row["us"].items()
                if way != "ours" and us < own * _NOISE
            ]
        if faults:
            by_cause.setdefault(_cause(name, causes), []).append(f"- {name}: {'; '.join(faults)}")
    kinds = (" exactness: ", " new shapes: ", " first call: ", " supports: ")
    for line in not_met:
        if any(kind in line for kind in kinds):
            by_cause.setdefault(_cause(line, causes), []).append(f"- {line}")
    return [line for cause, names in by_cause.items() for line in (cause, "", *names, "")]


def _cause(name: str, causes: dict[str, str]) -> str:
    return next((cause for start, cause in causes.items() if name.startswith(start)), "Cause not known yet.")


def _unmeasured(*results: dict[str, Any]) -> list[str]:
    where: dict[str, list[str]] = {}
    for row in (row for result in results for row in result["rows"]):
        for way, cause in row["causes"].items():
            if way != "ours" and not cause.startswith("not measured"):
                where.setdefault(f"{_LEGEND.get(way, way)}: {cause}", []).append(name_of(row))
    lines = [f"- {cause}: {', '.join(dict.fromkeys(names))}" for cause, names in where.items()]
    return lines + [
        f"- {name}: {error.strip().splitlines()[-1]}" for result in results for name, error in result["errors"].items()
    ]


def plot(result: dict[str, Any]) -> list[str]:
    """Return the lines of the plot: the forward of each slot at the shape that it is for."""
    first: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if row["what"] == "forward":
            first.setdefault(name_of(row), row)  # the shape that a slot is for was measured first
    rows = list(first.values())
    most = max([1.0, *(row["share"].get(way, 0.0) for row in rows for way in _DRAWN)])
    ticks = [tick / 10 for tick in range(0, int(most * 10) + 2, 2)]
    scale = _WIDE / max(ticks[-1], most)
    bottom = _TOP + len(rows) * _GROUP
    width, height = _LEFT + _WIDE + _RIGHT, bottom + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'role="img" aria-label="Share of the bandwidth of torch.clone, by slot and dtype">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 22, f"Forward on {result['machine']['card']}: share of the bandwidth of torch.clone", 15),
    ]
    for number, (way, colour) in enumerate(_DRAWN.items()):
        x = _LEFT + 150 * number
        lines += [f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>', _text(x + 18, 46, _LEGEND[way], 12)]
    x = _LEFT + 450
    lines += [f'<path d="M{x} 34v16" stroke="#c0182b" stroke-width="2"/>', _text(x + 10, 46, "the bar to reach", 12)]
    for tick in ticks:
        x = _LEFT + tick * scale
        lines += [
            f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#dddddd"/>',
            _text(x, bottom + 18, f"{tick:.0%}", 11, "middle"),
        ]
    lines.append(_text(_LEFT + _WIDE / 2, bottom + 42, "clone's time divided by the kernel's time", 12, "middle"))
    for number, row in enumerate(rows):
        lines += _group(row, _TOP + number * _GROUP + 6, scale)
    return [*lines, "</svg>"]


def _group(row: dict[str, Any], top: float, scale: float) -> list[str]:
    name, dtype = name_of(row).rsplit(" ", 1)
    lines = [
        _text(_LEFT - 10, top + 15, name, 12, "end"),
        _text(_LEFT - 10, top + 30, f"{dtype}, {shape_of(row)}", 11, "end", "#666666"),
    ]
    for number, (way, colour) in enumerate(_DRAWN.items()):
        y = top + number * _BAR
        share = row["share"].get(way)
        if share is not None:
            lines.append(f'<rect x="{_LEFT}" y="{y}" width="{share * scale:.1f}" height="{_BAR - 2}" fill="{colour}"/>')
        known = f"{share:.1%}" if share is not None else "none"
        lines.append(_text(_LEFT + _WIDE + 12, y + 9, f"{_LEGEND[way].split()[0]} {known}", 10))
    x = _LEFT + row["bar"] * scale
    return [*lines, f'<path d="M{x:.1f} {top - 2}v{3 * _BAR + 2}" stroke="#c0182b" stroke-width="2"/>']


def _text(x: float, y: float, words: str, size: int, anchor: str = "start", fill: str = "#222222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    main()
