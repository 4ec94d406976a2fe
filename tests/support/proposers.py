"""Base of the fakes of proposers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from foretoken.core.execution.proposer import PageRows
from foretoken.core.interface.protocols import ProposerTraits
from foretoken.core.ops.batch import Taps

MODEL = ProposerTraits(tokens_per_pass=1, catches_up=True, weighs=True)
"""Traits of a draft model."""


class BareProposer:
    """Keeps no KV and learns nothing; subclasses propose."""

    traits = MODEL
    taps: Taps = ()

    def observe(self, *step: object) -> None: ...

    @property
    def stored(self) -> tuple[PageRows, ...]:
        """Nothing."""
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Do nothing: it keeps nothing that could come back."""

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None: ...
