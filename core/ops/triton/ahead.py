"""Tokens of a pass that the device alone knows: taken from what the sampler left, not by the host.

A pass's packet was copied with the other tokens; these are put in their places on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...batch import RaggedBatch
from .choose import take_kernel


def take_ahead(batch: RaggedBatch, fields: Mapping[str, Tensor]) -> None:
    """Complete a pass's fields on the device, behind the copy of them and before who reads them."""
    ahead = batch.ahead
    if ahead is not None:
        take_kernel[(len(ahead.sources),)](
            ahead.words, fields["sources"], fields["token_ids"], ahead.vocab_size - 1, num_warps=1
        )


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Have the kernel compiled."""
    row = torch.full((1,), -1, dtype=torch.int32, device=device)
    take_kernel[(1,)](row.long(), row, row, vocab_size - 1, num_warps=1)
