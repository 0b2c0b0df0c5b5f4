# SPDX-License-Identifier: Apache-2.0
"""Tell the user something without ever failing for it, whatever the host's warnings and logging do."""

import contextlib
import sys
import warnings

__all__ = ["describe", "warn"]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue ``message`` as a warning.

    A host may turn warnings into errors, or replace ``showwarning`` by something that raises. Neither may abort a
    discovery or a call that has already succeeded, so what could not be shown is logged instead, and written to stderr
    where even the logger raises.
    """
    try:
        warnings.warn(message, category, stacklevel=3)
    except Exception:  # noqa: BLE001 -- whatever the host's filter or hook raised, the message must not get lost
        try:
            import logging

            logging.getLogger("tokenspeed_kernel").warning("%s", message)
        except Exception:  # noqa: BLE001 -- a handler or filter of the host's logging raised
            with contextlib.suppress(Exception):  # there may be no stderr, or a closed one
                sys.stderr.write(f"tokenspeed_kernel: {message}\n")


def describe(error: BaseException) -> str:
    """Return type and text of an error; the type alone if its text cannot be had, whatever getting it raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 -- an exception whose str() raises, or exits, is still a failure to report
        return type(error).__name__
