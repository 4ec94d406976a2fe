"""Training of EAGLE-3 heads: initial weights and loss.

The loop is in draft/training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.model.description.tensors import FINAL_NORM, layer_prefix
from .common.losses import kl_overlap_loss, pass_weights
from .common.training import (
    ReadWeight,
    Recipe,
    Student,
    TeacherOutput,
    next_rows,
    pass_last_tap,
)
from .eagle_network import EagleConfig, EagleHead

NUM_PASSES = 7  # number of unrolled passes


class EagleStudent(Student):
    """An EAGLE-3 head in training, which reads its own features in later passes.

    The paper calls this "training-time test".
    """

    kind = EagleConfig.kind

    def __init__(self, head: EagleHead) -> None:
        self.module: nn.Module = head
        self.taps, self.depth = head.config.taps, NUM_PASSES
        self._head = head

    @override
    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        total = taught.p.new_zeros(())
        weights = pass_weights(self.depth)
        width = taught.token_ids.shape[1]
        passes = min(self.depth, width - 2)
        for index, hidden in enumerate(self._head(taught.token_ids, taught.taps, passes)):
            rows = taught.rows[:, 1 + index :]
            is_used = rows >= 0
            logits = self._head.logits(hidden[is_used])
            losses = kl_overlap_loss(logits, taught.p, rows[is_used])
            total = total + weights[index] * losses.mean()
        return total / sum(weights[:passes])

    @override
    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        width = taught.token_ids.shape[1]
        passes = self._head(taught.token_ids, taught.taps, min(self.depth, width - 2))
        rows = next_rows(
            taught.rows, torch.arange(1, width).expand(len(taught.rows), -1), self.depth
        )
        # Pass k of column i predicts the token after position i + 1 + k.
        fits = (rows >= 0).all(dim=-1)[:, : passes[-1].shape[1]]
        hidden = torch.stack([each[:, : fits.shape[1]][fits] for each in passes], dim=1)
        return self._head.logits(hidden), rows[:, : fits.shape[1]][fits]


def _new(same: dict[str, Any], layers: int, block: int) -> EagleHead:  # noqa: ARG001
    return EagleHead(EagleConfig(**same, num_layers=1))


def _begin_as_target(head: EagleHead, weights: ReadWeight, num_layers: int) -> None:
    """Copy the target's last layer, and set the weights of `fc` so that it returns the last tap.

    The half of the attention's input matrices that reads the embedding keeps random weights.
    """
    prefix = layer_prefix(num_layers - 1)
    for name, own in head.midlayer.named_parameters():
        if name != "input_layernorm.weight":  # This norm belongs to the embedding.
            theirs = weights(prefix + name.replace("hidden_norm", "input_layernorm"))
            own[..., -theirs.shape[-1] :] = theirs
    head.norm.weight.copy_(weights(FINAL_NORM))
    head.fc.weight.zero_()
    pass_last_tap(head.fc, head.config.hidden_size)


EAGLE_RECIPE = Recipe(
    about="a head that drafts one token per pass",
    options=("draft_vocab",),
    make=_new,
    begin_as_target=_begin_as_target,
    student=EagleStudent,
    brings_output=True,
)
