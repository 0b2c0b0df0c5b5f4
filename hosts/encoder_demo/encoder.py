# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, model and sentence embeddings of the pretrained encoder, from a local folder and without a hub."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read while transformers is imported

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModel, AutoTokenizer

from errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Batch = dict[str, torch.Tensor]

__all__ = ["embed", "load_model", "load_tokenizer", "tokenize", "vocabulary_size"]

_BATCH = 100  # sentences: weights are rounded once a batch
_LONGEST = 256  # tokens: what the model's card says it was trained with


def vocabulary_size(folder: Path) -> int:
    """Return the number of rows of the word embedding."""
    return int(AutoConfig.from_pretrained(folder).vocab_size)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that lies in ``folder``."""
    return AutoTokenizer.from_pretrained(folder)


def load_model(folder: Path, state: dict[str, torch.Tensor], attention: str, device: torch.device) -> Any:
    """Return the encoder in float32 with the tensors of ``state``, frozen, in evaluation mode, on ``device``.

    ``attention`` is a name known to transformers' AttentionInterface. The tensors are given rather than read by
    ``from_pretrained``, so that whole and packed weights take the same way.

    Raises:
        DemoError: a tensor is missing or has another shape.
    """
    config = AutoConfig.from_pretrained(folder)
    model = AutoModel.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    try:
        missing = model.load_state_dict(state, strict=False).missing_keys  # old files also store position_ids
    except RuntimeError as error:
        raise DemoError(f"the weights do not fit the model in {str(folder)!r}: {error}".replace("\n", " ")) from error
    if missing:
        raise DemoError(f"the weights lack {len(missing)} tensors, {missing[0]!r} first; use a file of this model")
    return model.float().eval().requires_grad_(False).to(device)


def tokenize(tokenizer: Any, sentences: Sequence[str], device: torch.device) -> list[Batch]:
    """Return batches of at most 100 sentences, each padded to its longest: int64 tensors (batch, tokens)."""
    return [
        dict(
            tokenizer(
                list(sentences[start : start + _BATCH]),
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            ).to(device)
        )
        for start in range(0, len(sentences), _BATCH)
    ]


@torch.inference_mode()
def embed(model: Any, batches: Sequence[Batch], label: str) -> torch.Tensor:
    """Return one unit vector a sentence, float32 (sentences, width): mean over real tokens, then L2 norm.

    Shows ``label`` and the batches done on standard error.
    """
    vectors = []
    for batch in tqdm(batches, desc=label, unit="batch"):
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)  # [CLS] and [SEP] are always there: never 0
        vectors.append(torch.nn.functional.normalize(mean, dim=1))
    return torch.cat(vectors)
