"""ModelRunner: computes one step in the model thread, from a `StepPlan` to a `StepOutput`."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from ..interface.circuit_breaker import CircuitBreaker
from ..interface.step import NO_DRAFT, Draft, PlanRow, RowOutput, StepOutput, StepPlan, TokenLogprob
from ..interface.step_runner import OnKernelsStarted, Pending, ignore_kernels, launch_behind
from ..model.decoder import Decoder
from ..ops.batch import DeviceTokens, ForwardOutput, RaggedBatch, SamplingPlan, Segment, Wanted
from ..ops.device import Stopwatch, make_stopwatch
from ..ops.kv_pool import KVPool
from ..sampling.logits_processors import SampleRow
from ..sampling.logprobs import token_logprobs
from ..sampling.rejection import SampledDraft, verify_by_rejection
from ..sampling.sampler import DeviceSampler, PendingTokens
from ..sampling.verifier import NOT_FINITE, Choice, LogitsRow, Verified, VerifyRow, walk_drafts
from .proposer import Proposer, VerifiedRow

logger = logging.getLogger(__name__)
MAX_FAILURES = 20  # of one method of the proposer, in a row
NO_GUESS = (NO_DRAFT,)  # the paths of a row that drafts nothing


Paths = Sequence[Sequence[Draft]]  # of each row: the draft on its own pages, then its branches


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """What logits decide: every path of the rows that sample, one after another."""

    rows: list[VerifyRow]
    num_ahead: list[int]  # of each row: tokens that the device alone knows
    probs: list[Tensor | None]  # what each draft was drawn from, where it matters
    places: list[int]  # the rows of logits that decide, among all that were wanted

    @classmethod
    def of(cls, rows: Sequence[PlanRow], paths: Paths) -> LogitsLayout:
        """Those of a step, whose logits lie as its segments do."""
        layout = cls([], [], [], [])
        at = 0
        for row, drafts in zip(rows, paths, strict=True):
            for index, draft in enumerate(drafts):
                at += num_logits(row, draft) if index == 0 else len(draft.token_ids) + 1
                if row.samples:
                    layout.rows.append(VerifyRow(row.tokens, draft.token_ids, row.sampling))
                    layout.num_ahead.append(int(row.is_ahead))
                    layout.probs.append(draft.probs if isinstance(draft, SampledDraft) else None)
                    layout.places.extend(range(at - len(draft.token_ids) - 1, at))
        return layout

    def decisive(self, logits: Tensor) -> Tensor:
        """The rows that decide, of all ``logits`` of the step."""
        return logits if len(self.places) == len(logits) else logits[self.places]

    def draws(self, num_logits: int) -> SamplingPlan | None:
        """What is to be drawn, said before the pass; None where some of the logits do not decide.

        A place for each draft token and one behind it, in the order of `walk_drafts`.
        """
        if len(self.places) != num_logits:
            return None
        pairs = zip(self.rows, self.num_ahead, strict=True)
        rows = [SampleRow(row.tokens, row.sampling, num_ahead=ahead) for row, ahead in pairs]
        return SamplingPlan(rows, [len(row.draft) + 1 for row in self.rows])

    def sample_rows(self) -> list[SampleRow]:
        """What each of the decisive rows decides."""
        return [
            SampleRow(row.tokens, row.sampling, row.draft[:depth], ahead)
            for row, ahead in zip(self.rows, self.num_ahead, strict=True)
            for depth in range(len(row.draft) + 1)
        ]


def num_logits(row: PlanRow, draft: Draft) -> int:
    """Last rows of a segment whose logits matter."""
    wants_prompt = row.sampling.params.prompt_logprobs is not None
    if wants_prompt and row.start + 1 < row.sampling.prompt_len:
        return row.stop - row.start + len(draft.token_ids)
    return len(draft.token_ids) + 1 if row.samples else 0


def prompt_logprobs(
    rows: Sequence[PlanRow], paths: Paths, logits: Tensor
) -> list[Sequence[TokenLogprob]]:
    """Log-probabilities of the prompt tokens behind the chunk's, for rows that request them."""
    if all(row.sampling.params.prompt_logprobs is None for row in rows):
        return [()] * len(rows)
    found: list[Sequence[TokenLogprob]] = []
    at = 0
    for row, (draft, *others) in zip(rows, paths, strict=True):
        num_top = row.sampling.params.prompt_logprobs
        following = row.tokens[row.start + 1 : min(row.stop + 1, row.sampling.prompt_len)]
        if num_top is None or not following:
            found.append(())
        else:
            chunk = logits[at : at + len(following)]
            found.append(token_logprobs(chunk, following, num_top))
        at += num_logits(row, draft) + sum(len(other.token_ids) + 1 for other in others)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A step between its launch and its end.

    What the host may still write or read while the device works is its own: the tokens on their
    way to the host, and the clocks. The device uses all else in the order of the launches.
    """

    plan: StepPlan
    paths: Paths
    layout: LogitsLayout
    batch: RaggedBatch
    output: ForwardOutput
    # chosen by the device; None: the sampler is called by `_finish`
    tokens: PendingTokens | None
    clocks: tuple[Stopwatch, Stopwatch]  # of the drafts and of the forward pass
    seconds: float  # that the launch took


class PendingStep:
    """`Pending` of a `ModelRunner`."""

    def __init__(self, work: Work, finish: Callable[[Work], StepOutput]) -> None:
        self.plan, self.tokens = work.plan, work.tokens
        self._finish: Callable[[], StepOutput] | None = partial(finish, work)
        self._output = StepOutput(rows=())

    def finish(self) -> StepOutput:
        """Wait for its tokens, not for later launches. Raises the device's errors."""
        if self._finish is not None:
            self._output = self._finish()
            self._finish = None  # drop the work
        return self._output

    def lend(self, batch_rows: Mapping[str, int], num_rows: int, vocab_size: int) -> DeviceTokens:
        """Tokens that the next step takes on the device.

        ``batch_rows``: by request the row of that step's batch, of ``num_rows``, that its token
        goes to. Raises ValueError where more than the next tokens of these requests is decided.
        """
        if self.tokens is None or not self.plan.is_decode_only:
            raise ValueError("the step before decides more than a token for each row")
        sources = np.full(num_rows, -1, np.int32)
        for index, row in enumerate(self.plan.rows):
            if row.request_id in batch_rows:
                sources[batch_rows[row.request_id]] = index
        return DeviceTokens(self.tokens.words, sources, vocab_size)


