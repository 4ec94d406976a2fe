"""Base of the fakes of proposers."""

from __future__ import annotations

import torch

from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.protocols import ProposerTraits
from foretoken.core.ops.batch import Taps

MODEL = ProposerTraits(tokens_per_pass=1, catches_up=True, weighs=True)
"""Traits of a draft model."""


class BareProposer(Proposer):
    """Keeps no KV and learns nothing; subclasses propose."""

    traits = MODEL
    taps: Taps = ()

    source = "bare"
    device = torch.device("cpu")

    def observe(self, *step: object) -> None: ...
