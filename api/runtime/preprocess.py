"""Conversion of prompts and parameters to engine requests."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ...core.config import EngineConfig
from ...core.engine.inbox import TokenStream
from ...core.errors import InvalidRequest
from ...core.interface.extras.images import PromptImage, with_image_rows
from ...core.interface.extras.request_extras import NO_TRANSFER, Transfer, request_extras
from ...core.interface.request import (
    DEFAULT_CACHE,
    CacheOptions,
    Delta,
    FinishReason,
    OnToken,
    Request,
)
from ...core.interface.sampling import Pooling, SamplingMetadata
from ...core.sampling.seeds import sibling_seed
from ..structured.matcher import Grammar
from ..text.tokenizer import Tokenizer
from ..types.request_context import random_id, tenant_of
from ..types.sampling_params import SamplingParams
from .adapters import ServedAdapter
from .serving_engine import ServingEngine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]
SEED_BITS = 64


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine options after checking them.

    Raises `InvalidRequest` for an unknown name or an invalid value.
    """
    known = EngineConfig.names()
    for name in options:
        if name not in known:
            message = f"{name} is not an option of the engine; options are {', '.join(known)}"
            raise InvalidRequest(message, param=name)
    return EngineConfig(**options)


def is_one_prompt(prompt: object) -> TypeGuard[Prompt]:
    """Whether ``prompt`` is a text or a list of token ids, rather than a list of prompts.

    Raises `InvalidRequest` for other types.
    """
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest("prompt must be a text or a list of token ids", param="prompt")
    return len(prompt) > 0 and isinstance(prompt[0], int)


def is_one_conversation(messages: object) -> TypeGuard[Conversation]:
    """Whether ``messages`` is a list of messages, rather than a list of conversations.

    Raises `InvalidRequest` for other types.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages must be a list of objects", param="messages")
    return len(messages) == 0 or isinstance(messages[0], Mapping)


def one_params(params: object) -> SamplingParams:
    """Return the parameters of a single prompt. Raises `InvalidRequest` for another type."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params must be a SamplingParams", param="params")
    return params


def warm_params(params: SamplingParams, *, max_tokens: int = 0) -> SamplingParams:
    """Return parameters that only compute the prompt, or generate ``max_tokens`` tokens."""
    return SamplingParams(
        max_tokens=max_tokens,
        prompt_only=not max_tokens,
        speculation="off",
        cache_salt=params.cache_salt,
        lora=params.lora,
        deadline=params.deadline,
        priority=params.priority,
    )


def with_adapter(params: object, lora: str | None) -> object:
    """Return the parameters (one set or a list) with the adapter ``lora`` set, if it is given."""
    if lora is None:
        return params
    if params is None or isinstance(params, SamplingParams):
        return replace(params or SamplingParams(), lora=lora)
    if isinstance(params, Sequence) and not isinstance(params, str):
        return [with_adapter(each, lora) for each in params]
    return params


def many_params(params: object, count: int) -> list[SamplingParams]:
    """Return one set of parameters per prompt.

    Raises `InvalidRequest` if a list of parameters does not have ``count`` entries.
    """
    if params is None or isinstance(params, SamplingParams):
        return [one_params(params)] * count
    if not isinstance(params, Sequence) or len(params) != count:
        message = f"params must be one SamplingParams or a list of {count}, one for each prompt"
        raise InvalidRequest(message, param="params")
    return [one_params(each) for each in params]


def one_id(request_id: object) -> str | None:
    """Return the id of a single request. Raises `InvalidRequest` for another type."""
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequest("request_id must be a text", param="request_id")
    return request_id


def many_ids(request_id: object, count: int) -> list[str | None]:
    """Return one id per prompt; each is None if no ids are given. Raises `InvalidRequest`."""
    if request_id is None:
        return [None] * count
    if isinstance(request_id, str) or not isinstance(request_id, Sequence):
        message = f"request_id must be a list of {count} ids, one for each prompt"
        raise InvalidRequest(message, param="request_id")
    if len(request_id) != count:
        message = f"request_id must have {count} ids, one for each prompt, not {len(request_id)}"
        raise InvalidRequest(message, param="request_id")
    return [one_id(each) for each in request_id]


def children(params: SamplingParams) -> Iterator[tuple[SamplingParams, int]]:
    """Yield the parameters and the seed of each of the n choices.

    Choice 0 has the same seed as the single choice of a request with n = 1.
    """
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**SEED_BITS
    if params.n == 1:
        yield params, seed
        return
    first = replace(params, n=1)
    others = replace(first, prompt_logprobs=None)
    for index in range(params.n):
        yield others if index else first, sibling_seed(seed, index)


