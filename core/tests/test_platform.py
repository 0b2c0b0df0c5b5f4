# SPDX-License-Identifier: Apache-2.0
"""platform: what a kernel may require, and which machine selection works for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_kernel.platform import (
    ArchVersion,
    CapabilityRequirement,
    InterconnectInfo,
    Platform,
    PlatformInfo,
    current_platform,
)

MakePlatform = Callable[..., PlatformInfo]


def test_arch_versions_compare_as_numbers() -> None:
    """10.0 is newer than 9.0, and 8.9 than 8.6."""
    assert ArchVersion(10, 0) > ArchVersion(9, 0) > ArchVersion(8, 9) > ArchVersion(8, 6)
    assert str(ArchVersion(8, 9)) == "8.9"


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "cpu", "acme"])
def test_default_requirement_is_met_everywhere(platform: MakePlatform, vendor: str) -> None:
    """A kernel that requires nothing runs on every platform."""
    assert CapabilityRequirement().satisfied_by(platform(vendor, 0, 0))


@pytest.mark.parametrize(
    ("requirement", "machine", "code"),
    [
        ({"vendors": frozenset({"nvidia"})}, ("nvidia", 7, 0), None),
        ({"vendors": frozenset({"nvidia"})}, ("amd", 9, 0), "vendor"),
        ({"vendors": frozenset({"nvidia"})}, ("cpu", 0, 0), "vendor"),
        ({"vendors": frozenset({"nvidia", "amd"})}, ("amd", 9, 0), None),
        ({"vendors": frozenset()}, ("nvidia", 9, 0), None),
        ({"min_arch_version": ArchVersion(9, 0)}, ("nvidia", 9, 0), None),
        ({"min_arch_version": ArchVersion(9, 0)}, ("nvidia", 8, 9), "arch"),
        ({"max_arch_version": ArchVersion(8, 9)}, ("nvidia", 8, 9), None),
        ({"max_arch_version": ArchVersion(8, 9)}, ("nvidia", 9, 0), "arch"),
        ({"required_features": frozenset({"tma"})}, ("nvidia", 9, 0, "tma"), None),
        ({"required_features": frozenset({"tma", "f4"})}, ("nvidia", 9, 0, "tma"), "feature"),
    ],
)
def test_requirement(platform: MakePlatform, requirement: dict[str, Any], machine: tuple[Any, ...], code: str) -> None:
    """A requirement is met or says by which rule it is not; bounds are inclusive."""
    unmet = CapabilityRequirement(**requirement).unmet_by(platform(*machine))
    assert (unmet and unmet[0]) == code
    assert CapabilityRequirement(**requirement).satisfied_by(platform(*machine)) is (code is None)


def test_unmet_requirement_names_what_is_needed_and_what_is_there(platform: MakePlatform) -> None:
    """The sentence names both sides."""
    unmet = CapabilityRequirement(required_features=frozenset({"tma", "f4"})).unmet_by(platform("nvidia", 9, 0, "tma"))
    assert unmet == ("feature", "needs f4, which nvidia device (nvidia 9.0) lacks")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(("nvidia", 8, 0), True), (("nvidia", 7, 5), False), (("amd", 9, 4), True), (("amd", 9, 0), False)],
)
def test_vendor_floors(platform: MakePlatform, machine: tuple[Any, ...], expected: bool) -> None:
    """Each vendor has its own least architecture."""
    floors = {"nvidia": ArchVersion(8, 0), "amd": ArchVersion(9, 4)}
    requirement = CapabilityRequirement(vendors=frozenset(floors), vendor_min_arch_versions=floors)
    assert requirement.satisfied_by(platform(*machine)) is expected


def test_a_floor_is_common_or_by_vendor() -> None:
    """A vendor has its own floor or the common one, and a requirement has one kind of them."""
    floors = {"amd": ArchVersion(9, 4)}
    by_vendor = CapabilityRequirement(vendors=frozenset({"amd"}), vendor_min_arch_versions=floors)
    assert by_vendor.min_arch_version_for("amd") == ArchVersion(9, 4)
    assert CapabilityRequirement(ArchVersion(9, 0)).min_arch_version_for("nvidia") == ArchVersion(9, 0)
    with pytest.raises(ValueError, match="not both"):
        CapabilityRequirement(ArchVersion(9, 0), vendors=frozenset({"amd"}), vendor_min_arch_versions=floors)


@pytest.mark.parametrize("vendors", [None, frozenset({"amd"}), frozenset({"nvidia", "amd"})])
def test_vendor_floors_must_name_the_vendors(vendors: frozenset[str] | None) -> None:
    """Floors for other vendors than the required ones are refused when the requirement is made."""
    with pytest.raises(ValueError, match="vendor_min_arch_versions names"):
        CapabilityRequirement(vendors=vendors, vendor_min_arch_versions={"nvidia": ArchVersion(8, 0)})


def test_requirement_hashes() -> None:
    """Requirements serve as keys, floors included."""
    floors = {"nvidia": ArchVersion(8, 0)}
    made = [CapabilityRequirement(vendors=frozenset(floors), vendor_min_arch_versions=floors) for _ in range(2)]
    assert len(set(made)) == 1


def test_platform_info_facts(platform: MakePlatform) -> None:
    """A platform tells its vendor, its architecture as text, and all its features."""
    hopper = platform("nvidia", 9, 0, "memory:tma")
    assert (hopper.is_nvidia, hopper.is_amd, hopper.arch) == (True, False, "9.0")
    assert hopper.features == {"memory:tma"}
    assert str(hopper) == "nvidia device (nvidia 9.0)"


def test_platform_info_hashes() -> None:
    """A platform with every field given serves as a key."""
    link = InterconnectInfo("nvswitch", ((0.0, 900.0), (900.0, 0.0)), 4, True)
    info = PlatformInfo(
        "nvidia", ArchVersion(9, 0), "H", 2, 1, 1.0, 1, 1, 1, interconnect=link, numa_cpu_affinity=((0,),)
    )
    assert hash(info) == hash(info)


def test_override_and_reset_decide_for_whom_is_selected(
    platform: MakePlatform, kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice made before ``override`` or ``reset`` does not outlive it."""
    from tokenspeed_kernel.selection import select_kernel

    kernel("everywhere", priority=4)
    kernel("amd_only", priority=12, capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    chosen = [select_kernel("quant", "op", None).name]
    Platform.override(platform("amd", 9, 4))
    chosen.append(select_kernel("quant", "op", None).name)
    monkeypatch.setattr(PlatformInfo, "detect", classmethod(lambda cls: platform("cpu", 0, 0)))
    Platform.reset()
    chosen.append(select_kernel("quant", "op", None).name)
    assert chosen == ["everywhere", "amd_only", "everywhere"]


def test_platform_is_detected_once(platform: MakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is asked at the first use, and again only after a reset."""
    asked: list[int] = []

    def detect(cls: type) -> PlatformInfo:
        asked.append(1)
        return platform("cpu", 0, 0)

    monkeypatch.setattr(PlatformInfo, "detect", classmethod(detect))
    Platform.reset()
    assert current_platform() is Platform.get() is current_platform()
    assert len(asked) == 1
    Platform.reset()
    current_platform()
    assert len(asked) == 2


@pytest.mark.parametrize("torch", ["None", "a module that raises"])
def test_machine_without_torch_is_a_cpu(python: Callable[..., subprocess.CompletedProcess[str]], torch: str) -> None:
    """Where torch is absent or broken the platform is a CPU without devices."""
    broken = (
        "class Broken:\n    def find_spec(self, name, path=None, target=None):\n        if name == 'torch': 1 / 0\n"
    )
    hide = "sys.modules['torch'] = None" if torch == "None" else f"{broken}\nsys.meta_path.insert(0, Broken())"
    code = (
        "import sys\n" + hide + "\nfrom tokenspeed_kernel.platform import PlatformInfo\np = PlatformInfo.detect()\n"
        "sys.stdout.write(f'{p.vendor} {p.arch} {p.device_count} {sorted(p.features)} {p.total_memory > 0}')"
    )
    done = python(code)
    assert done.stdout == "cpu 0.0 0 [] True", done.stderr


def _fake_torch(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: Any) -> None:
    found = SimpleNamespace(name="fake", total_memory=1 << 30, multi_processor_count=8, **properties)
    cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda index: found, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))


def test_nvidia_device_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device gives its compute capability and the features that it brought."""
    _fake_torch(monkeypatch, major=9, minor=0, memory_clock_rate=2619000, memory_bus_width=5120)
    actual = PlatformInfo.detect()
    assert (actual.vendor, actual.arch, actual.device_count) == ("nvidia", "9.0", 2)
    assert {"tensor_core:f8", "memory:tma", "runtime:cuda_graph"} <= actual.features
    assert "tensor_core:f4" not in actual.features
    assert actual.memory_bandwidth == pytest.approx(3352.3, abs=0.1)


@pytest.mark.parametrize(
    ("name", "expected"), [("gfx942:sramecc+:xnack-", "9.4"), ("gfx90a", "9.0"), ("gfx1100", "11.0"), ("gfx950", "9.5")]
)
def test_amd_device_is_detected(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    """A ROCm device gives its architecture from the last two hexadecimal digits of its name."""
    _fake_torch(monkeypatch, hip="6.2", gcnArchName=name)
    actual = PlatformInfo.detect()
    assert (actual.vendor, actual.arch, actual.is_amd) == ("amd", expected, True)
