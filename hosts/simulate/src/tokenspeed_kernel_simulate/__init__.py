# SPDX-License-Identifier: Apache-2.0
"""Quantize a whole ``nn.Module`` for simulation, through the quantization slots of ``tokenspeed_kernel``."""

from tokenspeed_kernel_simulate.layers import SimulatedLayer
from tokenspeed_kernel_simulate.simulation import Simulation, restore, simulate

__all__ = ["SimulatedLayer", "Simulation", "restore", "simulate"]
