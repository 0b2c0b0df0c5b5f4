# SPDX-License-Identifier: Apache-2.0
"""Make the page ``docs/benchmarks/README.md`` from the JSON beside it, so that no figure is typed by hand.

python benchmarks/render.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COLUMNS = (
    "how",
    "device",
    "chosen for `fake_quant_fp8`",
    "calls it served",
    "the reference's bits",
    "cosine, mean and worst",
    "same nearest neighbour",
    "time, as a multiple of float32's",
)
FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


def main() -> None:
    """Write the page."""
    result = json.loads((FOLDER / "gpu-tests.json").read_text(encoding="utf-8"))
    (FOLDER / "README.md").write_text("\n".join(_page(result)) + "\n", encoding="utf-8")


def _page(result: dict[str, Any]) -> list[str]:
    machine, tests = result["machine"], result["tests"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "kernels"))
    passed = tests["tests"] - tests["skipped"] - tests["failures"] - tests["errors"]
    return [
        "# What was measured",
        "",
        f"On an {machine['card']} ({machine['cards']} of them), {machine['date']}: "
        f"Python {machine['python']}, CUDA {machine['cuda']}, {versions}.",
        "Made by `benchmarks/render.py` from [gpu-tests.json](gpu-tests.json), which `tests/run_gpu.py` wrote.",
        "",
        "## Tests on the GPU",
        "",
        f"{passed} passed, {tests['failures']} failed, {tests['errors']} errors, {tests['skipped']} skipped.",
        "",
        "| module | tests run |",
        "|---|---|",
        *(f"| `{name}` | {count} |" for name, count in sorted(tests["ran"].items())),
        "",
        "Skipped:",
        "",
        *(f"- {test}" for test in tests["skipped_tests"]),
        "",
        "## The demo",
        "",
        "A sentence encoder with FP8 simulated in every linear layer, beside itself in float32.",
        "A simulation adds work: it is not meant to be faster than float32.",
        "Within one device the bits of the chosen kernel are the reference's.",
        "Across devices the model's own arithmetic differs, and the cosines say by how much.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
        *(_row(how, facts) for how, facts in result["demo"].items()),
    ]


def _row(how: str, facts: dict[str, Any]) -> str:
    chosen = facts["choices"][0]["chosen"]
    served = facts["stats"]["fake_quant_fp8"][chosen]["served"]
    cells = (
        how,
        facts["device"],
        f"`{chosen}`",
        f"{served} of {facts['calls']['fake_quant_fp8']}",
        "yes" if facts["parity"] else "NO",
        f"{facts['cosine_mean']:.6f}, {facts['cosine_worst']:.6f}",
        f"{facts['top1_agreement_percent']:.1f}%",
        f"{facts['seconds']['simulated'] / facts['seconds']['float32']:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
