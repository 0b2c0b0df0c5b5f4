# SPDX-License-Identifier: Apache-2.0
"""A host engine in small: a real sentence encoder, quantized and attended through slots, against float32.

`python hosts/encoder_demo [--text FILE] [--device auto|cpu|cuda] [--model DIR] [--weights FILE]
[--json FILE] [--picture FILE]`
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from errors import DemoError
from picture import draw
from report import report_lines
from sentences import read_sentences

_PACKAGES = {"torch", "transformers", "safetensors", "tqdm", "tokenspeed_kernel", "tokenspeed_kernel_simulate"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="encoder_demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("sentences.txt"), metavar="FILE")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a folder that pack.py wrote")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="another safetensors file, whole or packed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all the facts there too")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw accuracy against bits there, as SVG")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0; 1 if a kernel's bits differ from the reference's; 2 for a mistake of the caller."""
    options = _parser().parse_args(arguments)
    try:
        sentences = read_sentences(options.text)
        try:
            from comparison import compare  # torch and transformers come with it
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:  # a broken installation is no caller's mistake
                raise
            raise DemoError(f"the package {error.name!r} is not installed; pip install it") from error
        facts = compare(sentences, options.model, options.weights, options.device)
        print(*report_lines(facts), sep="\n")
        if options.json is not None:
            _write("--json", options.json, json.dumps(asdict(facts), indent=2))
        if options.picture is not None:
            _write("--picture", options.picture, draw(facts.formats))
    except DemoError as error:
        print(f"encoder_demo: {error}", file=sys.stderr)
        return 2
    return 0 if facts.parity else 1


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot write {option} {str(path)!r}: {error.strerror}; name a writable file") from error


if __name__ == "__main__":
    sys.exit(main())
