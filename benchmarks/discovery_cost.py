# SPDX-License-Identifier: Apache-2.0
"""What the first discovery of a process costs, beside other ways to load the same plugins, in one run: as ratios.

    pip install --target STEVEDORE stevedore
    pip install --no-deps --target PUBLISHED tokenspeed-kernel==0.1.4
    python benchmarks/discovery_cost.py [--peer STEVEDORE --peer PUBLISHED] [--repeat N] [--json FILE]

A temporary folder gets 100, 300 or 1000 distributions, 10 or 100 of them trivial plugins that require a version of the
core and register one kernel. Each variant loads them in a fresh interpreter that sees no other distribution; the
variants take turns, so that a slow moment hits them alike. What a variant imports on first use is timed apart. The bare
``entry_points`` loads the functions and does not call them; stevedore runs without its cache. Both peers are optional;
the published core imports torch, so torch has to be there for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "core" / "src"
TREES = ((100, 10), (300, 10), (1000, 10), (1000, 100))  # distributions, and how many of them are plugins
BARS = {"of bare entry_points": 1.0, "of stevedore": 1.0, "of the published": 1.0, "second call": 0.05}
GROWTH = 1.2  # the most that a distribution may cost among 1000, as a share of what one costs among 100

_CHILD = """
import sys, time
variant, tree, *folders = sys.argv[1:]
sys.path[:0] = folders
start = time.perf_counter()
if variant == "ours":
    from tokenspeed_kernel import settings, references
    from tokenspeed_kernel.plugins import discovery, gates, installed, loading, records
    import packaging.specifiers
    load = discovery.discover_plugins
elif variant == "bare":
    import importlib.metadata
    load = lambda: [point.load() for point in importlib.metadata.entry_points(group="tokenspeed_kernel.plugins")]
elif variant == "stevedore":
    from stevedore.extension import ExtensionManager
    load = lambda: list(ExtensionManager("tokenspeed_kernel.plugins", invoke_on_load=False))
else:
    import types
    package = types.ModuleType("tokenspeed_kernel")  # its __init__ needs a GPU; its modules do not
    package.__path__ = [folders[0] + "/tokenspeed_kernel"]
    sys.modules["tokenspeed_kernel"] = package
    from tokenspeed_kernel import registry
    from tokenspeed_kernel.plugins import discover_plugins as load
imports = time.perf_counter() - start
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry and entry not in folders[1:]] + [tree]
if variant == "stevedore":
    sys.path.remove(folders[0])  # it has distributions of its own
start = time.perf_counter()
first = load()
middle = time.perf_counter()
load()
end = time.perf_counter()
assert len(first) == int(tree.rpartition("-")[2]), first
print(imports, middle - start, end - middle)
"""

_PLUGIN = """
def register():
    from tokenspeed_kernel.registry import register_kernel
    register_kernel("gemm", "mm{0}", name="k{0}", solution="s{0}", signatures=())(print)
"""


def main() -> int:
    """Measure, print a table, and return 0 if every ratio is within its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, action="append", default=[], help="a folder that a peer is unpacked in")
    parser.add_argument("--repeat", type=int, default=9, help="interpreters per variant and size")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    options = parser.parse_args()
    folders = {"ours": SOURCE, "bare": Path(), **_peers(options.peer)}
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        medians = {}
        for size, plugins in TREES:
            tree = Path(temporary) / f"{size}-{plugins}"
            _write_tree(tree, size, plugins)
            medians[size, plugins] = _measure(folders, tree, options.repeat)
            result[f"{size} distributions, {plugins} plugins"] = _ratios(medians[size, plugins])
    growth = medians[1000, 100]["ours"][1] / 10 / medians[100, 10]["ours"][1]
    imports = {name: medians[300, 10][name][0] / medians[300, 10]["bare"][0] for name in folders}
    result["first-use imports, of importlib.metadata's"] = {k: round(v, 2) for k, v in imports.items()}
    result["a distribution among 1000, of one among 100"] = {"ours": round(growth, 3)}
    for row, ratios in result.items():
        print(f"{row:<45} " + "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sizes = [result[f"{size} distributions, {plugins} plugins"] for size, plugins in TREES]
    good = all(ratios[name] <= bar for ratios in sizes for name, bar in BARS.items() if name in ratios)
    return 0 if good and growth <= GROWTH else 1


def _peers(folders: list[Path]) -> dict[str, Path]:
    found = {}
    for folder in folders:
        if (folder / "stevedore").is_dir():
            found["stevedore"] = folder
        if (folder / "tokenspeed_kernel").is_dir():
            found["published"] = folder
    return found


def _write_tree(tree: Path, size: int, plugins: int) -> None:
    for index in range(size):
        is_plugin = index % (size // plugins) == 0
        number = index // (size // plugins)
        info = tree / f"dist_{index:04}-1.{index}.dist-info"
        info.mkdir(parents=True)
        requires = "Requires-Dist: tokenspeed-kernel<2,>=0.1\n" if is_plugin else "Requires-Dist: numpy>=1.20\n"
        head = f"Metadata-Version: 2.1\nName: dist-{index:04}\nVersion: 1.{index}\n{requires}"
        (info / "METADATA").write_text(head + "Classifier: Private :: Do Not Upload\n" * 20 + "\n" + "text\n" * 500)
        (info / "RECORD").write_text("dist/module.py,sha256=0,0\n" * 40)
        if is_plugin:
            (info / "entry_points.txt").write_text(f"[tokenspeed_kernel.plugins]\np{number} = plug{number}:register\n")
            (tree / f"plug{number}.py").write_text(_PLUGIN.format(number))
        elif index % 3 == 0:
            (info / "entry_points.txt").write_text(f"[console_scripts]\ncommand{index} = module:main\n")
    os.utime(tree, (1e9, 1e9))  # an installation is older than the moment before


def _measure(folders: dict[str, Path], tree: Path, repeat: int) -> dict[str, tuple[float, ...]]:
    taken: dict[str, list[tuple[float, ...]]] = {variant: [] for variant in folders}
    for _ in range(repeat + 1):
        for variant, seconds in taken.items():
            seconds.append(_seconds(variant, tree, folders[variant]))
    # The first fills caches.
    return {name: tuple(map(statistics.median, zip(*rows[1:], strict=True))) for name, rows in taken.items()}


def _seconds(variant: str, tree: Path, folder: Path) -> tuple[float, ...]:
    cache = tree.parent / "cache" / "python-entrypoints"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".disable").touch()  # stevedore's cache
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENSPEED_KERNEL_", "LIBREYOLO_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD, variant, str(tree), str(folder.resolve())],
        capture_output=True,
        text=True,
        check=False,
        env={**environ, "XDG_CACHE_HOME": str(cache.parent)},
    )
    if done.returncode:
        raise RuntimeError(f"the measuring process of {variant} ended early:\n{done.stderr}")
    return tuple(map(float, done.stdout.split()))


def _ratios(medians: dict[str, tuple[float, ...]]) -> dict[str, float]:
    _, first, second = medians["ours"]
    names = {"bare": "of bare entry_points", "stevedore": "of stevedore", "published": "of the published"}
    ratios = {label: round(first / medians[name][1], 3) for name, label in names.items() if name in medians}
    return {**ratios, "second call": round(second / first, 4)}


if __name__ == "__main__":
    sys.exit(main())
