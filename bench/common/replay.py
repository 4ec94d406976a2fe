"""A real engine that is made to say what was recorded: real step times on given texts.

The target computes everything as ever; then the recorded token of each position gets a logit that
wins. So acceptance is that of the recorded text, not of the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.execution.model_runner import LaunchedStep, ModelRunner
from ...core.sampling.verifier import Verified

WINNING = 1e4  # a logit above all others


class ReplayRunner(ModelRunner):
    """Steers every request along its answer in ``recorded`` (by request id), if there are any."""

    recorded: Mapping[str, Sequence[int]] = {}

    @property
    def is_async(self) -> bool:
        """Never: what is to be said must be known when the tokens are chosen."""
        return False

    @classmethod
    def over(cls, runner: ModelRunner) -> ReplayRunner:
        """The same model, pool and proposer."""
        return cls(runner.decoder, runner.pool, runner.proposer)

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        if not self.recorded:
            return super()._verify(work)
        at = 0
        indices: list[int] = []
        token_ids: list[int] = []
        for row, draft in zip(work.layout.requests, work.layout.drafts, strict=True):
            if not row.samples:
                continue
            answer = self.recorded[row.request_id]
            position = len(row.tokens) - row.sampling.prompt_len
            for depth in (0, *draft.depths()):
                if position + depth < len(answer):
                    indices.append(at)
                    token_ids.append(answer[position + depth])
                at += 1
        work.output.logits[indices, token_ids] = WINNING
        return super()._verify(work)
