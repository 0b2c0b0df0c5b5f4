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
_FORMAT_COLUMNS = (
    "weights + activations",
    "bits per weight",
    "bits per activation",
    "cosine, mean",
    "worst",
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
        "What simulated quantization costs on the GPU is on [a page of its own](fake-quant.md).",
        "",
        "## Tests on the GPU",
        "",
        f"{passed} passed, {tests['failures']} failed, {tests['errors']} errors, {tests['skipped']} skipped.",
        "",
        "| module | tests run |",
        "|---|---|",
        *(f"| `{name}` | {count} |" for name, count in sorted(tests["ran"].items())),
        "",
        *_named("Failed", tests.get("failed_tests", [])),
        *_named("Skipped", [f"{count} because {why}" for why, count in _reasons(tests["skipped_tests"]).items()]),
        *_conformance(result.get("conformance", {})),
        "## The demo",
        "",
        "A sentence encoder with FP8 simulated in every linear layer, in weights and activations, beside float32.",
        "A simulation adds work: it is not meant to be faster than float32.",
        "Within one device the bits of the chosen kernel are the reference's.",
        "Across devices the model's own arithmetic differs, and the cosines say by how much.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
        *(_row(how, facts) for how, facts in result["demo"].items()),
        "",
        *_formats(result["demo"]["provider installed"]),
    ]


def _named(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {line}" for line in lines), ""] if lines else []


def _reasons(skipped: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for test in skipped:
        reason = test.partition(": ")[2]
        counts[reason] = counts.get(reason, 0) + 1
    return counts


_SIGNS = {"passed": "yes", "failed": "**NO**", "not examined": "-"}


def _conformance(plugins: dict[str, Any]) -> list[str]:
    """Return a table for each plugin: checks down, kernels across, and below it why a check was not made."""
    if not plugins:
        return []
    lines = [
        "## Conformance",
        "",
        "What `tokenspeed-kernel verify` said; what has a - was not examined, with the reason below.",
        "",
    ]
    for plugin, facts in plugins.items():
        kernels = facts["kernels"]
        checks = list(dict.fromkeys(check for kernel in kernels.values() for check in kernel["checks"]))
        lines += [f"`{plugin}`:", ""]
        lines += ["| check | " + " | ".join(f"`{name}`" for name in kernels) + " |", "|---" * (len(kernels) + 1) + "|"]
        for check in checks:
            said = [kernel["checks"].get(check, {}).get("outcome") for kernel in kernels.values()]
            lines.append(f"| `{check}` | " + " | ".join(_SIGNS.get(outcome, "") for outcome in said) + " |")
        lines += ["| seconds | " + " | ".join(f"{kernel['seconds']:.1f}" for kernel in kernels.values()) + " |", ""]
        reasons: dict[str, dict[str, None]] = {}  # with the checks, each once
        for kernel in kernels.values():
            for check, found in kernel["checks"].items():
                if found["outcome"] != "passed":
                    reasons.setdefault(found["findings"][0], {})[check] = None
        lines += [f"- {', '.join(f'`{check}`' for check in said)}: {reason}" for reason, said in reasons.items()]
        lines += [""] if reasons else []
    return lines


def _formats(facts: dict[str, Any]) -> list[str]:
    return [
        f"Every format, on {facts['device']} with the provider installed; the bits include the scales.",
        "",
        "| " + " | ".join(_FORMAT_COLUMNS) + " |",
        "|---" * len(_FORMAT_COLUMNS) + "|",
        *(
            f"| {row['name']} | {row['weight_bits']:.2f} | {row['activation_bits']:.2f} | {row['cosine_mean']:.5f} "
            f"| {row['cosine_worst']:.5f} | {row['top1_agreement_percent']:.1f}% "
            f"| {row['seconds'] / facts['float32_seconds']:.1f} |"
            for row in facts["formats"]
        ),
    ]


def _row(how: str, facts: dict[str, Any]) -> str:
    chosen = next(choice["chosen"] for choice in facts["choices"] if choice["slot"] == "fake_quant_fp8")
    served = facts["stats"]["fake_quant_fp8"][chosen]["served"]
    fp8 = next(row for row in facts["formats"] if (row["weights"], row["activations"]) == ("fp8", "fp8"))
    cells = (
        how,
        facts["device"],
        f"`{chosen}`",
        f"{served} of {facts['calls']['fake_quant_fp8']}",
        "yes" if facts["parity"] else "NO",
        f"{fp8['cosine_mean']:.6f}, {fp8['cosine_worst']:.6f}",
        f"{fp8['top1_agreement_percent']:.1f}%",
        f"{fp8['seconds'] / facts['float32_seconds']:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
