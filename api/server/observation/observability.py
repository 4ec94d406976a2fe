"""Metrics, request logs, traces and recorded traffic of a server."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import ASGIApp

from ....core.errors import InvalidRequest
from ....core.telemetry.observers import EngineObserver
from ...runtime.engine_client import EngineClient
from ...serving.metrics import ServerMetrics
from ...serving.serving_context import Service
from ...serving.settings import Listen, ObservingOptions
from ...types.request_context import caller, caller_of
from .logs import log_request
from .request_log import RequestLog

if TYPE_CHECKING:
    from ....core.interface.request import Delta, Request
    from ....draft.training.traffic import Recorder, TrafficRecorder
    from ...certify.recorder import RequestRecorder
    from .tracing import Telemetry

R = TypeVar("R", bound="Recorder[Any]")
PROMPT_SETTINGS = ("tool_parser", "reasoning_parser", "normalize", "token_history")
"""Settings of the server that change the prompt that a body is rendered to."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observing:
    """The observers of a server."""

    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    access_log: bool = False
    telemetry: Telemetry | None = None
    recorder: TrafficRecorder | None = None
    request_recorder: RequestRecorder | None = None
    # settings of the server that change prompts, for the records of requests
    prompt_settings: Mapping[str, Any] = field(default_factory=dict)

    def around(self, app: ASGIApp, service: Service) -> ASGIApp:
        """Return the application wrapped with its observers."""
        self.metrics.is_ready = lambda: service.unready is None
        self.metrics.is_draining = lambda: service.draining
        if self.request_recorder is not None:
            app = self.request_recorder.around(app)
        return RequestLog(
            app,
            self.metrics,
            log=log_request if self.access_log else None,
            span=None if self.telemetry is None else self.telemetry.span,
        )

    @asynccontextmanager
    async def serving(self, llm: EngineClient, model: str) -> AsyncIterator[None]:
        """Observe this engine and the running event loop inside the block."""
        if self.telemetry is not None:
            self.telemetry.watch(llm.engine, model)
        if self.recorder is not None:
            llm.engine.metrics.observers.append(_Recording(self.recorder))
            self.recorder.name(model, await asyncio.to_thread(llm.tokenizer.fingerprint))
        if self.request_recorder is not None:
            await asyncio.to_thread(_name, self.request_recorder, llm, self.prompt_settings)
            llm.engine.metrics.observers.append(_Recording(self.request_recorder))
        try:
            with self.metrics.lag.measured():
                yield
        finally:
            if self.telemetry is not None:
                await asyncio.to_thread(self.telemetry.close)
            for recorder in (self.recorder, self.request_recorder):
                if recorder is not None:
                    await asyncio.to_thread(recorder.close)


class _Recording(EngineObserver):
    """Passes finished requests to a recorder, with their callers."""

    def __init__(self, recorder: Recorder[Any]) -> None:
        self._recorder = recorder

    def begin(self, request: Request, now: float) -> None:  # noqa: ARG002
        if request.sampling.generates:  # other requests have no answer to record
            self._recorder.expect(request, caller())

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:  # noqa: ARG002
        if delta.terminal:
            self._recorder.finish(request, delta)


def make_observing(options: ObservingOptions, listen: Listen) -> Observing:
    """Return the observers that the options ask for.

    With API keys, only requests with a ``record_key`` are recorded. Raises `InvalidRequest` if the
    extra for tracing or the address of a collector is missing.
    """
    has_keys, traffic, requests = bool(listen.settings.api_keys), None, None
    if options.record_traffic is not None:
        from ....draft.training.traffic import TrafficRecorder

        traffic = _recorder(TrafficRecorder, options.record_traffic, options, has_keys=has_keys)
    if options.record_requests is not None:
        from ...certify.recorder import RequestRecorder, load_redact

        redact = load_redact(options.record_redact) if options.record_redact else None
        requests = _recorder(RequestRecorder, options.record_requests, options, has_keys=has_keys)
        requests.redact = redact
    return Observing(
        access_log=options.access_log or listen.log_level == "debug",
        telemetry=_telemetry(options),
        recorder=traffic,
        request_recorder=requests,
        prompt_settings={name: getattr(listen.settings, name) for name in PROMPT_SETTINGS},
    )


def _name(recorder: RequestRecorder, llm: EngineClient, prompts: Mapping[str, Any]) -> None:
    """Set the facts of all records. Reads samples of the weights."""
    built, config = llm.built, llm.config
    template = {
        "chat_template": config.chat_template,
        "default_chat_template_kwargs": config.default_chat_template_kwargs,
    }
    recorder.name(
        built.path,
        built.settings,
        exact=built.exact,
        serving={**prompts, **{name: value for name, value in template.items() if value}},
        decode=partial(llm.tokenizer.decode, skip_special_tokens=False),
    )


def _recorder(kind: type[R], folder: str, options: ObservingOptions, *, has_keys: bool) -> R:
    from ....draft.training.traffic import DEFAULT_BYTES

    keys = {caller_of(key) for key in options.record_keys}
    return kind(
        Path(folder),
        max_bytes=options.record_bytes or DEFAULT_BYTES,
        callers=keys if keys or has_keys else None,
    )


def _telemetry(options: ObservingOptions) -> Telemetry | None:
    """Return the tracing observer; None without tracing.

    The endpoint comes from the options or OpenTelemetry's own variables.
    """
    if options.otlp_endpoint is None and not options.tracing:
        return None
    if options.otlp_endpoint is None and not any(name in os.environ for name in ENDPOINTS):
        message = f"--tracing needs --otlp-endpoint or the variable {ENDPOINTS[1]}"
        raise InvalidRequest(message, param="tracing")
    try:
        telemetry = importlib.import_module(".tracing", __package__)
    except ModuleNotFoundError as error:
        message = f"tracing needs the extra otel: pip install 'foretoken[otel]' ({error})"
        raise InvalidRequest(message, param="tracing") from None
    provider = telemetry.otlp_provider(options.otlp_endpoint)
    made: Telemetry = telemetry.Telemetry(provider, step_rate=options.trace_steps)
    return made
