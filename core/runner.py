"""ModelRunner: one step in the model thread, from a plan of ints to an outcome of ints."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

import torch
from msgspec.structs import replace

from .asked import Asked, Paths, num_logits, prompt_logprobs
from .batch import RaggedBatch, Segment, Wanted
from .kv_pool import KVPool
from .launch import Launched
from .launched import LaunchedStep, check_steady
from .model.decoder import Decoder
from .ops.device import make_stopwatch
from .proposer import Proposer
from .rejection import SampledDraft, verify_by_rejection
from .sampler import DeviceSampler, Drawing
from .step import NO_DRAFT, Draft, PlanRow, RowOutput, StepOutput, StepPlan, TokenLogprob
from .verify import NOT_FINITE, Choice, Place, Verified, walk_drafts

logger = logging.getLogger(__name__)
MAX_FAILURES = 20
NO_GUESS = (NO_DRAFT,)  # the paths of a row that drafts nothing


class ModelRunner:
    """Propose, one ragged forward pass, verify.

    Holds no request: whatever a step needs of one is lent by its plan row.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        proposer: Proposer | None = None,
        *,
        rejection: bool = False,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.proposer = proposer
        self._drafting, self._computing = (make_stopwatch(decoder.device) for _ in range(2))
        self._num_failures = 0  # of the proposer, in a row
        self.rejection = rejection  # verify by rejection sampling, for comparison only
        self._on_device = isinstance(decoder.sampler, DeviceSampler)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """Compute one ragged batch. Raises what the forward pass raises: then no row is valid."""
        began = time.perf_counter()
        self._drafting.start()
        paths = self._paths(plan)
        self._drafting.stop()
        self._computing.start()
        self._open_branches(plan.rows)
        batch, asked = self._batch(plan.rows, paths), Asked.of(plan.rows, paths)
        may_choose = self._on_device and self.launches
        draws = asked.draws(batch.num_logits) if may_choose else None
        output = self.decoder.forward(batch, self.pool, Wanted(draws))
        self._computing.stop()
        rows = self._verify(plan.rows, paths, output.logits, asked, output.tokens)
        for index in _unsound_chunks(plan.rows, batch, output.hidden):
            rows[index] = RowOutput(request_id=plan.rows[index].request_id, error=NOT_FINITE)
        times = self._times(time.perf_counter() - began)
        return StepOutput(rows=rows, times=times, num_rows=int(batch.lens.sum()))

    def announce(self, to: Callable[[], None]) -> None:
        """Call ``to`` before drafts are made and before the target's pass; see `Announcer`."""
        self.decoder.on_pass = to

    @property
    def launches(self) -> bool:
        """Whether `launch` may be called: where the device computes behind the host's back."""
        return self._on_device and not self.rejection

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: Launched | None = None) -> LaunchedStep:
        """Ask for a steady step without waiting; see `Launcher.launch`."""
        check_steady(plan)
        assert after is None or isinstance(after, LaunchedStep)
        self._propose(plan)  # a steady plan: it only learns what to forget
        return LaunchedStep(plan.rows, self.decoder, self.pool, after)

    def _times(self, whole: float) -> dict[str, float]:
        """Of a step that took ``whole`` seconds; on a GPU, drafts and forward pass by its clock.

        Deciding is the rest: there the host prepares it while the pass still runs.
        """
        draft, forward = self._drafting.seconds(), self._computing.seconds()
        verify = max(0.0, whole - draft - forward)
        return {"draft": draft, "forward": forward, "verify": verify}

    # -- drafts ---------------------------------------------------------------------------------

    def _paths(self, plan: StepPlan) -> list[Sequence[Draft]]:
        """What to verify for each row: the draft on its own pages, then its branches."""
        proposed = self._propose(plan)
        if plan.is_plain:
            return [NO_GUESS] * len(plan.rows)
        return [
            (
                proposed.get(index) or self._known(row.draft),
                *(self._known(b.draft) for b in row.branches),
            )
            for index, row in enumerate(plan.rows)
        ]

    def _known(self, draft: Draft) -> Draft:
        """A draft that came with the plan, as far as it is sound."""
        return self._sound(draft, len(draft.token_ids))

    def _propose(self, plan: StepPlan) -> dict[int, Draft]:
        """The proposer's drafts by row. One that fails costs its drafts, never the step."""
        if self.proposer is None:
            return {}
        try:
            if plan.departed or plan.fresh_pages:
                self.proposer.forget(plan.departed, plan.fresh_pages)
            if plan.is_plain:
                return {}
            wanted = [index for index, row in enumerate(plan.rows) if row.max_draft > 0]
            if not wanted:
                return {}
            self.decoder.on_pass()  # tokens must not wait for all passes of the draft model
            proposed = self.proposer.propose([plan.rows[index] for index in wanted])
            drafts = {
                index: self._sound(draft, plan.rows[index].max_draft)
                for index, draft in zip(wanted, proposed, strict=True)
            }
        except Exception:
            logger.exception("the proposer failed; this step goes on without drafts")
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                logger.error("the proposer failed %d times in a row: it is let go", MAX_FAILURES)
                self.proposer = None
            return {}
        self._num_failures = 0
        return drafts

    def _sound(self, draft: Draft, max_draft: int) -> Draft:
        """The chain to be verified: the trunk up to its first token that the model lacks."""
        draft = draft.trunk()
        if not draft.token_ids or isinstance(draft, SampledDraft):
            return draft
        vocab_size = self.decoder.config.vocab_size
        sound = takewhile(lambda token_id: 0 <= token_id < vocab_size, draft.token_ids[:max_draft])
        token_ids = array("q", sound)
        return replace(draft, token_ids=token_ids, sources=tuple(draft.sources[: len(token_ids)]))

    def _open_branches(self, rows: Sequence[PlanRow]) -> None:
        """Each branch begins with a copy of the page that it shares with its row."""
        sources, targets = array("q"), array("q")
        for row in rows:
            shared = (row.stop - 1) // self.pool.page_size
            for branch in row.branches:
                sources.append(row.page_ids[shared])
                targets.append(branch.page_ids[shared])
        self.pool.copy_pages(sources, targets)

    def _adopt(self, rows: Sequence[PlanRow], verified: Sequence[Sequence[Verified]]) -> None:
        """Where a branch won, its KV moves to the row's own pages."""
        sources, targets = array("q"), array("q")
        for row, outcomes in zip(rows, verified, strict=True):
            best = _furthest(outcomes) if row.branches else 0
            if best:
                last = row.stop + outcomes[best].num_accepted - 1
                page_size = self.pool.page_size
                pages = slice((row.stop - 1) // page_size, last // page_size + 1)
                sources += row.branches[best - 1].page_ids[pages]
                targets += row.page_ids[pages]
        self.pool.copy_pages(sources, targets)

    # -- forward and verify ---------------------------------------------------------------------

    def _batch(self, rows: Sequence[PlanRow], paths: Paths) -> RaggedBatch:
        """Each row's pending tokens and its draft, then its branches, one segment after another."""
        segments = []
        for row, (draft, *others) in zip(rows, paths, strict=True):
            tokens = row.tokens[row.start : row.stop]
            tokens.extend(draft.token_ids)
            segments.append(Segment(tokens, row.start, row.page_ids, num_logits(row, draft)))
            for branch, other in zip(row.branches, others, strict=True):
                tokens = row.tokens[row.stop - 1 : row.stop] + array("q", other.token_ids)
                segments.append(Segment(tokens, row.stop - 1, branch.page_ids, len(tokens)))
        return self.decoder.batch(segments, page_size=self.pool.page_size)

    def _verify(
        self,
        rows: Sequence[PlanRow],
        paths: Paths,
        logits: torch.Tensor,
        asked: Asked,
        drawing: Drawing | None,
    ) -> list[RowOutput]:
        """What the rows yield. Where the pass chose, changed ``logits`` change no token."""
        prompts = prompt_logprobs(rows, paths, logits)
        found = iter(self._verified(asked.decisive(logits), asked, drawing))
        verified = [
            [next(found) for _ in drafts if row.samples]
            for row, drafts in zip(rows, paths, strict=True)
        ]
        self._adopt(rows, verified)
        return [self._output(*each) for each in zip(rows, paths, verified, prompts, strict=True)]

    def _verified(
        self, logits: torch.Tensor, asked: Asked, drawing: Drawing | None
    ) -> Sequence[Verified]:
        """Each path's outcome; where the pass has chosen, by its tokens."""
        if self.rejection:
            return verify_by_rejection(logits, asked.rows, asked.probs)
        if drawing is None:
            return self.decoder.sampler.verify(logits, asked.rows)
        return walk_drafts(logits, asked.rows, lambda places: _chosen(drawing, places))

    @staticmethod
    def _output(
        row: PlanRow,
        drafts: Sequence[Draft],
        verified: Sequence[Verified],
        prompt: Sequence[TokenLogprob],
    ) -> RowOutput:
        """The path that got furthest is what the row yields."""
        if not verified:
            return RowOutput(request_id=row.request_id, prompt_logprobs=prompt)
        best = _furthest(verified)
        draft, outcome = drafts[best], verified[best]
        others = [path for index, path in enumerate(drafts) if index != best]
        return RowOutput(
            request_id=row.request_id,
            token_ids=outcome.token_ids,
            num_proposed=sum(len(path.token_ids) for path in drafts),
            num_accepted=outcome.num_accepted,
            sources=tuple(source for path in (draft, *others) for source in path.sources),
            draft_len=len(draft.token_ids),
            backlog=drafts[0].backlog,
            logprobs=outcome.logprobs,
            prompt_logprobs=prompt,
            error=outcome.error,
        )


def _chosen(drawing: Drawing, places: Sequence[Place]) -> list[Choice]:
    """What a pass chose at some places. Waits for it, so nobody asks before there is need."""
    choices = drawing.choices()
    return [choices[at] for at, _ in places]


def _unsound_chunks(rows: Sequence[PlanRow], batch: RaggedBatch, hidden: torch.Tensor) -> list[int]:
    """Prefill chunks with a row of ``hidden`` [num_rows, hidden] that is not finite.

    The last row of a prompt alone decides a token and is checked by the verifier, but the KV of
    all of them is about to be published: it must reach nobody.
    """
    chunks = [i for i, row in enumerate(rows) if row.stop - row.start > 1 or not row.samples]
    if not chunks:
        return []
    finite = torch.isfinite(hidden).all(dim=-1).cpu().numpy()  # one read for all of them
    firsts = accumulate((1 + len(row.branches) for row in rows), initial=0)  # segment of each row
    first_rows = batch.first_rows[list(firsts)[:-1]]
    spans = [(int(first_rows[i]), rows[i].stop - rows[i].start) for i in chunks]
    sound = [bool(finite[first : first + count].all()) for first, count in spans]
    return [index for index, is_sound in zip(chunks, sound, strict=True) if not is_sound]


def _furthest(verified: Sequence[Verified]) -> int:
    """The path of a row with the most accepted tokens, the first of those; 0 if there is none."""
    order = range(len(verified))
    return max(order, key=lambda index: (verified[index].num_accepted, -index), default=0)
