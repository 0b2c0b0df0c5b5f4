# SPDX-License-Identifier: Apache-2.0
"""What the machine offers, and what a kernel needs of it: frozen facts.

A machine without a GPU is a platform like any other (vendor ``"cpu"``). torch is imported only when somebody asks for
the platform of this machine; asking initialises CUDA where there is a GPU, so neither import nor discovery asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed_kernel import epoch

__all__ = ["ArchVersion", "CapabilityRequirement", "InterconnectInfo", "Platform", "PlatformInfo", "current_platform"]


@dataclass(frozen=True, order=True)
class ArchVersion:
    """A compute architecture: CUDA compute capability ``(9, 0)``, or gfx942 as ``(9, 4)``."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class InterconnectInfo:
    """How the GPUs of one host are linked; bandwidths in GB/s."""

    topology: str
    bandwidth_matrix: tuple[tuple[float, ...], ...] | None = None
    nvlink_version: int | None = None
    nvswitch_present: bool = False


@dataclass(frozen=True)
class PlatformInfo:
    """One kind of device, and how many a process sees. Memory is in bytes, bandwidth in GB/s; 0 where unknown."""

    vendor: str
    """``"nvidia"``, ``"amd"``, ``"cpu"``, or another vendor's name."""
    arch_version: ArchVersion
    device_name: str
    device_count: int
    total_memory: int
    memory_bandwidth: float
    sm_count: int
    max_threads_per_sm: int
    max_shared_memory_per_sm: int
    sm_features: frozenset[str] = frozenset()
    runtime_features: frozenset[str] = frozenset()
    interconnect: InterconnectInfo | None = None
    numa_cpu_affinity: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def detect(cls) -> PlatformInfo:
        """Return this machine's platform: the first visible GPU's, or the CPU's. Initialises CUDA if it is there."""
        return _detect()

    @property
    def features(self) -> frozenset[str]:
        """Everything a kernel may require by name."""
        return self.sm_features | self.runtime_features

    @property
    def arch(self) -> str:
        """The architecture as text, ``"9.0"``. It does not name the vendor."""
        return str(self.arch_version)

    @property
    def is_nvidia(self) -> bool:
        """Whether the device is NVIDIA's."""
        return self.vendor == "nvidia"

    @property
    def is_amd(self) -> bool:
        """Whether the device is AMD's."""
        return self.vendor == "amd"

    @property
    def is_npu(self) -> bool:
        """Whether the device is an Ascend NPU."""
        return self.vendor == "ascend"

    @property
    def is_ampere(self) -> bool:
        """Whether it is of NVIDIA's architectures 8.x: Ampere and Ada Lovelace."""
        return self.is_nvidia and self.arch_version.major == 8

    @property
    def is_hopper(self) -> bool:
        """Whether it is of NVIDIA's architectures 9.x."""
        return self.is_nvidia and self.arch_version.major == 9

    @property
    def is_blackwell(self) -> bool:
        """Whether it is of NVIDIA's architectures 10.x, the data-centre ones of the generation."""
        return self.is_nvidia and self.arch_version.major == 10

    @property
    def is_ampere_plus(self) -> bool:
        """Whether it is NVIDIA's 8.0 or newer."""
        return self.is_nvidia and self.arch_version.major >= 8

    @property
    def is_hopper_plus(self) -> bool:
        """Whether it is NVIDIA's 9.0 or newer."""
        return self.is_nvidia and self.arch_version.major >= 9

    @property
    def is_blackwell_plus(self) -> bool:
        """Whether it is NVIDIA's 10.0 or newer."""
        return self.is_nvidia and self.arch_version.major >= 10

    @property
    def is_cdna4(self) -> bool:
        """Whether it is AMD's gfx950."""
        return self.is_amd and self.arch_version == ArchVersion(9, 5)

    @property
    def is_cdna5(self) -> bool:
        """Whether it is AMD's gfx1250."""
        return self.is_amd and self.arch_version == ArchVersion(12, 5)

    @property
    def is_cdna4_plus(self) -> bool:
        """Whether it is AMD's gfx950, gfx1250 or newer; the numbers between are of RDNA."""
        return self.is_cdna4 or self.is_cdna5_plus

    @property
    def is_cdna5_plus(self) -> bool:
        """Whether it is AMD's gfx1250 or newer."""
        return self.is_amd and self.arch_version >= ArchVersion(12, 5)

    @property
    def generation_name(self) -> str:
        """The generation's name, ``"Hopper"``, or the architecture where it has none here."""
        named = _GENERATIONS.get((self.vendor, self.arch_version))
        prefix = {"nvidia": "SM", "amd": "GFX"}.get(self.vendor, f"{self.vendor}:")
        return named or f"{prefix}{self.arch}"

    def __str__(self) -> str:
        return f"{self.device_name} ({self.vendor} {self.arch})"


