"""Evaluator: a draft on held-out answers, its acceptance by position and its gap models."""

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
BEST = 4  # candidates of a position that a tree may hold
FIT_STEPS = 300  # of the optimiser of gap models
NEAR_GREEDY = 0.3  # below it an answer counts as a greedy one


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Along held-out answers at one temperature, chains as deep as the draft drafts at once.

    ``by_position[j]``: of the chains that are right so far, those that are right at j as well.
    ``best_4[j]``: those whose 4 best candidates hold the target's token, as a tree may have them.
    ``tokens_per_step``: the accepted tokens of a whole chain and one more.
    """

    temperature: float
    num_chains: int
    by_position: list[float]
    best_4: list[float]
    tokens_per_step: float

    def to_dict(self) -> dict[str, object]:
        """Fields for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """The 4 best candidates of every position, and which of them the target took."""

    gaps: Tensor  # [n, 4] how far each lies behind the best score
    ranks: Tensor  # [n] the target's token; 4: none of them
    reached: Tensor  # [n] whether the chain was right so far


class Evaluator:
    """Evaluates a student on held-out conversations, with the same noise every time."""

    def __init__(self, teacher: Teacher, held: Sequence[Conversation], *, seed: int) -> None:
        self._teacher, self._held, self._seed = teacher, held, seed

    def acceptance(
        self, student: Student, temperature: float, most: int
    ) -> tuple[Acceptance, RankedCandidates]:
        """Measure ``most`` conversations, with answers at ``temperature`` if there are any."""
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
    """Target and draft choose with the same noise. ``logits`` [chains, depth, draft_vocab]."""
    p = taught.p[rows.flatten()]
    outside = (1 - p.sum(dim=-1, keepdim=True)).clamp_min(1e-7)
    target = torch.cat((p, outside), dim=-1).log()  # all ids that the draft lacks are the last one
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
    """The numbers of a `GapModel` under which the ranks of reached positions are likeliest."""
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
