"""Answers of the render routes: the prompt that a request would compute, as token ids.

The shape is vLLM's ``GenerateRequest``. Routers read it to find the server whose cache holds most
of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from ..runtime.conversation.chat_input import ChatInput
from ..runtime.preprocess import warm_params
from ..structured.schemas.preparing import OPTIONS
from ..types.sampling_params import LeftOutFloat, LeftOutInt, SamplingParams
from .answers import Free
from .sampling import Sampling
from .serving_context import Service

SHOWN = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs",
    "prompt_logprobs", "bad_words", "logit_bias", "allowed_token_ids",
)  # fmt: skip
STRUCTURED = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""vLLM's fields of ``structured_outputs``, and our names for them."""


class Rendered(Struct, kw_only=True):
    """One prompt of a request that was checked but not computed.

    ``sampling_params`` are the effective parameters under vLLM's names: the model's defaults are
    filled in, and ``max_tokens`` is limited by the context. ``token_offsets`` and ``features`` are
    always null.
    """

    request_id: str
    token_ids: Sequence[int]
    token_offsets: None = None
    features: None = None
    sampling_params: Free
    model: str
    stream: bool
    stream_options: Free | None = None
    cache_salt: str | None
    priority: int


async def render_chat(
    service: Service, chat: ChatInput, body: Sampling, *, request_id: str, is_prewarm: bool
) -> Rendered:
    """Check a conversation and return its rendered prompt. Raises the errors of
    `ChatClient.check`.
    """
    token_ids = await service.chat.check(chat, is_prewarm=is_prewarm)
    params = warm_params(chat.params) if is_prewarm else chat.params
    return rendered(service, body, params, token_ids, request_id)


def rendered(
    service: Service,
    body: Sampling,
    params: SamplingParams,
    token_ids: Sequence[int],
    request_id: str,
) -> Rendered:
    """Return the answer for one prompt that has passed all checks."""
    built = service.llm.built
    options = getattr(body, "stream_options", None) if body.stream else None
    return Rendered(
        request_id=request_id,
        token_ids=token_ids,
        sampling_params=_sampling(
            built.sampling_defaults.fill(params), built.max_model_len - len(token_ids)
        ),
        model=service.model,
        stream=bool(body.stream),
        stream_options=None if options is None else msgspec.to_builtins(options),
        cache_salt=params.cache_salt,
        priority=params.priority,
    )


def _sampling(params: SamplingParams, room: int) -> Free:
    """Return the parameters under vLLM's names. ``room``: tokens left in the context."""
    shown = {name: _plain(getattr(params, name)) for name in SHOWN}
    shown["max_tokens"] = room if params.max_tokens is None else min(params.max_tokens, room)
    asked = {name: getattr(params, own) for name, own in STRUCTURED.items()}
    given = {name: value for name, value in asked.items() if value is not None}
    if isinstance(schema := given.get("json"), Mapping):
        given["json"] = {name: value for name, value in schema.items() if name != OPTIONS}
    shown["structured_outputs"] = given or None
    return shown


def _plain(value: object) -> object:
    """Convert a number of a `LeftOut` type, which msgspec cannot encode, to a plain one."""
    if isinstance(value, LeftOutFloat):
        return float(value)
    return int(value) if isinstance(value, LeftOutInt) else value
