"""``--prewarm FILE``: prompts to cache before the first request.

The file is a JSON list or JSON Lines. An entry has ``prompt`` (text or token ids) or ``messages``
and optional ``tools``, and optionally ``cache_salt`` and ``ttl`` (seconds to pin it).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ...core.errors import InvalidRequest
from ...core.interface.request import MAX_TTL, CacheOptions, Pin
from ..dialects.openai.bodies import Message
from ..dialects.openai.reading import plain_chat
from ..runtime.chat import ChatClient
from ..runtime.conversation.tools import WHOLE, Tools, read_tools
from ..runtime.engine_client import EngineClient

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Warm(Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt to compute at startup."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    cache_salt: str | None = None
    ttl: Annotated[float, Meta(gt=0, le=MAX_TTL)] | None = None

    def __post_init__(self) -> None:
        """Check that exactly one of prompt and messages is given."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("an entry needs either prompt or messages, but not both")


def read_prewarm(path: str) -> list[Warm]:
    """Return the prompts of a file. Raises `InvalidRequest`, which names the file and the line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"prewarm: {path}: {error.strerror}", param="prewarm") from None
    if data.lstrip()[:1] == b"[":
        return _decode(data, list[Warm], path)
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    return [_decode(line, Warm, f"{path}, line {number}") for number, line in lines]


async def prewarm(llm: EngineClient, chat: ChatClient, warms: Sequence[Warm]) -> int:
    """Compute the prompts one after the other. Return the number of tokens written to the cache.

    ``chat`` renders the conversations. Each prompt reuses cached pages of the earlier ones. Raises
    the errors of `EngineClient.open`.
    """
    written = 0
    if warms:
        await llm.when_complete()
    for warm in warms:
        if llm.draining:
            break
        usage = await llm.prewarm(
            await _prompt(chat, warm), cache=_options(warm), cache_salt=warm.cache_salt
        )
        written += usage.cache_write_tokens
    if warms:
        logger.info("prewarmed %d prompts: %d tokens", len(warms), written)
    return written


async def _prompt(client: ChatClient, warm: Warm) -> str | list[int]:
    """Return a prompt. A conversation has no generation prompt, since any turn may follow."""
    if warm.messages is None:
        return warm.prompt or ""
    chat = plain_chat(warm.messages, tools=read_tools(warm.tools), opens=False)
    prompt = await client.render(chat)
    if prompt.images:
        raise chat.images[0].refusal("images are not supported by --prewarm")
    return [*prompt.token_ids]


def _decode(data: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"prewarm: {where}: {error}", param="prewarm") from None


def _options(warm: Warm) -> CacheOptions:
    return CacheOptions(pins=() if warm.ttl is None else (Pin(WHOLE, warm.ttl),))