@dataclass(frozen=True)
class CapabilityRequirement:
    """What a kernel needs of the platform. The default needs nothing.

    Raises:
        ValueError: ``vendor_min_arch_versions`` names other vendors than ``vendors`` does, or comes with
            ``min_arch_version``.
    """

    min_arch_version: ArchVersion | None = None
    max_arch_version: ArchVersion | None = None
    required_features: frozenset[str] = frozenset()
    vendors: frozenset[str] | None = None
    """The vendors it runs on; None or none for any."""
    vendor_min_arch_versions: Mapping[str, ArchVersion] = field(default_factory=dict, hash=False)
    """Per vendor, the least architecture: version numbers of two vendors do not compare."""

    def __post_init__(self) -> None:
        if self.vendor_min_arch_versions and self.min_arch_version is not None:
            raise ValueError("give min_arch_version or vendor_min_arch_versions, not both")
        if self.vendor_min_arch_versions and set(self.vendor_min_arch_versions) != set(self.vendors or ()):
            raise ValueError(
                f"vendor_min_arch_versions names {sorted(self.vendor_min_arch_versions)}, but vendors is "
                f"{sorted(self.vendors or ())}: give one least architecture for each vendor, and for no other"
            )

    def min_arch_version_for(self, vendor: str) -> ArchVersion | None:
        """Return the least architecture on ``vendor``, or None if there is none."""
        return self.vendor_min_arch_versions.get(vendor, self.min_arch_version)

    def missing_features(self, platform: PlatformInfo) -> frozenset[str]:
        """Return the required features that ``platform`` lacks."""
        return frozenset(self.required_features) - platform.features

    def unmet_by(self, platform: PlatformInfo) -> tuple[str, str] | None:
        """Return ``(code, sentence)`` for the first requirement that ``platform`` fails, or None if it meets all."""
        if self.vendors and platform.vendor not in self.vendors:
            return "vendor", f"needs {' or '.join(sorted(self.vendors))}, this is {platform}"
        least = self.min_arch_version_for(platform.vendor)
        if least is not None and platform.arch_version < least:
            return "arch", f"needs architecture {least} or newer, this is {platform}"
        if self.max_arch_version is not None and platform.arch_version > self.max_arch_version:
            return "arch", f"needs architecture {self.max_arch_version} or older, this is {platform}"
        if missing := self.missing_features(platform):
            return "feature", f"needs {', '.join(sorted(missing))}, which {platform} lacks"
        return None

    def satisfied_by(self, platform: PlatformInfo) -> bool:
        """Return whether ``platform`` meets every requirement."""
        return self.unmet_by(platform) is None


class Platform:
    """The platform that selection uses: this machine's, unless overridden."""

    _current: PlatformInfo | None = None

    @classmethod
    def get(cls) -> PlatformInfo:
        """Return the platform; the first call detects it."""
        if cls._current is None:
            cls._current = PlatformInfo.detect()
        return cls._current

    @classmethod
    def override(cls, platform: PlatformInfo) -> None:
        """Select for ``platform`` from now on, whatever the machine is."""
        cls._current = platform
        epoch.bump()

    @classmethod
    def reset(cls) -> None:
        """Detect again at the next use."""
        cls._current = None
        epoch.bump()


