"""Training of block heads: initial weights and loss.

The loop is in draft/training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.model.description.tensors import FINAL_NORM, layer_prefix
from .block_network import BlockConfig, BlockHead
from .common.losses import kl_overlap_loss, slot_weights
from .common.training import (
    ReadWeight,
    Recipe,
    Student,
    TeacherOutput,
    next_rows,
    next_values,
    pass_last_tap,
)

ANCHORS = 512  # maximum number of anchors of a batch
MARKOV_RANK = 64
SMOOTHING = 1.0  # pseudo-count per token, spread over next tokens by their frequency
QUIET = 0.3  # initial scale of the final norm if the Markov head is initialised from pairs


class BlockStudent(Student):
    """A block head in training; each batch draws new random anchors."""

    kind = BlockConfig.kind

    def __init__(self, head: BlockHead) -> None:
        self.module: nn.Module = head
        self.taps, self.depth = head.config.taps, head.config.num_drafted
        self._head = head
        self._weights = slot_weights(self.depth, head.config.block_size)

    @override
    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        anchors, is_drawn = _draw_anchors(taught.rows, ANCHORS, generator)
        rows = next_rows(taught.rows, anchors, self.depth)
        rows = rows.masked_fill(~is_drawn.unsqueeze(-1), -1)
        hidden = self._head(taught.token_ids, taught.taps, anchors)
        is_used = rows >= 0
        before = next_values(taught.token_ids, anchors, self.depth, 0)
        logits = self._head.logits(hidden[is_used].unsqueeze(1), before[is_used].unsqueeze(1))
        losses = kl_overlap_loss(logits.squeeze(1), taught.p, rows[is_used])
        weights = self._weights.to(losses.device).expand(rows.shape)[is_used]
        return (losses * weights).sum() / weights.sum()

    @override
    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        places = (taught.rows >= 0).nonzero()
        logits, targets = [], []
        for index in range(len(taught.rows)):
            anchors = places[places[:, 0] == index, 1].unsqueeze(0)
            if not anchors.shape[1]:
                continue
            rows = next_rows(taught.rows[index : index + 1], anchors, self.depth)
            fits = (rows >= 0).all(dim=-1)
            token_ids, taps = (each[index : index + 1] for each in (taught.token_ids, taught.taps))
            hidden = self._head(token_ids, taps, anchors)
            before = next_values(token_ids, anchors, self.depth, 0)
            logits.append(self._head.logits(hidden[fits], before[fits]))
            targets.append(rows[fits])
        return torch.cat(logits), torch.cat(targets)


def _draw_anchors(rows: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random positions in answers as anchors, at most ``most`` in all.

    Returns positions ``[b, n]``, and whether each one was drawn; the others are padding.
    """
    is_answer = rows >= 0
    counts = is_answer.sum(dim=1)
    num = int(min(int(counts.max()), max(1, most // len(rows))))
    order = torch.rand(rows.shape, generator=generator).to(rows.device)
    drawn = order.masked_fill(~is_answer, -1.0).topk(num, dim=1)
    return drawn.indices, drawn.values >= 0


def _new(same: dict[str, Any], layers: int, block: int) -> BlockHead:
    config = BlockConfig(
        **same,
        num_layers=layers,
        block_size=block,
        mask_token_id=same["vocab_size"] - 1,
        markov_rank=MARKOV_RANK,
        markov_vocab_size=same["draft_vocab_size"],
    )
    return BlockHead(config)


def _begin_as_target(head: BlockHead, weights: ReadWeight, num_layers: int) -> None:
    """Copy the target's last layers, and add the last tap to the output of `fc`.

    The norms of queries and keys, which the target may lack, begin with the scales of the target's
    queries and keys.
    """
    count = head.config.num_layers
    first = max(0, num_layers - count)
    for index, layer in enumerate(head.layers):
        prefix = layer_prefix(min(first + index, num_layers - 1))
        norm = weights(f"{prefix}input_layernorm.weight")
        for name, own in layer.named_parameters():
            if name.endswith("_norm.weight"):  # a norm of queries or keys
                own.fill_(_scale(weights(prefix + name.replace("_norm", "_proj")), norm))
            else:
                own.copy_(weights(prefix + name))
    head.hidden_norm.weight.copy_(weights(f"{layer_prefix(first)}input_layernorm.weight"))
    head.norm.weight.copy_(weights(FINAL_NORM))
    pass_last_tap(head.fc, head.config.hidden_size)


def _scale(matrix: Tensor, norm: Tensor) -> float:
    """Return the expected root mean square of ``matrix @ x`` for inputs x normed by ``norm``."""
    return math.sqrt(float((matrix * norm).square().sum(dim=1).mean()))


def _begin_with_pairs(head: BlockHead, pairs: Tensor) -> None:
    """Initialise the Markov head from ``pairs`` [num, 2] of neighbouring tokens in the data.

    The first rank holds the log frequency of each id. The other ranks hold the strongest directions
    of log(p(next | before) / p(next)), weighted by the frequencies of both ids.
    """
    markov, config = head.markov_head, head.config
    if markov is None or markov.kind != "vanilla":
        return
    size, rank = config.draft_vocab_size, config.markov_rank
    before, following = (head.markov_ids(each) for each in pairs.T)
    is_known = (before >= 0) & (following >= 0)
    counts = torch.zeros(size, size)
    counts.index_put_((before[is_known], following[is_known]), torch.ones(()), accumulate=True)
    total = counts.sum()
    behind_share = (counts.sum(dim=0) + 0.1) / (total + 0.1 * size)
    before_share = (counts.sum(dim=1) + 0.1) / (total + 0.1 * size)
    seen = counts.sum(dim=1, keepdim=True)
    likelier = (counts + SMOOTHING * behind_share) / ((seen + SMOOTHING) * behind_share)
    rows, columns = before_share.sqrt().unsqueeze(1), behind_share**0.75
    u, strength, v = torch.svd_lowrank(likelier.log() * rows * columns, q=rank - 1, niter=3)
    log_share = behind_share.log()
    markov.markov_w1.weight[:size, :1] = 1.0
    markov.markov_w2.weight[:, :1] = (log_share - log_share.mean()).unsqueeze(1)
    markov.markov_w1.weight[:size, 1:] = u * strength.sqrt() / rows
    markov.markov_w2.weight[:, 1:] = v * strength.sqrt() / columns.unsqueeze(1)
    head.norm.weight.mul_(QUIET)


BLOCK_RECIPE = Recipe(
    about="a head that drafts several tokens in one pass",
    options=("layers", "block", "draft_vocab"),
    init=None,
    make=_new,
    begin_as_target=_begin_as_target,
    begin_with_pairs=_begin_with_pairs,
    student=BlockStudent,
)
