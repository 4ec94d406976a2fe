"""IdlePrefill: computes the beginnings of next turns while the engine has nothing else to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import WeakSet

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ....core.engine.inbox import TokenStream
from ....core.errors import ForetokenError, InvalidRequest, PromptTooLong
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, FinishReason, Request
from ....core.telemetry.families import counter, counters
from ...types.request_context import in_batch, owner_of, random_id
from ...types.results import Choice
from ...types.shares import Owner, Shares
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from ..preprocess import Prepared, make_request, submit, warm_params
from .chunk_size import ChunkSize
from .next_prompt import NextPrompt, Render

logger = logging.getLogger(__name__)
MAX_WAITING = 64  # next turns that wait; `Shares` chooses which one is dropped beyond it
MAX_BYTES = 64 * 2**20  # approximate size of the waiting conversations
MAX_FAILURES = 3  # consecutive failures of the chat template after which an owner has no next turns
MAX_FAILED = 1024  # owners whose failures are counted
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
        self._waiting: OrderedDict[Owner, deque[NextPrompt]] = OrderedDict()  # none is empty
        self._shares: Shares[NextPrompt] = Shares(MAX_BYTES, MAX_WAITING)  # memory they take
        self._current: NextPrompt | None = None
        self._size: ChunkSize | None = None  # None until the first answer has ended
        self._task: asyncio.Task[None] | None = None
        # id of the request of the present chunk, and the task that reads it to its end
        self._chunk: tuple[str, asyncio.Task[FinishReason | None]] | None = None
        # consecutive failures of the chat template, by owner
        self._failures: OrderedDict[Owner, int] = OrderedDict()
        # Answers whose next turn will be computed. Their streams hold them while they run.
        self._answers: WeakSet[_RunningAnswer] = WeakSet()
        self._has_warned = False  # whether the log has the warning about them
        self.num_tokens = self.num_chunks = 0
        self.ends = dict.fromkeys(ENDS, 0)
        llm.session_ends.listeners.append(self.end_session)

    def wants(self, chat: ChatInput, request: Request) -> bool:
        """Whether to compute the next turn of a conversation when its answer has ended."""
        if not (chat.warms_next or self._is_on) or in_batch():
            return False
        # Another engine generates the answer of a request that hands over its pages.
        if chat.cache.is_private or request.cache.ends_session or request.transfer.hands_over:
            return False
        if chat.template.get("continue_final_message"):  # the answer is not a message of its own
            return False
        if not (chat.warms_next or chat.tools or _goes_on(chat, request)):
            return False
        failures = self._failures
        return not failures or failures.get(owner_of(chat.params.cache_salt), 0) < MAX_FAILURES

    def after(self, chat: ChatInput, request: Request) -> Callable[[Choice], None]:
        """Return a function that takes the answer to ``chat`` and queues the next turn."""
        answer = _RunningAnswer(request.cache.session)
        self._answers.add(answer)

        def begin(choice: Choice) -> None:
            # A front marks running requests of an ended session even if a replica fails to end it.
            is_last = answer.is_last or request.cache.ends_session
            if choice.finish_reason == "abort" or is_last:
                return
            if self._size is None:
                self._size = ChunkSize(self._llm.page_size)
            self._size.observe_answer(request.usage)
            if chat.warms_next or choice.tool_calls or _goes_on(chat, request):
                self._put(NextPrompt(chat, choice, request))

        return begin

    def arrived(self, chat: ChatInput) -> None:
        """Drop the next turns that ``chat`` continues."""
        if self._current is None and not self._waiting:
            return
        owner = owner_of(chat.params.cache_salt)
        self._drop(lambda turn: turn.continues(chat.messages, owner))

    def end_session(self, session: str) -> None:
        """Drop the next turns of a session, and those after its running answers. O(answers)."""
        for answer in self._answers:
            answer.is_last |= answer.session == session
        self._drop(lambda turn: turn.session == session)

    def flush(self, *salts: str | None) -> None:
        """Drop the next turns with these cache salts; without a salt, all of them."""
        self._drop(lambda turn: not salts or turn.chat.params.cache_salt in salts)

    async def settled(self) -> None:
        """Abort the chunk of a dropped next turn, and wait for its end.

        A flush of the cache before its end would leave all pages that the chunk uses.
        """
        if self._chunk is not None and self._current is None:
            request_id, reading = self._chunk
            self._llm.engine.abort(request_id)
            await asyncio.wait([reading])

    def collector(self) -> Collector:
        """Return the metrics."""
        return _Metrics(self)

    # -- queue ------------------------------------------------------------------------------------

    def _put(self, turn: NextPrompt) -> None:
        self._waiting.setdefault(turn.owner, deque()).append(turn)
        self._shares.add(turn.owner, turn, turn.num_bytes)
        while (excess := self._shares.excess()) is not None:
            self._remove(excess)
            self.ends["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="foretoken-idle-prefill")

    def _take(self) -> NextPrompt | None:
        """Take the oldest next turn of the owner whose turn it is; None if none waits."""
        if not self._waiting:
            return None
        owner, turns = next(iter(self._waiting.items()))
        self._waiting.move_to_end(owner)
        turn = turns[0]
        self._remove(turn)
        return turn

    def _remove(self, turn: NextPrompt) -> None:
        """Remove a next turn that waits."""
        self._shares.remove(turn)
        turns = self._waiting[turn.owner]
        turns.remove(turn)
        if not turns:
            del self._waiting[turn.owner]

    def _drop(self, is_over: Callable[[NextPrompt], bool]) -> None:
        over = [turn for turns in self._waiting.values() for turn in turns if is_over(turn)]
        for turn in over:
            self._remove(turn)
        self.ends["dropped"] += len(over)
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
            except Exception:
                end = "failed"
                logger.exception("the next turn was not computed in advance")
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
        while turn.num_missing:
            if not await self._is_idle_for(turn):
                return "dropped"
            size = self._size or ChunkSize(self._llm.page_size)
            if not await self._has_room(turn, self._next_request(turn, size)):
                return "dropped"
            # A request may have arrived meanwhile, or the next turn itself.
            is_free = self._llm.is_idle and self._current is turn
            if is_free and not await self._compute_chunk(turn, size):
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
        except PromptTooLong as error:
            logger.info("the next turn's prompt was not rendered: %s", error)
            return False
        except InvalidRequest as error:
            self._note_failure(turn.owner, error)
            return False
        self._failures.pop(turn.owner, None)
        return True

    def _note_failure(self, owner: Owner, error: InvalidRequest) -> None:
        logger.info("the next turn's prompt was not rendered: %s", error)
        number = self._failures[owner] = self._failures.pop(owner, 0) + 1
        if len(self._failures) > MAX_FAILED:
            self._failures.popitem(last=False)
        if number == MAX_FAILURES and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "next turns of an API key and salt are no longer computed in advance, because the "
                "chat template failed for %d of its conversations in a row: %s",
                MAX_FAILURES,
                error,
            )

    async def _has_room(self, turn: NextPrompt, request: Request) -> bool:
        """Whether the pool that would compute ``request`` has room for the rest of the next turn.

        Without a session the tokens in the cache are not pinned, and may have been evicted.
        """
        num_tokens = turn.num_wanted if turn.session is None else turn.num_missing
        return num_tokens <= await self._llm.engine.room_for(request) * self._llm.page_size

    async def _compute_chunk(self, turn: NextPrompt, size: ChunkSize) -> bool:
        """Compute the next chunk; return whether the chunks before it were still in the cache."""
        page_size, began = self._llm.page_size, time.monotonic()
        # The adapter may have been replaced since the last request was made.
        request = self._next_request(turn, size)
        stream = submit(self._llm.engine, request)
        if turn.adapter is not None:
            self._llm.adapters.find(turn.adapter).hold(stream)
        if not await self._finish(stream, turn, size.seconds):
            return True  # the computed part is cached, so the next try continues it
        usage = request.usage
        num_computed = len(request.tokens) - usage.cached_tokens
        size.observe_chunk(num_computed, time.monotonic() - began)
        self.num_chunks += 1
        self.num_tokens += num_computed
        # A model with recurrent states resumes a page before the end of the last chunk.
        is_kept = turn.num_chunks == 0 or usage.cached_tokens >= turn.num_cached - page_size
        # A chunk that ends behind an image may end within a page.
        turn.num_cached = len(request.tokens) // page_size * page_size
        turn.num_chunks += 1
        return is_kept

    async def _finish(self, stream: TokenStream, turn: NextPrompt, seconds: float) -> bool:
        """Wait for the end of a chunk, and return whether it was computed.

        After ``seconds`` it is aborted as soon as a request is there. A chunk takes that long if
        pages before it, which were cached when the answer ended, have been evicted.
        """
        reading = asyncio.create_task(_reason(stream))
        self._chunk = stream.request.request_id, reading
        try:
            while not (await asyncio.wait([reading], timeout=seconds))[0]:
                if not (self._llm.is_idle and self._current is turn):
                    self._llm.engine.abort(stream.request.request_id)
                    break
            return await reading is not FinishReason.ABORT
        finally:
            self._chunk = None

    def _next_request(self, turn: NextPrompt, size: ChunkSize) -> Request:
        """Return the request of the next chunk.

        The last chunk is the prompt of the session's next turn, so its pages stay pinned.
        """
        stop = min(turn.num_wanted, turn.num_cached + size.tokens)
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
        request.tenant = None  # idle time is charged to no tenant
        request.extras = msgspec.structs.replace(request.extras, is_idle_prefill=True)
        return request


class _RunningAnswer:
    """An answer of a session that has not ended. ``is_last``: whether its session has ended."""

    def __init__(self, session: str | None) -> None:
        self.session = session
        self.is_last = False


async def _reason(stream: TokenStream) -> FinishReason | None:
    """Read a stream to its end and return its finish reason. Raises the request's error."""
    return [delta.finish_reason async for delta in stream][-1]


def _goes_on(chat: ChatInput, request: Request) -> bool:
    """Whether a conversation is likely to go on: it has a session or earlier answers."""
    if request.cache.session is not None:
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