class ModelRunner:
    """Propose, one ragged forward pass, verify.

    Holds no request: a plan row lends all that a step needs of one.
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
        self._breakers = {name: CircuitBreaker(MAX_FAILURES) for name in ("propose", "observe")}
        self.rejection = rejection  # verify by rejection sampling, for comparison only
        self._on_device = isinstance(decoder.sampler, DeviceSampler)

    @property
    def launches(self) -> bool:
        """Whether the device computes behind the host's back, tokens included."""
        return self._on_device and not self.rejection

    def step(self, plan: StepPlan) -> StepOutput:
        """Launch one step and wait for it."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Launch drafts and a forward pass; see `StepRunner.launch`."""
        if after is not None and not self.launches:
            return launch_behind(
                partial(self.launch, on_kernels_started=on_kernels_started), plan, after.finish()
            )
        began = time.perf_counter()
        drafting, computing = clocks = self._clocks()
        drafting.start()
        paths = self._paths(plan, on_kernels_started)
        drafting.stop()
        computing.start()
        self._open_branches(plan.rows)
        layout = LogitsLayout.of(plan.rows, paths)
        batch = self._batch(plan.rows, paths, after)
        output = self._forward(batch, layout, on_kernels_started)
        computing.stop()
        tokens = self._begin(output, layout)
        seconds = time.perf_counter() - began
        work = Work(plan, paths, layout, batch, output, tokens, clocks, seconds)
        return PendingStep(work, self._finish)

    @torch.inference_mode()
    def _finish(self, work: Work) -> StepOutput:
        """What the rows yield."""
        began, rows = time.perf_counter(), work.plan.rows
        verified = self._verify(work)
        best = [_furthest(outcomes) for outcomes in verified]
        self._adopt(rows, verified, best)
        prompts = prompt_logprobs(rows, work.paths, work.output.logits)
        outputs = [
            _output(*each) for each in zip(rows, work.paths, verified, best, prompts, strict=True)
        ]
        for index in _unsound_chunks(work):
            outputs[index] = RowOutput(request_id=rows[index].request_id, error=NOT_FINITE)
        self._observe(work, best, outputs)
        times = _times(work.clocks, work.seconds + time.perf_counter() - began)
        return StepOutput(rows=outputs, times=times, num_rows=int(work.batch.lens.sum()))

    def _clocks(self) -> tuple[Stopwatch, Stopwatch]:
        return make_stopwatch(self.decoder.device), make_stopwatch(self.decoder.device)

    # -- drafts ---------------------------------------------------------------------------------

    def _paths(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> list[Sequence[Draft]]:
        """The drafts of each row to be verified: the one on its own pages, then its branches."""
        proposed = self._propose(plan, on_kernels_started)
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
        """A draft of the plan, up to its first invalid token."""
        return self._sound(draft, len(draft.token_ids))

    def _propose(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> dict[int, Draft]:
        """The proposer's drafts by row. One that fails costs its drafts, never the step."""
        if self.proposer is None:
            return {}
        try:
            if plan.released_request_ids or plan.newly_allocated_pages:
                self.proposer.forget(plan.released_request_ids, plan.newly_allocated_pages)
            if plan.is_plain:
                return {}
            wanted = [index for index, row in enumerate(plan.rows) if row.max_draft > 0]
            if not wanted:
                return {}
            on_kernels_started()  # delivery must not wait for all passes of the draft model
            proposed = self.proposer.propose([plan.rows[index] for index in wanted])
            drafts = {
                index: self._sound(draft, plan.rows[index].max_draft)
                for index, draft in zip(wanted, proposed, strict=True)
            }
        except Exception:
            self._failed("propose")
            return {}
        self._breakers["propose"].record_success()
        return drafts

    def _observe(self, work: Work, best: Sequence[int], outputs: Sequence[RowOutput]) -> None:
        """Report the step to the proposer. One that fails costs its drafts, never the step."""
        if self.proposer is None:
            return
        try:
            verified = _verified_rows(work, best, outputs)
            self.proposer.observe(work.batch, work.output, verified)
        except Exception:
            self._failed("observe")
        else:
            self._breakers["observe"].record_success()

    def _failed(self, what: str) -> None:
        """Log and count the exception that is being handled."""
        logger.exception("the proposer failed to %s; the step goes on without it", what)
        self._breakers[what].record_failure()
        if self._breakers[what].is_open:
            logger.error("the proposer failed %d times in a row: it is let go", MAX_FAILURES)
            self.proposer = None

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
        """Copy the page that a branch shares with its row: the branch begins with the copy."""
        sources, targets = array("q"), array("q")
        for row in rows:
            shared = (row.stop - 1) // self.pool.page_size
            for branch in row.branches:
                sources.append(row.page_ids[shared])
                targets.append(branch.page_ids[shared])
        self.pool.copy_pages(sources, targets)

    def _adopt(
        self,
        rows: Sequence[PlanRow],
        verified: Sequence[Sequence[Verified]],
        best: Sequence[int],
    ) -> None:
        """Copy the KV of a winning branch to the row's own pages."""
        sources, targets = array("q"), array("q")
        for row, outcomes, index in zip(rows, verified, best, strict=True):
            if index > 0:
                last = row.stop + outcomes[index].num_accepted - 1
                page_size = self.pool.page_size
                pages = slice((row.stop - 1) // page_size, last // page_size + 1)
                sources += row.branches[index - 1].page_ids[pages]
                targets += row.page_ids[pages]
        self.pool.copy_pages(sources, targets)

    # -- forward and verify ---------------------------------------------------------------------

    def _batch(self, rows: Sequence[PlanRow], paths: Paths, after: Pending | None) -> RaggedBatch:
        """Each row's pending tokens and its draft, then its branches, one segment after another."""
        segments: list[Segment] = []
        num_rows, unknown = 0, dict[str, int]()  # by request, the row of the batch
        for row, (draft, *others) in zip(rows, paths, strict=True):
            tokens = row.tokens[row.start : row.stop - row.is_ahead]
            if row.is_ahead:
                unknown[row.request_id] = num_rows
                tokens.append(0)
            tokens.extend(draft.token_ids)
            segments.append(Segment(tokens, row.start, row.page_ids, num_logits(row, draft)))
            num_rows += len(tokens)
            for branch, other in zip(row.branches, others, strict=True):
                tokens = row.tokens[row.stop - 1 : row.stop] + array("q", other.token_ids)
                segments.append(Segment(tokens, row.stop - 1, branch.page_ids, len(tokens)))
                num_rows += len(tokens)
        ahead = self._device_tokens(rows, unknown, num_rows, after) if unknown else None
        return self.decoder.batch(segments, page_size=self.pool.page_size, device_tokens=ahead)

    def _forward(
        self, batch: RaggedBatch, layout: LogitsLayout, on_kernels_started: OnKernelsStarted
    ) -> ForwardOutput:
        draws = layout.draws(batch.num_logits) if self._chooses else None
        taps = () if self.proposer is None else self.proposer.taps
        output = self.decoder.forward(batch, self.pool, Wanted(draws, taps, on_kernels_started))
        if output.taps is not None and self._chooses:  # the next pass may come before `_observe`
            output = output._replace(taps=output.taps.clone())
        return output

    @property
    def _chooses(self) -> bool:
        """Whether the device chooses the tokens before the host waits for the pass."""
        return self._on_device and self.launches

    def _device_tokens(
        self,
        rows: Sequence[PlanRow],
        unknown: Mapping[str, int],
        num_rows: int,
        after: Pending | None,
    ) -> DeviceTokens:
        """Tokens that the device takes from the step ``after``, for the rows that are ahead."""
        if not isinstance(after, PendingStep):
            raise ValueError("the step that chooses these rows' tokens is not under way")
        if any(row.is_ahead and row.sampling.reads_text for row in rows):
            raise ValueError("a row that reads the text cannot be ahead of it")
        return after.lend(unknown, num_rows, self.decoder.config.vocab_size)

    def _begin(self, output: ForwardOutput, layout: LogitsLayout) -> PendingTokens | None:
        """What the device chooses: along with the pass, or behind it."""
        if output.tokens is not None or not (layout.rows and self._chooses):
            return output.tokens
        sampler = self.decoder.sampler
        assert isinstance(sampler, DeviceSampler)
        return sampler.begin(layout.decisive(output.logits), layout.sample_rows())

    def _verify(self, work: Work) -> list[list[Verified]]:
        """Each row's paths, none where it does not sample."""
        found = iter(self._verified(work.layout.decisive(work.output.logits), work))
        return [
            [next(found) for _ in drafts if row.samples]
            for row, drafts in zip(work.plan.rows, work.paths, strict=True)
        ]

    def _verified(self, logits: torch.Tensor, work: Work) -> Sequence[Verified]:
        """Each path's outcome, by the tokens that the device chose or by ``logits``."""
        rows, tokens = work.layout.rows, work.tokens
        if self.rejection:
            return verify_by_rejection(logits, rows, work.layout.probs)
        if tokens is None:
            return self.decoder.sampler.verify(logits, rows)
        return walk_drafts(logits, rows, lambda places: _chosen(tokens, places))


def _output(
    row: PlanRow,
    drafts: Sequence[Draft],
    verified: Sequence[Verified],
    best: int,
    prompt: Sequence[TokenLogprob],
) -> RowOutput:
    """The row yields its best path."""
    if not verified:
        return RowOutput(request_id=row.request_id, prompt_logprobs=prompt)
    draft, outcome = drafts[best], verified[best]
    others = [path for index, path in enumerate(drafts) if index != best]
    return RowOutput(
        request_id=row.request_id,
        token_ids=outcome.token_ids,
        num_proposed=sum(len(path.token_ids) for path in drafts),
        num_accepted=outcome.num_accepted,
        sources=tuple(source for path in (draft, *others) for source in path.sources),
        draft_len=len(draft.token_ids),
        num_uncached_draft_tokens=drafts[0].num_uncached_draft_tokens,
        logprobs=outcome.logprobs,
        prompt_logprobs=prompt,
        error=outcome.error,
    )


def _times(clocks: tuple[Stopwatch, Stopwatch], whole: float) -> dict[str, float]:
    """Of a step that took the host ``whole`` seconds; deciding is the rest of it.

    On a GPU drafts and forward pass are timed by its clock, and the host prepares deciding while
    the pass still runs.
    """
    draft, forward = (clock.seconds() for clock in clocks)
    return {"draft": draft, "forward": forward, "verify": max(0.0, whole - draft - forward)}


def _chosen(pending_tokens: PendingTokens, places: Sequence[LogitsRow]) -> list[Choice]:
    """The choices of a pass at some places. Waits for the device: call it as late as possible."""
    choices = pending_tokens.choices()
    return [choices[at] for at, _ in places]


def _firsts(work: Work) -> list[int]:
    """The first row of each plan row's own segment in the batch."""
    segments = accumulate((1 + len(row.branches) for row in work.plan.rows), initial=0)
    firsts: list[int] = work.batch.first_rows[list(segments)[:-1]].tolist()
    return firsts


def _unsound_chunks(work: Work) -> list[int]:
    """Prefill chunks with a hidden state that is not finite.

    The last row of a prompt alone decides a token and is checked by the verifier, but the KV of
    all of them is about to be published, and must not be.
    """
    rows = work.plan.rows
    chunks = [i for i, row in enumerate(rows) if row.stop - row.start > 1 or not row.samples]
    if not chunks:
        return []
    finite = torch.isfinite(work.output.hidden).all(dim=-1).cpu().numpy()  # one read for all
    firsts = _firsts(work)
    spans = [(firsts[i], rows[i].stop - rows[i].start) for i in chunks]
    sound = [bool(finite[first : first + count].all()) for first, count in spans]
    return [index for index, is_sound in zip(chunks, sound, strict=True) if not is_sound]


def _verified_rows(
    work: Work, best: Sequence[int], outputs: Sequence[RowOutput]
) -> list[VerifiedRow]:
    """Which rows of the batch hold what was committed."""
    found = []
    rows = zip(work.plan.rows, work.paths, _firsts(work), best, outputs, strict=True)
    for row, drafts, first, index, output in rows:
        behind = first + row.stop - row.start  # the first row of the draft
        kept = list(range(first, behind))
        if index > 0:  # the branch's own segment, behind its copy of the last token
            lens = [len(draft.token_ids) for draft in drafts]
            behind += lens[0] + sum(1 + length for length in lens[1:index]) + 1
        kept += range(behind, behind + output.num_accepted)
        found.append(VerifiedRow(row, [] if output.error else kept, output))
    return found


def _furthest(verified: Sequence[Verified]) -> int:
    """The path of a row with the most accepted tokens, the first of those; 0 if there is none."""
    order = range(len(verified))
    return max(order, key=lambda index: (verified[index].num_accepted, -index), default=0)
