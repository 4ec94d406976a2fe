"""OpenTelemetry traces: a span per HTTP request, with a child span per request of the engine.

This is the only file that imports OpenTelemetry, and it is imported only with tracing enabled.
Attribute names follow OpenTelemetry's conventions for generative AI and HTTP. Spans never contain
text of requests or answers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from ...._version import __version__
from ....core.interface.output import StepOutput
from ....core.interface.plan import ScheduledRequest, StepPlan
from ....core.interface.request import Delta, Request
from ....core.interface.sampling import TokenSamplingParams
from ....core.scheduling.chunk_budget import num_step_tokens
from ....core.telemetry.observers import EngineObserver
from ...runtime.serving_engine import ServingEngine
from ...types.request_context import CONTEXT, RequestContext
from ...types.sampling_params import SamplingParams

MAX_CHUNKS = 32  # spans per prompt; the last one covers all later chunks
NANO = 1e9
SEND_SECONDS = 3.0
TRACES_PATH = "/v1/traces"


Value = str | bool | int | float | list[str]
_COMPLETIONS = "/v1/completions"


def operation_of(request: Request, http: RequestContext | None) -> str:
    """Return the operation's name in OpenTelemetry's conventions."""
    if request.sampling.pooling is not None:
        return "embeddings"
    is_text = http is None or http.route == _COMPLETIONS
    return "text_completion" if is_text else "chat"


def asked_of(request: Request) -> dict[str, Value]:
    """Return the numeric parameters of a request as span attributes."""
    params = request.sampling.params
    asked: dict[str, Value | None] = {
        "gen_ai.provider.name": "foretoken",
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": _fitting(params),
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _fitting(params: TokenSamplingParams) -> int | None:
    """Return the caller's seed; None if it does not fit into OTLP's signed 64-bit integers."""
    seed = params.seed if isinstance(params, SamplingParams) else None
    return seed if seed is not None and seed < 2**63 else None


def cost_of(request: Request, delta: Delta) -> dict[str, Value]:
    """Return the usage and the finish reason of a request as span attributes."""
    usage = request.usage
    cost: dict[str, Value] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "foretoken.num_preemptions": request.num_preemptions,
    }
    if usage.completion_tokens:
        cost["gen_ai.response.time_to_first_chunk"] = usage.time_to_first_token
    if delta.finish_reason is not None:
        cost["gen_ai.response.finish_reasons"] = [delta.finish_reason.value]
    if delta.error is not None:
        cost["error.type"] = type(delta.error).__name__
    return cost


def decoding_of(request: Request, seconds: Mapping[str, float]) -> dict[str, Value]:
    """Return the counts and times of all decoding steps of a request as span attributes.

    Concurrent requests share the steps, so their times include work for other requests.
    """
    usage = request.usage
    told: dict[str, Value] = {
        "foretoken.decode.steps": usage.verify_steps,
        "foretoken.decode.proposed_tokens": usage.proposed_tokens,
        "foretoken.decode.accepted_tokens": usage.accepted_tokens,
    }
    for part, part_seconds in seconds.items():
        told[f"foretoken.decode.{part}_seconds"] = part_seconds
    return told


def otlp_provider(endpoint: str | None) -> TracerProvider:
    """Return a provider that exports spans in batches, from a thread of its own.

    ``endpoint``: the address of the collector, with or without its path ``/v1/traces``; None: the
    OTEL_EXPORTER_* variables set it.
    """
    if endpoint is not None and not endpoint.rstrip("/").endswith(TRACES_PATH):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    named = "OTEL_SERVICE_NAME" in os.environ
    attributes = {"service.version": __version__} | ({} if named else {"service.name": "foretoken"})
    provider = TracerProvider(resource=Resource.create(attributes))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_timeout())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _timeout() -> float | None:
    """Return the time limit for sending a batch, in seconds; None if the environment sets it.

    The default is short, since the exit of the process waits for the last batch.
    """
    names = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
    return None if any(name in os.environ for name in names) else SEND_SECONDS


@dataclass(slots=True)
class _Chunk:
    """Prompt tokens that one step computed, with start and end in seconds."""

    start: int
    stop: int
    began: float
    ended: float


@dataclass(slots=True)
class _Live:
    """A running request of the engine."""

    span: trace.Span
    context: Context  # context with its span as the current one
    http: RequestContext | None
    arrival: float  # seconds on the engine's clock
    offset: int  # nanoseconds from the engine's clock to the wall clock
    chunks: list[_Chunk] = field(default_factory=list)
    # seconds of its decoding steps, by part
    seconds: dict[str, float] = field(default_factory=dict)

    def at(self, seconds: float) -> int:
        """Convert seconds on the engine's clock to nanoseconds of wall-clock time."""
        return self.offset + int(seconds * NANO)

    def take_part(
        self, scheduled: ScheduledRequest, output: StepOutput, began: float, ended: float
    ) -> None:
        """Add a step in which the request took part."""
        if scheduled.stop - scheduled.start == 1:
            for part, seconds in output.times.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        elif len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(_Chunk(scheduled.start, scheduled.stop, began, ended))
        else:
            self.chunks[-1].stop, self.chunks[-1].ended = scheduled.stop, ended


