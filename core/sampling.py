"""Logits processors, per row and position-exact: each row sees the history of its own path.

Order within a row: logit_bias -> repetition, frequency, presence penalty -> allowed_token_ids ->
bad words, constraint, min_tokens -> temperature -> top-k -> min-p -> top-p. What is left is drawn
in verify.py. min_tokens gives way to a constraint: an answer that is complete may end.

A row's result depends on that row alone, bit for bit: masses are summed as integers, whose order
does not matter, and all else is elementwise or a maximum. Ties go to the lowest token id, so
top-k keeps exactly k tokens and ``top_k=1`` is greedy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .constraint import ConstraintFailed
from .step import Refusal, RowSampling

_NEVER = -math.inf
_MIN_TEMPERATURE = 1e-30  # smaller ones would be 0 in float32
_SORTABLE = 4096  # tokens; sorting fewer is cheaper than narrowing them further
_FAINT = -50.0  # log-probabilities below it do not count


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose token a row of logits decides: the one after ``tokens`` (prompt, output) and ``tail``.

    ``tail`` holds the draft tokens on this row's path, so that ``tokens`` is lent, never copied.
    """

    tokens: array[int]
    sampling: RowSampling
    tail: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Output position of the token to draw, which is the number of output tokens before it."""
        return len(self.tokens) + len(self.tail) - self.sampling.prompt_len

    def ending(self, length: int) -> tuple[int, ...]:
        """The last ``length`` tokens of the path, fewer where it is shorter."""
        recent = (*self.tokens[-length:], *self.tail) if length else ()
        return recent[max(0, len(recent) - length) :]


def out_of_vocabulary(sampling: RowSampling, vocab_size: int) -> str | None:
    """The complaint about the first field with a token id that the vocabulary lacks, or None.

    Ids of ``stop_ids`` that the caller did not write (a model's own) are ignored: never drawn.
    """
    fields: dict[str, Sequence[int]] = {
        "logit_bias": tuple(sampling.params.logit_bias or ()),
        "allowed_token_ids": sampling.params.allowed_token_ids or (),
        "bad_words": [token_id for word in sampling.bad_words_ids for token_id in word],
        "stop_token_ids": sampling.params.stop_token_ids,
    }
    for name, ids in fields.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            worst = max(ids) if min(ids) >= 0 else min(ids)
            return f"{name} has token id {worst}, but the vocabulary has {vocab_size} tokens"
    return None


def is_edited(row: SampleRow) -> bool:
    """Whether `edit_rows` has anything to do for this row."""
    params = row.sampling.params
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.allowed_token_ids is not None
        or bool(row.sampling.bad_words_ids)
        or row.sampling.constraint is not None
        or row.position < params.min_tokens
    )


def is_cut(row: SampleRow, vocab_size: int) -> bool:
    """Whether `survivors` has anything to do for this row."""
    params = row.sampling.params
    return 0 < params.top_k < vocab_size or params.min_p > 0.0 or params.top_p < 1.0


def edit_rows(values: Tensor, rows: Sequence[SampleRow]) -> list[str | None]:
    """Everything before the temperature, in place on ``values`` [num_rows, vocab].

    Returns, per row, what makes its parameters impossible to serve.
    """
    return [_edited(row_values, row) for row_values, row in zip(values, rows, strict=True)]


def _edited(values: Tensor, row: SampleRow) -> str | None:
    rules = _rules(row.sampling, values.shape[-1], values.device)
    if rules.error is None:
        try:
            _edit(values, row, rules)
        except ConstraintFailed as error:
            return Refusal(error)
    return rules.error


def scaled(values: Tensor, rows: Sequence[SampleRow], tau: float = 1.0) -> Tensor:
    """``values`` [num_rows, vocab] over temperature times ``tau``; the best becomes exactly 0."""
    degrees = [max(row.sampling.params.temperature * tau, _MIN_TEMPERATURE) for row in rows]
    # A scalar divisor may be turned into a factor; a tensor divides alike on every device.
    divisor = torch.tensor(degrees, dtype=torch.float32).to(values.device)
    return (values - values.amax(-1, keepdim=True)).div_(divisor[:, None])


def survivors(values: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """What top-k, min-p and top-p leave of ``values`` [num_rows, vocab], each row's maximum 0.

    Returns (values, ids), both [num_rows, width], best first; shorter rows end in -inf.
    """
    cuts = _Cuts.of(rows, values)
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
    ids = _nonzero(values >= values.topk(min(num_ids, len(values))).values[-1])
    order = values[ids].sort(descending=True, stable=True).indices
    return ids[order[:num_ids]]


def argmax(values: Tensor) -> Tensor:
    """Id of each row's maximum in ``values`` [num_rows, vocab], the lowest one in a tie."""
    if values.device.type == "cpu":  # numpy's is ten times as fast
        return torch.from_numpy(np.argmax(values.numpy(), axis=-1))
    return values.argmax(-1)


def masses(values: Tensor, vocab_size: int) -> Tensor:
    """``exp(values)`` of values <= 0 in units of `mass_unit`, int64: their sums are exact."""
    return values.exp().mul_(1.0 / mass_unit(vocab_size)).to(torch.int64)


def mass_unit(vocab_size: int) -> float:
    """The least mass that counts: a power of two such that a whole row sums below 2**62."""
    return math.ldexp(1.0, vocab_size.bit_length() - 62)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The token ids of one request's edits as tensors, or what is wrong with them."""

    bias_ids: Tensor
    bias: Tensor
    allowed: Tensor | None
    stops: Tensor
    error: str | None


# By request and no longer than it lives: it may hold a big matcher.
_RULES: WeakKeyDictionary[RowSampling, dict[tuple[int, torch.device], _Rules]] = WeakKeyDictionary()


def _rules(sampling: RowSampling, vocab_size: int, device: torch.device) -> _Rules:
    known, place = _RULES.setdefault(sampling, {}), (vocab_size, device)
    if place not in known:
        known[place] = _make_rules(sampling, vocab_size, device)
    return known[place]


def _make_rules(sampling: RowSampling, vocab_size: int, device: torch.device) -> _Rules:
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


@dataclass(frozen=True, slots=True)
class _Cuts:
    """top-k, min-p and top-p of several rows: of tokens best first, a prefix is kept."""

    top_k: Tensor  # int64 [num_rows, 1]; the vocabulary's size where off
    floor: Tensor  # float32 [num_rows, 1]; least value for min-p, -inf where off
    top_p: Tensor  # float64 [num_rows, 1]
    vocab_size: int

    @classmethod
    def of(cls, rows: Sequence[SampleRow], values: Tensor) -> _Cuts:
        """The cuts that the rows of ``values`` [num_rows, vocab] ask for."""
        size, params = values.shape[-1], [row.sampling.params for row in rows]
        top_k = [[p.top_k if 0 < p.top_k < size else size] for p in params]
        floor = [[math.log(p.min_p) if p.min_p > 0.0 else _NEVER] for p in params]
        top_p = [[p.top_p] for p in params]
        return cls(
            torch.tensor(top_k).to(values.device),
            torch.tensor(floor, dtype=torch.float32).to(values.device),
            torch.tensor(top_p, dtype=torch.float64).to(values.device),
            size,
        )

    def keep(self, ranked: Tensor, total: Tensor | None) -> Tensor:
        """Which of the values ``ranked`` best first stay, bool [num_rows, num_candidates].

        ``total``: a row's mass, where ``ranked`` is not all of it.
        """
        keep = torch.arange(ranked.shape[-1], device=ranked.device) < self.top_k
        keep &= ranked >= self.floor
        mass = masses(ranked, self.vocab_size).mul_(keep)
        reached = mass.cumsum(-1)
        return keep & (reached - mass < self._limit(reached[:, -1:] if total is None else total))

    def candidates(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids in rising order that may stay [num_rows, num_candidates], and the `keep` total."""
        if len(values) == 1:  # a big vocabulary on a CPU: narrowing is cheaper than sorting
            ids, total = self._narrowed(values)
            return ids[None], total
        return torch.arange(self.vocab_size, device=values.device).expand(len(values), -1), None

    def _narrowed(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        top_k = int(self.top_k)
        if top_k < self.vocab_size:
            return _nonzero(values[0] >= values[0].topk(top_k).values[-1]), None
        if float(self.floor) > _NEVER:
            return _nonzero(values[0] >= self.floor[0]), None
        mass = masses(values[0], self.vocab_size)
        total = mass.sum()[None, None]
        return self._narrowed_by_top_p(values[0], mass, total), total

    def _narrowed_by_top_p(self, values: Tensor, mass: Tensor, total: Tensor) -> Tensor:
        limit = int(self._limit(total))
        # Tokens lighter than an equal share of what top-p leaves out cannot be inside it.
        share = (int(total) - limit) / self.vocab_size * mass_unit(self.vocab_size)
        low, high = (math.log(share) - 1e-5 if share > 0 else _NEVER), 0.0
        ids = _nonzero(values >= low)
        low = max(low, _FAINT)
        while len(ids) > _SORTABLE and high - low > 0.05:
            middle = (low + high) / 2
            above = ids[values[ids] >= middle]
            if int(mass[above].sum()) >= limit:
                ids, low = above, middle
            else:
                high = middle
        return ids

    def _limit(self, total: Tensor) -> Tensor:
        """The mass at which a row is full, int64 [num_rows, 1]; out of reach where top-p is off."""
        limit = (total * self.top_p).ceil_().to(torch.int64)
        return torch.where(self.top_p < 1.0, limit, torch.iinfo(torch.int64).max)


def _nonzero(mask: Tensor) -> Tensor:
    if mask.device.type == "cpu":  # numpy's is several times as fast
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]
