"""Chain rejection sampling, the usual verifier of speculation: here for comparison only.

A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)), where p is
the target's processed distribution; the first one refused is recovered from norm(max(p - q, 0)),
and the bonus token is drawn from p (Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al.,
arXiv 2302.01318). Every token is an exact sample of p, and sum_i min(p_i, q_i) of the drafts are
accepted, a little more than `verify` accepts. The price: the output is exact in distribution only.
Which tokens come out depends on what was drafted, and so on the drafter, the depth and the batch
that decided the depth; and a draft token must be verified whatever it turned out to be, for to
drop it after a look at it biases the output. Without drafts the tokens are those of `verify`.

All randomness is keyed by (seed, position, purpose): the same drafts give the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..interface.draft import Draft
from .encoded import CUT, GREEDY, MIN_P, SAMPLED
from .gumbel import gumbel_rows, uniform, vocabulary_hashes
from .logits_processors import SampleRow, argmax, scaled, truncate
from .seeds import purpose_seed
from .top_k_top_p import masses
from .verifier import (
    LogitsRow,
    SampledToken,
    Verified,
    VerifyRequest,
    processed,
    sample,
    walk_drafts,
)

_ACCEPT, _DRAFT = 0, 1  # purposes; what is recovered has the request's own noise
_BLOCK = 2**22  # probabilities handled at once


class SampledDraft(Draft, frozen=True, eq=False, gc=False):
    """A draft that was drawn from ``probs`` [len(token_ids), vocab], float32."""

    probs: Tensor | None = None


class _Guess(NamedTuple):
    """A draft token and what it was drawn from; None: it was certain."""

    token_id: int
    probs: Tensor | None  # [vocab]


@torch.inference_mode()
def verify_by_rejection(
    logits: Tensor, requests: Sequence[VerifyRequest], draft_probs: Sequence[Tensor | None]
) -> list[Verified]:
    """Verify by rejection sampling; otherwise like `verify`.

    ``draft_probs``: for each row, the distributions [len(draft), vocab] that its tokens were drawn
    from, float32, or None where the drafter left nothing to chance, as a look-up does. Raises
    ValueError for a shape that does not fit.
    """
    guesses = _guesses(requests, draft_probs, logits.shape[-1])
    return walk_drafts(logits, requests, lambda places: _choose(logits, places, guesses))


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[SampledToken], Tensor]:
    """Draw one draft token per row of ``logits`` [num_rows, vocab], which are only read.

    For drafters: the target's processors, but noise that the verifier does not use. Also returns
    what was drawn from, float32 [num_rows, vocab]; of no meaning where a choice is an error.
    """
    exact, errors = probabilities(logits, rows)
    probs = exact.to(torch.float32)
    seeds = [purpose_seed(row.sampling.seed, _DRAFT) for row in rows]
    ids = _gumbel_argmax(probs, [(s, row.position) for s, row in zip(seeds, rows, strict=True)])
    pairs = zip(ids, errors, strict=True)
    return [
        SampledToken(i) if error is None else SampledToken(-1, error) for i, error in pairs
    ], probs


def probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, list[str | None]]:
    """The processed distributions float64 [num_rows, vocab], and what is wrong with each row.

    One-hot at temperature 0. A row depends on itself alone, bit for bit.
    """
    edited = any(row.is_edited(logits.shape[-1]) for row in rows)
    values, errors = processed(logits.to(torch.float32), rows, edited)
    broken = torch.tensor([error is not None for error in errors]).to(values.device)
    weights = _weights(values.masked_fill(broken[:, None], 0.0), rows)
    return weights.to(torch.float64) / weights.sum(-1, keepdim=True), errors


def _weights(values: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Integers [num_rows, vocab] in proportion to the probabilities: their sums are exact."""
    weights = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    kinds = [row.encoded(values.shape[-1]).kind for row in rows]
    for kind in dict.fromkeys(kinds):
        of_kind = [i for i, each in enumerate(kinds) if each == kind]
        ids, weight = _WEIGH[kind](values[of_kind], [rows[i] for i in of_kind])
        weights[of_kind] = torch.zeros_like(weights[of_kind]).scatter_(-1, ids, weight)
    return weights


