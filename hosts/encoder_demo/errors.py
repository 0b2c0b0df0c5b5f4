# SPDX-License-Identifier: Apache-2.0
"""The one exception that the commands of this folder print as a single line."""

__all__ = ["DemoError"]


class DemoError(Exception):
    """A mistake that the caller can mend: the message says what failed, with which value, and what to do."""
