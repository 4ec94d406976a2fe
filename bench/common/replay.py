"""A real engine that is forced to generate recorded answers: real step times on given texts.

The target computes every step as usual; then the recorded token of each position gets a logit that
wins. So acceptance depends on the recorded text, not on the model's own output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.execution.model_runner import LaunchedStep, ModelRunner
from ...core.sampling.verifier import Verified

WINNING = 1e4  # A logit above all others.


class ReplayRunner(ModelRunner):
    """A model runner that forces each request to generate its recorded answer.

    ``recorded``: answers by request id; if it is empty, the model chooses the tokens.
    """

    recorded: Mapping[str, Sequence[int]] = {}

    @property
    def is_async(self) -> bool:
        """Always False: the recorded token must be known before the next token is chosen."""
        return False

    @classmethod
    def over(cls, runner: ModelRunner) -> ReplayRunner:
        """Return a replay runner with the same model, pool and proposer."""
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
