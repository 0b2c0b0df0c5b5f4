# SPDX-License-Identifier: Apache-2.0
"""What a slot call costs, in one run: beside a class that only forwards, a ``torch.library`` operator and the peers.

    python benchmarks/call_cost.py [--peer FOLDER] [--json FILE]

FOLDER is where the published packages lie: ``pip install --no-deps --target FOLDER tokenspeed-kernel==0.1.4
libreyolo==1.6.0``. Each variant runs in a process of its own, because the peer shares our import name. The processes
take turns, and each measures the forwarding class of the same moment, so that ratios do not depend on how fast the
machine is just then. What a kernel's own ``supports`` costs is its provider's, and is left out; so is the function
that all of them call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

CORE_BAR = 2.5  # of the forwarding class
PEER_BAR = 1 / 6  # of the fastest way of a peer, which is by position; by keyword the class itself costs as much

PRELUDE = """
import json, sys, timeit, types, warnings, logging
logging.disable()
warnings.simplefilter("ignore")
import torch

def kernel(x, scale=None):
    return x

class Forwards:
    def __init__(self, function):
        self.function = function
    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

def seconds(statement, number):
    return min(timeit.repeat(statement, number=number, repeat=7)) / number

forwards = Forwards(kernel)
function = {"positions": lambda: kernel(1, 2), "keywords": lambda: kernel(1, scale=2)}
floor = {form: seconds(way, 100000) for form, way in function.items()}
by_class = {
    "positions": seconds(lambda: forwards(1, 2), 100000) - floor["positions"],
    "keywords": seconds(lambda: forwards(1, scale=2), 100000) - floor["keywords"],
}

def ratios(name, by_position, by_keyword=None, number=50000):
    ways = {"positions": by_position} if by_keyword is None else {"positions": by_position, "keywords": by_keyword}
    return {
        f"{name}, {form}": (seconds(way, number) - floor[form]) / by_class[form] for form, way in ways.items()
    }

def stand_in(name):
    package = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + "/" + name]
    sys.modules[name] = package
    sys.path.insert(0, sys.argv[1])
"""
OURS = """
from tokenspeed_kernel import register, slot
register("bench", kernel, name="bench")
handle = slot("bench")
handle(1, scale=2)
bound = handle.bind(1, scale=2)

@torch.library.custom_op("tokenspeed_bench::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

tensor = torch.ones(1)
def predicates():
    return (torch.jit.is_tracing(), torch.compiler.is_compiling(), torch.compiler.is_exporting(),
            torch.onnx.is_in_onnx_export())

print(json.dumps({
    **ratios("a bound handle", lambda: bound(1, 2), lambda: bound(1, scale=2)),
    **ratios("a slot call", lambda: handle(1, 2), lambda: handle(1, scale=2)),
    **ratios("torch's four capture predicates", predicates),
    **ratios("a torch.library operator", lambda: same(tensor), number=5000),
}))
"""
LIBREYOLO = """
stand_in("libreyolo")
import libreyolo.kernels as kernels
kernels.register("bench", kernel, name="bench")
resolve = kernels.resolve
print(json.dumps(ratios(
    "libreyolo: resolve, then call", lambda: resolve("bench")(1, 2), lambda: resolve("bench")(1, scale=2), 20000
)))
"""
TOKENSPEED = """
stand_in("tokenspeed_kernel")
from tokenspeed_kernel.platform import ArchVersion, Platform, PlatformInfo
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.selection import select_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature, format_signatures
Platform.override(PlatformInfo("nvidia", ArchVersion(9, 0), "x", 1, 0, 0.0, 0, 0, 0))
register_kernel("f", "m", solution="s", signatures=format_signatures(("a",), "dense", {torch.float32}))(kernel)
ready = format_signature(a=dense_tensor_format(torch.float32))
print(json.dumps(ratios(
    "tokenspeed-kernel: select_kernel, then call",
    lambda: select_kernel("f", "m", ready)(1, 2),
    lambda: select_kernel("f", "m", ready)(1, scale=2),
    20000,
)))
"""


def main() -> int:
    """Measure, print a table, and return 0 if the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="the folder with the published packages")
    parser.add_argument("--repeat", type=int, default=5, help="processes per variant")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    options = parser.parse_args()
    programs = [OURS] if options.peer is None else [OURS, LIBREYOLO, TOKENSPEED]
    runs = [_run(program, options.peer) for _ in range(options.repeat) for program in programs]
    taken: dict[str, list[float]] = {}
    for run in runs:
        for name, ratio in run.items():
            taken.setdefault(name, []).append(ratio)
    ratios = {name: round(statistics.median(values), 2) for name, values in taken.items()}
    for name, ratio in ratios.items():
        print(f"{name:<56} {ratio:>7.2f} times a class that only forwards")
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    peers = [ratio for name, ratio in ratios.items() if "then call, positions" in name]
    checks = [(f"a slot call, {form}", f"{CORE_BAR} times the class", CORE_BAR) for form in ("positions", "keywords")]
    if peers:
        checks.append(("a slot call, positions", "a sixth of the fastest peer", min(peers) * PEER_BAR))
    for name, what, bar in checks:
        print(f"{name}: {ratios[name]} of at most {bar:.2f} ({what}): {'met' if ratios[name] <= bar else 'missed'}")
    return 0 if all(ratios[name] <= bar for name, _, bar in checks) else 1


def _run(program: str, peer: Path | None) -> dict[str, float]:
    command = [sys.executable, "-c", PRELUDE + program, str(peer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ratios: dict[str, float] = json.loads(done.stdout)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
