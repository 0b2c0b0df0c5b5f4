# SPDX-License-Identifier: Apache-2.0
"""Tell the user something without ever failing for it: a warning, or a log line where warnings are errors."""

import warnings

__all__ = ["describe", "warn"]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue ``message`` as a warning.

    A host may turn warnings into errors, or replace ``showwarning`` by something that raises. Neither may abort a
    discovery or a call that has already succeeded, so what could not be shown is logged instead.
    """
    try:
        warnings.warn(message, category, stacklevel=3)
    except Exception:  # noqa: BLE001 -- whatever the host's filter or hook raised, the message must not get lost
        import logging

        logging.getLogger("tokenspeed_kernel").warning("%s", message)


def describe(error: BaseException) -> str:
    """Return type and text of an error; the type alone if its text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 -- an exception whose str() raises is still a failure to report
        return type(error).__name__
