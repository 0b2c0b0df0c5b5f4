# SPDX-License-Identifier: Apache-2.0
"""settings: every environment variable, its second names, and when it is read."""

from __future__ import annotations

import pytest

from tokenspeed_kernel import epoch, settings
from tokenspeed_kernel.settings import hub_enabled, override_variable


def _read(monkeypatch: pytest.MonkeyPatch, **environ: str) -> settings.Settings:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.refresh()
    return settings.current()


def test_nothing_set_gives_the_defaults() -> None:
    """Without variables everything is on and nothing is forced."""
    actual = settings.current()
    assert (actual.selection, actual.hub, actual.disabled, actual.allowed) == (None, True, (), None)
    assert (dict(actual.overrides), actual.verbose) == ({}, False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("off", "reference"),
        ("OFF", "reference"),
        ("reference", "reference"),
        ("auto", None),
        ("Auto", None),
        ("", None),
        ("  ", None),
        ("triton", "triton"),
        (" triton ", "triton"),
        ("myBackend", "myBackend"),
    ],
)
def test_selection_words(monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None) -> None:
    """``off`` and ``reference`` mean the references, ``auto`` and nothing the normal order, all else a solution."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_SELECTION=value).selection == expected


SELECTION = ["TOKENSPEED_KERNEL_SELECTION", "LIBREYOLO_KERNELS", "LIBREYOLO_QUANT_KERNELS"]


@pytest.mark.parametrize("name", SELECTION)
def test_selection_is_read_from_each_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each of the three names alone sets the selection."""
    assert _read(monkeypatch, **{name: "hub"}).selection == "hub"


@pytest.mark.parametrize(("stronger", "weaker"), [(0, 1), (0, 2), (1, 2)])
def test_selection_names_in_order(monkeypatch: pytest.MonkeyPatch, stronger: int, weaker: int) -> None:
    """The native name wins, then the current LibreYOLO name, then the legacy one."""
    actual = _read(monkeypatch, **{SELECTION[weaker]: "weak", SELECTION[stronger]: "strong"})
    assert actual.selection == "strong"


def test_empty_native_name_leaves_the_second_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable is an unset one, so the next name counts."""
    actual = _read(monkeypatch, TOKENSPEED_KERNEL_SELECTION="", LIBREYOLO_KERNELS=" ", LIBREYOLO_QUANT_KERNELS="off")
    assert actual.selection == "reference"


def test_native_auto_outweighs_a_second_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` is a value: it takes back what a LibreYOLO name asks for."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_SELECTION="auto", LIBREYOLO_KERNELS="off").selection is None


@pytest.mark.parametrize("name", ["TOKENSPEED_KERNEL_HUB", "LIBREYOLO_HUB_KERNELS"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", False),
        ("false", False),
        ("OFF", False),
        ("No", False),
        (" 0 ", False),
        ("1", True),
        ("yes", True),
        ("", True),
    ],
)
def test_hub_words(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: bool) -> None:
    """``0 false off no`` in any case switch the Hub off; anything else, and nothing, leaves it on."""
    _read(monkeypatch, **{name: value})
    assert hub_enabled() is expected


def test_hub_native_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LibreYOLO name is honoured only when the native one is unset."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_HUB="1", LIBREYOLO_HUB_KERNELS="0").hub is True
    assert _read(monkeypatch, TOKENSPEED_KERNEL_HUB="").hub is False


@pytest.mark.parametrize(
    ("value", "expected"), [("a", ("a",)), (" a , b@dist ,,", ("a", "b@dist")), ("", ()), (" , ", ())]
)
def test_disabled_plugins_are_a_list(monkeypatch: pytest.MonkeyPatch, value: str, expected: tuple[str, ...]) -> None:
    """Spaces and empty items in the list are tolerated."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_DISABLE_PLUGINS=value).disabled == expected


@pytest.mark.parametrize(("value", "expected"), [("a, b", ("a", "b")), ("", None), (" , ", None)])
def test_allowed_plugins_are_a_list_or_all(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: tuple[str, ...] | None
) -> None:
    """An allow-list that names nothing is none at all."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_PLUGINS=value).allowed == expected


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False), ("off", False), ("", False)])
def test_verbose_words(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    """The log of choices is on only when asked for."""
    assert _read(monkeypatch, TOKENSPEED_KERNEL_VERBOSE=value).verbose is expected


@pytest.mark.parametrize(
    ("family", "mode", "expected"),
    [
        ("quant", "fake_quant_fp8", "TOKENSPEED_KERNEL_OVERRIDE_QUANT_FAKE_QUANT_FP8"),
        ("attention", "decode", "TOKENSPEED_KERNEL_OVERRIDE_ATTENTION_DECODE"),
        ("my-family", "a.b", "TOKENSPEED_KERNEL_OVERRIDE_MY_FAMILY_A_B"),
    ],
)
def test_override_variable_names(family: str, mode: str, expected: str) -> None:
    """The variable is upper case, and what a shell does not take in a name becomes an underscore (case 8)."""
    assert override_variable(family, mode) == expected


def test_overrides_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every override variable that is set and not empty is read."""
    actual = _read(monkeypatch, TOKENSPEED_KERNEL_OVERRIDE_A_B=" k ", TOKENSPEED_KERNEL_OVERRIDE_C_D=" ")
    assert dict(actual.overrides) == {"TOKENSPEED_KERNEL_OVERRIDE_A_B": "k"}


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the environment counts only after a refresh."""
    first = settings.current()
    monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", "hub")
    assert settings.current() is first
    settings.refresh()
    assert settings.current().selection == "hub"


def test_refresh_makes_choices_stale() -> None:
    """A refresh counts as a change of what choices depend on."""
    before = epoch.current.value
    settings.refresh()
    assert epoch.current.value > before
