"""The application over the built-in pair in this process, with everything that observes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from foretoken import AsyncLLM
from foretoken.api.server.app import create_app
from foretoken.api.server.observation.observability import Observing
from foretoken.api.server.observation.tracing import Telemetry
from foretoken.api.serving.settings import Settings

T = TypeVar("T")
SECONDS = 60.0
KEY = "sk-of-nobody"
MODEL = "pair"


class Observed:
    """A server without a socket: its metrics, its spans, its log (by caplog)."""

    def __init__(self, *, step_rate: float = 0.0, kv_disk: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.observing = Observing(
            access_log=True, telemetry=Telemetry(provider, step_rate=step_rate)
        )
        self.llm = AsyncLLM(
            "builtin",
            max_model_len=256,
            kv_tokens=1024,
            page_size=16,
            threads=1,
            kv_disk=kv_disk,
        )
        self.do(self.llm.start())
        self._serving = self.observing.serving(self.llm, MODEL)
        self.do(self._serving.__aenter__())
        settings = Settings(api_keys=(KEY,), served_names=(MODEL,))
        transport = httpx.ASGITransport(
            create_app(self.llm, settings, self.observing), raise_app_exceptions=False
        )
        self._http = httpx.AsyncClient(transport=transport, base_url="http://testserver")

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> httpx.Response:
        """The whole answer; the key is given unless ``authorization`` says otherwise."""
        sent = {"authorization": f"Bearer {KEY}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return self.do(self._http.request(method, path, json=body, headers=sent))

    def complete(self, prompt: str = "def fib(n):", **fields: Any) -> httpx.Response:
        """One completion; headers by ``headers``."""
        headers = fields.pop("headers", {})
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
        return self.ask("POST", "/v1/completions", body, **headers)

    def samples(self) -> dict[str, float]:
        """Every sample of /metrics by name and label values."""
        text = self.ask("GET", "/metrics").text
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def spans(self) -> list[ReadableSpan]:
        """Return the spans that ended since the last call."""
        ended = list(self._spans.get_finished_spans())
        self._spans.clear()
        return ended

    def close(self) -> None:
        """End the engine and its loop."""
        self.do(self._http.aclose())
        self.do(self.llm.close())
        self.do(self._serving.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()
