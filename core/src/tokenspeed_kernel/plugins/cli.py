# SPDX-License-Identifier: Apache-2.0
"""``python -m tokenspeed_kernel.plugins``: what is installed, what of it is loaded, and why the rest is not."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

from tokenspeed_kernel import CONTRACT, __version__
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP, PluginRecord, discover_plugins, plugin_records
from tokenspeed_kernel.plugins.metadata import normal
from tokenspeed_kernel.registry import KernelRegistry, describe_kernel

__all__ = ["main"]

SCHEMA = 1
"""The version of the JSON document: raised when a field goes or changes its meaning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if something is wrong, or the plugin asked for is unknown."""
    parser = argparse.ArgumentParser(prog="python -m tokenspeed_kernel.plugins", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list every installed plugin with its state")
    info = commands.add_parser("info", help="show one plugin and its kernels")
    info.add_argument("name", help="the plugin's entry-point name, or name@distribution")
    commands.add_parser("doctor", help="say what is wrong with this installation")
    for command in (listing, info):
        command.add_argument("--json", action="store_true", help="print a JSON document instead")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # what plugins print is no part of the answer
        discover_plugins()
    if options.command == "doctor":
        return _doctor()
    records = plugin_records()
    if options.command == "info":
        wanted = normal(options.name)
        found = [r for r in records if wanted in (normal(r.name), normal(f"{r.name}@{r.package}"))]
        if not found:
            known = ", ".join(sorted({record.name for record in records})) or "none"
            print(f"no installed plugin is called {options.name!r}; there are: {known}", file=sys.stderr)
        records = found
    if options.json:
        print(_document(records))
    elif options.command == "list":
        _print_list(records)
    else:
        for record in records:
            _print_record(record)
    unknown = options.command == "info" and not records
    return 1 if unknown or any(record.state == "failed" for record in records) else 0


def _doctor() -> int:
    from tokenspeed_kernel.plugins.doctor import findings

    found = list(findings())
    print(*found or ["Nothing is wrong."], sep="\n")
    return 1 if found else 0


def _print_list(records: list[PluginRecord]) -> None:
    if not records:
        print(f"No kernel plugin is installed: no distribution has an entry point in {ENTRY_POINT_GROUP!r}.")
    width = max((len(record.name) for record in records), default=0)
    for record in records:
        what = ", ".join(record.kernel_names) or " ".join((record.reason or "; ".join(record.notes)).split())
        where = f"{record.package} {record.version}  {record.milliseconds:.1f} ms"
        print(f"{record.name:<{width}}  {record.state:<11}  {where}  {what}".rstrip())


def _print_record(record: PluginRecord) -> None:
    print(f"Plugin: {record.name}")
    print(f"  State: {record.state}" + (f" ({record.reason})" if record.reason else ""))
    print(f"  Distribution: {record.package} {record.version}")
    print(f"  Entry point: {record.value or 'none'}")
    print(f"  Time: {record.milliseconds:.1f} ms")
    for note in record.notes:
        print(f"  Note: {note}")
    for kernel in record.kernel_names:
        print("  " + describe_kernel(kernel).replace("\n", "\n  "))
    if record.traceback:
        print(record.traceback, end="")


def _document(records: list[PluginRecord]) -> str:
    plugins = [dataclasses.asdict(record) | {"kernels": _kernels(record)} for record in records]
    head = {"schema": SCHEMA, "version": __version__, "contract": CONTRACT, "group": ENTRY_POINT_GROUP}
    return json.dumps({**head, "plugins": plugins}, indent=1)


def _kernels(record: PluginRecord) -> list[dict[str, object]]:
    owner = f"{record.name}@{record.package}"
    owned = (r for r in KernelRegistry.get().owned_by(owner) if record.state == "loaded")
    return [
        {
            "name": r.spec.name,
            "operator": f"{r.spec.family}.{r.spec.mode}",
            "solution": r.spec.solution,
            "priority": int(r.spec.priority),
            "active": KernelRegistry.get().registration(r.spec.name) is r,
        }
        for r in owned
    ]