def current_platform() -> PlatformInfo:
    """Return the platform that selection uses."""
    return Platform.get()


_GENERATIONS = {
    ("nvidia", ArchVersion(8, 0)): "Ampere",
    ("nvidia", ArchVersion(8, 6)): "Ampere",
    ("nvidia", ArchVersion(8, 9)): "Ada Lovelace",
    ("nvidia", ArchVersion(9, 0)): "Hopper",
    ("nvidia", ArchVersion(10, 0)): "Blackwell",
    ("amd", ArchVersion(9, 5)): "CDNA4",
    ("amd", ArchVersion(12, 0)): "RDNA4",
    ("amd", ArchVersion(12, 5)): "CDNA5",
}

# Tensor-core and copy features by the architecture that brought them (CUDA C++ Programming Guide, compute capabilities;
# AMD CDNA ISA guides). The names are those that published kernels require.
_NVIDIA_FEATURES = (
    (ArchVersion(7, 0), ("tensor_core:f16",)),
    (ArchVersion(8, 0), ("tensor_core:int8", "memory:async_copy")),
    (ArchVersion(8, 9), ("tensor_core:f8",)),
    (ArchVersion(9, 0), ("memory:tma", "compute:cluster")),
    (ArchVersion(10, 0), ("tensor_core:f4",)),
)
_AMD_FEATURES = ((ArchVersion(9, 5), ("tensor_core:f16", "tensor_core:f8", "tensor_core:f4", "memory:async_copy")),)


def _detect() -> PlatformInfo:
    try:
        import torch
    except Exception:  # noqa: BLE001 -- a torch that is absent or broken leaves a machine that computes nothing on a GPU
        return _cpu()
    if not torch.cuda.is_available():
        return _cpu()
    properties = torch.cuda.get_device_properties(0)
    amd = torch.version.hip is not None
    arch = _amd_arch(properties.gcnArchName) if amd else ArchVersion(properties.major, properties.minor)
    return PlatformInfo(
        vendor="amd" if amd else "nvidia",
        arch_version=arch,
        device_name=properties.name,
        device_count=torch.cuda.device_count(),
        total_memory=properties.total_memory,
        memory_bandwidth=_bandwidth(properties),
        sm_count=properties.multi_processor_count,
        max_threads_per_sm=getattr(properties, "max_threads_per_multi_processor", 0),
        max_shared_memory_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 0),
        sm_features=_features(arch, _AMD_FEATURES if amd else _NVIDIA_FEATURES),
        runtime_features=frozenset({"runtime:cuda_graph"}),
    )


def _cpu() -> PlatformInfo:
    import platform

    return PlatformInfo(
        vendor="cpu",
        arch_version=ArchVersion(0, 0),
        device_name=platform.machine() or "cpu",
        device_count=0,
        total_memory=_host_memory(),
        memory_bandwidth=0.0,
        sm_count=0,
        max_threads_per_sm=0,
        max_shared_memory_per_sm=0,
    )


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows, no such name elsewhere
        return 0


def _features(arch: ArchVersion, table: tuple[tuple[ArchVersion, tuple[str, ...]], ...]) -> frozenset[str]:
    return frozenset(name for least, names in table if arch >= least for name in names)


def _amd_arch(gcn_name: str) -> ArchVersion:
    """``"gfx942:sramecc+"`` -> 9.4: the last two characters are minor version and stepping, both hexadecimal."""
    digits = gcn_name.partition(":")[0].removeprefix("gfx")
    return ArchVersion(int(digits[:-2]), int(digits[-2], 16))


def _bandwidth(properties: object) -> float:
    """Peak memory bandwidth in GB/s: two transfers a clock, bus width in bits, clock in kHz."""
    clock = getattr(properties, "memory_clock_rate", 0)
    width = getattr(properties, "memory_bus_width", 0)
    return 2.0 * clock * width / 8 / 1e6
