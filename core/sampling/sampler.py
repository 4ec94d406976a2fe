"""Sampler: who chooses the tokens of a step, one for each backend.

A draft and its target choose by the same one, so that the same noise decides between nearly the
same scores. The torch one is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from .logits_processors import SampleRow
from .verifier import Choice, Verified, VerifyRow, sample, verify


class Sampler(Protocol):
    """Chooses tokens as `core.sampling.verifier` does: by each row alone, bit for bit."""

    def verify(self, logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
        """Compare drafts with the target's own tokens; see `core.sampling.verifier.verify`."""

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
    ) -> list[Choice]:
        """Draw one token per row; see `core.sampling.verifier.sample`."""


class PendingTokens(Protocol):
    """Tokens that a device was asked to choose."""

    @property
    def words(self) -> Tensor:
        """One for each row, on the device, in a form that the backend reads: see `Ahead`.

        They hold until the decoder's next pass: what reads them is asked for before that.
        """

    def choices(self) -> list[Choice]:
        """Wait for them, and for nothing that the device was asked for since."""


@runtime_checkable
class DeviceSampler(Sampler, Protocol):
    """A `Sampler` of a backend that computes behind the host's back.

    Its batches may go on from tokens that the host does not know yet (`RaggedBatch.device_tokens`),
    and may be told what they will decide, so that the pass itself may choose
    (`RaggedBatch.sampling_plan`).
    """

    def begin(self, logits: Tensor, rows: Sequence[SampleRow]) -> PendingTokens:
        """As `sample`, without waiting."""


class TorchSampler:
    """`Sampler` on any device."""

    def verify(self, logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
        """Compare drafts with the target's own tokens."""
        return verify(logits, rows)

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
    ) -> list[Choice]:
        """Draw one token per row."""
        return sample(logits, rows, temperature_scale=temperature_scale)
