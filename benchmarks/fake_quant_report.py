# SPDX-License-Identifier: Apache-2.0
"""The words for what ``fake_quant.py`` measured: its table, and the bars that were not met. Needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["name_of", "not_met", "print_report", "shape_of", "why_missed"]

_WAYS = ("ours", "reference", "compiled", "peer")


def name_of(row: dict[str, Any]) -> str:
    """Return the slot, the form of the call, and the dtype."""
    form = f", {row['form']}" if row["form"] else ""
    return f"{row['slot'].removeprefix('fake_quant_')}{form} {row['dtype']}"


def shape_of(row: dict[str, Any]) -> str:
    """Return the shape, as 4096x14336."""
    return "x".join(map(str, row["shape"]))


def why_missed(row: dict[str, Any]) -> str:
    """Return what a row has and what it should have."""
    if "ours" in row["causes"]:
        return f"no kernel: {row['causes']['ours']}"
    if "kernels" in row and not row["bar"]:
        return f"launches {row['kernels']}"
    if row["what"].startswith("call"):
        return f"{row['us']['ours']:.1f} us, at most {row['bar']:.0f}"
    extra = f", launches {row['kernels']}" if "kernels" in row and len(row["kernels"] or ()) != 1 else ""
    return f"{row['share'].get('ours', 0.0):.1%} of clone's bandwidth, at least {row['bar']:.1%}{extra}"


def not_met(result: dict[str, Any]) -> list[str]:
    """Return every bar that was missed, and everything that could not be measured, one a line."""
    lines = []
    for row in result["rows"]:
        what = f"{name_of(row)} {row['what']} {shape_of(row)}"
        if not row["met"]:
            lines.append(f"{what}: {why_missed(row)}")
        if row.get("supports_us", 0.0) > row.get("supports_bar", 0.0):
            lines.append(f"{what} supports: {row['supports_us']:.2f} us, at most {row['supports_bar']:.0f}")
        if row.get("differing", {}).get("ours"):
            lines.append(f"{what}: {row['differing']['ours']} elements differ")
    for record in result["exactness"]:
        if not record["met"]:
            counts = {data: count.get("ours") for data, count in record["differing"].items()}
            lines.append(f"{name_of(record)} exactness: {counts} {record['causes'].get('ours', '')}")
    lines += [
        f"{name_of(record)} new shapes: compiled {', '.join(record['compiled'])}"
        for record in result["new_shapes"]
        if not record["met"]
    ]
    lines += [
        f"{record['slot']} {record['form']} first call: {record['seconds']:.2f} s, at most {record['bar']}"
        for record in result["first_calls"]
        if not record["met"]
    ]
    return lines + [f"{name}: {error.strip().splitlines()[-1]}" for name, error in result["errors"].items()]


def print_report(result: dict[str, Any]) -> None:
    """Print what happened at new shapes and in new processes, then the table, then what was not met."""
    for record in result["new_shapes"]:
        peer = f"; peer: {record['peer']}" if "peer" in record else ""
        made = len(record["compiled"])
        print(f"new shapes {name_of(record)}: slowest {record['slowest_ms']:.2f} ms, {made} compiled{peer}")
    for record in result["first_calls"]:
        own = f"{record['seconds']:.2f} s, after {record['triton']:.2f} s in which Triton started"
        print(f"first call {record['slot']} {record['form']}: {own}")
    print(f"\n{'slot':<35}{'what':<10}{'shape':<11} {'ours':>7}{'%clone':>7}{'bar':>5}", end="")
    print(f"{'ref':>8}{'compil':>8}{'peer':>8}  us")
    for row in result["rows"]:
        share = f"{100 * row['share']['ours']:.1f}" if "ours" in row.get("share", {}) else ""
        bar = f"{row['bar']:.0f}" if row["bar"] >= 1 or row["bar"] == 0 else f"{100 * row['bar']:.0f}%"
        ours, *others = (f"{row['us'][way]:.1f}" if way in row["us"] else "-" for way in _WAYS)
        verdict = "met" if row["met"] else "no kernel" if "ours" in row["causes"] else "MISSED"
        what = row["what"].replace(" with ", "+")
        print(f"{name_of(row):<35}{what:<10}{shape_of(row):<11} {ours:>7}{share:>7}{bar:>5}", end="")
        print(*(f"{us:>8}" for us in others), f"  {verdict}", sep="")
    if asked := [row["supports_us"] for row in result["rows"] if "supports_us" in row]:
        print(f"an answer whether a kernel serves a call: {min(asked):.2f} to {max(asked):.2f} us")
    if bare := [row["launch_us"] for row in result["rows"] if "launch_us" in row]:
        print(f"a bare Triton launch: {min(bare):.1f} us")
    print("\nnot met:", *(result["not_met"] or ["nothing"]), sep="\n  ")
