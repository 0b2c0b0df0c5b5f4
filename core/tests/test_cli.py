# SPDX-License-Identifier: Apache-2.0
"""The command line: ``list`` and ``info``, what they print, and their exit codes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel.plugins.cli import main

Output = pytest.CaptureFixture[str]


def test_list_of_nothing_says_so(plugins: Any, capsys: Output) -> None:
    """Without plugins the list says that none is installed, and succeeds."""
    assert main(["list"]) == 0
    assert "No kernel plugin is installed" in capsys.readouterr().out


def test_list_has_one_line_a_plugin(plugins: Any, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has name, state, distribution, version, time, and kernels or reason."""
    plugins.add("a", plugins.kernel("k1"))
    plugins.add("b", plugins.kernel("k2", 11))
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "b")
    assert main(["list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:4] + first.split()[-1:] == ["a", "loaded", "dist-a", "1.0", "k1"]
    assert float(first.split()[4]) > 0
    assert second.split()[:4] == ["b", "disabled", "dist-b", "1.0"]
    assert "TOKENSPEED_KERNEL_DISABLE_PLUGINS" in second


@pytest.mark.filterwarnings("ignore:plugin 'bad'")
def test_list_with_a_failure_exits_with_one(plugins: Any, capsys: Output) -> None:
    """A failed plugin is one line with its cause, even if that has several lines, and the exit code is 1."""
    plugins.add("bad", "raise RuntimeError('boom\\nsecond line')")
    plugins.add("good", plugins.kernel("k"))
    assert main(["list"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["bad", "failed"], ["good", "loaded"]]
    assert "boom" in lines[0]


def test_info_of_a_loaded_plugin(plugins: Any, capsys: Output) -> None:
    """``info`` shows the distribution, the entry point, and each kernel's description."""
    plugins.add("mine", plugins.kernel("k1", 14))
    assert main(["info", "mine"]) == 0
    text = capsys.readouterr().out
    parts = (
        "Plugin: mine",
        "State: loaded",
        "dist-mine 1.0",
        "tsk_plugin_mine:register",
        "Kernel: k1",
        "quant.op",
        "14 (",
    )
    assert [part for part in parts if part not in text] == []


@pytest.mark.filterwarnings("ignore:plugin 'bad'")
def test_info_of_a_failed_plugin(plugins: Any, capsys: Output) -> None:
    """``info`` shows the cause and the traceback of a failure, and the exit code is 1."""
    plugins.add("bad", "raise RuntimeError('boom')")
    assert main(["info", "bad"]) == 1
    text = capsys.readouterr().out
    assert "State: failed (RuntimeError: boom)" in text
    assert "Traceback (most recent call last)" in text


def test_info_of_an_unknown_plugin_is_one_line(plugins: Any, capsys: Output) -> None:
    """An unknown name is one line on stderr that lists the plugins, and exit code 1."""
    plugins.add("mine", plugins.kernel("k"))
    assert main(["info", "nope"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "no installed plugin is called 'nope'; there are: mine\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["info"]])
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: Output) -> None:
    """A wrong command line exits with 2 and the usage text."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m tokenspeed_kernel.plugins" in capsys.readouterr().err


def test_module_runs(plugins: Any, python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """``python -m tokenspeed_kernel.plugins`` prints the list and exits with its code."""
    plugins.add("tsk_cli_only", plugins.kernel("k"))
    done = python("-m", "tokenspeed_kernel.plugins", "info", "tsk_cli_only", TOKENSPEED_KERNEL_PLUGINS="tsk_cli_only")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Plugin: tsk_cli_only" in done.stdout
    done = python("-m", "tokenspeed_kernel.plugins", "info", "nope", TOKENSPEED_KERNEL_PLUGINS="tsk_cli_only")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
