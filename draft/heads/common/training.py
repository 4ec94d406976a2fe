"""What training needs of a kind of draft: a `Recipe` to make one, and the `Student` that learns.

The training loop, the teacher and the data are in draft/training; kinds know nothing of these.
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

    ``p[i]`` is the target's distribution of the token *behind* one row, over the draft's ids:
    ``rows`` [b, T] says which ``i`` belongs to a position, -1 where there is none: outside answers,
    and where nothing follows.
    """

    token_ids: Tensor  # [b, T]
    lens: Tensor  # [b]
    taps: Tensor  # [b, T, num_taps * hidden]
    p: Tensor  # [num_rows, draft_vocab]
    rows: Tensor  # [b, T]

    @property
    def num_tokens(self) -> int:
        """Tokens, without the padding."""
        return int(self.lens.sum())


class Student(Protocol):
    """A draft in training.

    A *chain* is a run of drafted tokens behind one place of an answer, along the answer itself.
    """

    kind: str  # of head, or "lm"
    module: nn.Module
    taps: Taps
    depth: int  # tokens of a chain
    rate: float = 1.0  # of learning, as a share of the usual one

    def loss(self, taught: TeacherOutput, generator: torch.Generator) -> Tensor:
        """The mean loss over a batch."""

    def chains(self, taught: TeacherOutput) -> tuple[Tensor, Tensor]:
        """Draft a chain at every place where a whole one fits; returns logits and target rows.

        Logits ``[chains, depth, draft_vocab]``, and the rows of ``taught.p`` ``[chains,
        depth]``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedKind:
    """What can be chosen for drafts of one kind.

    ``about``: the kind in a few words. ``options``: fields of `TrainOptions` that only some kinds
    have. ``init``: what the weights begin as unless the user says otherwise; None: random.
    """

    about: str
    options: tuple[str, ...]
    init: Literal["target"] | None = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(TrainedKind):
    """How heads of one kind are made and trained.

    ``make``: makes a head of random weights from fields of `HeadConfig`, the number of layers and
    the size of a block. ``begin_as_target``: copies the target's last layers, by the
    number of its layers. ``begin_with_pairs``: begins with neighbouring tokens of answers ``[num,
    2]``, where a part of the head sees the token before alone. ``brings_output``: whether the files
    of a head of a part of the vocabulary have its rows of the target's output: other engines expect
    them beside the map of ids.
    """

    make: Callable[[dict[str, Any], int, int], Any]
    begin_as_target: Callable[[Any, ReadWeight, int], None]
    begin_with_pairs: Callable[[Any, Tensor], None] | None = None
    student: Callable[[Any], Student]
    brings_output: bool = False


# -- parts of students and recipes ----------------------------------------------------------------


def next_values(values: Tensor, anchors: Tensor, depth: int, fill: int) -> Tensor:
    """Take the values of ``depth`` places from each anchor on, ``[b, T]`` to ``[b, n, depth]``.

    ``fill`` stands behind the last place.
    """
    places = anchors.unsqueeze(-1) + torch.arange(depth, device=anchors.device)
    padded = nn.functional.pad(values, (0, depth), value=fill)
    return padded.gather(1, places.flatten(1)).view(places.shape)


def next_rows(rows: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """Take the rows of the distributions behind anchors, ``[b, n, depth]``; -1: none."""
    return next_values(rows, anchors, depth, -1)


def pass_last_tap(fc: nn.Linear, hidden: int) -> None:
    """Add to a layer that it passes the last of the taps on."""
    fc.weight[:, -hidden:] += torch.eye(hidden)
