"""Metrics, request logs, traces and recorded traffic of a server."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from ...core.errors import InvalidRequest
from ...core.telemetry.metrics import EngineObserver
from ..runtime.engine_client import EngineClient
from ..serving.metrics import ServerMetrics
from ..serving.serving_context import Service
from ..types.request_context import caller
from .logs import log_request
from .request_log import RequestLog, no_span

if TYPE_CHECKING:
    from ...core.interface.request import Delta, Request
    from ...draft.training.traffic import TrafficRecorder
    from .tracing import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Observing:
    """The observers of a server."""

    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    access_log: bool = False
    telemetry: Telemetry | None = None
    recorder: TrafficRecorder | None = None

    def around(self, app: ASGIApp, service: Service) -> ASGIApp:
        """Wrap the application with its observers."""
        self.metrics.is_ready = lambda: service.unready is None
        self.metrics.is_draining = lambda: service.draining
        return RequestLog(
            app,
            self.metrics,
            log=log_request if self.access_log else None,
            span=no_span if self.telemetry is None else self.telemetry.span,
        )

    @asynccontextmanager
    async def serving(self, llm: EngineClient, model: str) -> AsyncIterator[None]:
        """Observe this engine and the running loop inside the block."""
        if self.telemetry is not None:
            self.telemetry.watch(llm.engine, model)
        if self.recorder is not None:
            llm.engine.metrics.observers.append(_Recording(self.recorder))
            self.recorder.name(model, await asyncio.to_thread(llm.tokenizer.fingerprint))
        try:
            with self.metrics.lag.measured():
                yield
        finally:
            if self.telemetry is not None:
                await asyncio.to_thread(self.telemetry.close)
            if self.recorder is not None:
                await asyncio.to_thread(self.recorder.close)


class _Recording(EngineObserver):
    """Passes requests to a recorder, with the caller that each is served for."""

    def __init__(self, recorder: TrafficRecorder) -> None:
        self._recorder = recorder

    def begin(self, request: Request, now: float) -> None:  # noqa: ARG002
        self._recorder.expect(request, caller())

    def observe_delta(self, request: Request, delta: Delta, now: float) -> None:  # noqa: ARG002
        if delta.terminal:
            self._recorder.finish(request, delta)


def make_telemetry(endpoint: str | None, *, step_rate: float) -> Telemetry:
    """Traces over OTLP, to ``endpoint`` or to where OpenTelemetry's own variables say.

    Raises `InvalidRequest` where the extra is not installed.
    """
    try:
        telemetry = importlib.import_module(".tracing", __package__)
    except ModuleNotFoundError as error:
        message = f"tracing needs the extra otel: pip install 'foretoken[otel]' ({error})"
        raise InvalidRequest(message, param="tracing") from None
    made: Telemetry = telemetry.Telemetry(telemetry.otlp_provider(endpoint), step_rate=step_rate)
    return made
