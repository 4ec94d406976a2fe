"""Logits processors, per row and position-exact: each row sees the history of its own path.

Order within a row: logit_bias -> repetition, frequency, presence penalty -> allowed_token_ids ->
bad words, constraint, min_tokens -> temperature -> top-k -> min-p -> top-p. What is left is drawn
in verifier.py. min_tokens gives way to a constraint: an answer that is complete may end.

A row's result depends on that row alone, bit for bit: masses are summed as integers, whose order
does not matter, and all else is elementwise or a maximum. Ties go to the lowest token id, so
top-k keeps exactly k tokens and ``top_k=1`` is greedy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..interface.output import Refusal
from ..interface.sampling import ConstraintFailed, SamplingMetadata, beyond_vocabulary
from .top_k_top_p import TopKTopP, nonzero

_NEVER = -math.inf
MIN_TEMPERATURE = 1e-30  # smaller ones would be 0 in float32


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """A row of logits: it decides the token after ``tokens`` (prompt, output) and ``tail``.

    ``tail`` holds the draft tokens on this row's path, so that ``tokens`` is lent, never copied.
    ``num_ahead``: tokens between the two that the device alone knows.
    """

    tokens: array[int]
    sampling: SamplingMetadata
    tail: Sequence[int] = ()
    num_ahead: int = 0

    @property
    def position(self) -> int:
        """Output position of the token to draw, which is the number of output tokens before it."""
        return len(self.tokens) + self.num_ahead + len(self.tail) - self.sampling.prompt_len

    @property
    def is_edited(self) -> bool:
        """Whether `apply_processors` has anything to do for this row."""
        return self.sampling.has_processors_at(self.position)

    def ending(self, length: int) -> tuple[int, ...]:
        """The last ``length`` tokens of the path, fewer where it is shorter."""
        recent = (*self.tokens[-length:], *self.tail) if length else ()
        return recent[max(0, len(recent) - length) :]


def out_of_vocabulary(sampling: SamplingMetadata, vocab_size: int) -> str | None:
    """The complaint about the first field with a token id that the vocabulary lacks, or None."""
    for name, ids in sampling.token_id_fields().items():
        if message := beyond_vocabulary(name, ids, vocab_size):
            return message
    return None


def has_truncation(row: SampleRow, vocab_size: int) -> bool:
    """Whether `truncate` has anything to do for this row."""
    params = row.sampling.params
    return 0 < params.top_k < vocab_size or params.min_p > 0.0 or params.top_p < 1.0


def apply_processors(values: Tensor, rows: Sequence[SampleRow]) -> list[str | None]:
    """Everything before the temperature, in place on ``values`` [num_rows, vocab].

    Returns, per row, what makes its parameters impossible to serve.
    """
    return [_edited(row_values, row) for row_values, row in zip(values, rows, strict=True)]


def _edited(values: Tensor, row: SampleRow) -> str | None:
    rules = row.sampling.cached(_make_rules, values.shape[-1], values.device)
    if rules.error is None:
        try:
            _edit(values, row, rules)
        except ConstraintFailed as error:
            return Refusal(error)
    return rules.error


def scaled(values: Tensor, rows: Sequence[SampleRow], temperature_scale: float = 1.0) -> Tensor:
    """``values`` [num_rows, vocab] over temperature times scale; the best becomes exactly 0."""
    temperatures = [
        max(row.sampling.params.temperature * temperature_scale, MIN_TEMPERATURE) for row in rows
    ]
    # A scalar divisor may be turned into a factor; a tensor divides alike on every device.
    divisor = torch.tensor(temperatures, dtype=torch.float32).to(values.device)
    return (values - values.amax(-1, keepdim=True)).div_(divisor[:, None])


def truncate(values: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Apply top-k, min-p and top-p to ``values`` [num_rows, vocab], each row's maximum 0.

    Returns (values, ids), both [num_rows, width], best first; shorter rows end in -inf.
    """
    cuts = TopKTopP.of([row.sampling.params for row in rows], values)
    ids, total = cuts.candidates(values)
    ranked, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    keep = cuts.keep(ranked, total)
    width = int(keep.sum(-1).max())
    return ranked.masked_fill_(~keep, _NEVER)[:, :width], ids.gather(-1, order[:, :width])


