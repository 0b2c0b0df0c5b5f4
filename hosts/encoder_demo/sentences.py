# SPDX-License-Identifier: Apache-2.0
"""Read the text: one sentence a line. Imports no torch, so that a wrong path is answered at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from errors import DemoError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_sentences"]

_LEAST = 2  # a nearest neighbour needs somebody else


def read_sentences(path: Path) -> list[str]:
    """Return the lines of ``path`` that are not blank, stripped, in order.

    Raises:
        DemoError: the file is missing, unreadable or not UTF-8, or has fewer than two sentences.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DemoError(f"cannot read the text {str(path)!r}: {error.strerror}; name a readable text file") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"the text {str(path)!r} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
    sentences = [line.strip() for line in lines if line.strip()]
    if len(sentences) < _LEAST:
        raise DemoError(f"the text {str(path)!r} has {len(sentences)} sentences; write {_LEAST} or more, one a line")
    return sentences
