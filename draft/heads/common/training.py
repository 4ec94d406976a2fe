"""Interface of the kinds of drafts for training: a `Recipe` makes drafts, a `Student` is trained.

The training loop, the teacher and the data are in draft/training; kinds do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ....core.ops.batch import Taps

ReadWeight: TypeAlias = Callable[[str], Tensor]
"""Reads one of the target's tensors, by its name in transformers, as float32."""


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """The target's outputs for a batch of conversations, padded at their ends to one length T.

    ``p[i]`` is the target's distribution of the *next* token after a position, over the draft's
    ids. ``rows`` [b, T] is the index into ``p`` of each position. It is -1 for positions outside
    answers and for the last token of an answer.
    """

    token_ids: Tensor  # [b, T]
    lens: Tensor  # [b]
    taps: Tensor  # [b, T, num_taps * hidden]
    p: Tensor  # [num_rows, draft_vocab]
    rows: Tensor  # [b, T]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lens.sum())


class Student(Protocol):
    """A draft in training.

    Training and evaluation use *chains*: the draft predicts the next few tokens of an answer, and
    each prediction follows the answer's tokens, not the draft's own ones.
    """

    kind: str  # kind of head, or "lm"
    module: nn.Module
    taps: Taps
    depth: int  # number of tokens of a chain
    rate: float = 1.0  # factor by which the learning rate is multiplied

    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        """Return the mean loss over a batch."""

    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        """Predict a chain after every position that has ``depth`` more tokens in its answer.

        Returns logits ``[chains, depth, draft_vocab]`` and the rows of ``taught.p``, ``[chains,
        depth]``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedKind:
    """Options for training drafts of one kind.

    ``about``: a short description of the kind. ``options``: fields of `TrainOptions` that this kind
    supports and that some other kinds do not. ``init``: default for the initial weights; None for
    random ones.
    """

    about: str
    options: tuple[str, ...]
    init: Literal["target"] | None = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(TrainedKind):
    """Functions to make and train heads of one kind.

    ``make``: makes a head with random weights from fields of `HeadConfig`, the number of layers and
    the block size. ``begin_as_target``: copies the target's last layers into a head; its last
    argument is the target's number of layers. ``begin_with_pairs``: initialises the part of a head
    that reads only the previous token, from pairs of neighbouring tokens in answers, [num, 2].
    ``student``: wraps a head for training. ``brings_output``: whether the files of a head with a
    reduced vocabulary include the rows of the target's output layer for it. Other engines require
    these rows.
    """

    make: Callable[[dict[str, Any], int, int], Any]
    begin_as_target: Callable[[Any, ReadWeight, int], None]
    begin_with_pairs: Callable[[Any, Tensor], None] | None = None
    student: Callable[[Any], Student]
    brings_output: bool = False


# -- parts of students and recipes ----------------------------------------------------------------


def next_values(values: Tensor, anchors: Tensor, depth: int, fill: int) -> Tensor:
    """Return the values at each anchor and the positions after it, ``[b, T] -> [b, n, depth]``.

    Positions after the last one have the value ``fill``.
    """
    places = anchors.unsqueeze(-1) + torch.arange(depth, device=anchors.device)
    padded = nn.functional.pad(values, (0, depth), value=fill)
    return padded.gather(1, places.flatten(1)).view(places.shape)


def next_rows(rows: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """Return the indices of the target's distributions at each anchor and after it.

    The shape is [b, n, depth]; positions without a distribution have -1.
    """
    return next_values(rows, anchors, depth, -1)


def pass_last_tap(fc: nn.Linear, hidden: int) -> None:
    """Add an identity matrix to the columns of a layer that read the last tap."""
    fc.weight[:, -hidden:] += torch.eye(hidden)
