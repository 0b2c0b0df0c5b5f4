# SPDX-License-Identifier: Apache-2.0
"""The command line: ``verify PLUGIN`` examines an installed plugin, prints a table, and exits by the result."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


_EXIT_CODES = "Exit codes: 0 nothing failed; 1 a check failed; 3 some kernel itself could run no call here."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: that of the report, or 1 without torch."""
    parser = argparse.ArgumentParser(prog="tokenspeed-kernel", description=__doc__, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify")
    verify = commands.add_parser("verify", help="examine every kernel of an installed plugin")
    verify.add_argument("plugin", help="the plugin's entry-point name, or name@distribution")
    verify.add_argument("--json", metavar="FILE", help="write the report there too, as JSON; - for stdout, alone")
    answer = commands.add_parser("answer")  # what a check starts, and nobody else: see elsewhere.py
    for name in ("question", "plugin", "kernel"):
        answer.add_argument(name)
    options = parser.parse_args(arguments)
    if options.command == "answer":
        return _answer(options.question, options.plugin, options.kernel)
    return _verify(options.plugin, options.json)


def _verify(plugin: str, path: str | None) -> int:
    try:
        import torch  # noqa: F401 -- asked for here: without it there is nothing to examine with
    except ImportError as error:
        print(f"kernels are examined with torch, which cannot be imported: {error}", file=sys.stderr)
        return 1
    from tokenspeed_kernel.testing.examination import examine_plugin

    with contextlib.redirect_stdout(sys.stderr):  # what plugins print is no part of the answer
        report = examine_plugin(plugin)
    if path != "-":
        print(report.table())
    if path == "-":
        print(report.to_json())
    elif path is not None:
        Path(path).write_text(report.to_json() + "\n", encoding="utf-8")
    return report.exit_code


def _answer(question: str, plugin: str, kernel: str) -> int:
    from tokenspeed_kernel.testing.elsewhere import answer

    with contextlib.redirect_stdout(sys.stderr):
        said = answer(question, plugin, kernel)
    print(json.dumps(said))
    return 0
