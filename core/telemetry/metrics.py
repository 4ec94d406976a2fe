"""Prometheus metrics of one engine. A metric that vLLM has, too, is named as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..errors import DeadlineExceeded
from ..interface.output import StepOutput
from ..interface.plan import StepPlan
from ..interface.request import Delta, FinishReason, Request
from ..scheduling.chunk_budget import num_step_tokens
from ..scheduling.scheduler import Scheduler
from .families import DURATIONS, PREFIX, Histogram, Histograms, Reader, counters
from .observers import Observers
from .readers import (
    EngineHealth,
    read_build,
    read_drafters,
    read_faults,
    read_pool,
    read_queue,
    read_states,
    read_tiers,
    read_tokens,
    read_transfers,
)
from .spec_decode_stats import SpecDecodeStats

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
PARTS = {
    "draft": "drafting",
    "forward": "the model",
    "verify": "choosing tokens",
    "host": "the rest",
}
"""Parts of a step's time, in words."""
DEADLINE = "deadline"
COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
C = TypeVar("C", bound=Collector)


class EngineMetrics:
    """Counters and histograms of an engine; `render` returns the body of ``/metrics``.

    ``gives_kv``: whether other engines may read this engine's KV pages.
    """

    def __init__(
        self, scheduler: Scheduler, engine: EngineHealth | None = None, *, gives_kv: bool = False
    ) -> None:
        self.registry = CollectorRegistry()
        self.spec_stats = SpecDecodeStats()
        for read in (
            partial(read_queue, scheduler),
            partial(read_pool, scheduler.cache),
            partial(read_tokens, self.spec_stats),
            partial(read_drafters, scheduler),
            read_build,
        ):
            self._add(Reader(read))
        if (states := scheduler.cache.states) is not None:
            self._add(Reader(partial(read_states, states)))
        loads = scheduler.page_loads
        if loads is not None:
            self._add(Reader(partial(read_tiers, loads, scheduler.cache.page_size)))
        tiers = None if loads is None else loads.tiers
        if gives_kv or (tiers is not None and tiers.refused_offers is not None):
            self._add(Reader(partial(read_transfers, scheduler.cache, tiers)))
        if engine is not None:
            self._add(Reader(partial(read_faults, engine)))
        self._last_token_times: dict[str, float] = {}
        failures = self._count(
            "observer_failures", "Calls to observers (logs, traces) that raised an exception"
        )
        self._observers = Observers(failures.inc)
        self.observers = self._observers.members  # receive each event, too
        self._make_request_metrics()
        self._make_step_metrics()

    def _make_request_metrics(self) -> None:
        self._prompt_tokens = self._count("prompt_tokens", "Prompt tokens of admitted requests")
        self._success = self._count("request_success", "Finished requests", "finished_reason")
        self._failed = self._count("request_failure", "Requests that ended with an error")
        self._aborted = self._count("request_aborts", "Requests that were aborted", "cause")
        for cause in ("caller", DEADLINE):
            self._aborted.labels(cause)
        self._first = self._time(
            "time_to_first_token_seconds", "Seconds from arrival to the first token"
        )
        self._between = self._time(
            "inter_token_latency_seconds", "Seconds between two successive tokens of a request"
        )
        self._per_token = self._time(
            "time_per_output_token_seconds",
            "Mean seconds per output token of a request, the first excluded",
        )
        self._whole = self._time(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token"
        )
        self._queued = self._time(
            "request_queue_time_seconds", "Seconds from arrival to the first step"
        )
        self._prefill = self._time(
            "request_prefill_time_seconds", "Seconds from the first step to the first token"
        )
        self._decode = self._time(
            "request_decode_time_seconds", "Seconds from the first token to the last"
        )
        self._prompt_lens = self._add(
            Histogram("request_prompt_tokens", "Prompt tokens of a finished request", TOKENS)
        )
        self._answer_lens = self._add(
            Histogram("request_generation_tokens", "Output tokens of a finished request", TOKENS)
        )

    def _make_step_metrics(self) -> None:
        self._steps = self._time(
            "step_seconds",
            "Seconds from a step's launch, or from the end of the preceding step if that is later, "
            "to the step's output",
        )
        self._parts = self._add(
            Histograms(
                "step_part_seconds",
                "Seconds of each part of an engine iteration",
                DURATIONS,
                "part",
            )
        )
        for part in PARTS:
            self._parts.of[part]  # present from the start: a rate needs a first value of 0
        self._ahead = self._count("steps_ahead", "Steps planned while the previous step ran")
        self._images = self._count("images_computed", "Images that the image tower computed")
        self._step_tokens = {"prefill": 0, "decode": 0}
        self._add(Reader(self._read_step_tokens))
        self._batch = self._add(Histogram("step_num_requests", "Requests in each step", COUNTS))
        self._batch_tokens = self._add(
            Histogram(
                "step_num_tokens", "Tokens computed in each step, excluding draft tokens", COUNTS
            )
        )

    def _read_step_tokens(self) -> Iterator[Metric]:
        tokens = self._step_tokens | {"draft": self.spec_stats.num_proposed}
        yield counters(
            "step_tokens", "Tokens computed, by kind: prefill, decode or draft", "kind", tokens
        )

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _time(self, name: str, text: str) -> Histogram:
        return self._add(Histogram(name, text, DURATIONS))

    def _add(self, collector: C) -> C:
        self.registry.register(collector)
        return collector

    def observe_arrival(self, request: Request, now: float) -> None:
        """Record an accepted request. This runs in the task of the caller, not of the engine."""
        if self.observers and not request.extras.is_idle_prefill:
            self._observers.begin(request, now)

    def observe_step(
        self,
        plan: StepPlan,
        output: StepOutput,
        *,
        began: float,
        computed: float,
        ended: float,
        is_ahead: bool = False,
    ) -> None:
        """Record one step, with times in seconds on the engine's clock.

        ``began``: start of the launch, or end of the preceding step if that is later; ``computed``:
        end of the step; ``ended``: end of the commit. ``is_ahead``: the step was planned before the
        preceding step was committed.
        """
        self._steps.observe(computed - began)
        if is_ahead:
            self._ahead.inc()
        self._observe_batch(plan)
        if output.num_images:
            self._images.inc(output.num_images)
        if not plan.is_plain:
            self.spec_stats.observe_requests(output.requests)
        for part, part_seconds in output.times.items():
            self._parts.of[part].observe(part_seconds)
        if self.observers:
            self._observers.observe_step(plan, output, began=began, ended=ended)

    def _observe_batch(self, plan: StepPlan) -> None:
        num_requests, num_tokens = len(plan.requests), num_step_tokens(plan.requests)
        num_prefill = 0
        if num_tokens > num_requests:  # otherwise every request has a single token
            lens = [scheduled.stop - scheduled.start for scheduled in plan.requests]
            num_prefill = sum(each for each in lens if each > 1)
        self._step_tokens["prefill"] += num_prefill
        self._step_tokens["decode"] += num_tokens - num_prefill
        self._batch.observe(num_requests)
        self._batch_tokens.observe(num_tokens)

    def part_seconds(self) -> dict[str, float]:
        """Return the total seconds since the start that each part of a round took, by part."""
        return {part: self._parts.of[part].sum for part in PARTS}

    def observe_round(self, output: StepOutput, seconds: float) -> None:
        """Record the ``seconds`` of a whole round; time outside the model thread counts as host."""
        self._parts.of["host"].observe(max(0.0, seconds - sum(output.times.values())))

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """Record the tokens of a delta, and the end of the request if it is the last delta.

        Prompts that are computed ahead of their requests are not recorded.
        """
        if request.extras.is_idle_prefill:
            return
        if delta.token_ids:
            self._observe_tokens(request, len(delta.token_ids), now)
            self.spec_stats.observe_delta(delta)
        elif delta.finish_reason in COMPLETED and not request.sampling.generates:
            self._observe_prompt(request)
        if delta.terminal:
            self._last_token_times.pop(request.request_id, None)
            self._observe_end(request, delta)
        if self.observers:
            self._observers.observe_delta(request, delta, now)

    def _observe_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        last = self._last_token_times.get(request.request_id)
        self._last_token_times[request.request_id] = now
        if last is None:
            self._first.observe(request.usage.time_to_first_token)
            self._observe_prompt(request)
            return
        # The tokens of one step count as evenly spaced in time.
        self._between.observe((now - last) / num_tokens, num_tokens)

    def _observe_prompt(self, request: Request) -> None:
        self._queued.observe(request.usage.queue_time)
        self._prompt_tokens.inc(request.num_given)

    def _observe_end(self, request: Request, delta: Delta) -> None:
        if isinstance(delta.error, DeadlineExceeded) or delta.stop_reason == DEADLINE:
            self._aborted.labels(DEADLINE).inc()
        elif delta.finish_reason is FinishReason.ABORT:
            self._aborted.labels("caller").inc()
        elif delta.finish_reason is None:
            self._failed.inc()
        if delta.finish_reason is not None:
            self._observe_answer(request, delta.finish_reason)

    def _observe_answer(self, request: Request, reason: FinishReason) -> None:
        usage = request.usage
        self._success.labels(reason.value).inc()
        self._whole.observe(usage.total_time)
        self._prompt_lens.observe(request.num_given)
        self._answer_lens.observe(usage.completion_tokens)
        if usage.completion_tokens == 0:
            return
        decode_time = usage.total_time - usage.time_to_first_token
        self._prefill.observe(usage.time_to_first_token - usage.queue_time)
        self._decode.observe(decode_time)
        if usage.completion_tokens > 1:
            self._per_token.observe(decode_time / (usage.completion_tokens - 1))

    async def refresh(self) -> None:
        """Do nothing: all values that `render` writes are counted in this process."""

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of ``/metrics``, in Prometheus's text format."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
