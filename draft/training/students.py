"""The kinds of drafts that can be trained: what they compute in training, and what is measured."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...core.ops.batch import Taps
from ..heads.block_network import BlockConfig, BlockHead
from ..heads.eagle_network import EagleConfig, EagleHead
from .losses import kl_overlap_loss, pass_weights, slot_weights
from .teacher import TeacherOutput

NUM_PASSES = 7  # that EAGLE-3 is unrolled
ANCHORS = 512  # of a batch, at most


class Student(Protocol):
    """A draft in training.

    A *chain* is a run of drafted tokens behind one place of an answer, along the answer itself.
    """

    kind: str  # of head, or "lm"
    module: nn.Module
    taps: Taps
    depth: int  # tokens of a chain

    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        """The mean loss over a batch."""

    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        """Draft a chain at every place where a whole one fits; returns logits and target rows.

        Logits ``[chains, depth, draft_vocab]``, and the rows of ``taught.p`` ``[chains,
        depth]``.
        """


# -- block ----------------------------------------------------------------------------------------


class BlockStudent(Student):
    """A head that drafts a block in one pass; anchors are drawn anew in every batch."""

    kind = BlockConfig.kind

    def __init__(self, head: BlockHead) -> None:
        self.module: nn.Module = head
        self.taps, self.depth = head.config.taps, head.config.num_drafted
        self._head = head
        self._weights = slot_weights(self.depth, head.config.block_size)

    @override
    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        anchors, is_drawn = _draw_anchors(taught.rows, ANCHORS, generator)
        rows = _rows_behind(taught.rows, anchors, self.depth)
        rows = rows.masked_fill(~is_drawn.unsqueeze(-1), -1)
        hidden = self._head(taught.token_ids, taught.taps, anchors)
        is_used = rows >= 0
        before = _tokens_behind(taught.token_ids, anchors, self.depth)
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
            rows = _rows_behind(taught.rows[index : index + 1], anchors, self.depth)
            fits = (rows >= 0).all(dim=-1)
            token_ids, taps = (each[index : index + 1] for each in (taught.token_ids, taught.taps))
            hidden = self._head(token_ids, taps, anchors)
            before = _tokens_behind(token_ids, anchors, self.depth)
            logits.append(self._head.logits(hidden[fits], before[fits]))
            targets.append(rows[fits])
        return torch.cat(logits), torch.cat(targets)


def _draw_anchors(rows: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Places of answers, ``[b, n]``, and which of them are; the others fill up."""
    is_answer = rows >= 0
    counts = is_answer.sum(dim=1)
    num = int(min(int(counts.max()), max(1, most // len(rows))))
    order = torch.rand(rows.shape, generator=generator).to(rows.device)
    drawn = order.masked_fill(~is_answer, -1.0).topk(num, dim=1)
    return drawn.indices, drawn.values >= 0


def _rows_behind(rows: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """Rows of the distributions of the tokens behind anchors, ``[b, n, depth]``; -1: none."""
    places = anchors.unsqueeze(-1) + torch.arange(depth, device=anchors.device)
    padded = nn.functional.pad(rows, (0, depth), value=-1)
    return padded.gather(1, places.flatten(1)).view(places.shape)


def _tokens_behind(token_ids: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """The token before each that a block drafts, ``[b, n, depth]``."""
    places = anchors.unsqueeze(-1) + torch.arange(depth, device=anchors.device)
    padded = nn.functional.pad(token_ids, (0, depth))
    return padded.gather(1, places.flatten(1)).view(places.shape)


# -- EAGLE-3 --------------------------------------------------------------------------------------


class EagleStudent(Student):
    """An EAGLE-3 head, unrolled on its own features ("training-time test")."""

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
        rows = _rows_behind(
            taught.rows, torch.arange(1, width).expand(len(taught.rows), -1), self.depth
        )
        # Pass k of column i decides the token behind place i + 1 + k.
        fits = (rows >= 0).all(dim=-1)[:, : passes[-1].shape[1]]
        hidden = torch.stack([each[:, : fits.shape[1]][fits] for each in passes], dim=1)
        return self._head.logits(hidden), rows[:, : fits.shape[1]][fits]


# -- a language model -----------------------------------------------------------------------------


class LmStudent(Student):
    """A small language model of the target's vocabulary; it reads tokens alone."""

    kind = "lm"
    taps: Taps = ()

    def __init__(self, model: nn.Module, depth: int) -> None:
        self.module, self.depth = model, depth

    @override
    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        is_used = taught.rows >= 0
        losses = kl_overlap_loss(self._logits(taught)[is_used], taught.p, taught.rows[is_used])
        return losses.mean()

    def _logits(self, taught: TeacherOutput) -> Tensor:
        logits: Tensor = self.module(input_ids=taught.token_ids, use_cache=False).logits
        return logits

    @override
    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        # Along an answer, a draft has seen its own earlier tokens.
        width = taught.token_ids.shape[1]
        anchors = torch.arange(width, device=taught.rows.device).expand(len(taught.rows), -1)
        rows = _rows_behind(taught.rows, anchors, self.depth)
        fits = (rows >= 0).all(dim=-1)
        logits = self._logits(taught)
        padded = nn.functional.pad(logits, (0, 0, 0, self.depth))
        batch, places = fits.nonzero(as_tuple=True)
        spans = places.unsqueeze(-1) + torch.arange(self.depth, device=places.device)
        return padded[batch.unsqueeze(-1), spans], rows[fits]
