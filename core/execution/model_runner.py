"""ModelRunner: computes one step in the model thread, from a `StepPlan` to a `StepOutput`."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile

import numpy as np
import torch
from msgspec.structs import replace

from ..errors import is_out_of_memory
from ..interface.draft import NO_DRAFT, Draft
from ..interface.output import RequestOutput, StepOutput, TokenLogprob
from ..interface.plan import ScheduledRequest, StepPlan
from ..interface.protocols import OnKernelsStarted, Pending, StepCancelled, ignore_kernels
from ..model.decoder import Decoder
from ..model.images.vision import Vision
from ..ops.batch import DeviceTokens, ForwardOutput, RaggedBatch, SamplingPlan, Wanted
from ..ops.kv_pool import KVPool
from ..ops.machine.device import Stopwatch, default_stream, make_stopwatch, prepare_thread
from ..ops.rows.step_inputs import rows_library
from ..sampling.sampler import DeviceSampler, PendingTokens
from ..sampling.verifier import (
    NOT_FINITE,
    NOTHING_VERIFIED,
    Verified,
    follow_choices,
)
from ..scheduling.guarded_speculator import CircuitBreaker
from .image_rows import image_rows
from .packing.policies import KeepPolicy, pack_kv
from .proposer import Proposer, VerifiedRequest
from .step_layout import StepLayout, cut_to_spare_pages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A launched step whose outcome the host has not read yet.

    Until then the host reads only the clocks and ``tokens``. All other buffers belong to the
    device, which uses them in the order of the launches.
    """

    plan: StepPlan
    layout: StepLayout
    batch: RaggedBatch
    output: ForwardOutput
    # tokens that the device chooses; None: the host samples them in `_finish`
    tokens: PendingTokens | None
    clocks: tuple[Stopwatch, Stopwatch]  # clocks of drafting and of the forward pass
    seconds: float  # duration of the launch on the host
    num_images: int = 0  # number of images that this step encoded


class PendingStep:
    """The `Pending` of a `ModelRunner`: a launched step that `finish` completes."""

    def __init__(self, work: LaunchedStep, finish: Callable[[LaunchedStep], StepOutput]) -> None:
        self.plan, self.tokens = work.plan, work.tokens
        self._finish: Callable[[], StepOutput] | None = partial(finish, work)
        self._output: StepOutput | None = None

    def finish(self) -> StepOutput:
        """Wait for the step's tokens, but not for later launches, and return the step's output.

        Raises errors that occurred on the device. Raises `StepCancelled` if an earlier call of this
        method failed: the proposer must not observe a step twice.
        """
        # Dropping the closure frees the buffers of the step, even if the call fails.
        finish, self._finish = self._finish, None
        if finish is not None:
            self._output = finish()
        if self._output is None:
            raise StepCancelled
        return self._output

    def next_inputs(
        self, batch_rows: Mapping[str, int], num_rows: int, vocab_size: int
    ) -> DeviceTokens:
        """Return the tokens of this step as inputs of the next step, without waiting for them.

        ``batch_rows`` maps a request id to the row of the next step's batch that takes the
        request's token; that batch has ``num_rows`` rows. Raises ValueError if this step may yield
        more than one token for a request, or if the host chooses its tokens.
        """
        if self.tokens is None or not self.plan.is_decode_only:
            raise ValueError(
                "the next step cannot take its inputs from this step on the device: this step may "
                "yield several tokens per request, or the host chooses its tokens"
            )
        sources = np.full(num_rows, -1, np.int32)
        for index, scheduled in enumerate(self.plan.requests):
            if scheduled.request_id in batch_rows:
                sources[batch_rows[scheduled.request_id]] = index
        return DeviceTokens(self.tokens.words, sources, vocab_size)


