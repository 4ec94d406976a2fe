"""HugeArena: memory for weights in huge pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..machine.host_memory import map_zeros

_CHUNK = 64 << 20  # bytes; memory that is never written costs only address space
_ALIGNMENT = 64


class HugeArena:
    """Allocates consecutive tensors in chunks. A chunk is freed with its last tensor."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return dense uint8 zeros of ``shape``."""
        size = math.prod(shape)
        if size > len(self._chunk):
            self._chunk = map_zeros(max(size, _CHUNK))
        taken = self._chunk[:size]
        self._chunk = self._chunk[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken.view(shape)
