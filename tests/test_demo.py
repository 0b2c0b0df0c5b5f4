# SPDX-License-Identifier: Apache-2.0
"""The example host on the real encoder, in every way of having its providers; and its answers to mistakes."""

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments import Environment

DEMO = Path(__file__).parent.parent / "hosts" / "encoder_demo"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def demo_environment(environment: Environment, wheels: dict[str, Path]) -> Environment:
    """Return an environment that has what the demo needs besides core."""
    environment.install(wheels["simulate"])
    return environment


@pytest.fixture
def run_demo(demo_environment: Environment, tmp_path: Path) -> Run:
    """Return a runner of the demo over a part of its text, which returns the facts that it wrote."""
    text = tmp_path / "text.txt"
    lines = (DEMO / "sentences.txt").read_text(encoding="utf-8").splitlines()[:40]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(**variables: str) -> dict[str, Any]:
        report = tmp_path / "facts.json"
        picture = tmp_path / "formats.svg"
        arguments = [
            str(DEMO),
            "--text",
            str(text),
            "--device",
            "cpu",
            "--json",
            str(report),
            "--picture",
            str(picture),
        ]
        done = demo_environment.run("-W", "error", *arguments, variables=variables)
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        assert facts["parity"] is True
        fp8 = _formats(facts)["fp8 + fp8"]
        assert fp8["cosine_worst"] > 0.99
        assert fp8["top1_agreement_percent"] >= 90
        return facts

    return run


def _formats(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {measured["name"]: measured for measured in facts["formats"]}


def _served(facts: dict[str, Any], slot: str) -> dict[str, int]:
    return {kernel: counts["served"] for kernel, counts in facts["stats"][slot].items()}


def _candidates(facts: dict[str, Any]) -> list[dict[str, Any]]:
    choice = next(choice for choice in facts["choices"] if choice["slot"] == "fake_quant_fp8")
    candidates: list[dict[str, Any]] = choice["explanation"]["candidates"]
    return candidates


def test_all_providers_on_a_machine_without_a_gpu(
    environment: Environment, wheels: dict[str, Path], run_demo: Run
) -> None:
    """Every plugin is loaded, the reference and the policy serve every call, and Triton's refusal is explained."""
    environment.install(*(wheels[name] for name in ("triton-fake-quant", "hub-ms-deform-attn", "sdpa-policy")))
    facts = run_demo()
    assert {plugin["name"]: plugin["state"] for plugin in facts["plugins"]} == dict.fromkeys(
        ("hub_ms_deform_attn", "sdpa_policy", "triton_fake_quant"), "loaded"
    )
    quantizations = {slot for slot in facts["calls"] if slot != "sdpa"}
    assert len(quantizations) == 8
    for slot in quantizations:
        assert _served(facts, slot) == {f"{slot}:reference": facts["calls"][slot]}
    assert _served(facts, "sdpa") == {"sdpa_policy": facts["calls"]["sdpa"]}
    assert facts["portable_calls"] == 0
    refused = {c["kernel"]: c["stage"] for c in _candidates(facts) if not c["chosen"]}
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
    assert [c["kernel"] for c in _candidates(facts)] == ["fake_quant_fp8:reference"]


def test_no_provider_at_all(run_demo: Run) -> None:
    """Core alone gives the same numbers: references, and the host's own attention."""
    facts = run_demo()
    assert facts["plugins"] == []
    assert facts["portable_calls"] == facts["calls"]["sdpa"] > 0
    assert facts["stats"]["sdpa"] == {}


def test_every_format_in_table_and_picture(run_demo: Run, tmp_path: Path) -> None:
    """Bits include the scales, within a family accuracy grows with them, and no label of the picture hides another."""
    formats = _formats(run_demo())
    bits = {name: measured["weight_bits"] for name, measured in formats.items()}
    assert bits["mxfp4"] == 4.25
    assert bits["int4/32"] == 5.0
    assert bits["nvfp4"] == pytest.approx(4.5, abs=1e-3)  # and one scale a tensor
    assert bits["fp8"] == 8.0625  # a scale a row, of 384 or 1536
    means = [formats[name]["cosine_mean"] for name in ("int3/32", "int4/32", "int5/128", "int6/128", "int8")]
    assert means == sorted(means)
    for name in ("fp8", "int8", "nvfp4", "mxfp4"):
        assert formats[f"{name} + {name}"]["cosine_mean"] < formats[name]["cosine_mean"]
    root = ET.parse(tmp_path / "formats.svg").getroot()  # noqa: S314 -- a file that the demo has just written
    labels = [element for element in root.findall(".//{*}text") if element.text in formats]
    assert {label.text for label in labels} == formats.keys()
    boxes = [_box(label.text or "", label.attrib) for label in labels]
    for (left, right, height), (other_left, other_right, other_height) in itertools.combinations(boxes, 2):
        assert right < other_left or other_right < left or abs(height - other_height) > 13  # the size of the letters


def _box(text: str, attributes: dict[str, str]) -> tuple[float, float, float]:
    """Return left, right and height of a label whose letters are 7 wide, which is more than they are."""
    x, width = float(attributes["x"]), 7 * len(text)
    left = x - width if attributes["text-anchor"] == "end" else x
    return left, left + width, float(attributes["y"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "/no/such/file.txt"], "/no/such/file.txt"),
        (["--text", str(DEMO)], str(DEMO)),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_clear_line(demo_environment: Environment, arguments: list[str], said: str) -> None:
    """A missing text or model is one line that names it, exit code 2, no traceback."""
    done = demo_environment.run(str(DEMO), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_packed_model_gives_the_same_bits(demo_environment: Environment, tmp_path: Path) -> None:
    """A folder that holds only what a text needs gives the embeddings of the whole model, to the bit."""
    text = tmp_path / "text.txt"
    text.write_text("A cat sat on the mat.\nThe dog slept in the sun.\nRain fell all night.\n", encoding="utf-8")
    packed = tmp_path / "packed"
    done = demo_environment.run(str(DEMO / "pack.py"), "--text", str(text), "--out", str(packed))
    assert done.returncode == 0, done.stderr
    facts = []
    for more in ([], ["--model", str(packed)]):
        report = tmp_path / "facts.json"
        arguments = [str(DEMO), "--text", str(text), "--device", "cpu", "--json", str(report), *more]
        done = demo_environment.run(*arguments)
        assert done.returncode == 0, done.stderr
        facts.append(json.loads(report.read_text(encoding="utf-8")))
    assert facts[0]["nearest"] == facts[1]["nearest"]
    for whole, part in zip(facts[0]["formats"], facts[1]["formats"], strict=True):
        assert {**whole, "seconds": 0} == {**part, "seconds": 0}
