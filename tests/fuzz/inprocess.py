"""The application over a model, in this process: one call is one ASGI request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx

from foretoken import AsyncLLM
from foretoken.api.server.app import create_app
from foretoken.api.serving.settings import Settings

HANG_SECONDS = 30.0
SMALL: dict[str, Any] = {"max_model_len": 192, "kv_tokens": 3072, "threads": 1}
JSON = {"content-type": "application/json"}


class App:
    """A model on an event loop in a thread of its own; closed by `close`."""

    def __init__(
        self, model: str = "builtin", *, settings: Settings | None = None, **options: Any
    ) -> None:
        """Each call shows the first admin key of the ``settings``, if there is one."""
        settings = settings or Settings()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.llm = AsyncLLM(model, **{**SMALL, **options})
        self._run(self.llm.start())
        transport = httpx.ASGITransport(create_app(self.llm, settings), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url="http://testserver",
            headers=[("authorization", f"Bearer {key}") for key in settings.admin_keys[:1]],
        )
        self.num_calls = 0

    def ask(
        self,
        method: str,
        target: str,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """The whole answer; raises TimeoutError for one that does not come."""
        self.num_calls += 1
        began = time.monotonic()
        response = self._run(
            self._http.request(method, target, content=content, headers=headers or JSON)
        )
        response.extensions["seconds"] = time.monotonic() - began
        return response

    def post(self, path: str, body: object) -> httpx.Response:
        """A JSON body, NaN and infinities as Python writes them."""
        return self.ask("POST", path, json.dumps(body).encode())

    def cache(self) -> dict[str, Any]:
        """Return the body of GET /cache."""
        return dict(self.ask("GET", "/cache").json())

    def close(self) -> None:
        """End the engine and its loop."""
        self._run(self._http.aclose())
        self._run(self.llm.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_SECONDS)
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_SECONDS)
