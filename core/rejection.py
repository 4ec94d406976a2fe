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

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import gumbel_rows, purpose_seed, uniform, vocabulary_hashes
from .sampling import SampleRow, argmax, is_cut, masses, scaled, survivors
from .step import Draft
from .verify import Choice, Place, Verified, VerifyRow, processed, sample, walk_drafts

_ACCEPT, _DRAFT = 0, 1  # purposes; what is recovered has the request's own noise
_BLOCK = 2**22  # probabilities handled at once


@dataclass(frozen=True, slots=True)
class SampledDraft(Draft):
    """A draft that was drawn from ``probs`` [len(token_ids), vocab], float32."""

    probs: Tensor | None = field(default=None, compare=False)


class _Guess(NamedTuple):
    """A draft token and what it was drawn from; None: it was certain."""

    token_id: int
    probs: Tensor | None  # [vocab]


@torch.inference_mode()
def verify_by_rejection(
    logits: Tensor, rows: Sequence[VerifyRow], draft_probs: Sequence[Tensor | None]
) -> list[Verified]:
    """As `verify`, by rejection sampling.

    ``draft_probs``: for each row, the distributions [len(draft), vocab] that its tokens were drawn
    from, float32, or None where the drafter left nothing to chance, as a look-up does. Raises
    ValueError for a shape that does not fit.
    """
    guesses = _guesses(rows, draft_probs, logits.shape[-1])
    return walk_drafts(logits, rows, lambda places: _choose(logits, places, guesses))


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[Choice], Tensor]:
    """Draw one draft token per row of ``logits`` [num_rows, vocab], which are only read.

    For drafters: the target's processors, but noise that the verifier does not use. Also returns
    what was drawn from, float32 [num_rows, vocab]; of no meaning where a choice is an error.
    """
    exact, errors = probabilities(logits, rows)
    probs = exact.to(torch.float32)
    seeds = [purpose_seed(row.sampling.seed, _DRAFT) for row in rows]
    ids = _race(probs, [(s, row.position) for s, row in zip(seeds, rows, strict=True)])
    pairs = zip(ids, errors, strict=True)
    return [Choice(i) if error is None else Choice(-1, error) for i, error in pairs], probs


def probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, list[str | None]]:
    """The processed distributions float64 [num_rows, vocab], and what is wrong with each row.

    One-hot at temperature 0. A row depends on itself alone, bit for bit.
    """
    values, errors = processed(logits.to(torch.float32), rows, edited=True)
    broken = torch.tensor([error is not None for error in errors]).to(values.device)
    weights = _weights(values.masked_fill_(broken[:, None], 0.0), rows)
    return weights.to(torch.float64) / weights.sum(-1, keepdim=True), errors


def _weights(values: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Integers [num_rows, vocab] in proportion to the probabilities: their sums are exact."""
    size = values.shape[-1]
    weights = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    kinds = [_kind(row, size) for row in rows]
    for kind in sorted(set(kinds)):
        of_kind = [i for i, each in enumerate(kinds) if each == kind]
        chosen, theirs = values[of_kind], [rows[i] for i in of_kind]
        if kind == 0:
            kept, ids = torch.zeros(len(chosen), 1), argmax(chosen)[:, None]
        else:
            kept, ids = scaled(chosen, theirs), torch.arange(size).expand(len(chosen), -1)
        if kind == 2:
            kept, ids = survivors(kept, theirs)
        mass, ids = masses(kept.to(values.device), size), ids.to(values.device)
        weights[of_kind] = torch.zeros_like(weights[of_kind]).scatter_(-1, ids, mass)
    return weights
