# SPDX-License-Identifier: Apache-2.0
"""What a repeated selection costs, beside the published tokenspeed-kernel, in one run: as ratios.

    pip install --no-deps --target FOLDER tokenspeed-kernel==0.1.4
    python benchmarks/select_cost.py --peer FOLDER [--rounds N] [--json FILE]

Each implementation runs in a process of its own, where both register the same kernels and select for the same requests;
the processes take turns, so that a slow moment hits them alike. A round's figure is the least of several repetitions,
and a ratio compares the medians over the rounds. The published one imports torch, so torch has to be there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "core" / "src"
BAR = 0.5  # the most that a selection may cost, as a share of the peer's

_SETUP = """
import sys, timeit, types

folder, whole = sys.argv[1], sys.argv[2] == "whole"
sys.path.insert(0, folder)
if not whole:  # its __init__ needs a GPU; its modules do not
    package = types.ModuleType("tokenspeed_kernel")
    package.__path__ = [folder + "/tokenspeed_kernel"]
    sys.modules["tokenspeed_kernel"] = package

import torch
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.selection import select_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures

Platform.override(PlatformInfo("nvidia", ArchVersion(9, 0), "device", 1, 0, 0.0, 0, 0, 0))
half = torch.bfloat16


def register(family, mode, solution, roles, priority, **traits):
    signatures = format_signatures(roles, "dense", {half, torch.float16})
    register_kernel(family, mode, solution=solution, signatures=signatures, traits=traits, priority=priority)(print)


register("gemm", "mm", "fast", ("a", "b"), 10, x=frozenset({1, 2}), y=frozenset({True}), z=frozenset({"q"}))
register("gemm", "mm", "plain", ("a", "b"), 4)
register("attention", "decode", "fast", ("q", "k", "v"), 10, head_dim=frozenset({64, 128}))
ready = format_signature(a=dense_tensor_format(half), b=dense_tensor_format(half))


def ready_signature():
    return select_kernel("gemm", "mm", ready)


def two_roles_three_traits():
    signature = format_signature(a=dense_tensor_format(half), b=dense_tensor_format(half))
    return select_kernel("gemm", "mm", signature, traits={"x": 1, "y": True, "z": "q"})


def three_roles_seven_traits():
    signature = format_signature(q=dense_tensor_format(half), k=dense_tensor_format(half), v=dense_tensor_format(half))
    traits = {"head_dim": 128, "causal": True, "page": 16, "window": None, "softcap": 0.0, "sink": False, "group": 8}
    return select_kernel("attention", "decode", signature, traits=traits)


requests = (ready_signature, two_roles_three_traits, three_roles_seven_traits)
print(*(request().name for request in requests), flush=True)
for _ in sys.stdin:  # one line, one round
    print(*(min(timeit.repeat(request, number=5000, repeat=5)) for request in requests), flush=True)
"""

REQUESTS = ("a ready signature", "2 roles and 3 traits, built", "3 roles and 7 traits, built")


class _Implementation:
    """One process that measures when asked to."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        # An override variable of the caller would take selection off its cached path.
        environ = {name: text for name, text in os.environ.items() if not name.startswith("TOKENSPEED_KERNEL_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SETUP, str(folder.resolve()), "whole" if whole else "modules"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.chosen = self._line()

    def round(self) -> list[float]:
        """Return the seconds that each request took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._line()]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if len(words) != len(REQUESTS):
            raise RuntimeError("the measuring process ended early; its error is above")
        return words


def main() -> int:
    """Measure, print a table, and return 0 if every request is within the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="the folder that the published wheel is unpacked in")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each implementation")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    options = parser.parse_args()
    ours, peer = _Implementation(SOURCE, whole=True), _Implementation(options.peer, whole=False)
    if ours.chosen != peer.chosen:
        raise RuntimeError(f"the two choose differently, so their costs do not compare: {ours.chosen}, {peer.chosen}")
    rounds = [(ours.round(), peer.round()) for _ in range(options.rounds + 1)][1:]  # the first warms up
    ours.close()
    peer.close()
    ratios = {
        request: round(statistics.median(o[i] for o, _ in rounds) / statistics.median(p[i] for _, p in rounds), 3)
        for i, request in enumerate(REQUESTS)
    }
    print(f"{'request':<30} {'of the peer':>11} {'bar':>5}")
    for request, ratio in ratios.items():
        print(f"{request:<30} {ratio:>11.3f} {BAR:>5}")
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    return 0 if all(ratio <= BAR for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
