"""Sampler: protocol for choosing the tokens of a step, which each backend implements.

A draft model and its target use the same sampler, so that the same noise decides between nearly
equal scores. Tests compare the other samplers with the torch sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from .drafted_row import DraftedRow
from .gumbel import vocabulary_hashes
from .verifier import Best, Choices, SampledToken, Verified, best, sample, verify


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The tokens of a reduced draft vocabulary, in the order of its logits."""

    token_ids: Tensor  # [draft_vocab], without duplicates
    vocab_size: int

    @cached_property
    def hashes(self) -> Tensor:
        """`vocabulary_hashes` of ``token_ids``, [draft_vocab]."""
        return vocabulary_hashes(self.vocab_size, self.token_ids.device)[self.token_ids]

    @cached_property
    def names(self) -> list[int]:
        """``token_ids`` as a list."""
        ids: list[int] = self.token_ids.tolist()
        return ids

    def serves(self, rows: Sequence[DraftedRow]) -> bool:
        """Whether ``rows`` can be sampled from logits of the reduced vocabulary.

        This is so if no parameter edits the logits of any row.
        """
        return all(row.encoded(self.vocab_size).edited_until == 0 for row in rows)

    def widened(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [n, draft_vocab] as float32 [n, vocab_size], -inf for other tokens."""
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf, dtype=torch.float32)
        wide[:, self.token_ids] = logits.float()
        return wide


class Sampler(Protocol):
    """Chooser of tokens, by the rules of `core.sampling.verifier`.

    Each row's result depends on that row alone.
    """

    def verify(self, logits: Tensor, requests: Sequence[DraftedRow]) -> list[Verified]:
        """Verify drafts against the target's own tokens; see `core.sampling.verifier.verify`."""

    def sample(self, logits: Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
        """Draw one token per row; see `core.sampling.verifier.sample`."""

    def best(
        self,
        logits: Tensor,
        rows: Sequence[DraftedRow],
        num_best: int,
        *,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        """Return the tokens with the highest scores; see `core.sampling.verifier.best`.

        ``draft_vocab``: the tokens to which the columns of ``logits`` belong; None: the columns are
        the whole vocabulary.
        """


class PendingTokens(Protocol):
    """Tokens that the device may still be choosing."""

    @property
    def words(self) -> Tensor:
        """The tokens on the device, one 64-bit word per row; see `DeviceTokens` for the format.

        They are valid until the decoder's next pass, which may read its input tokens from them.
        """

    def choices(self) -> Choices:
        """Wait for these tokens, but not for later launches, and return them.

        The call may also follow later passes.
        """


class PendingBest(Protocol):
    """The best few tokens of each row, which the device may still be choosing."""

    @property
    def words(self) -> Tensor:
        """The words of all rows' tokens on the device, row after row; see `PendingTokens.words`."""

    def bests(self) -> list[Best]:
        """Wait for the best tokens, but not for later launches, and return them.

        The result is as `Sampler.best` describes it.
        """


@runtime_checkable
class DeviceSampler(Sampler, Protocol):
    """A `Sampler` of a backend whose device computes asynchronously.

    A batch may have input tokens that the host does not know yet (`RaggedBatch.device_tokens`), and
    a pass may choose tokens itself (`Wanted.draws`).
    """

    def begin(self, logits: Tensor, rows: Sequence[DraftedRow]) -> PendingTokens:
        """Begin to draw the tokens that `sample` returns, without waiting; at least one row."""

    def begin_runs(
        self, logits: Tensor, rows: Sequence[DraftedRow], counts: Sequence[int]
    ) -> PendingTokens | None:
        """Begin to draw the runs of tokens of a `SamplingPlan`, without waiting.

        Returns None if a row's logits are edited or may be refused: such rows depend on the drafted
        tokens, so they need `begin`.
        """


class TorchSampler(Sampler):
    """The reference `Sampler`, in torch on any device."""

    @override
    def verify(self, logits: Tensor, requests: Sequence[DraftedRow]) -> list[Verified]:
        return verify(logits, requests)

    @override
    def sample(self, logits: Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
        return sample(logits, rows)

    @override
    def best(
        self,
        logits: Tensor,
        rows: Sequence[DraftedRow],
        num_best: int,
        *,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        logits = logits if draft_vocab is None else draft_vocab.widened(logits)
        return best(logits, rows, num_best)
