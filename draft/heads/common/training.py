"""The interface of a kind of draft to training: a `Recipe` makes a draft, a `Student` learns.

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

    ``p[i]`` is the target's distribution of the token *after* a position, over the draft's ids.
    ``rows`` [b, T] is the ``i`` of each position, or -1 outside answers and at the last token.
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

    A *chain* is a run of draft positions after one position of an answer. Its tokens are the
    answer's.
    """

    kind: str  # kind of head, or "lm"
    module: nn.Module
    taps: Taps
    depth: int  # number of tokens of a chain
    rate: float = 1.0  # factor of the usual learning rate

    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        """Return the mean loss over a batch."""

    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        """Draft a chain at every position where a whole chain fits.

        Returns logits ``[chains, depth, draft_vocab]`` and the rows of ``taught.p``,
        ``[chains, depth]``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedKind:
    """Options for training drafts of one kind.

    ``about``: a short description of the kind. ``options``: fields of `TrainOptions` that the kind
    supports and others may not. ``init``: default of the initial weights; None: random.
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
    that reads only the previous token, from neighbouring tokens of answers ``[num, 2]``.
    ``student``: wraps a head for training. ``brings_output``: whether the files of a reduced head
    include its rows of the target's output layer, which other engines expect with the map of ids.
    """

    make: Callable[[dict[str, Any], int, int], Any]
    begin_as_target: Callable[[Any, ReadWeight, int], None]
    begin_with_pairs: Callable[[Any, Tensor], None] | None = None
    student: Callable[[Any], Student]
    brings_output: bool = False


# -- parts of students and recipes ----------------------------------------------------------------


def next_values(values: Tensor, anchors: Tensor, depth: int, fill: int) -> Tensor:
    """Return the values at ``depth`` positions from each anchor on, ``[b, T] -> [b, n, depth]``.

    Positions after the last one have the value ``fill``.
    """
    places = anchors.unsqueeze(-1) + torch.arange(depth, device=anchors.device)
    padded = nn.functional.pad(values, (0, depth), value=fill)
    return padded.gather(1, places.flatten(1)).view(places.shape)


def next_rows(rows: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """Return the rows of the distributions from anchors on, ``[b, n, depth]``, or -1."""
    return next_values(rows, anchors, depth, -1)


def pass_last_tap(fc: nn.Linear, hidden: int) -> None:
    """Add an identity to a layer, so that it passes the last tap on."""
    fc.weight[:, -hidden:] += torch.eye(hidden)
