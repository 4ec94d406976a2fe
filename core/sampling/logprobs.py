"""Log-probabilities of the model's raw logits, unaffected by sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface.output import TokenLogprob
from .logits_processors import best_ids
from .top_k_top_p import mass_unit, masses

_BLOCK = 2**23  # maximum number of logits that a GPU processes at once


@torch.inference_mode()
def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return raw log-probabilities of ``token_ids`` [num_rows] under ``logits`` [num_rows, vocab].

    Each result also has the row's ``num_top`` most likely tokens, best first; of equal ones, the
    lowest id comes first. Raises IndexError for a token id outside the vocabulary.
    """
    size = logits.shape[-1]
    for token_id in token_ids:
        if not 0 <= token_id < size:
            raise IndexError(f"token id {token_id} is not in the vocabulary of {size} tokens")
    if logits.device.type == "cpu":
        pairs = zip(logits, token_ids, strict=True)
        return [_of_row(values.to(torch.float32), token_id, num_top) for values, token_id in pairs]
    # Results are read in blocks, because reading them row by row would wait for the GPU each time.
    step = max(1, _BLOCK // size)
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), step):
        rows = slice(start, start + step)
        found += _of_rows(logits[rows].to(torch.float32), token_ids[rows], num_top)
    return found


def _of_row(values: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    shifted = values - values.amax()
    total = int(masses(shifted, len(values)).sum())
    top = best_ids(shifted, num_top).tolist()
    return _entry(total, [token_id, *top], shifted[[token_id, *top]].tolist(), len(values))


def _of_rows(values: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of ``token_ids`` in ``values`` [num_rows, vocab].

    The host waits for the device only once.
    """
    shifted = values - values.amax(-1, keepdim=True)
    totals = masses(shifted, values.shape[-1]).sum(-1, keepdim=True)
    own = torch.tensor(token_ids, dtype=torch.int64).to(values.device)
    ids = torch.cat((own[:, None], _best_ids(shifted, num_top)), dim=-1)
    known = [each.to(torch.float64) for each in (totals, ids, shifted.gather(-1, ids))]
    entries = []
    for total, *numbers in torch.cat(known, dim=-1).tolist():
        half = len(numbers) // 2
        entries.append(
            _entry(total, [int(i) for i in numbers[:half]], numbers[half:], values.shape[-1])
        )
    return entries


def _best_ids(values: Tensor, num_ids: int) -> Tensor:
    """Return `best_ids` of each row of ``values`` [num_rows, vocab], without waiting for a GPU."""
    num_ids = min(num_ids, values.shape[-1])
    if num_ids == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    best, ids = values.topk(num_ids)
    # topk returns arbitrary ids of the values that equal the last one: the lowest such ids replace
    # them.
    last, places = best[:, -1:], torch.arange(values.shape[-1], device=values.device)
    lowest = torch.where(values == last, places, len(places)).topk(num_ids, largest=False).values
    rank = torch.arange(num_ids, device=values.device) - (best > last).sum(-1, keepdim=True)
    ids = torch.where(best == last, lowest.gather(-1, rank.clamp_(min=0)), ids).sort(-1).values
    order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def _entry(
    total: float, token_ids: Sequence[int], shifted: Sequence[float], vocab_size: int
) -> TokenLogprob:
    """Build the result of a row for ``token_ids``: the token itself, then the most likely tokens.

    ``shifted``: logits of ``token_ids`` minus the row's maximum. ``total``: sum of the row's
    `masses`.
    """
    # A row with NaN may have no mass; then its log-probabilities are NaN.
    log_total = math.log(total * mass_unit(vocab_size)) if total > 0 else math.nan
    (token_id, *top), (own, *others) = token_ids, (value - log_total for value in shifted)
    return TokenLogprob(token_id, own, tuple(zip(top, others, strict=True)))
