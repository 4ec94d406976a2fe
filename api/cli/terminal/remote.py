"""A running server as the partner of ``foretoken chat --url``."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Self

from ....core.errors import ForetokenError
from ...serving.http_client import HttpServer, error_message
from ...types.sampling_params import SamplingParams
from ..config import SAMPLING_FLAGS
from .terminal import PLAIN, Printer, Style

# fields with these values are not sent, so that the server's defaults apply
LEFT_OUT = SamplingParams()


class ServerModel:
    """The first model of an OpenAI-compatible server."""

    def __init__(self, url: str, key: str | None, style: Style = PLAIN) -> None:
        self.name = ""
        self.context: int | None = None  # number of tokens, if the server reports it
        self.sampling: Mapping[str, Any] = {}
        self._takes_ids = False  # whether the server accepts token ids in messages
        self._server, self._style = HttpServer(url, key), style

    @classmethod
    async def connect(cls, url: str, key: str | None, style: Style = PLAIN) -> Self:
        """Return the server's first model. Raises `ForetokenError` if the server does not
        answer.
        """
        found = cls(url, key, style)
        model = (await found._server.models())[0]
        found.name = model["id"]
        context = model.get("max_model_len")  # vLLM and SGLang report it too
        found.context = context if isinstance(context, int) else None
        if isinstance(sampling := model.get("default_sampling_params"), dict):
            found.sampling = sampling  # only foretoken sends it
            found._takes_ids = bool(sampling)
        return found

    async def answer(
        self, messages: list[dict[str, Any]], params: SamplingParams, texts: list[str]
    ) -> list[int] | None:
        """Print an answer as it arrives, then its statistics if requested."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_given(params),
        }
        if self._takes_ids:
            body["return_token_ids"] = True
        usage: Mapping[str, Any] = {}
        token_ids: list[int] = []
        has_thoughts, printer = False, Printer()
        try:
            async with aclosing(self._events("/v1/chat/completions", body)) as events:
                async for event in events:
                    if "error" in event:
                        raise ForetokenError(error_message(event["error"]))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        thought = delta.get("reasoning_content") or ""
                        has_thoughts |= bool(thought)
                        texts.append(delta.get("content") or "")
                        token_ids = delta.get("token_ids") or token_ids
                        printer.think(thought)
                        printer.write(texts[-1])
        finally:
            printer.end()
        if self._style.has_stats:
            print(_cost_line(usage), file=sys.stderr)
        return None if has_thoughts else token_ids  # later prompts leave reasoning out

    async def _events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects of an event stream."""
        rest = b""
        async with aclosing(self._server.pieces("POST", path, json.dumps(body).encode())) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield json.loads(data)


def _given(params: SamplingParams) -> dict[str, Any]:
    pairs = ((name, getattr(params, name)) for name in SAMPLING_FLAGS)
    return {name: value for name, value in pairs if value is not getattr(LEFT_OUT, name)}


def _cost_line(usage: Mapping[str, Any]) -> str:
    parts = [f"{usage.get('completion_tokens', 0)} tokens"]
    if speculation := usage.get("speculation"):
        num_steps = max(1, speculation["verify_steps"])
        parts[0] += f" in {num_steps} steps"
        accepted, proposed = speculation["accepted_tokens"], speculation["proposed_tokens"]
        parts.append(f"{accepted} of {proposed} draft tokens accepted" if proposed else "no drafts")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts.append(f"{cached} of {usage.get('prompt_tokens', 0)} prompt tokens cached")
    return f"[{', '.join(parts)}]"
