# SPDX-License-Identifier: Apache-2.0
"""The facts of a run as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comparison import Choice, Facts

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
    yield "calls (first batch, warm-up and timed run):"
    for slot, kernels in facts.stats.items():
        yield from (
            f"  {slot}: {kernel} served {counts['served']} of {facts.calls[slot]}, failed {counts['failed']}"
            + "".join(f", declined {count} ({reason})" for reason, count in counts["declined"].items())
            for kernel, counts in kernels.items()
        )
    yield f"  sdpa: the host's portable path served {facts.portable_calls} of {facts.calls['sdpa']}"
    yield ""
    yield f"agreement with float32: cosine mean {facts.cosine_mean:.6f}, worst {facts.cosine_worst:.6f}"
    yield f"same nearest neighbour: {facts.top1_agreement_percent:.1f}%"
    yield f"  nearest to {facts.nearest[0]!r} is {facts.nearest[1]!r}"
    yield (
        f"time: float32 {facts.seconds['float32']:.3f} s, simulated {facts.seconds['simulated']:.3f} s "
        "(a simulation adds work to the model: it is not meant to be faster)"
    )
    yield from (_parity_line(choice) for choice in facts.choices if choice.bit_equal is not None)


def _parity_line(choice: Choice) -> str:
    line = f"parity: {choice.slot} of the {choice.role}, {choice.chosen} against the reference: "
    line += f"bit-equal {'yes' if choice.bit_equal else 'NO'}"
    return line + (" (the slot chose the reference itself)" if choice.is_reference else "")
