"""Explanation of why the model does not choose a recorded token at a position.

It is computed from the raw logits of the position, with the functions of the sampler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..interface.sampling import SamplingMetadata
from .drafted_row import DraftedRow
from .logits_processors import scaled, truncate
from .verifier import processed

CUTS = {"top_k": 0, "min_p": 0.0, "top_p": 1.0}  # cuts, and their values that keep all tokens
CONSTRAINT = "constraint"


@torch.inference_mode()
def excluded_by(values: Tensor, row: DraftedRow, token_id: int) -> str | None:
    """Return the first of `EXCLUDERS` that excludes a token, in the order of the sampler.

    ``values`` [1, vocab] are the raw logits after ``row``. Returns None if nothing excludes it.
    """
    encoded, sampling = row.encoded(values.shape[-1]), row.sampling
    if len(encoded.allowed) and token_id not in encoded.allowed:
        return "allowed_token_ids"
    mask, _ = encoded.ask(row.tokens, row.draft)
    if mask is not None and not mask[token_id]:
        is_early = row.position < encoded.min_tokens and token_id in encoded.stops
        return "min_tokens" if is_early else CONSTRAINT
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
