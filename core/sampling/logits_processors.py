"""Logits processors, which edit each row of logits by the tokens before its own position.

Order within a row: logit_bias -> repetition, frequency, presence penalty -> allowed_token_ids ->
bad words, constraint, min_tokens -> temperature -> top-k -> min-p -> top-p. The verifier draws from
the remaining tokens. A constraint takes precedence over min_tokens: if it allows only stop tokens,
the answer may end early.

A row's result depends only on that row, bit for bit: probability masses are summed as integers,
whose order does not matter, and all other operations are elementwise or a maximum. Ties go to the
lowest token id, so top-k keeps exactly k tokens and ``top_k=1`` is greedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..interface.sampling import SamplingMetadata
from .drafted_row import DraftedRow
from .encoded import EncodedSampling, Fields, Mask
from .top_k_top_p import TopKTopP, nonzero

_NEVER = -math.inf


def apply_processors(values: Tensor, rows: Sequence[DraftedRow]) -> list[str | None]:
    """Edit logits ``values`` [num_rows, vocab] in place by the processors before the temperature.

    Returns one item per row: an error if the request's parameters cannot be served, else None.
    """
    vocab_size, device = values.shape[-1], values.device
    errors = []
    for row_values, row in zip(values, rows, strict=True):
        encoded = row.encoded(vocab_size)
        mask, error = encoded.ask(row.tokens, row.draft)
        if error is None:
            lists = row.sampling.cached(_on_device, vocab_size, device)
            _edit(row_values, row, encoded, lists, mask)
        errors.append(error)
    return errors


def scaled(values: Tensor, rows: Sequence[DraftedRow]) -> Tensor:
    """Return logits ``values`` [num_rows, vocab], less the row's maximum, divided by temperature.

    So the largest value of each row is exactly 0.
    """
    temperatures = [row.encoded(values.shape[-1]).fields["temperature"] for row in rows]
    # torch may multiply by the reciprocal of a scalar divisor. Division by a tensor gives the same
    # bits on every device.
    divisor = torch.tensor(temperatures, dtype=torch.float32).to(values.device)
    return (values - values.amax(-1, keepdim=True)).div_(divisor[:, None])


def truncate(values: Tensor, rows: Sequence[DraftedRow]) -> tuple[Tensor, Tensor]:
    """Apply top-k, min-p and top-p to ``values`` [num_rows, vocab] as `scaled` returns them.

    Returns (values, token ids) of the kept tokens, both [num_rows, width], best first. Rows that
    keep fewer tokens are padded with -inf.
    """
    cuts = TopKTopP.of([row.encoded(values.shape[-1]).fields for row in rows], values)
    ids, total = cuts.candidates(values)
    ranked, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    keep = cuts.keep(ranked, total)
    width = int(keep.sum(-1).max())
    return ranked.masked_fill_(~keep, _NEVER)[:, :width], ids.gather(-1, order[:, :width])


def best_ids(values: Tensor, num_ids: int) -> Tensor:
    """Return the token ids of the ``num_ids`` largest ``values`` [vocab], best first.

    Of equal values, the one with the lowest id comes first.
    """
    if num_ids == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    # topk returns arbitrary indices of equal values, so all equal values are collected.
    ids = nonzero(values >= values.topk(min(num_ids, len(values))).values[-1])
    order = values[ids].sort(descending=True, stable=True).indices
    return ids[order[:num_ids]]


def argmax(values: Tensor) -> Tensor:
    """Return the id of each row's maximum in ``values`` [num_rows, vocab].

    Of equal values, the lowest id is returned.
    """
    if values.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's.
        return torch.from_numpy(np.argmax(values.numpy(), axis=-1))
    return values.argmax(-1)


def _on_device(sampling: SamplingMetadata, vocab_size: int, device: torch.device) -> list[Tensor]:
    encoded = sampling.cached(EncodedSampling, vocab_size)
    lists = encoded.biased, encoded.bias, encoded.allowed, encoded.stops
    return [torch.from_numpy(each).to(device) for each in lists]


def _edit(
    values: Tensor,
    row: DraftedRow,
    encoded: EncodedSampling,
    lists: Sequence[Tensor],
    mask: Mask | None,
) -> None:
    biased, bias, allowed, stops = lists
    if len(biased):
        values[biased] += bias
    _penalise(values, row, encoded.fields)
    if len(allowed):
        kept = values[allowed]
        values.fill_(_NEVER)[allowed] = kept
    if mask is not None:
        values.masked_fill_(~torch.from_numpy(mask).to(values.device), _NEVER)
    for token_id in row.banned_by_words(encoded.words):
        values[token_id] = _NEVER
    if encoded.bans_stops(row.position, mask):
        values[stops] = _NEVER


def _penalise(values: Tensor, row: DraftedRow, fields: Fields) -> None:
    """Apply the repetition penalty of CTRL, then the frequency and presence penalties of OpenAI.

    Source: arXiv 1909.05858.
    """
    factor = fields["repetition_penalty"]
    if factor != 1.0:
        ids = _history(row, 0, values)
        seen = values[ids]
        values[ids] = torch.where(seen > 0, seen / factor, seen * factor)
    frequency, presence = fields["frequency_penalty"], fields["presence_penalty"]
    if frequency != 0.0 or presence != 0.0:
        output = _history(row, row.sampling.prompt_len, values)
        ids, counts = torch.unique(output, return_counts=True)
        values[ids] -= counts * frequency + presence


def _history(row: DraftedRow, start: int, values: Tensor) -> Tensor:
    """Return the row's tokens and draft from position ``start`` on, int64 [num_tokens].

    Ids outside the vocabulary are left out.
    """
    path = row.tokens[start:]
    path.extend(row.draft)
    # `frombuffer` does not copy the memory of ``path``, and it rejects an empty array.
    ids = torch.frombuffer(path, dtype=torch.int64).clone() if path else torch.empty(0).long()
    return ids[(ids >= 0) & (ids < len(values))].to(values.device)
