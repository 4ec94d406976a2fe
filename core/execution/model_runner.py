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

from ..errors import is_out_of_memory
from ..interface.draft import NO_DRAFT, Draft
from ..interface.output import RequestOutput, StepOutput, TokenLogprob
from ..interface.plan import ScheduledRequest, StepPlan
from ..interface.protocols import OnKernelsStarted, Pending, StepCancelled, ignore_kernels
from ..model.decoder import Decoder
from ..ops.batch import DeviceTokens, ForwardOutput, RaggedBatch, Segment, Wanted
from ..ops.device import Stopwatch, make_stopwatch
from ..ops.kv_pool import KVPool
from ..sampling.rejection import SampledDraft, verify_by_rejection
from ..sampling.sampler import DeviceSampler, PendingTokens
from ..sampling.verifier import (
    NOT_FINITE,
    NOTHING_VERIFIED,
    LogitsRow,
    SampledToken,
    Verified,
    walk_drafts,
)
from ..scheduling.guarded_speculator import CircuitBreaker
from .launch_behind import launch_behind
from .layout import LogitsLayout, fitting, moves, prompt_logprobs, request_segments
from .proposer import Proposer, VerifiedRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step between its launch and its end.

    What the host may still write or read while the device works is its own: the tokens on their
    way to the host, and the clocks. The device uses all else in the order of the launches.
    """

    plan: StepPlan
    drafts: Sequence[Draft]  # of each request
    layout: LogitsLayout
    batch: RaggedBatch
    output: ForwardOutput
    # chosen by the device; None: the sampler is called by `_finish`
    tokens: PendingTokens | None
    clocks: tuple[Stopwatch, Stopwatch]  # of the drafts and of the forward pass
    seconds: float  # that the launch took


class PendingStep:
    """`Pending` of a `ModelRunner`."""

    def __init__(self, work: LaunchedStep, finish: Callable[[LaunchedStep], StepOutput]) -> None:
        self.plan, self.tokens = work.plan, work.tokens
        self._finish: Callable[[], StepOutput] | None = partial(finish, work)
        self._output: StepOutput | None = None

    def finish(self) -> StepOutput:
        """Wait for its tokens, not for later launches. Raises the device's errors.

        Raises `StepCancelled` if it failed before: the proposer must not observe a step twice.
        """
        finish, self._finish = self._finish, None  # drop the work
        if finish is not None:
            self._output = finish()
        if self._output is None:
            raise StepCancelled
        return self._output

    def lend(self, batch_rows: Mapping[str, int], num_rows: int, vocab_size: int) -> DeviceTokens:
        """Tokens that the next step takes on the device.

        ``batch_rows``: by request the row of that step's batch, of ``num_rows``, that its token
        goes to. Raises ValueError where more than the next tokens of these requests is decided.
        """
        if self.tokens is None or not self.plan.is_decode_only:
            raise ValueError("the step before decides more than a token for each request")
        sources = np.full(num_rows, -1, np.int32)
        for index, scheduled in enumerate(self.plan.requests):
            if scheduled.request_id in batch_rows:
                sources[batch_rows[scheduled.request_id]] = index
        return DeviceTokens(self.tokens.words, sources, vocab_size)


class ModelRunner:
    """Propose, one ragged forward pass, verify.

    Holds no request: a `ScheduledRequest` lends all that a step needs.
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
        self.proposer = proposer  # None, too, once it was given up
        self._lost_proposer = False  # it was given up
        self._taps = () if proposer is None else proposer.taps
        self._breakers = {name: CircuitBreaker() for name in ("propose", "observe")}
        self.rejection = rejection  # verify by rejection sampling, for comparison only
        self._on_device = isinstance(decoder.sampler, DeviceSampler)

    @property
    def is_async(self) -> bool:
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
        if after is not None and not self.is_async:
            return launch_behind(
                partial(self.launch, on_kernels_started=on_kernels_started), plan, after.finish()
            )
        began = time.perf_counter()
        drafting, computing = clocks = self._clocks()
        drafting.start()
        drafts = self._drafts(plan, on_kernels_started)
        drafting.stop()
        computing.start()
        layout = LogitsLayout.of(plan.requests, drafts)
        batch = self._batch(plan.requests, drafts, after)
        output = self._forward(batch, layout, on_kernels_started)
        computing.stop()
        tokens = self._begin(output, layout)
        seconds = time.perf_counter() - began
        work = LaunchedStep(plan, drafts, layout, batch, output, tokens, clocks, seconds)
        return PendingStep(work, self._finish)

    @torch.inference_mode()
    def _finish(self, work: LaunchedStep) -> StepOutput:
        """What the requests yield."""
        began, requests = time.perf_counter(), work.plan.requests
        verified = self._verify(work)
        self._move_accepted(work, verified)
        prompts = prompt_logprobs(requests, work.drafts, work.output.logits)
        outputs = [
            _output(*each) for each in zip(requests, work.drafts, verified, prompts, strict=True)
        ]
        for index in _unsound_chunks(work):
            outputs[index] = RequestOutput(request_id=requests[index].request_id, error=NOT_FINITE)
        self._observe(work, verified, outputs)
        times = _times(work.clocks, work.seconds + time.perf_counter() - began)
        return StepOutput(
            requests=outputs,
            times=times,
            num_rows=int(work.batch.lens.sum()),
            lost_proposer=self._lost_proposer,
        )

    def _clocks(self) -> tuple[Stopwatch, Stopwatch]:
        return make_stopwatch(self.decoder.device), make_stopwatch(self.decoder.device)

    # -- drafts ---------------------------------------------------------------------------------

    def _drafts(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> Sequence[Draft]:
        """The draft of each request that is to be verified."""
        proposed = self._propose(plan, on_kernels_started)
        if plan.is_plain:
            return [NO_DRAFT] * len(plan.requests)
        return [
            self._draft(scheduled, proposed.get(index, NO_DRAFT))
            for index, scheduled in enumerate(plan.requests)
        ]

    def _draft(self, scheduled: ScheduledRequest, proposed: Draft) -> Draft:
        """Return the proposer's draft, or the tokens that were looked up where it has none."""
        if proposed.token_ids:
            return proposed
        known = scheduled.draft_plan.draft
        draft = self._sound(known, scheduled, len(known.token_ids))
        if not scheduled.draft_plan.max_draft:
            return draft
        # The proposer found none of them.
        return replace(draft, odds=(0.0,) * len(draft.token_ids), note=proposed.note)

    def _propose(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> dict[int, Draft]:
        """The proposer's drafts by index of the request; none if it fails."""
        if self.proposer is None:
            return {}
        try:
            if plan.released_request_ids or plan.newly_allocated_pages:
                self.proposer.forget(plan.released_request_ids, plan.newly_allocated_pages)
            if plan.is_plain:
                return {}
            wanted = [
                index for index, each in enumerate(plan.requests) if each.draft_plan.max_draft > 0
            ]
            if not wanted:
                return {}
            on_kernels_started()  # delivery must not wait for all passes of the draft model
            proposed = self.proposer.propose([plan.requests[index] for index in wanted])
            drafts = {
                index: self._sound(draft, each := plan.requests[index], each.draft_plan.max_draft)
                for index, draft in zip(wanted, proposed, strict=True)
            }
        except Exception as failure:
            if is_out_of_memory(failure):  # depends on the requests: later drafts may fit
                logger.warning("out of memory while drafting; the step continues without drafts")
            else:
                self._failed("propose")
            return {}
        self._breakers["propose"].record_success()
        return drafts

    def _observe(
        self, work: LaunchedStep, verified: Sequence[Verified], outputs: Sequence[RequestOutput]
    ) -> None:
        """Report the step to the proposer. One that fails costs its drafts, never the step."""
        if self.proposer is None:
            return
        try:
            requests = _verified_requests(work, verified, outputs)
            self.proposer.observe(work.batch, work.output, requests)
        except Exception:
            self._failed("observe")
        else:
            self._breakers["observe"].record_success()

    def _failed(self, what: str) -> None:
        """Log and count the exception that is being handled."""
        logger.exception("the proposer failed to %s; the step continues without drafts", what)
        self._breakers[what].record_failure()
        if self._breakers[what].is_open:
            logger.error("the proposer failed repeatedly and is no longer used")
            self.proposer, self._lost_proposer = None, True

    def _sound(self, draft: Draft, scheduled: ScheduledRequest, max_draft: int) -> Draft:
        """What of a draft is verified: its nodes up to the first token that the model lacks.

        A chain for rejection sampling, and where the nodes' parents make no tree.
        """
        if not draft.token_ids or isinstance(draft, SampledDraft):
            return draft
        if self.rejection or not draft.is_valid:
            draft = draft.trunk()
        vocab_size = self.decoder.config.vocab_size
        sound = takewhile(lambda token_id: 0 <= token_id < vocab_size, draft.token_ids[:max_draft])
        token_ids = array("q", sound)
        draft = replace(draft.first(len(token_ids)), token_ids=token_ids)
        return fitting(draft, scheduled, self.pool.page_size)

    def _move_accepted(self, work: LaunchedStep, verified: Sequence[Verified]) -> None:
        """Copy the KV of accepted nodes to the slots that their positions have."""
        pairs = [
            pair
            for scheduled, draft, outcome in zip(
                work.plan.requests, work.drafts, verified, strict=True
            )
            if draft.parents
            for pair in moves(scheduled, draft, outcome.path, self.pool.page_size)
        ]
        if pairs:
            self.pool.copy_slots(*zip(*pairs, strict=True))

    # -- forward and verify ---------------------------------------------------------------------

    def _batch(
        self, requests: Sequence[ScheduledRequest], drafts: Sequence[Draft], after: Pending | None
    ) -> RaggedBatch:
        """Each request's pending tokens and its draft, one request after another."""
        segments: list[Segment] = []
        num_rows, unknown = 0, dict[str, int]()  # by request, the row of the batch
        for scheduled, draft in zip(requests, drafts, strict=True):
            tokens = scheduled.tokens[scheduled.start : scheduled.stop - scheduled.is_ahead]
            if scheduled.is_ahead:
                unknown[scheduled.request_id] = num_rows
                tokens.append(0)
            num_rows += len(tokens) + len(draft.token_ids)
            segments += request_segments(scheduled, tokens, draft, self.pool.page_size)
        ahead = self._device_tokens(requests, unknown, num_rows, after) if unknown else None
        return self.decoder.batch(segments, page_size=self.pool.page_size, device_tokens=ahead)

    def _forward(
        self, batch: RaggedBatch, layout: LogitsLayout, on_kernels_started: OnKernelsStarted
    ) -> ForwardOutput:
        draws = layout.draws(batch.num_logits) if self._chooses else None
        # The taps of a proposer that was given up stay: a GPU's graphs were captured with them.
        wanted = Wanted(draws, self._taps, on_kernels_started)
        output = self.decoder.forward(batch, self.pool, wanted)
        if output.taps is not None and self._chooses:  # the next pass may come before `_observe`
            output = output._replace(taps=output.taps.clone())
        return output

    @property
    def _chooses(self) -> bool:
        """Whether the device chooses the tokens before the host waits for the pass."""
        return self._on_device and self.is_async

    def _device_tokens(
        self,
        requests: Sequence[ScheduledRequest],
        unknown: Mapping[str, int],
        num_rows: int,
        after: Pending | None,
    ) -> DeviceTokens:
        """Tokens that the device takes from the step ``after``, for the requests that are ahead."""
        if not isinstance(after, PendingStep):
            raise ValueError("the step that chooses these requests' tokens is not under way")
        if any(scheduled.is_ahead and scheduled.sampling.reads_text for scheduled in requests):
            raise ValueError("a request that reads the text cannot be ahead of it")
        return after.lend(unknown, num_rows, self.decoder.config.vocab_size)

    def _begin(self, output: ForwardOutput, layout: LogitsLayout) -> PendingTokens | None:
        """What the device chooses: along with the pass, or behind it."""
        if output.tokens is not None or not (layout.requests and self._chooses):
            return output.tokens
        sampler = self.decoder.sampler
        assert isinstance(sampler, DeviceSampler)
        return sampler.begin(layout.decisive(output.logits), layout.sample_rows())

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        """Each request's outcome, nothing where it does not sample."""
        found = iter(self._verified(work.layout.decisive(work.output.logits), work))
        return [
            next(found) if scheduled.samples else NOTHING_VERIFIED
            for scheduled in work.plan.requests
        ]

    def _verified(self, logits: torch.Tensor, work: LaunchedStep) -> Sequence[Verified]:
        """The outcome of requests that sample, by the device's tokens or by ``logits``."""
        requests, tokens = work.layout.requests, work.tokens
        if self.rejection:
            return verify_by_rejection(logits, requests, work.layout.probs)
        if tokens is None:
            return self.decoder.sampler.verify(logits, requests)
        return walk_drafts(logits, requests, lambda places: _chosen(tokens, places))


def _output(
    scheduled: ScheduledRequest, draft: Draft, outcome: Verified, prompt: Sequence[TokenLogprob]
) -> RequestOutput:
    """What the request yields."""
    if not scheduled.samples:
        return RequestOutput(request_id=scheduled.request_id, prompt_logprobs=prompt)
    return RequestOutput(
        request_id=scheduled.request_id,
        token_ids=outcome.token_ids,
        draft=draft,
        path=outcome.path,
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


def _chosen(pending_tokens: PendingTokens, places: Sequence[LogitsRow]) -> list[SampledToken]:
    """The choices of a pass at some places. Waits for the device: call it as late as possible."""
    choices = pending_tokens.choices()
    return [choices[at] for at, _ in places]


def _firsts(work: LaunchedStep) -> list[int]:
    """The first row of each request in the batch."""
    pairs = zip(work.plan.requests, work.drafts, strict=True)
    counts = [scheduled.stop - scheduled.start + len(draft.token_ids) for scheduled, draft in pairs]
    return list(accumulate(counts[:-1], initial=0))


def _unsound_chunks(work: LaunchedStep) -> list[int]:
    """Prefill chunks with a hidden state that is not finite.

    The last row of a prompt alone decides a token and is checked by the verifier, but the KV of
    all of them is about to be published, and must not be.
    """
    requests = work.plan.requests
    chunks = [
        i
        for i, scheduled in enumerate(requests)
        if scheduled.stop - scheduled.start > 1 or not scheduled.samples
    ]
    if not chunks:
        return []
    finite = torch.isfinite(work.output.hidden).all(dim=-1).cpu().numpy()  # one read for all
    firsts = _firsts(work)
    spans = [(firsts[i], requests[i].stop - requests[i].start) for i in chunks]
    sound = [bool(finite[first : first + count].all()) for first, count in spans]
    return [index for index, is_sound in zip(chunks, sound, strict=True) if not is_sound]


def _verified_requests(
    work: LaunchedStep, verified: Sequence[Verified], outputs: Sequence[RequestOutput]
) -> list[VerifiedRequest]:
    """Which rows of the batch hold what was committed."""
    found = []
    for scheduled, first, outcome, output in zip(
        work.plan.requests, _firsts(work), verified, outputs, strict=True
    ):
        behind = first + scheduled.stop - scheduled.start  # the first row of the draft
        kept = [*range(first, behind), *(behind + node for node in outcome.path)]
        found.append(VerifiedRequest(scheduled, [] if output.error else kept, output))
    return found
