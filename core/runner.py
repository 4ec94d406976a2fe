"""ModelRunner: one step in the model thread, from a plan of ints to an outcome of ints."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from itertools import takewhile

import torch

from .batch import RaggedBatch, Segment, build_batch
from .kv_pool import KVPool
from .model.decoder import Decoder
from .proposer import Proposer
from .step import Draft, PlanRow, RowOutput, StepOutput, StepPlan, TokenLogprob
from .verify import NOT_FINITE, Verified, VerifyRow, prompt_logprobs, verify

logger = logging.getLogger(__name__)
NO_DRAFT = Draft()


class ModelRunner:
    """Propose, one ragged forward pass, verify.

    Holds no request: whatever a step needs of one is lent by its plan row.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, proposer: Proposer | None = None) -> None:
        self.decoder = decoder
        self.pool = pool
        self.proposer = proposer

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """Compute one ragged batch. Raises what the forward pass raises: then no row is valid."""
        began = time.perf_counter()
        drafts = self._propose(plan)
        drafted = time.perf_counter()
        batch = self._batch(plan.rows, drafts)
        hidden = self.decoder.hidden_states(batch, self.pool)
        logits = self.decoder.logits(hidden, batch)
        forwarded = time.perf_counter()
        rows = self._verify(plan.rows, drafts, logits)
        for index in _unsound_chunks(plan.rows, batch, hidden):
            rows[index] = RowOutput(request_id=plan.rows[index].request_id, error=NOT_FINITE)
        times = {
            "draft": drafted - began,
            "forward": forwarded - drafted,
            "verify": time.perf_counter() - forwarded,
        }
        return StepOutput(rows=rows, times=times)

    def _propose(self, plan: StepPlan) -> list[Draft]:
        """A draft for each row. A proposer that fails costs its drafts, never the step."""
        drafts = [NO_DRAFT] * len(plan.rows)
        if self.proposer is None:
            return drafts
        try:
            self.proposer.forget(plan.departed, plan.fresh_pages)
            wanted = [index for index, row in enumerate(plan.rows) if row.max_draft > 0]
            proposed = self.proposer.propose([plan.rows[index] for index in wanted])
            for index, draft in zip(wanted, proposed, strict=True):
                drafts[index] = self._sound(draft, plan.rows[index].max_draft)
        except Exception:
            logger.exception("the proposer failed; this step goes on without drafts")
            return [NO_DRAFT] * len(plan.rows)
        return drafts

    def _sound(self, draft: Draft, max_draft: int) -> Draft:
        """The draft up to its first token that the model does not have."""
        vocab_size = self.decoder.config.vocab_size
        sound = takewhile(lambda token_id: 0 <= token_id < vocab_size, draft.token_ids[:max_draft])
        token_ids = array("q", sound)
        return Draft(token_ids, tuple(draft.sources[: len(token_ids)]))

    def _batch(self, rows: Sequence[PlanRow], drafts: Sequence[Draft]) -> RaggedBatch:
        """Each row's pending tokens and its draft, one segment after the other."""
        segments = [
            Segment(
                token_ids=row.tokens[row.start : row.stop] + array("q", draft.token_ids),
                start=row.start,
                page_ids=row.page_ids,
                num_logits=_num_logits(row, draft),
            )
            for row, draft in zip(rows, drafts, strict=True)
        ]
        return build_batch(segments, page_size=self.pool.page_size, device=self.decoder.device)

    def _verify(
        self, rows: Sequence[PlanRow], drafts: Sequence[Draft], logits: torch.Tensor
    ) -> list[RowOutput]:
        prompts = self._prompt_logprobs(rows, drafts, logits)
        verify_rows: list[VerifyRow] = []
        keep: list[int] = []
        at = 0
        for row, draft in zip(rows, drafts, strict=True):
            num_logits = _num_logits(row, draft)
            if row.samples:
                verify_rows.append(VerifyRow(row.tokens, draft.token_ids, row.sampling))
                last = at + num_logits
                keep += range(last - len(draft.token_ids) - 1, last)
            at += num_logits
        if len(keep) < len(logits):
            logits = logits[keep]
        verified = iter(verify(logits, verify_rows))
        return [
            _output(row, draft, next(verified) if row.samples else None, prompt)
            for row, draft, prompt in zip(rows, drafts, prompts, strict=True)
        ]

    @staticmethod
    def _prompt_logprobs(
        rows: Sequence[PlanRow], drafts: Sequence[Draft], logits: torch.Tensor
    ) -> list[Sequence[TokenLogprob]]:
        """For rows that ask: log-probabilities of the prompt tokens that follow the chunk's."""
        found: list[Sequence[TokenLogprob]] = []
        at = 0
        for row, draft in zip(rows, drafts, strict=True):
            num_top = row.sampling.params.prompt_logprobs
            following = row.tokens[row.start + 1 : min(row.stop + 1, row.sampling.prompt_len)]
            if num_top is None or not following:
                found.append(())
            else:
                chunk = logits[at : at + len(following)]
                found.append(prompt_logprobs(chunk, following, num_top))
            at += _num_logits(row, draft)
        return found


def _unsound_chunks(rows: Sequence[PlanRow], batch: RaggedBatch, hidden: torch.Tensor) -> list[int]:
    """Prefill chunks with a row of ``hidden`` [num_rows, hidden] that is not finite.

    The last row alone decides a token and is checked by the verifier, but the KV of all of them
    is about to be published: it must reach nobody.
    """
    chunks = [index for index, row in enumerate(rows) if row.stop - row.start > 1]
    if not chunks:
        return []
    finite = torch.isfinite(hidden).all(dim=-1)
    spans = [(int(batch.first_rows[i]), rows[i].stop - rows[i].start) for i in chunks]
    sound = [bool(finite[first : first + count].all()) for first, count in spans]
    return [index for index, is_sound in zip(chunks, sound, strict=True) if not is_sound]


def _num_logits(row: PlanRow, draft: Draft) -> int:
    """Last rows of a segment whose logits matter."""
    wants_prompt = row.sampling.params.prompt_logprobs is not None
    if wants_prompt and row.start + 1 < row.sampling.prompt_len:
        return row.stop - row.start + len(draft.token_ids)
    return len(draft.token_ids) + 1 if row.samples else 0


def _output(
    row: PlanRow, draft: Draft, verified: Verified | None, prompt: Sequence[TokenLogprob]
) -> RowOutput:
    if verified is None:
        return RowOutput(request_id=row.request_id, prompt_logprobs=prompt)
    return RowOutput(
        request_id=row.request_id,
        token_ids=verified.token_ids,
        num_proposed=len(draft.token_ids),
        num_accepted=verified.num_accepted,
        sources=draft.sources,
        logprobs=verified.logprobs,
        prompt_logprobs=prompt,
        error=verified.error,
    )
