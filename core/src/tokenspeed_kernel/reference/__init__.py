# SPDX-License-Identifier: Apache-2.0
"""The oracles: what each op computes, in plain PyTorch, by purpose."""
