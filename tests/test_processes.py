# SPDX-License-Identifier: Apache-2.0
"""Plans and models across processes: forked and spawned workers, and a process without the provider."""

from pathlib import Path

import pytest

from environments import Environment

WORKERS = """
import sys

import torch
from torch.utils.data import DataLoader, Dataset
from tokenspeed_kernel import discover_plugins, freeze, slot


class Quantized(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.full((3,), float(index))
        handle = slot("fake_quant_fp8")
        y = handle(x, torch.tensor(0.1))
        return handle.explain(x, torch.tensor(0.1)).chosen, freeze().digest, float(y.sum())


if __name__ == "__main__":
    discover_plugins()
    plan = freeze()
    loader = DataLoader(
        Quantized(),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=sys.argv[1],
        worker_init_fn=plan.adopt_in_worker,
    )
    items = list(loader)
    print({chosen for chosen, _, _ in items} == {"template_fake_quant_fp8"})
    print({digest for _, digest, _ in items} == {plan.digest})
    print(items[0][2], round(items[3][2], 1))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_run_the_plan_of_their_parent(
    method: str, environment: Environment, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """Each worker of a data loader adopts the plan, runs its kernel and has its digest."""
    environment.install(wheels["template"])
    program = tmp_path / "program.py"
    program.write_text(WORKERS, encoding="utf-8")
    done = environment.run("-W", "error", str(program), method)
    assert done.stdout.splitlines() == ["True", "True", "0.0 9.0"], done.stderr


SAVE = """
import torch
from tokenspeed_kernel import discover_plugins, slot
import quantizer

discover_plugins()
module = quantizer.Quantizer()
print(module(torch.ones(2)).tolist(), slot("fake_quant_fp8").stats()["template_fake_quant_fp8"]["served"])
torch.save(module, "module.pt")
"""
LOAD = """
import torch
from tokenspeed_kernel import discover_plugins, slot

discover_plugins()
module = torch.load("module.pt", weights_only=False)
print(module(torch.ones(2)).tolist(), slot("fake_quant_fp8").stats()["fake_quant_fp8:reference"]["served"])
"""
MODULE = """
import torch
from tokenspeed_kernel import slot


class Quantizer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fake_quant = slot("fake_quant_fp8")
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, x):
        return self.fake_quant(x, self.scale)
"""


def test_a_saved_model_loads_where_its_provider_is_not(
    environment: Environment, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """A module that ran a plugin's kernel loads after the plugin is gone, and computes the same with the reference."""
    (tmp_path / "quantizer.py").write_text(MODULE, encoding="utf-8")
    environment.install(wheels["template"])
    prelude = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, '.')\n"
    with_provider = environment.output(prelude + SAVE)
    environment.uninstall("kernel-plugin-template")
    assert environment.output(prelude + LOAD) == with_provider
