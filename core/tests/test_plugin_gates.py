# SPDX-License-Identifier: Apache-2.0
"""Which plugins may load at all: lists in the environment and of the host, and names that two distributions claim."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel.plugins import (
    DISABLE_ENV_VAR,
    disable_plugin,
    discover_plugins,
    enable_plugin,
    list_plugins,
    plugin_records,
    reset_plugins,
)
from tokenspeed_kernel.registry import KernelRegistry

Said = Callable[..., list[str]]
ALLOW = "TOKENSPEED_KERNEL_PLUGINS"


def _kernels() -> list[str]:
    return [spec.name for spec in KernelRegistry.get().list_kernels("quant", "op")]


def _states() -> dict[str, str]:
    return {f"{record.name}@{record.package}": record.state for record in plugin_records()}


@pytest.fixture
def two(plugins: Any) -> Any:
    """Install the plugins ``my_plugin`` (of ``my-dist``) and ``other`` (of ``other-dist``)."""
    plugins.add("my_plugin", plugins.kernel("mine"), distribution="my-dist")
    plugins.add("other", plugins.kernel("others", 11), distribution="other-dist")
    return plugins


@pytest.mark.parametrize(
    "value",
    [
        "my_plugin",
        " my_plugin , ,",
        "My-Plugin",
        "my.plugin",
        "my_plugin@my-dist",
        "MY-PLUGIN@My_Dist",
        "my_plugin,my_plugin",
    ],
)
def test_environment_disables_by_name(two: Any, monkeypatch: pytest.MonkeyPatch, said: Said, value: str) -> None:
    """Entry-point names, normalised, also with their distribution, are skipped and not imported."""
    monkeypatch.setenv(DISABLE_ENV_VAR, value)
    assert [info.name for info in discover_plugins()] == ["other"]
    assert _states() == {"my_plugin@my-dist": "disabled", "other@other-dist": "loaded"}
    assert "tsk_plugin_my_plugin" not in sys.modules
    assert said() == []


def test_disabled_record_says_how_to_enable(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the variable and the plugin."""
    monkeypatch.setenv(DISABLE_ENV_VAR, "my_plugin")
    discover_plugins()
    (record,) = (record for record in plugin_records() if record.name == "my_plugin")
    assert DISABLE_ENV_VAR in record.reason
    assert "my_plugin" in record.reason


