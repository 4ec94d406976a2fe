"""Exact top-k, min-p and top-p.

Probabilities are summed as integers (`masses`), so the order of summation does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .encoded import Fields

_NEVER = -math.inf
_SORTABLE = 4096  # this many tokens or fewer are sorted instead of reduced further
_FAINT = -50.0  # tokens below this scaled logit have no mass that counts


def masses(values: Tensor, vocab_size: int) -> Tensor:
    """Return ``exp(values)`` of values <= 0 as int64 multiples of `mass_unit`.

    Sums of such integers are exact.
    """
    return values.exp().mul_(1.0 / mass_unit(vocab_size)).to(torch.int64)


def mass_unit(vocab_size: int) -> float:
    """Return the unit of `masses`: a power of two for which a row's sum stays below 2**62."""
    return math.ldexp(1.0, vocab_size.bit_length() - 62)


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """Limits of top-k, min-p and top-p for several rows, each of which keeps its best tokens."""

    top_k: Tensor  # int64 [num_rows, 1]; the vocabulary size: off
    min_p_logit: Tensor  # float32 [num_rows, 1]; minimum scaled logit by min-p; -inf: off
    top_p: Tensor  # float64 [num_rows, 1]
    vocab_size: int

    @classmethod
    def of(cls, fields: Sequence[Fields], values: Tensor) -> TopKTopP:
        """Build the limits for rows of ``values`` [num_rows, vocab].

        ``fields``: `EncodedSampling.fields` of each row.
        """
        size, device = values.shape[-1], values.device
        top_k = [[each["top_k"] or size] for each in fields]
        min_p_logit = [[each["min_p_logit"]] for each in fields]
        top_p = [[each["top_p"]] for each in fields]
        return cls(
            torch.tensor(top_k).to(device),
            torch.tensor(min_p_logit, dtype=torch.float32).to(device),
            torch.tensor(top_p, dtype=torch.float64).to(device),
            size,
        )

    def keep(self, ranked: Tensor, total: Tensor | None) -> Tensor:
        """Return a mask of the kept values, bool [num_rows, num_candidates].

        ``ranked``: values of each row's candidates, best first. ``total``: mass of each whole row,
        int64 [num_rows, 1]; None: only the candidates count.
        """
        keep = torch.arange(ranked.shape[-1], device=ranked.device) < self.top_k
        keep &= ranked >= self.min_p_logit
        mass = masses(ranked, self.vocab_size).mul_(keep)
        reached = mass.cumsum(-1)
        return keep & (reached - mass < self._limit(reached[:, -1:] if total is None else total))

    def candidates(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return token ids that may be kept, and the argument ``total`` of `keep`.

        The ids are [num_rows, num_candidates], ascending in each row.
        """
        # For one row on a CPU it is cheaper to drop hopeless tokens first than to sort all.
        if len(values) == 1 and values.device.type == "cpu":
            ids, total = self._narrowed(values)
            return ids[None], total
        return torch.arange(self.vocab_size, device=values.device).expand(len(values), -1), None

    def _narrowed(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        top_k = int(self.top_k)
        if top_k < self.vocab_size:
            return nonzero(values[0] >= values[0].topk(top_k).values[-1]), None
        if float(self.min_p_logit) > _NEVER:
            return nonzero(values[0] >= self.min_p_logit[0]), None
        mass = masses(values[0], self.vocab_size)
        total = mass.sum()[None, None]
        return self._narrowed_by_top_p(values[0], mass, total), total

    def _narrowed_by_top_p(self, values: Tensor, mass: Tensor, total: Tensor) -> Tensor:
        limit = int(self._limit(total))
        # Top-p never keeps a token with less mass than (mass outside top-p) / (vocabulary size).
        share = (int(total) - limit) / self.vocab_size * mass_unit(self.vocab_size)
        low, high = (math.log(share) - 1e-5 if share > 0 else _NEVER), 0.0
        ids = nonzero(values >= low)
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
        """Return the mass that the tokens kept by top-p must reach, int64 [num_rows, 1].

        For rows without top-p it is the greatest int64, which no mass reaches.
        """
        limit = (total * self.top_p).ceil_().to(torch.int64)
        return torch.where(self.top_p < 1.0, limit, torch.iinfo(torch.int64).max)


def nonzero(mask: Tensor) -> Tensor:
    """Return the indices of a mask's true items, int64 [num_true]."""
    if mask.device.type == "cpu":  # numpy's flatnonzero is several times as fast as torch's.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]
