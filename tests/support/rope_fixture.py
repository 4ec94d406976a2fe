"""Turns: RoPE of frequencies that a test chooses."""

from __future__ import annotations

import torch
from torch import Tensor


class Turns:
    """`Rope` by the formula: ``frequencies`` [head_dim / 2] are radians per position.

    Its table has ``least`` positions at least.
    """

    def __init__(self, frequencies: Tensor, least: int = 0) -> None:
        self.frequencies = frequencies
        self.least = least

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, head_dim / 2]`` of positions ``[T]``."""
        assert int(positions.max()) < stop
        angles = positions.unsqueeze(1) * self.frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[stop, head_dim / 2]``, or of more positions."""
        stop = max(stop, self.least)
        return self.rows(torch.arange(stop), stop)