class Telemetry(EngineObserver):
    """The spans of an engine's requests and steps, and of HTTP requests.

    A request of the engine has a span, with child spans for the queue, for each prefill chunk and
    for all decoding together. ``step_rate``: fraction of the steps that get a trace of their own.
    """

    def __init__(self, provider: TracerProvider, *, step_rate: float = 0.0) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("foretoken", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._step_rate = step_rate
        self._steps_due = 0.0
        self._model = ""
        self._live: dict[str, _Live] = {}

    def watch(self, engine: ServingEngine, model: str) -> None:
        """Trace the requests of this engine."""
        engine.metrics.observers.append(self)
        self._model = model

    def close(self) -> None:
        """Send the remaining spans. Blocking."""
        for live in self._live.values():
            live.span.end()
        self._live.clear()
        self._provider.shutdown()

    # -- HTTP -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def span(self, http: RequestContext) -> Iterator[None]:
        """Make a span current inside the block, as a child of the caller's span if it sent one."""
        if http.is_probe:
            yield
            return
        parent = self._propagator.extract(dict(Headers(scope=http.scope)))
        with self._tracer.start_as_current_span(
            http.method, parent, kind=trace.SpanKind.SERVER, record_exception=False
        ) as span:
            if span.is_recording():
                http.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
            try:
                yield
            finally:
                self._describe_http(span, http)

    def _describe_http(self, span: trace.Span, http: RequestContext) -> None:
        if http.answered_ns:  # this span covers text processing and sending
            self._child(None, "emit", http.answered_ns, time.time_ns())
        span.update_name(f"{http.method} {http.route}")
        span.set_attributes(
            {
                "http.request.method": http.method,
                "http.route": http.route,
                "http.response.status_code": http.status,
                "foretoken.request_id": http.request_id,
            }
        )
        if http.error is not None:
            span.set_attribute("error.type", http.error.code or http.error.kind)
        if http.status >= 500:
            span.set_status(trace.StatusCode.ERROR)

    # -- the engine -----------------------------------------------------------------------------

    def begin(self, request: Request, now: float) -> None:
        """Start the span of an accepted request, as a child of the span of its HTTP request."""
        http = CONTEXT.get()
        operation = operation_of(request, http)
        offset = time.time_ns() - int(now * NANO)
        span = self._tracer.start_span(
            f"{operation} {self._model}", start_time=offset + int(now * NANO)
        )
        if not span.is_recording():
            return
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.request.model", self._model)
        span.set_attributes(asked_of(request))
        context = trace.set_span_in_context(span)
        self._live[request.request_id] = _Live(span, context, http, now, offset)

    def observe_step(
        self, plan: StepPlan, output: StepOutput, *, began: float, ended: float
    ) -> None:
        """Add a step to the spans of its requests. Trace the step itself if sampling selects it."""
        if self._live:
            for scheduled in plan.requests:
                live = self._live.get(scheduled.request_id)
                if live is not None and live.arrival <= began:  # an earlier request had this id
                    live.take_part(scheduled, output, began, ended)
        self._steps_due += self._step_rate
        if self._steps_due >= 1:
            self._steps_due -= 1
            self._trace_step(plan, output, began, ended)

    def _trace_step(self, plan: StepPlan, output: StepOutput, began: float, ended: float) -> None:
        """Trace one step: its parts in sequence, then the remaining time as "host"."""
        end = time.time_ns()
        at = end - int((ended - began) * NANO)
        span = self._tracer.start_span("step", Context(), start_time=at)
        span.set_attributes(
            {
                "foretoken.step.num_requests": len(plan.requests),
                "foretoken.step.num_tokens": num_step_tokens(plan.requests),
                "foretoken.step.num_draft_tokens": sum(
                    len(out.draft.token_ids) for out in output.requests
                ),
            }
        )
        context = trace.set_span_in_context(span)
        for part, seconds in output.times.items():
            self._child(context, part, at, at := at + int(seconds * NANO))
        self._child(context, "host", at, max(at, end))
        span.end(max(at, end))

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
        """End the span of a finished request, with its child spans."""
        if not delta.terminal:
            return
        live = self._live.pop(request.request_id, None)
        if live is None:
            return
        self._tell_parts(live, request, now)
        live.span.set_attributes(cost_of(request, delta))
        if delta.error is not None:
            live.span.set_status(trace.StatusCode.ERROR)
        live.span.end(live.at(now))
        if live.http is not None:
            live.http.answered_ns = live.at(now)

    def _tell_parts(self, live: _Live, request: Request, now: float) -> None:
        usage = request.usage
        has_begun = bool(live.chunks or live.seconds)
        waited = live.arrival + usage.queue_time if has_begun else now
        self._child(live.context, "queue", live.at(live.arrival), live.at(waited))
        for chunk in live.chunks:
            told = {"foretoken.chunk.start": chunk.start, "foretoken.chunk.stop": chunk.stop}
            began, ended = live.at(chunk.began), live.at(chunk.ended)
            self._child(live.context, "prefill", began, ended, told)
        if usage.completion_tokens:
            first = live.at(live.arrival + usage.time_to_first_token)
            self._child(
                live.context, "decode", first, live.at(now), decoding_of(request, live.seconds)
            )

    def _child(
        self,
        context: Context | None,  # None: the current context
        name: str,
        began: int,
        ended: int,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        span = self._tracer.start_span(name, context, start_time=began, attributes=attributes)
        span.end(ended)
