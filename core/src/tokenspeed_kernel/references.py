# SPDX-License-Identifier: Apache-2.0
"""The contracts of the declared slots, and the references that every registry gets from them."""

from __future__ import annotations

import threading

from tokenspeed_kernel.contract import SlotContract
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, registering_owner

__all__ = ["contracts", "declare_contract", "registry_with_references"]

_QUANT = {
    "fake_quant_fp8": "(x, scale): x on the E4M3 grid of scale",
    "fake_quant_int8_per_channel": "(weight, ch_axis=0, scale=None): weight on the int8 grid of each channel",
    "fake_quant_int8_affine": "(x, lo, hi, scalars=False): x on the int8 grid from lo to hi",
    "fake_quant_int_grouped": "(weight, bits, group_size, scale=None): weight as integers, a scale per group of a row",
    "fake_quant_nvfp4_weight": "(weight, tensor_amax): weight as E2M1, an E4M3 scale per 16, one scale per tensor",
    "fake_quant_nvfp4_dynamic": "(x): the same under the largest magnitude of x",
    "fake_quant_mxfp4_weight": "(weight): weight as E2M1, a power of two per 32",
    "fake_quant_mxfp4_dynamic": "(x): x as E2M1, a power of two per 32",
}

BUILT_IN = (
    *(
        SlotContract(
            name=name,
            family="quant",
            mode=name,
            summary=f"{name}{summary}",
            reference=f"tokenspeed_kernel.reference.quant:{name}",
        )
        for name, summary in _QUANT.items()
    ),
    SlotContract(
        name="ms_deform_attn",
        family="attention",
        mode="ms_deform_attn",
        summary="ms_deform_attn(value, spatial_shapes, sampling_locations, attention_weights): deformable attention",
    ),
    SlotContract(
        name="sdpa",
        family="attention",
        mode="sdpa",
        summary="sdpa(q, k, v, *, attn_mask, dropout_p, is_causal, scale, enable_gqa): scaled dot-product attention",
        validate="tokenspeed_kernel.reference.attention:validate_sdpa",
        portable_in=frozenset({"onnx", "trace"}),  # what torch.export feeds decomposes the fused operator
    ),
)


contracts: dict[str, SlotContract] = {contract.name: contract for contract in BUILT_IN}
"""The declared slots, by name."""

_lock = threading.RLock()
_complete: KernelRegistry | None = None  # the registry that has the reference of every contract


def declare_contract(contract: SlotContract) -> None:
    """Add a slot's contract. The same one may be declared again.

    Raises:
        ValueError: a slot of that name or operator is declared with another contract.
        RuntimeError: the plan is frozen, and the slot is new.
    """
    global _complete  # noqa: PLW0603 -- which registry has the references is a fact of the process
    with _lock:
        for other in contracts.values():
            same_operator = (other.family, other.mode) == (contract.family, contract.mode)
            if (other.name == contract.name or same_operator) and other != contract:
                raise ValueError(f"slot {contract.name!r} cannot be declared: it is at odds with {other!r}")
        if contract.name not in contracts:
            KernelRegistry.get().require_thawed(f"slot {contract.name!r} cannot be declared")
        contracts.setdefault(contract.name, contract)
        _complete = None


def registry_with_references() -> KernelRegistry:
    """Return the process's registry, after registering in it the references of all declared slots."""
    global _complete  # noqa: PLW0603 -- as above
    registry = KernelRegistry.get()
    if _complete is not registry:
        with _lock:
            for contract in contracts.values():
                _register_reference(registry, contract)
            _complete = registry  # last: another thread that sees it may rely on it
    return registry


def _register_reference(registry: KernelRegistry, contract: SlotContract) -> None:
    name = f"{contract.name}:reference"
    if contract.reference is None or registry.get_by_name(name) is not None:
        return
    spec = KernelSpec(name=name, family=contract.family, mode=contract.mode, solution="reference", priority=0)
    token = registering_owner.set(None)  # a plugin that calls a slot while it registers does not own the references
    try:
        registry.register(spec, contract.reference)
    finally:
        registering_owner.reset(token)
