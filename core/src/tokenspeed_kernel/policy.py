# SPDX-License-Identifier: Apache-2.0
"""How the winner among eligible kernels is found, by operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tokenspeed_kernel import epoch

__all__ = ["AutotuneParams", "SelectionPolicy", "SelectionStrategy", "current_policy", "set_selection_policy"]


class SelectionStrategy(Enum):
    """By rank, or by measurement."""

    HEURISTIC = "heuristic"
    AUTOTUNE = "autotune"
    """Falls back to the rank: a selection has no inputs to run the candidates on."""


@dataclass
class AutotuneParams:
    """How long a measurement runs each candidate."""

    warmup_iters: int = 3
    bench_iters: int = 10
    use_cuda_events: bool = True


@dataclass
class SelectionPolicy:
    """The strategy of each operator."""

    default_strategy: SelectionStrategy = SelectionStrategy.HEURISTIC
    op_strategies: dict[tuple[str, str], SelectionStrategy] = field(default_factory=dict)
    autotune_params: AutotuneParams = field(default_factory=AutotuneParams)

    def get_strategy(self, family: str, mode: str) -> SelectionStrategy:
        """Return the strategy of one operator."""
        return self.op_strategies.get((family, mode), self.default_strategy)


_policy = SelectionPolicy()


def set_selection_policy(policy: SelectionPolicy) -> None:
    """Find winners by ``policy`` from now on.

    Raises:
        TypeError: ``policy`` is not a :class:`SelectionPolicy`.
    """
    global _policy  # noqa: PLW0603 -- the process has one, as the contract has it
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"policy must be a SelectionPolicy, got {policy!r}")
    _policy = policy
    epoch.bump()


def current_policy() -> SelectionPolicy:
    """Return the policy in force."""
    return _policy