def test_name_at_another_distribution_disables_nothing(two: Any, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """``name@distribution`` means that distribution's plugin only, and what it does not match is said."""
    monkeypatch.setenv(DISABLE_ENV_VAR, "my_plugin@other-dist")
    assert len(discover_plugins()) == 2
    assert len(said("'my_plugin@other-dist'")) == len(said()) == 1


@pytest.mark.parametrize("variable", [DISABLE_ENV_VAR, ALLOW])
def test_unknown_name_is_said_with_what_there_is(
    two: Any, monkeypatch: pytest.MonkeyPatch, said: Said, variable: str
) -> None:
    """A name that matches nothing gets one warning that lists the plugins."""
    monkeypatch.setenv(variable, "nonsense")
    discover_plugins()
    assert len(said()) == 1
    assert all(part in said()[0] for part in (variable, "'nonsense'", "my_plugin, other"))


@pytest.mark.parametrize("variable", [DISABLE_ENV_VAR, ALLOW])
@pytest.mark.parametrize("name", ["my-dist", "My_Dist"])
def test_name_of_a_distribution_gets_a_hint(
    two: Any, monkeypatch: pytest.MonkeyPatch, said: Said, variable: str, name: str
) -> None:
    """A distribution's name in a list is answered with the plugin that was probably meant."""
    monkeypatch.setenv(variable, name)
    discover_plugins()
    assert len(said()) == 1
    assert repr(name) in said()[0]
    assert "'my_plugin'" in said()[0]


@pytest.mark.parametrize("value", ["my_plugin", "MY.plugin", "my_plugin@my-dist", "my_plugin, "])
def test_allow_list_loads_nothing_else(two: Any, monkeypatch: pytest.MonkeyPatch, said: Said, value: str) -> None:
    """With an allow-list only what it names is imported; the others have a record that says so."""
    monkeypatch.setenv(ALLOW, value)
    assert [info.name for info in discover_plugins()] == ["my_plugin"]
    assert _states() == {"my_plugin@my-dist": "loaded", "other@other-dist": "not allowed"}
    assert "tsk_plugin_other" not in sys.modules
    assert said() == []


def test_disabled_outweighs_allowed(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin on both lists does not load."""
    monkeypatch.setenv(ALLOW, "my_plugin")
    monkeypatch.setenv(DISABLE_ENV_VAR, "my_plugin")
    assert discover_plugins() == []
    assert _states()["my_plugin@my-dist"] == "disabled"


def test_list_changed_later_withdraws(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that the environment disables after it was loaded is withdrawn at the next discovery, and comes back."""
    discover_plugins()
    monkeypatch.setenv(DISABLE_ENV_VAR, "my_plugin")
    discover_plugins()
    seen = [_kernels()]
    monkeypatch.delenv(DISABLE_ENV_VAR)
    discover_plugins()
    assert [*seen, sorted(_kernels())] == [["others"], ["mine", "others"]]


@pytest.mark.parametrize("name", ["my_plugin", "My-Plugin", "my_plugin@my-dist"])
def test_disable_before_discovery(two: Any, name: str) -> None:
    """A plugin that the host disabled is not imported."""
    disable_plugin(name)
    assert [info.name for info in discover_plugins()] == ["other"]
    assert "tsk_plugin_my_plugin" not in sys.modules


@pytest.mark.parametrize("name", ["my_plugin", "My-Plugin", "my_plugin@my-dist"])
def test_disable_after_discovery_withdraws_at_once(two: Any, name: str) -> None:
    """Its kernels are gone immediately, and enabling brings them back at the next discovery."""
    discover_plugins()
    disable_plugin(name)
    assert (_kernels(), [info.name for info in list_plugins()]) == (["others"], ["other"])
    assert _states()["my_plugin@my-dist"] == "disabled"
    enable_plugin(name)
    assert [info.name for info in discover_plugins()] == ["my_plugin", "other"]
    assert sorted(_kernels()) == ["mine", "others"]


def test_disabling_survives_a_reset(two: Any) -> None:
    """``reset_plugins`` forgets what is loaded, not what the host disabled."""
    disable_plugin("my_plugin")
    reset_plugins()
    assert [info.name for info in discover_plugins()] == ["other"]


def test_disabled_kernels_leave_slots_and_selections(two: Any) -> None:
    """A choice made before ``disable_plugin`` does not outlive it."""
    from tokenspeed_kernel import select_kernel

    discover_plugins()
    assert select_kernel("quant", "op", None).name == "others"
    disable_plugin("other")
    assert select_kernel("quant", "op", None).name == "mine"


@pytest.mark.parametrize("word", ["off", "reference"])
def test_selection_off_imports_nothing(two: Any, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """With the selection off, providers are not even imported; the records say why."""
    monkeypatch.setenv("LIBREYOLO_KERNELS", word)
    assert discover_plugins() == []
    assert set(_states().values()) == {"off"}
    assert not {"tsk_plugin_my_plugin", "tsk_plugin_other"} & set(sys.modules)


def test_selection_of_a_solution_still_loads(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution's name restricts the choice, not the loading."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_SELECTION", "mine")
    assert len(discover_plugins()) == 2


@pytest.fixture(params=["same", "Same"], ids=["equal", "normalised"])
def clash(plugins: Any, request: pytest.FixtureRequest) -> Any:
    """Install two distributions that both offer the plugin ``same``, in one of them perhaps spelt otherwise."""
    for letter in "ab":
        module = f"tsk_clash_{letter}"
        plugins.module(module, f"def register():\n    {plugins.kernel(f'kernel_{letter}')}\n")
        plugins.metadata(f"dist-{letter}", f"{'same' if letter == 'a' else request.param} = {module}:register")
    return plugins


def test_clashing_names_load_nothing(clash: Any) -> None:
    """None of the two is imported; both records name both distributions and how to choose."""
    assert discover_plugins() == []
    records = plugin_records()
    assert [record.state for record in records] == ["clashing"] * 2
    parts = ("dist-a", "dist-b", ALLOW, "@dist-a")
    assert [part for record in records for part in parts if part not in record.reason] == []
    assert not {"tsk_clash_a", "tsk_clash_b"} & set(sys.modules)


def test_clash_is_reported(clash: Any, said: Said) -> None:
    """That neither loads is said, with both distributions: isolation is never silence."""
    discover_plugins()
    assert len(said()) == 1
    assert all(part in said()[0] for part in ("dist-a", "dist-b", ALLOW))


@pytest.mark.parametrize("letter", ["a", "b"])
def test_allow_list_settles_a_clash(clash: Any, monkeypatch: pytest.MonkeyPatch, said: Said, letter: str) -> None:
    """``name@distribution`` in the allow-list loads that one."""
    monkeypatch.setenv(ALLOW, f"same@dist-{letter}")
    discover_plugins()
    assert (_kernels(), said()) == ([f"kernel_{letter}"], [])


def test_allow_list_that_names_both_settles_nothing(clash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare name does not say which of the two."""
    monkeypatch.setenv(ALLOW, "same")
    assert discover_plugins() == []


@pytest.mark.parametrize("how", ["environment", "host"])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_disabling_one_settles_a_clash(clash: Any, monkeypatch: pytest.MonkeyPatch, letter: str, how: str) -> None:
    """With one of the two disabled by its distribution the other loads, whichever it is."""
    if how == "environment":
        monkeypatch.setenv(DISABLE_ENV_VAR, f"same@dist-{letter}")
    else:
        disable_plugin(f"same@dist-{letter}")
    discover_plugins()
    (other,) = set("ab") - {letter}
    assert _kernels() == [f"kernel_{other}"]


@pytest.mark.parametrize("letter", ["a", "b"])
def test_settled_clash_survives_a_second_discovery(clash: Any, monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    """The disabled rival of the same name does not take the loaded one's kernels with it."""
    monkeypatch.setenv(DISABLE_ENV_VAR, f"same@dist-{letter}")
    for _ in range(2):
        discover_plugins()
    (other,) = set("ab") - {letter}
    assert _kernels() == [f"kernel_{other}"]


def test_name_that_was_settled_may_change_hands(clash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing the other distribution later unloads the first and loads the second."""
    monkeypatch.setenv(ALLOW, "same@dist-a")
    discover_plugins()
    monkeypatch.setenv(ALLOW, "same@dist-b")
    discover_plugins()
    assert _kernels() == ["kernel_b"]
    assert [info.package for info in list_plugins()] == ["dist-b"]


def test_one_distribution_may_offer_several_plugins(plugins: Any) -> None:
    """Two names in one distribution are two plugins, each with its own kernels, disabled one by one."""
    for letter in "ab":
        plugins.module(
            f"tsk_several_{letter}", f"def register():\n    {plugins.kernel(f'kernel_{letter}', ord(letter) - 90)}\n"
        )
    plugins.metadata("several", "one = tsk_several_a:register\ntwo = tsk_several_b:register")
    assert [info.kernel_names for info in discover_plugins()] == [("kernel_a",), ("kernel_b",)]
    disable_plugin("one")
    assert _kernels() == ["kernel_b"]
