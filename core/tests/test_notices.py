# SPDX-License-Identifier: Apache-2.0
"""notices: a message reaches the user, and never fails for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from tokenspeed_kernel.notices import warn


def _library_function() -> None:
    warn("attention please", RuntimeWarning)


def test_warn_issues_a_warning_of_the_category() -> None:
    """The message is a warning of the category that was asked for."""
    with pytest.warns(RuntimeWarning, match="^attention please$"):
        _library_function()


def test_warn_is_a_user_warning_by_default() -> None:
    """Without a category the message is a UserWarning."""
    with pytest.warns(UserWarning, match="plain"):
        warn("plain")


def test_warn_names_the_caller_of_the_function_that_warns() -> None:
    """The warning points at the code that called the library, so that filters by module work."""
    with pytest.warns(RuntimeWarning) as caught:
        _library_function()
    assert caught[0].filename == __file__


def test_warn_logs_what_a_filter_turns_into_an_error(log: Callable[[], list[str]]) -> None:
    """Where warnings are errors the message is logged, and nothing is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("100% sure")
    assert log() == ["100% sure"]


def test_warn_logs_what_a_broken_hook_refuses(log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's showwarning that raises costs the warning, not the call."""

    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no terminal")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", broken)
        warn("still said")
    assert log() == ["still said"]


def test_warn_says_nothing_where_the_host_ignores_warnings(log: Callable[[], list[str]]) -> None:
    """An ignored warning is neither shown nor logged: the host decided so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warn("unheard")
    assert (caught, log()) == ([], [])