def best_ids(values: Tensor, num_ids: int) -> Tensor:
    """Ids of the ``num_ids`` largest of ``values`` [vocab], best first, ties to the lowest id."""
    if num_ids == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    # topk alone leaves it open which of several equal values it takes.
    ids = nonzero(values >= values.topk(min(num_ids, len(values))).values[-1])
    order = values[ids].sort(descending=True, stable=True).indices
    return ids[order[:num_ids]]


def argmax(values: Tensor) -> Tensor:
    """Id of each row's maximum in ``values`` [num_rows, vocab], the lowest one in a tie."""
    if values.device.type == "cpu":  # numpy's is ten times as fast
        return torch.from_numpy(np.argmax(values.numpy(), axis=-1))
    return values.argmax(-1)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The token ids of one request's edits as tensors, or what is wrong with them."""

    bias_ids: Tensor
    bias: Tensor
    allowed: Tensor | None
    stops: Tensor
    error: str | None


def _make_rules(sampling: SamplingMetadata, vocab_size: int, device: torch.device) -> _Rules:
    params = sampling.params
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    stops = sorted(i for i in sampling.stop_ids if 0 <= i < vocab_size)
    return _Rules(
        bias_ids=torch.tensor(list(bias), dtype=torch.int64).to(device),
        bias=torch.tensor(list(bias.values()), dtype=torch.float32).to(device),
        allowed=None if allowed is None else torch.tensor(allowed, dtype=torch.int64).to(device),
        stops=torch.tensor(stops, dtype=torch.int64).to(device),
        error=out_of_vocabulary(sampling, vocab_size),
    )


def _edit(values: Tensor, row: SampleRow, rules: _Rules) -> None:
    if len(rules.bias_ids):
        values[rules.bias_ids] += rules.bias
    _penalise(values, row)
    if rules.allowed is not None:
        kept = values[rules.allowed]
        values.fill_(_NEVER)[rules.allowed] = kept
    for word in row.sampling.bad_words_ids:
        if word and row.ending(len(word) - 1) == tuple(word[:-1]):
            values[word[-1]] = _NEVER
    allowed = _constrain(values, row)
    if row.position < row.sampling.params.min_tokens and not _must_stop(allowed, rules):
        values[rules.stops] = _NEVER


def _constrain(values: Tensor, row: SampleRow) -> Tensor | None:
    """Ban what the row's constraint does not allow; returns what it allows, bool [vocab]."""
    constraint, start = row.sampling.constraint, row.sampling.prompt_len
    if constraint is None:
        return None
    mask = constraint.allowed(row.tokens, start, row.tail)
    if mask is None:
        return None
    allowed = torch.from_numpy(np.frombuffer(mask, dtype=np.bool_)).to(values.device)
    values.masked_fill_(~allowed, _NEVER)
    return allowed


def _must_stop(allowed: Tensor | None, rules: _Rules) -> bool:
    """Whether the constraint leaves nothing but stop tokens."""
    return allowed is not None and int(allowed.sum()) == int(allowed[rules.stops].sum())


def _penalise(values: Tensor, row: SampleRow) -> None:
    """Repetition as in CTRL (arXiv 1909.05858), frequency and presence as in OpenAI's API."""
    params = row.sampling.params
    if params.repetition_penalty != 1.0:
        ids = _history(row, 0, values)
        seen, factor = values[ids], params.repetition_penalty
        values[ids] = torch.where(seen > 0, seen / factor, seen * factor)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        output = _history(row, row.sampling.prompt_len, values)
        ids, counts = torch.unique(output, return_counts=True)
        values[ids] -= counts * params.frequency_penalty + params.presence_penalty


def _history(row: SampleRow, start: int, values: Tensor) -> Tensor:
    """The path's tokens from ``start`` on that the vocabulary has, int64 [num_tokens]."""
    path = row.tokens[start:]
    path.extend(row.tail)
    # frombuffer borrows the memory of ``path`` and refuses an empty one.
    ids = torch.frombuffer(path, dtype=torch.int64).clone() if path else torch.empty(0).long()
    return ids[(ids >= 0) & (ids < len(values))].to(values.device)
