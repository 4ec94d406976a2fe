"""Explanation of why the model chose another token than a recorded one at a position.

It is computed from the raw logits of the position, with the functions of the sampler.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from ..interface.sampling import SamplingMetadata
from .drafted_row import DraftedRow
from .logits_processors import scaled, truncate
from .logprobs import token_logprobs
from .verifier import best, processed

CUTS = {"top_k": 0, "min_p": 0.0, "top_p": 1.0}  # cuts, and their values that keep all tokens


class Explanation(Struct, kw_only=True, frozen=True):
    """Reasons why a position has the model's token and not the recorded one.

    ``chosen``: the token that the sampler draws from these logits; None if it can draw none.
    ``logprobs``: raw log-probabilities of the two tokens, by id. ``margin``: by how much the score
    of the model's token is higher; None if the recorded token is excluded. ``excluded_by``: the
    parameter that excludes the recorded token; None if it is not excluded.
    """

    chosen: int | None
    logprobs: Mapping[int, float]
    margin: float | None = None
    excluded_by: str | None = None


@torch.inference_mode()
def explain(
    logits: array[float],
    tokens: array[int],
    sampling: SamplingMetadata,
    given: int | None,
    own: int | None,
) -> Explanation:
    """Explain why the model's token ``own`` follows ``tokens``, and not the recorded ``given``.

    ``tokens`` include the prompt. ``logits`` [vocab] are the raw logits after ``tokens``. No other
    thread may use the constraint of ``sampling`` at the same time.
    """
    values = torch.from_numpy(np.frombuffer(logits, np.float32).copy())[None]
    row = DraftedRow(tokens, sampling)
    of_interest = [each for each in (given, own) if each is not None]
    logprobs = token_logprobs(values.expand(len(of_interest), -1), of_interest, 0)
    (order,) = best(values, [row], values.shape[-1])
    scores = dict(zip(order.token_ids, order.scores, strict=True))
    margin = excluded_by = None
    if given is not None and order.token_ids:
        if given not in scores:
            excluded_by = _excluded_by(values, row, given)
        elif own in scores:
            margin = scores[own] - scores[given]
    return Explanation(
        chosen=order.token_ids[0] if order.token_ids else None,
        logprobs={each.token_id: each.logprob for each in logprobs},
        margin=margin,
        excluded_by=excluded_by,
    )


def _excluded_by(values: Tensor, row: DraftedRow, token_id: int) -> str | None:
    """Return the first parameter that excludes a token, in the order of the sampler.

    Returns None if no parameter excludes it.
    """
    encoded, sampling = row.encoded(values.shape[-1]), row.sampling
    if len(encoded.allowed) and token_id not in encoded.allowed:
        return "allowed_token_ids"
    mask, _ = encoded.ask(row.tokens, row.draft)
    if mask is not None and not mask[token_id]:
        is_early = row.position < encoded.min_tokens and token_id in encoded.stops
        return "min_tokens" if is_early else sampling.constraint_param
    if token_id in row.banned_by_words(encoded.words):
        return "bad_words"
    if encoded.bans_stops(row.position, mask) and token_id in encoded.stops:
        return "min_tokens"
    edited, _ = processed(values, [row], row.is_edited(values.shape[-1]))
    return next((name for name in CUTS if not _keeps(edited, row, name, token_id)), None) or (
        _last_cut(sampling)
    )


def _keeps(edited: Tensor, row: DraftedRow, name: str, token_id: int) -> bool:
    """Whether a token of the ``edited`` logits [1, vocab] is kept if only cut ``name`` is used."""
    sampling = row.sampling
    others: dict[str, Any] = {cut: off for cut, off in CUTS.items() if cut != name}
    params = dataclasses.replace(sampling.params, **others)
    alone = DraftedRow(row.tokens, dataclasses.replace(sampling, params=params))
    _, ids = truncate(scaled(edited, [alone]), [alone])
    return token_id in ids[0].tolist()


def _last_cut(sampling: SamplingMetadata) -> str | None:
    """Return the cut that the sampler applies last.

    If no cut alone excludes a token, this one does, after the others have removed tokens.
    """
    active = [name for name, off in CUTS.items() if getattr(sampling.params, name) != off]
    return active[-1] if active else None
