# SPDX-License-Identifier: Apache-2.0
"""How well two sets of sentence embeddings, or two tensors, agree."""

from __future__ import annotations

import torch

__all__ = ["bit_equal", "cosines", "neighbours"]


def cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each pair of rows, float64 (rows,); float32 would round 1 - 1e-8 to 1."""
    return torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=1)


def neighbours(vectors: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest other row of each row of unit vectors, int64 (rows,)."""
    similarity = vectors.double() @ vectors.double().T
    return similarity.fill_diagonal_(-torch.inf).argmax(1)


def bit_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two float32 tensors have the same shape and the same bits (0.0 and -0.0 differ)."""
    return torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
