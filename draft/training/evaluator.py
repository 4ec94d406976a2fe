"""Evaluator: measures how often a draft is accepted on held-out answers.

It also fits the draft's models of acceptance by logit gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..heads.common.losses import gumbel
from ..heads.common.training import Student, TeacherOutput
from ..proposers.gap_model import GapNumbers
from .conversations import Conversation
from .teacher import Teacher

TEMPERATURES = (0.0, 0.7, 1.0)
BEST = 4  # number of candidates that a tree may hold for a position
FIT_STEPS = 300  # number of optimiser steps that fit a gap model
NEAR_GREEDY = 0.3  # temperature below which an answer counts as greedy


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of chains along held-out answers at one temperature.

    A chain has ``depth`` tokens of the student. ``by_position[j]``: of the chains whose tokens
    before position j are accepted, the share whose token at j is accepted, too. ``best_4[j]``: of
    the same chains, the share whose 4 best candidates at j include the target's token, as in a
    tree. ``tokens_per_step``: mean number of accepted tokens of a chain, plus the recovered or
    bonus token.
    """

    temperature: float
    num_chains: int
    by_position: list[float]
    best_4: list[float]
    tokens_per_step: float

    def to_dict(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """The 4 best candidates of every position, and the rank of the target's token."""

    gaps: Tensor  # [n, 4] best score minus the score of each candidate
    ranks: Tensor  # [n] rank of the target's token; 4 if it is not a candidate
    reached: Tensor  # [n] whether the chain was accepted up to the position


class Evaluator:
    """Evaluates a student on held-out conversations, with the same noise every time."""

    def __init__(self, teacher: Teacher, held: Sequence[Conversation], *, seed: int) -> None:
        self._teacher, self._held, self._seed = teacher, held, seed

    def acceptance(
        self, student: Student, temperature: float, most: int
    ) -> tuple[Acceptance, RankedCandidates]:
        """Return the student's acceptance at a temperature, and its ranked candidates.

        At most ``most`` conversations are measured. Their answers are greedy if ``temperature`` is
        near 0, and sampled otherwise; if there are no such answers, all answers are used.
        """
        was_training = student.module.training
        student.module.eval()
        ranked = [
            self._ranked(student, conversation, temperature, index)
            for index, conversation in enumerate(self._answers(temperature)[:most])
        ]
        student.module.train(was_training)
        if not ranked:
            return Acceptance(temperature, 0, [], [], 1.0), _join([])
        joined = _join(ranked)
        hits = (joined.ranks == 0).view(-1, student.depth).float()
        reached = joined.reached.view(-1, student.depth).float()
        near = (joined.ranks < BEST).view(-1, student.depth).float()
        count = reached.sum(dim=0).clamp_min(1)
        return (
            Acceptance(
                temperature,
                len(hits),
                ((hits * reached).sum(dim=0) / count).tolist(),
                ((near * reached).sum(dim=0) / count).tolist(),
                1 + float(hits.cumprod(dim=1).sum(dim=1).mean()) if len(hits) else 1.0,
            ),
            joined,
        )

    def _answers(self, temperature: float) -> list[Conversation]:
        alike = [
            conversation
            for conversation in self._held
            if (conversation.temperature < NEAR_GREEDY) == (temperature < NEAR_GREEDY)
        ]
        return alike or list(self._held)

    @torch.no_grad()
    def _ranked(
        self, student: Student, conversation: Conversation, temperature: float, index: int
    ) -> RankedCandidates:
        taught = self._teacher([conversation])
        with torch.autocast(taught.taps.device.type, torch.bfloat16):
            logits, rows = student.chains(taught)
        generator = torch.Generator().manual_seed(self._seed + index)
        return _rank(logits.float(), taught, rows, temperature, generator)


def _rank(
    logits: Tensor,
    taught: TeacherOutput,
    rows: Tensor,
    temperature: float,
    generator: torch.Generator,
) -> RankedCandidates:
    """Rank the draft's candidates; target and draft choose their tokens with the same noise.

    ``logits`` [chains, depth, draft_vocab]. ``rows`` [chains, depth]: rows of the target's
    probabilities.
    """
    p = taught.p[rows.flatten()]
    outside = (1 - p.sum(dim=-1, keepdim=True)).clamp_min(1e-7)
    target = torch.cat((p, outside), dim=-1).log()  # last column: all ids that the draft lacks
    log_q = logits.flatten(0, 1).log_softmax(dim=-1)
    if temperature > 0:
        noise = gumbel(tuple(target.shape), generator).to(target.device)
        target = target / temperature + noise
        log_q = log_q / temperature + noise[:, :-1]
    chosen = target.argmax(dim=-1)
    best = log_q.topk(min(BEST, log_q.shape[-1]), dim=-1)
    is_hit = best.indices == chosen.unsqueeze(-1)
    ranks = torch.where(is_hit.any(dim=-1), is_hit.float().argmax(dim=-1), BEST)
    hits = (ranks == 0).view(rows.shape).float()
    reached = torch.cat((torch.ones_like(hits[:, :1]), hits[:, :-1]), dim=1).cumprod(dim=1)
    return RankedCandidates(best.values[:, :1] - best.values, ranks, reached.flatten() > 0)


def _join(ranked: Sequence[RankedCandidates]) -> RankedCandidates:
    if not ranked:
        none = torch.zeros(0, dtype=torch.bool)
        return RankedCandidates(torch.empty(0, BEST), torch.empty(0), none)
    parts = [[getattr(each, name) for each in ranked] for name in ("gaps", "ranks", "reached")]
    return RankedCandidates(*(torch.cat(part) for part in parts))


def fit_gaps(ranked: RankedCandidates, first: GapNumbers) -> GapNumbers:
    """Return the parameters of a `GapModel` that fit the ranked candidates best.

    They maximise the likelihood of the positions before which the whole chain was accepted.
    ``first``: initial values, which are returned if there is no such position.
    """
    gaps, ranks = ranked.gaps[ranked.reached], ranked.ranks[ranked.reached].long()
    if not len(gaps):
        return first
    numbers = torch.tensor(first, requires_grad=True)
    optimizer = torch.optim.Adam([numbers], lr=0.03)
    for _ in range(FIT_STEPS):
        scale, offset, slope = numbers
        none = (offset - slope * gaps[:, 1:2]).to(gaps.dtype)
        scores = torch.cat((-scale * gaps, none), dim=-1)
        loss = torch.nn.functional.cross_entropy(scores, ranks)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = numbers.detach().tolist()
    return found[0], found[1], found[2]
