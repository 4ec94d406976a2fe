"""IdlePrefill: computes the beginnings of next turns while the engine has nothing else to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ....core.errors import ForetokenError, InvalidRequest
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Request
from ....core.telemetry.families import counter, counters
from ...types.request_context import CONTEXT, owner_of, random_id
from ...types.results import Choice
from ...types.shares import Owner
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from ..preprocess import Prepared, make_request, submit, warm_params
from .chunk_size import ChunkSize
from .next_prompt import NextPrompt, Render

logger = logging.getLogger(__name__)
MAX_WAITING = 64  # next turns that wait; beyond it, the owner with most loses its oldest
MAX_FAILURES = 3  # consecutive failures of the chat template after which nothing is computed
RECHECK_SECONDS = 1.0  # after which a waiting task asks again whether the engine is idle
ENDS = ("ready", "needless", "dropped", "failed")
"""How the computation of a next turn ended. "needless": all of it was in the cache already."""


class IdlePrefill:
    """Computes the prompts of next turns up to their last message, which is not known yet.

    A prompt is computed in small chunks, each a request of its own, and only while no other request
    runs or waits. So a new request waits for at most one chunk. Owners take turns.

    ``render`` returns the prompt of a conversation. ``is_on``: whether all conversations that are
    likely to go on are computed, rather than those alone whose request asks for it.
    """

    def __init__(self, llm: EngineClient, render: Render, *, is_on: bool) -> None:
        self._llm = llm
        self._render = render
        self._is_on = is_on
        self._waiting: OrderedDict[Owner, deque[NextPrompt]] = OrderedDict()
        self._current: NextPrompt | None = None
        self._size: ChunkSize | None = None  # None until the first answer has ended
        self._task: asyncio.Task[None] | None = None
        self._num_failures = 0  # consecutive failures of the chat template
        self.num_tokens = self.num_chunks = 0
        self.ends = dict.fromkeys(ENDS, 0)

    def wants(self, chat: ChatInput, request: Request) -> bool:
        """Whether to compute the next turn of a conversation when its answer has ended."""
        cache = chat.cache
        if cache.is_private or request.cache.ends_session or self._num_failures >= MAX_FAILURES:
            return False
        if chat.warms_next:
            return True
        context = CONTEXT.get()
        return self._is_on and not (context is not None and context.in_batch)

    def after(self, chat: ChatInput, request: Request) -> Callable[[Choice], None]:
        """Return a function that takes the answer to ``chat`` and queues the next turn."""

        def begin(choice: Choice) -> None:
            if choice.finish_reason == "abort":
                return
            if self._size is None:
                self._size = ChunkSize(self._llm.page_size)
            self._size.observe_answer(request.usage)
            if chat.warms_next or _goes_on(chat, choice, request):
                self._put(NextPrompt(chat, choice, request))

        return begin

    def arrived(self, chat: ChatInput) -> None:
        """Drop the next turns that ``chat`` continues: their requests are here."""
        if self._current is None and not self._waiting:
            return
        owner = owner_of(chat.params.cache_salt)
        self._drop(lambda turn: turn.continues(chat.messages, owner))

    def end_session(self, session: str) -> None:
        """Drop the next turns of a session."""
        self._drop(lambda turn: turn.session == session)

    def collector(self) -> Collector:
        """Return the metrics."""
        return _Metrics(self)

    # -- queue ------------------------------------------------------------------------------------

    def _put(self, turn: NextPrompt) -> None:
        self._waiting.setdefault(turn.owner, deque()).append(turn)
        if sum(map(len, self._waiting.values())) > MAX_WAITING:
            owner = max(self._waiting, key=lambda each: len(self._waiting[each]))
            self._waiting[owner].popleft()
            self.ends["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="foretoken-idle-prefill")

    def _take(self) -> NextPrompt | None:
        """Take the oldest next turn of the owner whose turn it is; None if there is none."""
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            if not turns:
                continue
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            return turn
        return None

    def _drop(self, is_over: Callable[[NextPrompt], bool]) -> None:
        for owner, turns in self._waiting.items():
            kept = deque(turn for turn in turns if not is_over(turn))
            self.ends["dropped"] += len(turns) - len(kept)
            self._waiting[owner] = kept
        if self._current is not None and is_over(self._current):
            self._current = None
            self.ends["dropped"] += 1

    # -- computation ------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Compute the next turns that wait, one after the other, until none is left."""
        while (turn := self._take()) is not None:
            self._current = turn
            turn.enter()
            try:
                end = await self._compute(turn)
            except ForetokenError as error:
                end = "failed"
                logger.info("the next turn was not computed in advance: %s", error)
            if self._current is turn:
                self.ends[end] += 1
                self._current = None

    async def _compute(self, turn: NextPrompt) -> str:
        """Compute a next turn chunk by chunk, until it is dropped. Return how it ended."""
        if not await self._is_idle_for(turn):
            return "dropped"
        if not await self._find(turn):
            return "failed"
        if not turn.num_missing:
            return "needless"
        if not await self._has_room(turn):
            return "dropped"
        while turn.num_missing:
            if not (await self._is_idle_for(turn) and await self._compute_chunk(turn)):
                return "dropped"
        return "ready"

    async def _is_idle_for(self, turn: NextPrompt) -> bool:
        """Wait until the engine is idle; return whether the next turn is still to be computed."""
        while not self._llm.is_idle and self._llm.ready:
            await self._llm.wait_for_room(RECHECK_SECONDS)
        return self._current is turn and self._llm.ready

    async def _find(self, turn: NextPrompt) -> bool:
        """Render the prompt; return whether the chat template rendered it."""
        try:
            await turn.render(self._render, self._llm.page_size)
        except InvalidRequest as error:
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                logger.warning(
                    "next turns are no longer computed in advance, because the chat template "
                    "failed for %d conversations in a row: %s",
                    MAX_FAILURES,
                    error,
                )
            logger.info("the next turn's prompt was not rendered: %s", error)
            return False
        self._num_failures = 0
        return True

    async def _has_room(self, turn: NextPrompt) -> bool:
        """Whether each pool has enough pages that no pin and no request holds."""
        info: Any = await self._llm.engine.cache_info()
        pools = info.get("replicas", [info])
        room = min((each["free_pages"] + each["evictable_pages"] for each in pools), default=0)
        return turn.num_missing <= room * self._llm.page_size

    async def _compute_chunk(self, turn: NextPrompt) -> bool:
        """Compute the next chunk; return whether the chunks before it were still in the cache."""
        size = self._size or ChunkSize(self._llm.page_size)
        stop = min(turn.num_wanted, turn.num_cached + size.tokens)
        request = self._request(turn, stop)
        began = time.monotonic()
        stream = submit(self._llm.engine, request)
        if turn.adapter is not None:
            self._llm.adapters.find(turn.adapter).hold(stream)
        async for _ in stream:
            pass
        usage = request.usage
        num_computed = len(request.tokens) - usage.cached_tokens
        size.observe_chunk(num_computed, time.monotonic() - began)
        self.num_chunks += 1
        self.num_tokens += num_computed
        is_kept = turn.num_chunks == 0 or usage.cached_tokens >= turn.num_cached
        turn.num_cached, turn.num_chunks = len(request.tokens), turn.num_chunks + 1
        return is_kept

    def _request(self, turn: NextPrompt, stop: int) -> Request:
        """Return the request of the chunk that ends at ``stop``.

        The last chunk is the prompt of the session's next turn, so its pages stay pinned.
        """
        prompt, params = turn.up_to(stop), warm_params(turn.chat.params)
        is_last = len(prompt.token_ids) >= turn.num_wanted
        cache = CacheOptions(session=turn.session) if is_last else DEFAULT_CACHE
        adapter = None if turn.adapter is None else self._llm.adapters.find(turn.adapter)
        prepared = Prepared(
            prompt=prompt,
            params=replace(params, priority=self._llm.config.max_priority),  # the least urgent
            cache=cache,
            adapter=adapter,
        )
        ends = self._llm.built.eos_token_ids
        request = make_request(f"idle-{random_id()}", prepared, seed=0, eos_token_ids=ends)
        request.tenant = None  # idle time is charged to nobody
        request.extras = msgspec.structs.replace(request.extras, is_ahead=True)
        return request


def _goes_on(chat: ChatInput, choice: Choice, request: Request) -> bool:
    """Whether a conversation is likely to go on: it has a session, earlier answers, or calls."""
    if request.cache.session is not None or choice.tool_calls:
        return True
    return any(message.get("role") == "assistant" for message in chat.messages)


class _Metrics(Collector):
    """The metrics of an `IdlePrefill`."""

    def __init__(self, idle: IdlePrefill) -> None:
        self._idle = idle

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Called by the registry."""
        idle = self._idle
        yield counter("idle_prefill_tokens", "Tokens computed in idle time", idle.num_tokens)
        yield counter("idle_prefill_chunks", "Chunks computed in idle time", idle.num_chunks)
        yield counters(
            "idle_prefill_turns", "Next turns that idle time was meant for", "end", idle.ends
        )