async def bad_words_ids(
    tokenizer: Tokenizer, params: SamplingParams
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word, at the beginning of a text and after a space."""
    if not params.bad_words:
        return ()
    forms = (form for word in params.bad_words for form in (word, f" {word.lstrip()}"))
    ids = await tokenizer.encode_words(tuple(forms))
    return tuple(dict.fromkeys(each for each in ids if each))


async def prediction_ids(tokenizer: Tokenizer, params: SamplingParams) -> array[int] | None:
    """Return the prediction's token ids; None for an empty prediction."""
    guess = params.prediction or ()
    if isinstance(guess, str):
        guess = await tokenizer.encode_prediction(guess)
    return array("q", guess) if guess else None


def needs_closing(params: SamplingParams) -> bool:
    """Whether the output is useless unless it is complete: JSON, or one of given choices."""
    return params.json_schema is not None or params.choice is not None


def closing_limit(params: SamplingParams, room: int, *, is_forced: bool) -> int | None:
    """Return the number of output tokens within which structured output must be complete.

    ``room``: number of output tokens that fit into the context. ``is_forced``: also limit output
    that would be useful if it were truncated, such as text that matches a regex. None means no
    limit; it is also returned if parameters ban tokens, since they might be needed for completion.
    """
    bans = params.allowed_token_ids is not None or params.bad_words or params.logit_bias
    if not params.close_early or bans or not (is_forced or needs_closing(params)):
        return None
    return room if params.max_tokens is None else min(room, params.max_tokens)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The token ids of a prompt.

    ``num_spliced``: number of ids that are original ids of earlier answers. ``images``: the images
    in place of image tokens. ``normalized``: names of the ``--normalize`` rules that changed the
    conversation. ``compared``: token ids of a recorded answer, for a `Pooling` that compares it.
    """

    token_ids: Sequence[int]
    num_spliced: int = 0
    normalized: tuple[str, ...] = ()
    images: tuple[PromptImage, ...] = ()
    compared: Sequence[int] = ()

    @property
    def cached_ids(self) -> array[int]:
        """The token ids as keys of the prefix cache: image rows replace image tokens."""
        return with_image_rows(self.token_ids, self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A tokenized prompt with its parameters, from which the requests of all choices are made.

    ``grammar`` is compiled once; each choice gets its own matcher. ``limit``: number of output
    tokens within which structured output must be complete; None for no limit. ``shown_ids``:
    special tokens to show in the text. ``pooling``: None for a request of text. ``adapter``: the
    adapter to apply. ``handover``: the KV transfer, which only the first choice makes; the other
    choices find its pages in the cache.
    """

    prompt: PromptTokens
    params: SamplingParams
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prediction: array[int] | None = None  # shared by all choices, read-only
    grammar: Grammar | None = None
    limit: int | None = None
    shown_ids: frozenset[int] = frozenset()
    pooling: Pooling | None = None
    cache: CacheOptions = DEFAULT_CACHE
    adapter: ServedAdapter | None = None
    handover: Transfer = NO_TRANSFER


def make_request(
    request_id: str,
    prepared: Prepared,
    *,
    seed: int,
    eos_token_ids: frozenset[int],
    on_token: OnToken | None = None,
) -> Request:
    """Return the engine's request for a prepared prompt.

    The request belongs to the tenant of the caller in the request context. Raises `InvalidRequest`
    if structured output has no token that could end it.
    """
    params, grammar, adapter = prepared.params, prepared.grammar, prepared.adapter
    pooling = prepared.pooling
    # A grammar allows no token after a complete answer, so an end token must be allowed.
    ends = not params.ignore_eos or grammar is not None
    stop_ids = (eos_token_ids if ends else frozenset()) | frozenset(params.stop_token_ids)
    if grammar is not None and not stop_ids:
        message = "structured output needs stop_token_ids: the model defines no end token"
        raise InvalidRequest(message, param="stop_token_ids")
    sampling = SamplingMetadata(
        params=params,
        seed=seed,
        prompt_len=len(prepared.prompt.token_ids),
        stop_ids=stop_ids,
        bad_words_ids=prepared.bad_words_ids,
        constraint=None if grammar is None else grammar.matcher(stop_ids, prepared.limit),
        constraint_param=None if grammar is None else params.structured_field,
        pooling=pooling,
    )
    tokens = prepared.prompt.cached_ids
    tokens.extend(prepared.prompt.compared)
    return Request(
        request_id=request_id,
        tokens=tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        depth=0 if params.speculation == "off" or pooling is not None else params.speculation,
        prediction=prepared.prediction,
        namespace=params.cache_salt if adapter is None else adapter.namespace(params.cache_salt),
        extras=request_extras(
            None if adapter is None else adapter.loaded.weights,
            prepared.prompt.images,
            None if pooling is None else pooling.branches_of(len(prepared.prompt.token_ids)),
        ),
        tenant=tenant_of(params.cache_salt),
        cache=prepared.cache,
        shown_ids=prepared.shown_ids,
        priority=params.priority,
        deadline=params.deadline,
        on_token=on_token,
    )


def submit(engine: ServingEngine, request: Request) -> TokenStream:
    """Submit a request to the engine. Raises the errors of `ServingEngine.submit`."""
    try:
        return engine.submit(request)
    except InvalidRequest as error:
        if error.param != "request_id":
            raise
    # Ids of open answers are unique, so this one belongs to an aborted request that has not ended.
    request.request_id = f"{request.request_id}~{random_id()[:8]}"
    return engine.submit(request)


def ended_stream(request: Request) -> TokenStream:
    """Return the stream of a request that was aborted before its first token."""
    request.usage.prompt_tokens = request.num_given
    stream = TokenStream(request)
    stream.push(Delta(finish_reason=FinishReason.ABORT))
    return stream
