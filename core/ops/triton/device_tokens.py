"""Tokens of a pass that the device alone knows: taken from what the sampler left, not by the host.

The pass's inputs were copied with the other tokens; these are put in their places on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import RaggedBatch
from .gumbel_argmax_kernels import take_kernel


def take_device_tokens(batch: RaggedBatch, fields: Mapping[str, Tensor]) -> None:
    """Complete a pass's inputs on the device, behind their copy and before the kernels."""
    device_tokens = batch.device_tokens
    if device_tokens is not None:
        take_kernel[(len(device_tokens.sources),)](
            device_tokens.words,
            fields["sources"],
            fields["token_ids"],
            device_tokens.vocab_size - 1,
            num_warps=1,
        )


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Have the kernel compiled."""
    row = torch.full((1,), -1, dtype=torch.int32, device=device)
    take_kernel[(1,)](row.long(), row, row, vocab_size - 1, num_warps=1)
