"""Sampler: the protocol that chooses the tokens of a step; each backend implements it.

A draft model and its target use the same sampler, so that the same noise decides between nearly
equal scores. The torch sampler is the oracle.
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

    token_ids: Tensor  # [draft_vocab], distinct
    vocab_size: int

    @cached_property
    def hashes(self) -> Tensor:
        """`vocabulary_hashes` at these ids, [draft_vocab]."""
        return vocabulary_hashes(self.vocab_size, self.token_ids.device)[self.token_ids]

    @cached_property
    def names(self) -> list[int]:
        """Token ids as a list."""
        ids: list[int] = self.token_ids.tolist()
        return ids

    def serves(self, rows: Sequence[DraftedRow]) -> bool:
        """Whether rows can be sampled from these tokens alone: no row may be edited."""
        return all(row.encoded(self.vocab_size).edited_until == 0 for row in rows)

    def widened(self, logits: Tensor) -> Tensor:
        """Widen ``[n, draft_vocab]`` to float32 ``[n, vocab_size]``; the other tokens get -inf."""
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf, dtype=torch.float32)
        wide[:, self.token_ids] = logits.float()
        return wide


class Sampler(Protocol):
    """Chooses tokens as `core.sampling.verifier` does.

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

        ``draft_vocab``: the tokens of the columns of ``logits``, unless they are the whole
        vocabulary.
        """


class PendingTokens(Protocol):
    """Tokens that a device is still choosing."""

    @property
    def words(self) -> Tensor:
        """One word per row on the device, in the backend's format; see `DeviceTokens`.

        They are valid until the decoder's next pass, which may take its tokens from them.
        """

    def choices(self) -> Choices:
        """Return these tokens without waiting for later launches.

        May be called after later passes.
        """


class PendingBest(Protocol):
    """The best few tokens of each row, which a device is still choosing."""

    @property
    def words(self) -> Tensor:
        """The words of all rows' tokens on the device, row after row; see `PendingTokens.words`."""

    def bests(self) -> list[Best]:
        """Return the best tokens without waiting for later launches; see `Sampler.best`."""


@runtime_checkable
class DeviceSampler(Sampler, Protocol):
    """A `Sampler` of a backend whose device computes asynchronously.

    A batch may continue tokens that the host does not know yet (`RaggedBatch.device_tokens`), and a
    pass may choose tokens itself (`Wanted.draws`).
    """

    def begin(self, logits: Tensor, rows: Sequence[DraftedRow]) -> PendingTokens:
        """Draw as `sample` does, for at least one row, without waiting."""

    def begin_runs(
        self, logits: Tensor, rows: Sequence[DraftedRow], counts: Sequence[int]
    ) -> PendingTokens | None:
        """Draw runs of tokens, as `SamplingPlan` describes them, without waiting.

        Returns None if a row is edited or may be refused: such rows need the drafts (`begin`).
        """


class TorchSampler(Sampler):
    """The oracle `Sampler`, in torch on any device."""

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
