"""Answers with the letters a, b, c ..., in chunks, or breaks as it is told."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """Orders are attributes; ``bodies`` is what it was asked."""

    def __init__(self) -> None:
        self.port = 0
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
            ]
        )
        self.reset()

    def reset(self) -> None:
        """Standard and nothing else."""
        self.bodies: list[dict[str, Any]] = []
        self.per_chunk = 1  # tokens
        self.usage = True  # in a last chunk
        self.continuous = False  # and in every other one
        self.refused: set[str] = set()  # fields that are a 400
        self.statuses: dict[int, int] = {}  # of the n-th answer
        self.breaks: dict[int, str] = {}  # how the n-th stream ends after two chunks
        self.extra_usage: dict[str, Any] = {}
        self.has_tokenize = True
        self.kv_usage: str | None = None
        self.max_model_len: int | None = None
        self.hang = False
        self.hold_for = 0  # tokens of the request that streams wait for at their 100th token
        self._released = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- routes ---------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        fields = set(body) | set(body.get("stream_options", {}))
        if bad := sorted(fields & self.refused):
            return JSONResponse({"error": {"message": f"unknown field {bad[0]}"}}, 400)
        if number in self.statuses:
            return JSONResponse({"error": {"message": "no"}}, self.statuses[number])
        is_chat = "messages" in body
        return StreamingResponse(
            self.stream(body, is_chat, self.breaks.get(number)), media_type="text/event-stream"
        )

    async def stream(self, body: dict[str, Any], is_chat: bool, end: str | None) -> AsyncIterator:
        count = body.get("max_tokens") or body["max_completion_tokens"]
        if self.hang:
            await asyncio.Event().wait()
        if count == self.hold_for:
            self._released.set()
        for index, start in enumerate(range(0, count, self.per_chunk)):
            tokens = range(start, min(count, start + self.per_chunk))
            text = "".join(string.ascii_lowercase[token % 26] for token in tokens)
            if index == 100 and self.hold_for:
                await self._released.wait()
            if index == 2 and end == "cut":
                raise ConnectionError
            if index == 2 and end == "error":
                yield _event({"error": {"message": "out of memory", "type": "server_error"}})
                return
            usage = {"usage": self._usage(tokens.stop)} if self.continuous else {}
            yield _event({"choices": [_choice(text, is_chat)], **usage})
        yield _event({"choices": [{**_choice("", is_chat), "finish_reason": "length"}]})
        if self.usage and "stream_options" in body:
            yield _event({"choices": [], "usage": self._usage(count)})
        yield b"data: [DONE]\n\n"

    def _usage(self, count: int) -> dict[str, Any]:
        return {"prompt_tokens": 10, "completion_tokens": count, **self.extra_usage}

    async def models(self, _request: Request) -> Response:
        model = {"id": "fake", "object": "model"}
        if self.max_model_len is not None:
            model["max_model_len"] = self.max_model_len
        return JSONResponse({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        if not self.has_tokenize:
            return JSONResponse({"error": "no such route"}, 404)
        prompt = (await request.json())["prompt"]
        return JSONResponse({"count": len(prompt), "tokens": [ord(c) % 128 for c in prompt]})

    async def metrics(self, _request: Request) -> Response:
        if self.kv_usage is None:
            return PlainTextResponse("", 404)
        return PlainTextResponse(f"# HELP x\n{self.kv_usage}\nother 3\n")

    async def health(self, _request: Request) -> Response:
        return Response()


def _choice(text: str, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, "finish_reason": None, **said}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
