# SPDX-License-Identifier: Apache-2.0
"""``python -m tokenspeed_kernel.plugins``: what is installed, what of it is loaded, and why the rest is not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP, PluginRecord, discover_plugins, plugin_records
from tokenspeed_kernel.plugins.installed import normal
from tokenspeed_kernel.registry import describe_kernel

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if a plugin failed or the one asked for is unknown."""
    parser = argparse.ArgumentParser(prog="python -m tokenspeed_kernel.plugins", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list every installed plugin with its state")
    info = commands.add_parser("info", help="show one plugin and its kernels")
    info.add_argument("name", help="the plugin's entry-point name")
    options = parser.parse_args(arguments)
    discover_plugins()
    return _list() if options.command == "list" else _info(options.name)


def _list() -> int:
    records = plugin_records()
    if not records:
        print(f"No kernel plugin is installed: no distribution has an entry point in {ENTRY_POINT_GROUP!r}.")
    width = max((len(record.name) for record in records), default=0)
    for record in records:
        what = ", ".join(record.kernel_names) or " ".join(record.reason.split())
        print(f"{record.name:<{width}}  {record.state:<11}  {record.package} {record.version}  {what}")
    return 1 if any(record.state == "failed" for record in records) else 0


def _info(name: str) -> int:
    found = [record for record in plugin_records() if normal(record.name) == normal(name)]
    if not found:
        known = ", ".join(sorted({record.name for record in plugin_records()})) or "none"
        print(f"no installed plugin is called {name!r}; there are: {known}", file=sys.stderr)
    for record in found:
        _print_record(record)
    return 0 if found and all(record.state != "failed" for record in found) else 1


def _print_record(record: PluginRecord) -> None:
    print(f"Plugin: {record.name}")
    print(f"  State: {record.state}" + (f" ({record.reason})" if record.reason else ""))
    print(f"  Distribution: {record.package} {record.version}")
    print(f"  Entry point: {record.value}")
    print(f"  Time: {record.milliseconds:.1f} ms")
    for kernel in record.kernel_names:
        print("  " + describe_kernel(kernel).replace("\n", "\n  "))
    if record.traceback:
        print(record.traceback, end="")
