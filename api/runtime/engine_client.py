"""EngineClient: loads a model and its tokenizer, and submits text requests to its engine."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from ...core.config import EngineConfig
from ...core.errors import EngineDead, ForetokenError, InvalidRequest
from ...core.interface.extras.request_extras import NO_TRANSFER, Transfer
from ...core.interface.request import DEFAULT_CACHE, CacheOptions, OnToken, Request, Usage
from ...core.interface.sampling import Pooling
from ...core.ops.machine.host_memory import keep_freed_memory
from ...core.ops.machine.imports import uncollected
from ...core.startup import timed
from ..build.built import Built
from ..media.reader import ImageReader
from ..structured.compiler import Grammars
from ..text.chat_template import template_of
from ..text.detokenizer import AnswerText
from ..text.openings import find_openings
from ..text.tokenizer import Tokenizer
from ..types.request_context import (
    adapter_name,
    arrival,
    in_batch,
    note_answer,
    random_id,
    seconds_left,
    session_key,
)
from ..types.results import Body, Completion
from ..types.sampling_params import SamplingParams
from .adapters import Adapters, ServedAdapter
from .cache_diagnostics import Explainer, Explanation, MissCauses
from .conversation.prompt_history import NO_NOTE, PromptLog, PromptNote
from .end_tokens import end_token_ids
from .generation import Answer, Generation
from .preprocess import (
    Conversation,
    Prepared,
    Prompt,
    PromptTokens,
    bad_words_ids,
    children,
    closing_limit,
    ended_stream,
    make_config,
    make_request,
    prediction_ids,
    submit,
    warm_params,
)
from .serving_engine import ServingEngine
from .sessions import SessionEnds, in_session


class EngineClient:
    """A client that converts prompts to engine requests, for `AsyncLLM` and the HTTP routes.
    ``options`` are the fields of `EngineConfig`, which are the flags of ``foretoken serve``. The
    model is loaded by `start`, by ``async with``, or by the first request. Belongs to one event
    loop.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:  # noqa: ANN401 - EngineConfig checks them
        self.config: EngineConfig = make_config(options)
        self._model = model
        self._built: Built[ServingEngine] | None = None
        self._tokenizer: Tokenizer | None = None
        self._grammars: Grammars | None = None  # set together with the tokenizer
        # set together with the tokenizer, if the model supports images
        self.images: ImageReader | None = None
        self._starting = asyncio.Lock()
        # the task that loads the model; it continues if `start` is cancelled
        self._loading: asyncio.Task[Built[ServingEngine]] | None = None
        # the task that runs `close` if ``async with`` was cancelled
        self._ending: asyncio.Task[None] | None = None
        self._closed = False  # new requests and calls are refused
        self._is_over = False  # requests of open calls are refused, too
        self._num_calls = 0  # number of open calls
        self._no_calls = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop on which `start` was called
        # set by `for_server`
        self.max_request_seconds: float | None = None
        self._counts_causes = False
        self.prompts = PromptLog()  # recent prompts, to explain later cache misses
        self.miss_causes = MissCauses(self.prompts)
        self.adapters = Adapters()  # replaced by the engine's adapters in `start`
        self._answers: dict[str, Answer] = {}  # answers that were not forgotten yet, by id
        self._room = asyncio.Event()  # set when an answer ends
        self._interactive_ended = -math.inf  # time at which the last answer outside a batch ended
        self.session_ends = SessionEnds()

    @classmethod
    def from_built(cls, built: Built[ServingEngine]) -> Self:
        """Return a client of an existing engine. `start` starts the engine."""
        llm = cls()
        llm._built = built
        return llm

    def for_server(self, max_request_seconds: float) -> None:
        """Limit the duration of each request, and count the causes of cache misses.

        A request may set an earlier deadline. Causes are found by comparison with earlier prompts
        in a separate thread.
        """
        self.max_request_seconds = max_request_seconds
        self._counts_causes = True

    # -- life -----------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Prepare what a server needs before it listens; by default, all that `start` does."""
        await self.start()

    async def start(self) -> None:
        """Load the model in a thread and start the engine. May be called twice.

        If the call is cancelled, loading continues and the next `start` uses the result.
        """
        self._check_open()
        self._loop = asyncio.get_running_loop()
        async with self._starting:
            self._check_open()
            if self._tokenizer is not None:
                return
            template, options = template_of(self.config)  # raises its errors before the slow load
            if self._built is None:
                self._built = await self._build()
            tokenizer = await asyncio.to_thread(
                Tokenizer.load, self._built.path, max_model_len=self._built.max_model_len
            )
            tokenizer.use_template(template, options)
            ends = await asyncio.to_thread(self._end_tokens, self._built, tokenizer)
            if ends != self._built.eos_token_ids:
                self._built = replace(self._built, eos_token_ids=ends)
            if (set_openings := self._built.set_openings) is not None:
                set_openings(await find_openings(tokenizer))
            built = self._built
            self.adapters = Adapters(
                built.adapters,
                built.engine.flush_cache,
                most=self.config.max_loras,
                reserved=frozenset({built.name, *built.aliases}),
            )
            for name, folder in self.config.lora_folders.items():
                await self.adapters.load(name, folder)
            if built.takes_images:
                self.images = ImageReader(built.path, self.config)
            await built.engine.start()
            self._grammars = Grammars(tokenizer, built.vocab_size, built.eos_token_ids)
            self._tokenizer = tokenizer

    def _end_tokens(self, built: Built[ServingEngine], tokenizer: Tokenizer) -> frozenset[int]:
        """Return the ids of the tokens that end an answer."""
        return end_token_ids(tokenizer, built.eos_token_ids)

    async def _build(self) -> Built[ServingEngine]:
        """Return the loaded model.

        If this call is cancelled, loading continues, and a later call uses the result.
        """
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name="foretoken-load")
        try:
            built = await asyncio.shield(self._loading)
        except Exception:  # not CancelledError, which may arrive after the model was loaded
            self._loading = None
            raise
        self._loading = None
        return built

    async def _load(self) -> Built[ServingEngine]:
        """Load the model in a thread."""
        keep_freed_memory()  # must run in the main thread, before other threads allocate
        return await asyncio.to_thread(_build, self._model, self.config)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish, then abort the rest. Idempotent.

        Running requests have ``drain_seconds`` to finish. In this time, a `call` of several
        requests may still submit its remaining requests.
        """
        self._closed = True
        drain_seconds = await self._finish_calls(drain_seconds)
        self._is_over = True
        self.miss_causes.close()
        async with self._starting:
            if self._loading is not None:  # a cancelled `start` left its task running
                await asyncio.wait({self._loading})
                if not self._loading.cancelled() and self._loading.exception() is None:
                    self._built = self._loading.result()
                self._loading = None
            if self._built is not None:
                await self._built.engine.close(drain_seconds=drain_seconds)
                if self._built.events is not None:
                    await asyncio.to_thread(self._built.events.close)
            if self._tokenizer is not None:
                self._tokenizer.close()
            if self._grammars is not None:
                self._grammars.close()
            if self.images is not None:
                self.images.close()

    async def _finish_calls(self, seconds: float) -> float:
        """Wait until every `call` has ended, at most ``seconds``. Return the seconds left."""
        if not self._num_calls or seconds <= 0:
            return seconds
        until = time.monotonic() + seconds
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_calls.wait(), seconds)
        return max(0.0, until - time.monotonic())

    @contextmanager
    def call(self) -> Iterator[None]:
        """Return the context of a call that submits several requests; `close` waits for its end.

        Raises `EngineDead` if new requests are refused.
        """
        self._check_open()
        self._num_calls += 1
        self._no_calls.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._no_calls.set()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except asyncio.CancelledError:
            self._ending = asyncio.create_task(self.close(), name="foretoken-close")
            raise
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self, *, is_in_call: bool = False) -> None:
        """Raise `EngineDead` if new requests are refused.

        ``is_in_call``: whether the request belongs to an open `call`, whose requests are accepted
        for longer.
        """
        if self._is_over or (self._closed and not is_in_call):
            raise EngineDead("this LLM is closed")
        if self._loop not in (None, asyncio.get_running_loop()):
            raise EngineDead("this LLM was started on another event loop")

    @property
    def built(self) -> Built[ServingEngine]:
        """The engine and its model. Available after `start`."""
        if self._built is None:
            raise self._absence
        return self._built

    @property
    def _absence(self) -> ForetokenError:
        """The error to raise before `start` has finished."""
        return EngineDead("this LLM is not started")

    @cached_property
    def engine(self) -> ServingEngine:
        """The engine. Available after `start`."""
        return self.built.engine

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Available after `start`."""
        if self._tokenizer is None:
            raise self._absence
        return self._tokenizer

    @property
    def page_size(self) -> int:
        """Tokens per page of the prefix cache. Available after `start`."""
        return self.engine.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages in the KV pool. Available after `start`."""
        return self.engine.num_pages

    async def when_complete(self) -> None:
        """Wait until all replicas are ready. An engine without replicas does not wait."""

    def replicas(self) -> Body:
        """Return the state of the replicas that serve requests; empty without replicas."""
        return {"replicas": []}

    async def change_replicas(self, least: int, most: int) -> None:
        """Change the minimum and maximum number of replicas.

        Raises `InvalidRequest` if this server does not start replicas.
        """
        del least, most
        raise InvalidRequest(
            "this server cannot change its replicas: start it with --ray", param="replicas"
        )

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def ready(self) -> bool:
        """Whether a new request would be accepted."""
        return not self._closed and self._tokenizer is not None and self.engine.alive

    # -- requests ----------------------------------------------------------------------------------

    async def open(
        self,
        prompt: Prompt | PromptTokens,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        shown_ids: frozenset[int] = frozenset(),
        cache: CacheOptions = DEFAULT_CACHE,
        note: PromptNote = NO_NOTE,
        needs_closing: bool = False,
        pooling: Pooling | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Tokenize a prompt and submit it. The caller must `forget` the answer in a ``finally``.

        - ``shown_ids``: special tokens to show in the text.
        - ``needs_closing``: complete structured output within the token limit even if it is not
          JSON.
        - ``pooling``: request vectors or scores in place of text. Such a request belongs to a
          `call`, is not part of a session, and its prompt is not logged.
        - ``transfer``: ``kv_transfer_params`` of the body, ignored if KV transfer is disabled.

        Raises `InvalidRequest`, `QueueFull`, `DeadlineExceeded` and `EngineDead`.
        """
        since = arrival()
        answer = self._register(params, request_id, is_in_call=pooling is not None)
        transfers = self.built.transfers
        handover = NO_TRANSFER if transfers is None else transfers.read(transfer)
        if pooling is None:  # a pooling call may have thousands of requests
            note_answer(answer)
        try:
            if pooling is None and (session := session_key(note.cache_key)) is not None:
                cache = in_session(cache, session)
            prepared = await self._prepare(
                prompt,
                answer.params,
                adapter=answer.adapter,
                needs_closing=needs_closing,
                pooling=pooling,
                shown_ids=shown_ids,
                cache=cache,
                handover=handover,
            )
            self._submit_choices(answer, prepared, since)
            if cache.session is not None and cache.ends_session:
                self.session_ends.tell(cache.session)
            if pooling is None:
                first = answer.generations[0].request
                self.prompts.record(answer.request_id, first, note, self.engine.now)
        except BaseException as error:
            if transfers is not None and handover.offer is not None:
                transfers.end(handover.offer)  # lets the peer free the pages
            self.forget(answer)
            await self.session_ends.end_refused(self.engine, cache, error)
            raise
        return answer

    async def check(
        self,
        prompt: Prompt | PromptTokens,
        params: SamplingParams,
        *,
        needs_closing: bool = False,
        pooling: Pooling | None = None,
        param: str = "prompt",
    ) -> Sequence[int]:
        """Tokenize and check a prompt as `open` does, without submitting it; return its token ids.

        ``param``: the field of the prompt, for errors. Raises `InvalidRequest`, and `EngineDead` if
        the client is closed.
        """
        self._check_open(is_in_call=pooling is not None)
        if (name := params.lora or adapter_name()) is not None:
            self.adapters.find(name)
        prepared = await self._prepare(
            prompt,
            self.built.sampling_defaults.fill(params),
            param=param,
            needs_closing=needs_closing,
            pooling=pooling,
        )
        choice, seed = next(children(prepared.params))  # the choices differ only in the seed
        try:
            self.engine.check(self._request("", dataclasses.replace(prepared, params=choice), seed))
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = param
            raise
        return prepared.prompt.token_ids

    def abort(self, request_id: str) -> None:
        """Abort a request with all its choices. Unknown ids are ignored."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            answer.aborted = True
            answer.close()
            self._room.set()  # the caller may be waiting for room

    async def render_text(
        self,
        messages: Conversation,
        options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        is_try: bool = False,
    ) -> str:
        """Return the rendered text of a conversation. ``options``: variables of the template.

        ``tools`` are functions in OpenAI's shape, as templates expect them. ``is_try``: do not log
        a failure. Raises `InvalidRequest`.
        """
        if not messages:
            raise InvalidRequest("messages must have at least one message", param="messages")
        return await self.tokenizer.render_chat(messages, options or {}, tools=tools, is_try=is_try)

    async def finish(self, answer: Answer) -> Completion:
        """Return the whole answer, read to its end, and forget it."""
        try:
            return await answer.collect()
        finally:
            self.forget(answer)

    async def prewarm(
        self,
        prompt: Prompt,
        *,
        cache: CacheOptions = DEFAULT_CACHE,
        cache_salt: str | None = None,
        request_id: str | None = None,
        note: PromptNote = NO_NOTE,
    ) -> Usage:
        """Compute a prompt, keep it in the cache, and return its usage."""
        params = warm_params(SamplingParams(cache_salt=cache_salt))
        answer = await self.open(prompt, params, request_id=request_id, cache=cache, note=note)
        return (await self.finish(answer)).usage

    def explain(self, response_id: str, *, previous_id: str | None = None) -> Explanation | None:
        """Explain the cache misses of a response's prompt; return None if an id is unknown.

        ``previous_id``: the response to compare with. Both must belong to the same caller.
        """
        return self._explainer.find(response_id, previous_id)

    @property
    def _explainer(self) -> Explainer:
        return Explainer(self.prompts, self.page_size, self._decoded)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Image rows have negative ids and no text."""
        text_ids = [token_id for token_id in token_ids if token_id >= 0]
        return self.tokenizer.decode(text_ids, skip_special_tokens=False)

    @property
    def is_idle(self) -> bool:
        """Whether no answer of this client runs or waits; ended ones may still be unread."""
        if self.session_ends.num_running:  # work for a session would keep its pages past its end
            return False
        return all(each.ended for each in self._answers.values())

    @property
    def seconds_alone(self) -> float:
        """Seconds since the last answer that is not part of a batch ended; 0 while one runs."""
        if any(not each.in_batch for each in self._answers.values()):
            return 0.0
        return time.monotonic() - self._interactive_ended

    def forget(self, answer: Answer) -> None:
        """Abort the rest of an answer and free its id. May be called twice."""
        answer.close()
        if answer.adapter is not None:
            adapter, answer.adapter = answer.adapter, None
            adapter.leave()
        if self._answers.get(answer.request_id) is answer:
            if not answer.in_batch:
                self._interactive_ended = time.monotonic()
            del self._answers[answer.request_id]
            self._count_cause(answer)
        if answer.generations:  # a refused request frees no room
            self._room.set()

    async def wait_for_room(self, seconds: float) -> None:
        """Wait until an answer ends, at most ``seconds``.

        The time is limited, since requests that do not belong to this client also free room.
        """
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._room.wait()

    def _count_cause(self, answer: Answer) -> None:
        prompt = self.prompts.find(answer.request_id) if self._counts_causes else None
        if prompt is not None and prompt.usage.completion_tokens and not self._closed:
            self.miss_causes.count(prompt, self._explainer, self.page_size)

    def _register(
        self, params: SamplingParams, request_id: str | None, *, is_in_call: bool = False
    ) -> Answer:
        """Return a new answer, registered by its id so that `abort` finds it.

        The model's recommended sampling values are filled in. Must run before the first await of a
        request. Raises `EngineDead`, and `InvalidRequest` for an id in use or an unknown adapter.
        """
        self._check_open(is_in_call=is_in_call)
        request_id = request_id or f"req-{random_id()}"
        known = self._answers.get(request_id)
        if known is not None and not known.ended:
            raise InvalidRequest(f"request_id {request_id} is in use", param="request_id")
        params = self.built.sampling_defaults.fill(params)
        name = params.lora or adapter_name()
        adapter = None if name is None else self.adapters.enter(name)
        answer = Answer(request_id, params, adapter=adapter, in_batch=in_batch())
        self._answers[request_id] = answer
        return answer

    async def _prepare(
        self,
        prompt: Prompt | PromptTokens,
        params: SamplingParams,
        *,
        adapter: ServedAdapter | None = None,
        param: str = "prompt",
        needs_closing: bool = False,
        pooling: Pooling | None = None,
        **own: Any,  # noqa: ANN401 - fields of `Prepared`
    ) -> Prepared:
        """Tokenize the prompt and compile the grammar.

        ``param``: the name of the prompt's field, for errors. ``own``: other fields of `Prepared`.
        """
        tokenizer = self.tokenizer
        generates = pooling is None and not params.prompt_only
        if isinstance(prompt, str):
            prompt = await tokenizer.encode(prompt, param=param, generates=generates)
        else:
            given = prompt.token_ids if isinstance(prompt, PromptTokens) else prompt
            tokenizer.check_ids(given, self.built.vocab_size, param, generates=generates)
        tokens = prompt if isinstance(prompt, PromptTokens) else PromptTokens(prompt)
        await tokenizer.prepare_stops(params.stop)
        room = self.built.max_model_len - len(tokens.token_ids)
        return Prepared(
            prompt=tokens,
            params=params,
            bad_words_ids=await bad_words_ids(tokenizer, params),
            prediction=await prediction_ids(tokenizer, params),
            grammar=None if self._grammars is None else await self._grammars.compile(params),
            limit=closing_limit(params, room, is_forced=needs_closing),
            pooling=pooling,
            adapter=adapter,
            **own,
        )

    def _submit_choices(
        self, answer: Answer, prepared: Prepared, since: float | None = None
    ) -> None:
        """Submit the requests of all choices, or none if one fails.

        The deadline counts from the time ``since``, by default the arrival of the request.
        """
        self._check_open(is_in_call=prepared.pooling is not None)
        answer.prompt = prepared.prompt
        try:
            limits = (prepared.params.deadline, self.max_request_seconds)
            left = seconds_left(since or arrival(), *limits)
            for params, seed in children(prepared.params):
                if params is not prepared.params:
                    prepared = dataclasses.replace(prepared, params=params)
                self._add_choice(answer, prepared, seed, left)
        except BaseException:
            answer.close()
            answer.generations.clear()
            raise

    def _add_choice(
        self, answer: Answer, prepared: Prepared, seed: int, deadline: float | None
    ) -> None:
        index = len(answer.generations)
        text = AnswerText(
            self.tokenizer.detokenizer(answer.prompt_token_ids, prepared.shown_ids),
            stops=tuple(prepared.params.stop),
            min_tokens=prepared.params.min_tokens,
        )
        name = answer.request_id if answer.params.n == 1 else f"{answer.request_id}-{index}"
        request = self._request(name, prepared, seed, text.add_token if text.watches else None)
        request.deadline = deadline
        if index == 0:
            self._hand_over(request, prepared.handover, aborted=answer.aborted)
        if answer.aborted:
            stream = ended_stream(request)
        else:
            stream = submit(self.engine, request)
            if answer.adapter is not None:
                answer.adapter.hold(stream)
        answer.generations.append(Generation(request, text, stream, self.engine.abort, index=index))

    def _hand_over(self, request: Request, handover: Transfer, *, aborted: bool) -> None:
        """Attach a KV transfer to a request: its pages are held for a peer or read from a peer.

        An offer of pages that cannot be used is ignored.
        """
        transfers, offer = self.built.transfers, handover.offer
        request.transfer = handover
        if transfers is None or offer is None:
            return
        if aborted:
            transfers.end(offer)
        if aborted or not transfers.check(offer, len(request.tokens)):
            request.transfer = replace(handover, offer=None)

    def _request(
        self, name: str, prepared: Prepared, seed: int, on_token: OnToken | None = None
    ) -> Request:
        """Return the engine's request for one choice."""
        ends = self.built.eos_token_ids
        return make_request(name, prepared, seed=seed, eos_token_ids=ends, on_token=on_token)


def _build(model: str | os.PathLike[str] | None, config: EngineConfig) -> Built[ServingEngine]:
    with timed("imports of the engine"), uncollected():
        from ..build.engine_builder import build  # imports torch

    return build(model, config)
