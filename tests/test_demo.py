# SPDX-License-Identifier: Apache-2.0
"""The example host on the real encoder, in every way of having its providers; and its answers to mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments import Environment

DEMO = Path(__file__).parent.parent / "hosts" / "encoder_demo"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run_demo(environment: Environment, tmp_path: Path) -> Run:
    """Return a runner of the demo over a part of its text, which returns the facts that it wrote."""
    text = tmp_path / "text.txt"
    lines = (DEMO / "sentences.txt").read_text(encoding="utf-8").splitlines()[:40]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(**variables: str) -> dict[str, Any]:
        report = tmp_path / "facts.json"
        arguments = [str(DEMO), "--text", str(text), "--device", "cpu", "--json", str(report)]
        done = environment.run("-W", "error", *arguments, variables=variables)
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        assert facts["parity"] is True
        assert facts["cosine_worst"] > 0.99
        assert facts["top1_agreement_percent"] >= 90
        return facts

    return run


def _served(facts: dict[str, Any], slot: str) -> dict[str, int]:
    return {kernel: counts["served"] for kernel, counts in facts["stats"][slot].items()}


def test_all_providers_on_a_machine_without_a_gpu(
    environment: Environment, wheels: dict[str, Path], run_demo: Run
) -> None:
    """Every plugin is loaded, the reference and the policy serve every call, and Triton's refusal is explained."""
    environment.install(*(wheels[name] for name in ("triton-fake-quant", "hub-ms-deform-attn", "sdpa-policy")))
    facts = run_demo()
    assert {plugin["name"]: plugin["state"] for plugin in facts["plugins"]} == dict.fromkeys(
        ("hub_ms_deform_attn", "sdpa_policy", "triton_fake_quant"), "loaded"
    )
    assert _served(facts, "fake_quant_fp8") == {"fake_quant_fp8:reference": facts["calls"]["fake_quant_fp8"]}
    assert _served(facts, "sdpa") == {"sdpa_policy": facts["calls"]["sdpa"]}
    assert facts["portable_calls"] == 0
    refused = {c["kernel"]: c["stage"] for c in facts["choices"][0]["explanation"]["candidates"] if not c["chosen"]}
    assert refused == {"triton_fake_quant_fp8": "capable"}


def test_a_disabled_plugin_is_shown_with_the_way_back(
    environment: Environment, wheels: dict[str, Path], run_demo: Run
) -> None:
    """With ``TOKENSPEED_KERNEL_DISABLE_PLUGINS`` its kernel is no candidate, and the report says why."""
    environment.install(wheels["triton-fake-quant"])
    facts = run_demo(TOKENSPEED_KERNEL_DISABLE_PLUGINS="triton_fake_quant")
    (plugin,) = facts["plugins"]
    assert plugin["state"] == "disabled"
    assert "TOKENSPEED_KERNEL_DISABLE_PLUGINS" in plugin["reason"]
    assert [c["kernel"] for c in facts["choices"][0]["explanation"]["candidates"]] == ["fake_quant_fp8:reference"]


def test_no_provider_at_all(run_demo: Run) -> None:
    """Core alone gives the same numbers: references, and the host's own attention."""
    facts = run_demo()
    assert facts["plugins"] == []
    assert facts["portable_calls"] == facts["calls"]["sdpa"] > 0
    assert facts["stats"]["sdpa"] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "/no/such/file.txt"], "/no/such/file.txt"),
        (["--text", str(DEMO)], str(DEMO)),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_clear_line(environment: Environment, arguments: list[str], said: str) -> None:
    """A missing text or model is one line that names it, exit code 2, no traceback."""
    done = environment.run(str(DEMO), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_packed_model_gives_the_same_bits(environment: Environment, tmp_path: Path) -> None:
    """A folder that holds only what a text needs gives the embeddings of the whole model, to the bit."""
    text = tmp_path / "text.txt"
    text.write_text("A cat sat on the mat.\nThe dog slept in the sun.\nRain fell all night.\n", encoding="utf-8")
    packed = tmp_path / "packed"
    done = environment.run(str(DEMO / "pack.py"), "--text", str(text), "--out", str(packed))
    assert done.returncode == 0, done.stderr
    facts = []
    for more in ([], ["--model", str(packed)]):
        report = tmp_path / "facts.json"
        arguments = [str(DEMO), "--text", str(text), "--device", "cpu", "--json", str(report), *more]
        done = environment.run(*arguments)
        assert done.returncode == 0, done.stderr
        facts.append(json.loads(report.read_text(encoding="utf-8")))
    keys = ("cosine_mean", "cosine_worst", "top1_agreement_percent", "nearest")
    assert [facts[0][key] for key in keys] == [facts[1][key] for key in keys]
