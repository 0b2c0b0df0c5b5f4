# SPDX-License-Identifier: Apache-2.0
"""The facts of a run as lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from comparison import Choice, Facts
    from measurement import Measurement

__all__ = ["report_lines"]


def report_lines(facts: Facts) -> Iterator[str]:
    """Yield the report, without line ends."""
    yield f"{facts.sentences} sentences on {facts.device}"
    yield "versions: " + ", ".join(f"{name} {version or 'absent'}" for name, version in facts.versions.items())
    yield ""
    yield "plugins:" if facts.plugins else "plugins: none installed"
    for plugin in facts.plugins:
        reason = f" ({plugin['reason']})" if plugin["reason"] else ""
        yield f"  {plugin['name']} {plugin['version']}: {plugin['state']}{reason}"
    for choice in facts.choices:
        yield ""
        yield f"{choice.role}, shape {choice.shape}:"
        yield from (f"  {line}" for line in choice.text.splitlines())
    for text in facts.uncalled.values():
        yield ""
        yield "not called by this model:"
        yield from (f"  {line}" for line in text.splitlines())
    yield ""
    yield "calls (warm-up and timed run of every format):"
    for slot, kernels in facts.stats.items():
        yield from (
            f"  {slot}: {kernel} served {counts['served']} of {facts.calls[slot]}, failed {counts['failed']}"
            + "".join(f", declined {count} ({reason})" for reason, count in counts["declined"].items())
            for kernel, counts in kernels.items()
        )
    yield f"  sdpa: the host's portable path served {facts.portable_calls} of {facts.calls['sdpa']}"
    yield ""
    yield from (_parity_line(choice) for choice in facts.choices if choice.bit_equal is not None)
    yield ""
    yield f"nearest to {facts.nearest[0]!r} is, in float32, {facts.nearest[1]!r}"
    yield ""
    yield "formats of weights + activations, against float32 (bits include the scales; int4/32: 32 weights share one):"
    yield from _table([_HEADER, _float32_row(facts), *(_row(measured) for measured in facts.formats)])
    yield "(a simulation adds work to the model: it is not meant to be faster)"


_HEADER = (
    *("format", "bits/weight", "bits/activation", "cosine mean", "worst", "same nearest", "seconds"),
    "calls served by",
)


def _float32_row(facts: Facts) -> tuple[str, ...]:
    return "float32", "32", "32", "1", "1", "100.0%", f"{facts.float32_seconds:.2f}", ""


def _row(measured: Measurement) -> tuple[str, ...]:
    calls = sum(measured.calls.values())
    served: Counter[str] = Counter()
    for slot, kernels in measured.served.items():  # the references of two slots count as one
        served.update({kernel.removeprefix(f"{slot}:"): count for kernel, count in kernels.items()})
    return (
        measured.name,
        f"{measured.weight_bits:.2f}",
        f"{measured.activation_bits:.2f}",
        f"{measured.cosine_mean:.5f}",
        f"{measured.cosine_worst:.5f}",
        f"{measured.top1_agreement_percent:.1f}%",
        f"{measured.seconds:.2f}",
        ", ".join(f"{kernel} {count} of {calls}" for kernel, count in served.items()),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows with aligned columns: text to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    for row in rows:
        cells = (
            cell.ljust(width) if n in {0, last} else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _parity_line(choice: Choice) -> str:
    line = f"parity: {choice.slot} of the {choice.role}, {choice.chosen} against the reference: "
    line += f"bit-equal {'yes' if choice.bit_equal else 'NO'}"
    return line + (" (the slot chose the reference itself)" if choice.is_reference else "")
