# SPDX-License-Identifier: Apache-2.0
"""Accuracy against bits as a picture: an SVG that needs no library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from measurement import Measurement

__all__ = ["draw"]

_WIDTH, _HEIGHT = 820, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 800, 60, 450  # of the area of the points
_GAP = 12  # from a point to its label
_LINE = 17  # the least distance of two labels
_LETTER = 7  # how wide a label counts, a letter
_COLOUR = "#1f5fa8"
_LEAST = 1e-9  # of the distance: a format that changes nothing would have no place on a logarithmic axis


def draw(measurements: Sequence[Measurement]) -> str:
    """Return an SVG: bits per weight to the right, the distance to float32 upwards, on a logarithmic scale."""
    bits = [measured.weight_bits for measured in measurements]
    distances = [max(1.0 - measured.cosine_mean, _LEAST) for measured in measurements]
    first, last = math.ceil(min(bits)) - 1, math.floor(max(bits)) + 1  # room for labels on both sides
    low, high = math.floor(math.log10(min(distances))), math.ceil(math.log10(max(distances)))
    high = max(high, low + 1)
    xs = [_LEFT + (_RIGHT - _LEFT) * (value - first) / (last - first) for value in bits]
    ys = [_BOTTOM - (_BOTTOM - _TOP) * (math.log10(value) - low) / (high - low) for value in distances]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text((_LEFT + _RIGHT) / 2, 26, "Distance of the sentence embeddings to float32, by format", 17, "middle"),
        *_axes(first, last, low, high),
    ]
    names = [measured.name for measured in measurements]
    for measured, x, y, (label_x, label_y, anchor) in zip(measurements, xs, ys, _places(names, xs, ys), strict=True):
        fill = _COLOUR if measured.activations else "white"
        if abs(label_y - y) > 1:
            end = label_x + (3 if anchor == "end" else -3)
            lines.append(f'<path d="M{x:.1f} {y:.1f}L{end:.1f} {label_y:.1f}" stroke="#999"/>')
        lines += [_point(x, y, fill), _text(label_x, label_y + 4, measured.name, 13, anchor)]
    return "\n".join([*lines, *_legend(), "</svg>", ""])


def _axes(first: int, last: int, low: int, high: int) -> Iterator[str]:
    for value in range(first, last + 1):
        x = _LEFT + (_RIGHT - _LEFT) * (value - first) / (last - first)
        yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#e4e4e4"/>'
        yield _text(x, _BOTTOM + 20, str(value), 13, "middle")
    for power in range(low, high + 1):
        y = _BOTTOM - (_BOTTOM - _TOP) * (power - low) / (high - low)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e4e4e4"/>'
        yield _text(_LEFT - 8, y + 4, f"{10.0**power:g}", 13, "end")
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" stroke="black" fill="none"/>'
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "bits per weight, scales included", 14, "middle")
    middle = (_TOP + _BOTTOM) / 2
    label = _text(0, 0, "1 - mean cosine (lower is better)", 14, "middle")
    yield f'<g transform="translate(24 {middle:.1f}) rotate(-90)">{label}</g>'


def _legend() -> Iterator[str]:
    y = _HEIGHT - 10
    yield _point(_LEFT + 100, y - 4, "white")
    yield _text(_LEFT + 112, y, "weights only", 13)
    yield _point(_LEFT + 230, y - 4, _COLOUR)
    yield _text(_LEFT + 242, y, "weights + activations", 13)
    yield _text(_LEFT + 410, y, "int4/32: 32 weights share a scale", 13)


def _places(names: Sequence[str], xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float, str]]:
    """Return where each label is, and its anchor: beside its point, or as near to that as it covers nothing."""
    taken = [(x - 7, x + 7, y) for x, y in zip(xs, ys, strict=True)]  # left, right, middle; the points first
    places: list[tuple[float, float, str]] = []
    for name, x, y in zip(names, xs, ys, strict=True):
        width = _LETTER * len(name)
        sides = ((x + _GAP, x + _GAP + width, "start"), (x - _GAP - width, x - _GAP, "end"))
        wanted = sorted(
            ((shift, side) for shift in range(-120, 121, 3) for side in sides),
            key=lambda place: abs(place[0]) + (4 if place[1][2] == "end" else 0),  # right, unless left is nearer
        )
        left, right, height, anchor = next(
            (
                (left, right, y + shift, anchor)
                for shift, (left, right, anchor) in wanted
                if left > _LEFT and right < _RIGHT and _TOP < y + shift < _BOTTOM
                if all(right < box[0] or box[1] < left or abs(y + shift - box[2]) >= _LINE for box in taken)
            ),
            (*sides[0][:2], y, "start"),  # no room anywhere
        )
        taken.append((left, right, height))
        places.append((left if anchor == "start" else right, height, anchor))
    return places


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _point(x: float, y: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{_COLOUR}" stroke-width="2"/>'