class ModelRunner:
    """Runner of steps: it proposes drafts, computes one ragged forward pass, and verifies.

    It keeps no data of requests: a `ScheduledRequest` has all data that a step needs.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        proposer: Proposer | None = None,
        *,
        vision: Vision | None = None,
        keep_policy: KeepPolicy | None = None,
    ) -> None:
        rows_library()  # compiles the library now if necessary, not during the first step
        self.decoder = decoder
        self.vision = vision  # None: prompts cannot have images
        self.pool = pool
        self.proposer = proposer  # None: there was no proposer, or it was disabled
        self._lost_proposer = False  # whether the proposer was disabled because it kept failing
        self._taps = () if proposer is None else proposer.taps
        self._breakers = {name: CircuitBreaker() for name in ("propose", "observe")}
        self._keep_policy = keep_policy
        self._on_device = isinstance(decoder.sampler, DeviceSampler)

    @property
    def is_async(self) -> bool:
        """Whether the device computes asynchronously and chooses the tokens itself."""
        return self._on_device

    @property
    def _chooses_on_device(self) -> bool:
        """Whether the device chooses the tokens while the host does not wait for the pass."""
        return self._on_device and self.is_async

    def prepare_thread(self) -> None:
        """Create what the calling thread needs to launch steps."""
        prepare_thread(self.decoder.device)

    def step(self, plan: StepPlan) -> StepOutput:
        """Launch one step, wait for it and return its output."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Launch drafting and the forward pass of a step; see `StepRunner.launch`."""
        with default_stream(self.decoder.device):
            return self._launch(plan, after, on_kernels_started)

    def _launch(
        self, plan: StepPlan, after: Pending | None, on_kernels_started: OnKernelsStarted
    ) -> Pending:
        began = time.perf_counter()
        drafting, computing = clocks = self._clocks()
        # A proposer may read the recurrent states, so they are initialised before it drafts.
        self._place_states(plan)
        self._pack(plan)
        drafting.start()
        drafts = self._drafts(plan, on_kernels_started)
        drafting.stop()
        computing.start()
        layout = StepLayout.of(plan.requests, drafts, self.pool.page_size)
        batch = self._batch(layout, after)
        num_images = 0 if self.vision is None else self.vision.num_computed
        draws = layout.sampling_plan(batch.num_logits) if self._chooses_on_device else None
        output = self._forward(batch, layout, draws, on_kernels_started)
        if self.vision is not None:
            num_images = self.vision.num_computed - num_images
        computing.stop()
        tokens = self._begin(output, layout, draws)
        seconds = time.perf_counter() - began
        work = LaunchedStep(plan, layout, batch, output, tokens, clocks, seconds, num_images)
        return PendingStep(work, self._finish)

    @torch.inference_mode()
    def _finish(self, work: LaunchedStep) -> StepOutput:
        """Verify the drafts of a launched step, tell the proposer the outcome, and return it."""
        began, layout = time.perf_counter(), work.layout
        verified = self._verify(work)
        if copies := layout.kv_copies([outcome.path for outcome in verified]):
            self.pool.copy_slots(*zip(*copies, strict=True))
        prompts = layout.prompt_logprobs(work.output.logits)
        pooled = layout.pooled(work.output.hidden, work.output.logits, self.decoder.sampler)
        outputs = [
            _output(*each)
            for each in zip(
                layout.requests,
                layout.samples,
                layout.drafts,
                verified,
                prompts,
                pooled,
                strict=True,
            )
        ]
        for index in _chunks_not_finite(work):
            request_id = layout.requests[index].request_id
            outputs[index] = RequestOutput(request_id=request_id, error=NOT_FINITE)
        self._observe(work, verified, outputs)
        times = _times(work.clocks, work.seconds + time.perf_counter() - began)
        return StepOutput(
            requests=outputs,
            times=times,
            num_rows=int(work.batch.lens.sum()),
            lost_proposer=self._lost_proposer,
            num_images=work.num_images,
        )

    def _clocks(self) -> tuple[Stopwatch, Stopwatch]:
        return make_stopwatch(self.decoder.device), make_stopwatch(self.decoder.device)

    # -- drafts ---------------------------------------------------------------------------------

    def _drafts(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> Sequence[Draft]:
        """Return the drafts to verify, one for each request of the plan."""
        proposed = self._propose(plan, on_kernels_started)
        if plan.is_plain:
            return [NO_DRAFT] * len(plan.requests)
        if not proposed and self._are_valid_chains(plan.requests):
            return [scheduled.draft_plan.draft for scheduled in plan.requests]
        return [
            self._draft(scheduled, proposed.get(index, NO_DRAFT))
            for index, scheduled in enumerate(plan.requests)
        ]

    def _are_valid_chains(self, requests: Sequence[ScheduledRequest]) -> bool:
        """Whether all planned drafts are looked-up chains of known tokens, verified as planned."""
        plans = [scheduled.draft_plan for scheduled in requests]
        if [1 for plan in plans if plan.max_draft or plan.draft.parents]:  # faster than `any`
            return False
        drafts = [plan.draft.token_ids for plan in plans if plan.draft.token_ids]
        if not set(map(type, drafts)) <= {array}:
            return False
        least = min(chain.from_iterable(drafts), default=0)
        most = max(chain.from_iterable(drafts), default=0)
        return least >= 0 and most < self.decoder.config.vocab_size

    def _draft(self, scheduled: ScheduledRequest, proposed: Draft) -> Draft:
        """Return ``proposed`` if it has tokens, otherwise the looked-up draft of the plan."""
        if proposed.token_ids:
            return proposed
        known = scheduled.draft_plan.draft
        draft = self._truncate_invalid(known, scheduled, len(known.token_ids))
        if not scheduled.draft_plan.max_draft:
            return draft
        # The proposer was asked and predicted no token of this draft.
        return replace(draft, survival=(0.0,) * len(draft.token_ids), note=proposed.note)

    def _propose(self, plan: StepPlan, on_kernels_started: OnKernelsStarted) -> dict[int, Draft]:
        """Return the proposer's drafts, by the index of their request in the plan.

        Returns an empty dict if the proposer fails.
        """
        if self.proposer is None:
            return {}
        try:
            if plan.released_request_ids or plan.newly_allocated_pages:
                self.proposer.forget(plan.released_request_ids, plan.newly_allocated_pages)
            # The proposer forgets reallocated pages before it adopts pages that a tier filled.
            if plan.loaded_pages:
                self.proposer.adopt(plan.loaded_pages)
            if plan.is_plain:
                return {}
            wanted = [
                index for index, each in enumerate(plan.requests) if each.draft_plan.max_draft > 0
            ]
            if not wanted:
                return {}
            # The engine may deliver the previous tokens while the draft model computes its passes.
            on_kernels_started()
            proposed = self.proposer.propose([plan.requests[index] for index in wanted])
            drafts = {
                index: self._truncate_invalid(
                    draft, each := plan.requests[index], each.draft_plan.max_draft
                )
                for index, draft in zip(wanted, proposed, strict=True)
            }
        except Exception as failure:
            # Memory use depends on the requests, so drafts of later steps may fit into memory.
            if is_out_of_memory(failure):
                logger.warning("out of memory while drafting; the step continues without drafts")
            else:
                self._record_exception("propose")
            return {}
        self._breakers["propose"].record_success()
        return drafts

    def _observe(
        self, work: LaunchedStep, verified: Sequence[Verified], outputs: Sequence[RequestOutput]
    ) -> None:
        """Report the outcome of a step to the proposer; the step succeeds even if that fails."""
        if self.proposer is None:
            return
        try:
            kept = work.layout.kept_rows([outcome.path for outcome in verified])
            requests = [
                VerifiedRequest(
                    scheduled,
                    [] if output.error or scheduled.extras.num_packed_away else rows,
                    output,
                )
                for scheduled, rows, output in zip(work.layout.requests, kept, outputs, strict=True)
            ]
            self.proposer.observe(work.batch, work.output, requests)
        except Exception:
            self._record_exception("observe")
        else:
            self._breakers["observe"].record_success()

    def _record_exception(self, what: str) -> None:
        """Log the exception that is being handled, and count a failure of the method ``what``."""
        logger.exception("the proposer failed to %s; the step continues without drafts", what)
        self._breakers[what].record_failure()
        if self._breakers[what].is_open:
            logger.error("the proposer failed repeatedly and is no longer used")
            self.proposer, self._lost_proposer = None, True

    def _truncate_invalid(self, draft: Draft, scheduled: ScheduledRequest, max_draft: int) -> Draft:
        """Return the nodes of a draft before the first token id outside the vocabulary.

        The draft becomes a chain if the model has recurrent states, or if its parents form no tree.
        It gets at most ``max_draft`` nodes, and only as many nodes off the trunk as the spare pages
        have slots.
        """
        if not draft.token_ids:
            return draft
        if scheduled.extras.state is not None or not draft.is_valid:
            draft = draft.trunk()
        vocab_size = self.decoder.config.vocab_size
        token_ids = array("q", draft.token_ids[:max_draft])
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            valid = takewhile(lambda token_id: 0 <= token_id < vocab_size, token_ids)
            token_ids = array("q", valid)
        draft = draft.first_nodes(len(token_ids))
        if not isinstance(draft.token_ids, array):
            draft = replace(draft, token_ids=token_ids)
        return cut_to_spare_pages(draft, scheduled, self.pool.page_size)

    # -- states ---------------------------------------------------------------------------------

    def _place_states(self, plan: StepPlan) -> None:
        """Initialise the state slots of requests that begin or that resume from a kept state.

        The slots of one step are distinct, so the order of initialisation does not matter. A step
        that is run again initialises them again.
        """
        states = self.pool.states
        if states is None:
            return
        for scheduled in plan.requests:
            if (state := scheduled.extras.state) is None:
                raise ValueError(
                    f"{scheduled.request_id} has no state slot, but the model has states"
                )
            if state.source >= 0:
                states.copy_slot(state.source, state.slot)
            elif scheduled.start == 0:
                states.reset(state.slot)

    def _pack(self, plan: StepPlan) -> None:
        """Pack the KV of the requests that the plan marks with a `KvPack`."""
        if self._keep_policy is not None:
            for scheduled in plan.requests:
                pack_kv(self._keep_policy, self.pool, scheduled)

    # -- forward and verify ---------------------------------------------------------------------

    def _batch(self, layout: StepLayout, after: Pending | None) -> RaggedBatch:
        inputs = self._next_inputs(layout, after) if layout.unknown_rows else None
        if layout.rows is not None:
            return self.decoder.row_batch(layout.rows, device_tokens=inputs)
        page_size = self.pool.page_size
        return self.decoder.batch(layout.segments, page_size=page_size, device_tokens=inputs)

    def _forward(
        self,
        batch: RaggedBatch,
        layout: StepLayout,
        draws: SamplingPlan | None,
        on_kernels_started: OnKernelsStarted,
    ) -> ForwardOutput:
        # The taps of a disabled proposer are still computed: CUDA graphs were captured with them.
        inputs, layer_vectors = None, None
        if self.vision is not None:
            hidden = self.decoder.config.hidden_size
            inputs, layer_vectors = image_rows(layout, batch, self.vision, hidden)
        wanted = Wanted(draws, self._taps, on_kernels_started, inputs, layer_vectors)
        output = self.decoder.forward(batch, self.pool, wanted)
        if (
            output.taps is not None and self._chooses_on_device
        ):  # The next pass may overwrite the taps before `_observe` reads them.
            output = output._replace(taps=output.taps.clone())
        return output

    def _next_inputs(self, layout: StepLayout, after: Pending | None) -> DeviceTokens:
        """Return input tokens that the device takes from ``after``, the step launched before.

        Raises ValueError if ``after`` is not a step of this runner, or if the sampling of a request
        needs its token history, which the host does not know yet.
        """
        if not isinstance(after, PendingStep):
            raise ValueError("the step that chooses the input tokens was not launched here")
        needed = [1 for each in layout.requests if each.is_ahead and each.sampling.needs_history]
        if needed:  # a list is faster than `any`
            raise ValueError(
                "a request that needs its token history cannot run before its last token is read"
            )
        vocab_size = self.decoder.config.vocab_size
        return after.next_inputs(layout.unknown_rows, layout.num_rows, vocab_size)

    def _begin(
        self, output: ForwardOutput, layout: StepLayout, draws: SamplingPlan | None
    ) -> PendingTokens | None:
        """Let the device choose the tokens of the pass, and return them as pending tokens.

        Returns None if the host samples them, or if no request samples.
        """
        if output.tokens is not None or not (layout.drafted and self._chooses_on_device):
            return output.tokens
        sampler = self.decoder.sampler
        assert isinstance(sampler, DeviceSampler)
        if draws is not None:
            tokens = sampler.begin_runs(output.logits, draws.rows, draws.counts)
            if tokens is not None:
                return tokens
        return sampler.begin(layout.sampled_logits(output.logits), layout.sample_rows())

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        """Return the outcome of each request; `NOTHING_VERIFIED` for a request without sampling."""
        logits = work.layout.sampled_logits(work.output.logits)
        verified = self._verified(logits, work.layout, work.tokens)
        if len(verified) == len(work.layout.samples):
            return [*verified]
        found = iter(verified)
        return [next(found) if samples else NOTHING_VERIFIED for samples in work.layout.samples]

    def _verified(
        self, logits: torch.Tensor, layout: StepLayout, tokens: PendingTokens | None
    ) -> Sequence[Verified]:
        """Return the outcome of each request that samples, by the device's ``tokens`` if not None.

        Without ``tokens`` the sampler chooses from ``logits`` [num_sampled, vocab].
        """
        requests = layout.drafted
        if tokens is None:
            return self.decoder.sampler.verify(logits, requests)
        return follow_choices(logits, requests, tokens.choices())  # `choices` waits for the device.


def _output(
    scheduled: ScheduledRequest,
    samples: bool,
    draft: Draft,
    outcome: Verified,
    prompt: Sequence[TokenLogprob],
    pooled: array[float] | None,
) -> RequestOutput:
    """Build a request's output; without sampling it has only the results of the prompt."""
    if not samples:
        return RequestOutput(request_id=scheduled.request_id, prompt_logprobs=prompt, pooled=pooled)
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
    """Return the seconds of drafting, forward pass and verification of a step.

    ``whole``: seconds of the whole step. All time except drafting and forward pass counts as
    verification. On a GPU, the GPU itself measures drafting and forward pass, because the host
    prepares the verification during the pass.
    """
    draft, forward = clocks[0].seconds(), clocks[1].seconds()
    return {"draft": draft, "forward": forward, "verify": max(0.0, whole - draft - forward)}


def _chunks_not_finite(work: LaunchedStep) -> list[int]:
    """Return the indices of the requests whose prefill chunk has a hidden state that is not finite.

    The verifier checks only the rows that decide a token. The KV of the other rows of a chunk will
    be published, so those rows are checked here.
    """
    requests = work.layout.requests
    chunks = [
        i
        for i, (scheduled, samples) in enumerate(zip(requests, work.layout.samples, strict=True))
        if scheduled.stop - scheduled.start > 1 or not samples
    ]
    if not chunks:
        return []
    # A single copy to the host, for all chunks, avoids further waits.
    finite = torch.isfinite(work.output.hidden).all(dim=-1).cpu().numpy()
    firsts = work.layout.first_rows
    spans = [(firsts[i], firsts[i] + requests[i].stop - requests[i].start) for i in chunks]
    return [i for i, span in zip(chunks, spans, strict=True) if not finite[slice(*span)].all()]