def _weigh_best(values: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    ids = argmax(values)[:, None]
    return ids, torch.ones_like(ids)


def _weigh_all(values: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    ids = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    return ids, masses(scaled(values, rows), values.shape[-1])


def _weigh_cut(values: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    kept, ids = truncate(scaled(values, rows), rows)
    return ids, masses(kept, values.shape[-1])


def _guesses(
    requests: Sequence[VerifyRequest], draft_probs: Sequence[Tensor | None], vocab_size: int
) -> list[_Guess | None]:
    """Draft token that each row of logits verifies; None behind a whole draft."""
    guesses: list[_Guess | None] = []
    for request, probs in zip(requests, draft_probs, strict=True):
        wanted = (len(request.draft), vocab_size)
        if probs is not None and probs.shape != wanted:
            raise ValueError(f"draft probabilities of shape {tuple(probs.shape)}, not {wanted}")
        each = [None] * len(request.draft) if probs is None else list(probs)
        guesses += [_Guess(*pair) for pair in zip(request.draft, each, strict=True)]
        guesses.append(None)
    return guesses


def _choose(
    logits: Tensor, places: Sequence[LogitsRow], guesses: Sequence[_Guess | None]
) -> list[SampledToken]:
    chosen: dict[int, SampledToken] = {}
    free = [place for place in places if guesses[place[0]] is None]
    if free:
        bonus = sample(logits[[at for at, _ in free]], [row for _, row in free])
        chosen.update(zip((at for at, _ in free), bonus, strict=True))
    bound = [(at, row, guess) for at, row in places if (guess := guesses[at]) is not None]
    step = max(1, _BLOCK // logits.shape[-1])
    for start in range(0, len(bound), step):
        block = bound[start : start + step]
        chosen.update(zip((at for at, *_ in block), _judge(logits, block), strict=True))
    return [chosen[at] for at, _ in places]


def _judge(logits: Tensor, trials: Sequence[_Trial]) -> list[SampledToken]:
    """Accept each draft token, or recover the target's own."""
    rows, guesses = [row for _, row, _ in trials], [guess for *_, guess in trials]
    target, errors = probabilities(logits[[at for at, *_ in trials]], rows)
    drawn_from = _drawn_from(guesses, target)
    accepted = _accepted(target, drawn_from, rows, guesses)
    remains = _remains(target, drawn_from)
    recovered = _gumbel_argmax(remains, [(row.sampling.seed, row.position) for row in rows])
    return [
        SampledToken(-1, error)
        if error is not None
        else SampledToken(guess.token_id if is_in else own)
        for error, is_in, guess, own in zip(errors, accepted, guesses, recovered, strict=True)
    ]


def _remains(target: Tensor, drawn_from: Tensor) -> Tensor:
    """Excess of the target's probabilities, not normalised; the target where it rounds to 0."""
    excess = (target - drawn_from).clamp_(min=0.0)
    return torch.where(excess.amax(-1, keepdim=True) > 0, excess, target)


def _drawn_from(guesses: Sequence[_Guess], like: Tensor) -> Tensor:
    """The drafts' distributions [num_guesses, vocab], one-hot for a token that was certain."""
    probs = torch.zeros_like(like)
    drawn = {i: guess.probs for i, guess in enumerate(guesses) if guess.probs is not None}
    if drawn:
        probs[list(drawn)] = torch.stack(list(drawn.values())).to(probs)
    for index, guess in enumerate(guesses):
        if guess.probs is None and 0 <= guess.token_id < like.shape[-1]:
            probs[index, guess.token_id] = 1.0
    return probs


def _accepted(
    target: Tensor, drawn_from: Tensor, rows: Sequence[SampleRow], guesses: Sequence[_Guess]
) -> list[bool]:
    known = [0 <= guess.token_id < target.shape[-1] for guess in guesses]
    pairs = zip(guesses, known, strict=True)
    ids = [[guess.token_id if is_known else 0] for guess, is_known in pairs]
    index = torch.tensor(ids, device=target.device)
    seeds = [purpose_seed(row.sampling.seed, _ACCEPT) for row in rows]
    draws = [[uniform(seed, row.position)] for seed, row in zip(seeds, rows, strict=True)]
    chance = torch.tensor(draws, dtype=torch.float64).to(target.device)
    passed = chance * drawn_from.gather(-1, index) < target.gather(-1, index)
    return [a and b for a, b in zip(passed[:, 0].tolist(), known, strict=True)]


def _gumbel_argmax(weights: Tensor, places: Sequence[tuple[int, int]]) -> list[int]:
    """Ids drawn in proportion to ``weights`` [num_rows, vocab] with the noise of ``places``."""
    noise = gumbel_rows(places, vocabulary_hashes(weights.shape[-1], weights.device))
    ids: list[int] = argmax(noise.add_(weights.log().to(torch.float32))).tolist()
    return ids


_Trial = tuple[int, SampleRow, _Guess]  # (row of the logits, what it decides, the draft token)
_Weigh = Callable[[Tensor, Sequence[SampleRow]], tuple[Tensor, Tensor]]  # -> ids, weights
_WEIGH: dict[int, _Weigh]
_WEIGH = {GREEDY: _weigh_best, SAMPLED: _weigh_all, MIN_P: _weigh_cut, CUT: _weigh_cut}
