# SPDX-License-Identifier: Apache-2.0
"""What importing core costs, beside pluggy, in one run: medians over fresh interpreters, as ratios.

    python benchmarks/import_cost.py [--repeat N] [--json FILE]

Each statement runs in an interpreter of its own; the variants take turns, so that a slow moment hits them alike, and
the cost of starting the interpreter is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PEER = "import pluggy"
BARS = {  # the most that a statement may cost, as a share of the peer's
    "import tokenspeed_kernel": 0.25,
    "from tokenspeed_kernel.plugins import discover_plugins": 1.0,
}


def main() -> int:
    """Measure, print a table, and return 0 if every statement is within its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=31, help="interpreters per statement")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {statement: [] for statement in (PEER, *BARS)}
    for _ in range(options.repeat + 1):
        for statement, taken in seconds.items():
            taken.append(_seconds(statement))
    medians = {
        statement: statistics.median(taken[1:]) for statement, taken in seconds.items()
    }  # the first fills caches
    ratios = {statement: round(medians[statement] / medians[PEER], 3) for statement in BARS}
    print(f"{'statement':<58} {'of pluggy':>9} {'bar':>5}")
    for statement, bar in BARS.items():
        print(f"{statement:<58} {ratios[statement]:>9.3f} {bar:>5}")
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    return 0 if all(ratios[statement] <= bar for statement, bar in BARS.items()) else 1


def _seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
