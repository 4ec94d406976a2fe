"""Next turns in idle time: their order, their bounds, and what ends them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.runtime.preprocess import PromptTokens
from foretoken.api.runtime.sessions import SessionEnds
from foretoken.api.runtime.turns.chunk_size import LEAST_SECONDS, ChunkSize
from foretoken.api.runtime.turns.idle_prefill import (
    MAX_BYTES,
    MAX_FAILURES,
    MAX_WAITING,
    IdlePrefill,
)
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.api.types.results import Choice, Tool, ToolCall
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import EngineDead, InvalidRequest, PromptTooLong
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.extras.request_extras import NO_TRANSFER, Transfer
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason, Request, Usage

PAGE = 4
REFUSED = InvalidRequest("no such role", param="messages")
ENDED = Choice(index=0, text="ok", finish_reason="stop", token_ids=[7, 8])


class Machine:
    """An engine and its client; the engine computes chunks at once, or by `step`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.asked: list[Request] = []  # requests whose room was asked for
        self.waiting: list[TokenStream] = []
        self.by_hand = False
        self.is_idle = self.ready = True
        self.page_size = PAGE
        self.room = 100
        self.keeps = True  # whether chunks stay in the cache
        self.state_lag = 0  # tokens between the end of a chunk and the state to resume from
        self.built = SimpleNamespace(eos_token_ids=frozenset({2}))
        self.config = SimpleNamespace(max_priority=10)
        self.engine = self
        self.freed = asyncio.Event()
        self.session_ends = SessionEnds()

    async def room_for(self, request: Request) -> int:
        self.asked.append(request)
        return self.room

    async def wait_for_room(self, seconds: float) -> None:
        del seconds
        self.freed.clear()
        await self.freed.wait()

    def submit(self, request: Request) -> TokenStream:
        if not self.ready:
            raise EngineDead("closed")
        self.requests.append(request)
        name = request.tokens[0]
        if self.keeps:
            lens = [len(each.tokens) for each in self.requests[:-1] if each.tokens[0] == name]
            cached = (max(lens, default=0) - self.state_lag) // PAGE * PAGE
            request.usage.cached_tokens = max(0, cached)
        stream = TokenStream(request)
        if self.by_hand:
            self.waiting.append(stream)
        else:
            stream.push(Delta(finish_reason=FinishReason.LENGTH))
        return stream

    def abort(self, request_id: str) -> None:
        streams = [each for each in self.waiting if each.request.request_id == request_id]
        for stream in streams:
            self.waiting.remove(stream)
            stream.push(Delta(finish_reason=FinishReason.ABORT))

    def step(self) -> None:
        self.waiting.pop(0).push(Delta(finish_reason=FinishReason.LENGTH))


class Scene:
    """Conversations of 3 tokens whose next turns begin with ``num_tokens`` other tokens."""

    def __init__(self, *, is_on: bool = True, num_tokens: int = 40) -> None:
        self.machine = Machine()
        self.num_tokens = num_tokens
        self.refused: Exception | None = None
        self.images: tuple[PromptImage, ...] = ()
        self.idle = IdlePrefill(self.machine, self.render, is_on=is_on)  # type: ignore[arg-type]

    async def render(self, chat: ChatInput) -> PromptTokens:
        if self.refused is not None:
            raise self.refused
        last = ord(chat.messages[-1]["content"])
        name = int(chat.messages[0]["content"])
        ids = [name, *range(100, 99 + self.num_tokens), last]
        return PromptTokens(ids, images=self.images)

    def ask(self, name: int, *, salt: str | None = None, **fields: Any) -> ChatInput:
        params = SamplingParams(cache_salt=salt)
        return ChatInput(messages=[{"role": "user", "content": str(name)}], params=params, **fields)

    def end(
        self,
        chat: ChatInput,
        choice: Choice = ENDED,
        *,
        session: str | None = "s",
        hands_over: bool = False,
        **cache: bool,
    ) -> bool:
        """End the answer to ``chat``; return whether its next turn is wanted."""
        request = SimpleNamespace(
            tokens=array("q", [1, 2, 3]),
            prompt_len=3,
            cache=CacheOptions(session=session, **cache),
            transfer=Transfer(hands_over=hands_over),
            usage=Usage(),
        )
        is_wanted = self.idle.wants(chat, request)  # type: ignore[arg-type]
        if is_wanted:
            self.idle.after(chat, request)(choice)  # type: ignore[arg-type]
        return is_wanted

    @property
    def names(self) -> list[int]:
        """The conversation of each chunk."""
        return [request.tokens[0] for request in self.machine.requests]

    async def settle(self) -> None:
        """Let the tasks run until they wait for the engine."""
        for _ in range(50 * MAX_WAITING):
            await asyncio.sleep(0)


def run(act: Callable[[], Any]) -> Any:
    async def body() -> Any:
        return await act()

    return asyncio.run(body())


def test_a_prompt_is_computed_in_chunks_of_whole_pages_up_to_the_unknown_message() -> None:
    async def act() -> list[Request]:
        scene = Scene(num_tokens=43)
        assert scene.end(scene.ask(1))
        await scene.settle()
        assert scene.idle.ends == {"ready": 1, "needless": 0, "dropped": 0, "failed": 0}
        return scene.machine.requests

    requests = run(act)
    lens = [len(request.tokens) for request in requests]
    assert lens == sorted(set(lens))
    assert lens[0] == 16
    assert lens[-1] == 40
    assert all(length % PAGE == 0 for length in lens)
    for request in requests:
        assert not request.sampling.generates
        assert request.extras.is_idle_prefill
        assert request.tenant is None
        assert request.priority == 10
    assert [request.cache.session for request in requests] == [None] * (len(lens) - 1) + ["s"]


def test_it_waits_while_a_request_runs_between_two_chunks_as_well() -> None:
    async def act() -> None:
        scene = Scene()
        machine = scene.machine
        machine.is_idle, machine.by_hand = False, True
        scene.end(scene.ask(1))
        await scene.settle()
        assert not machine.requests
        machine.is_idle = True
        machine.freed.set()
        await scene.settle()
        assert len(machine.requests) == 1
        machine.is_idle = False
        machine.step()
        await scene.settle()
        assert len(machine.requests) == 1
        machine.is_idle, machine.by_hand = True, False
        machine.freed.set()
        await scene.settle()
        assert scene.idle.ends["ready"] == 1

    run(act)


def test_a_flush_can_wait_for_the_end_of_the_chunk_that_it_dropped() -> None:
    """Else the chunk would keep the whole conversation in the cache that is flushed."""

    async def act() -> None:
        scene = Scene()
        scene.machine.by_hand = True
        scene.end(scene.ask(1, salt="a"))
        await scene.settle()
        assert len(scene.machine.waiting) == 1
        scene.idle.flush("b")
        await scene.idle.settled()
        assert len(scene.machine.waiting) == 1, "the other salt's chunk goes on"
        scene.idle.flush("a")
        await scene.idle.settled()
        assert not scene.machine.waiting
        await scene.settle()
        assert len(scene.machine.requests) == 1
        await scene.idle.settled()

    run(act)


def test_owners_take_turns() -> None:
    async def act() -> list[int]:
        scene = Scene(num_tokens=9)
        scene.machine.is_idle = False
        for name in (1, 2, 3):
            scene.end(scene.ask(name, salt="a"))
        await scene.settle()
        scene.end(scene.ask(4, salt="b"))
        scene.machine.is_idle = True
        scene.machine.freed.set()
        await scene.settle()
        return scene.names

    assert run(act).index(4) <= 2


def test_the_number_that_waits_is_bounded_and_the_largest_owner_loses() -> None:
    async def act() -> tuple[list[int], int]:
        scene = Scene(num_tokens=9)
        scene.machine.is_idle = False
        scene.end(scene.ask(0, salt="small"))
        for name in range(1, MAX_WAITING + 20):
            scene.end(scene.ask(name, salt="hostile"))
        scene.machine.is_idle = True
        await scene.settle()
        return scene.names, scene.idle.ends["dropped"]

    names, num_dropped = run(act)
    assert 0 in names
    assert len(set(names)) == MAX_WAITING
    assert num_dropped == 20


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_next_turn_s_request_ends_it(is_begun: bool) -> None:
    async def act() -> None:
        scene = Scene()
        machine = scene.machine
        machine.by_hand, machine.is_idle = True, is_begun
        chat = scene.ask(1)
        scene.end(chat)
        await scene.settle()
        assert len(machine.requests) == is_begun
        others = [{"role": "user", "content": "2"}, {"role": "user", "content": "x"}]
        scene.idle.arrived(ChatInput(messages=others, params=SamplingParams()))
        assert scene.idle.ends["dropped"] == 0
        later = [*chat.messages, {"role": "assistant", "content": "ok"}, others[1]]
        scene.idle.arrived(ChatInput(messages=later, params=SamplingParams(cache_salt="b")))
        assert scene.idle.ends["dropped"] == 0
        scene.idle.arrived(ChatInput(messages=later, params=SamplingParams()))
        assert scene.idle.ends["dropped"] == 1
        if is_begun:
            machine.step()
        machine.is_idle = True
        machine.freed.set()
        await scene.settle()
        assert len(machine.requests) == is_begun
        assert sum(scene.idle.ends.values()) == 1

    run(act)


def test_owners_whose_turns_have_all_arrived_are_forgotten() -> None:
    async def act() -> None:
        scene = Scene()
        scene.machine.is_idle = False
        for name in range(3 * MAX_WAITING):
            chat = scene.ask(name, salt=str(name))
            scene.end(chat)
            if name % 2:
                scene.idle.arrived(chat)
        assert len(scene.idle._waiting) <= MAX_WAITING
        assert all(scene.idle._waiting.values())

    run(act)


def test_the_memory_of_those_that_wait_is_bounded() -> None:
    async def act() -> None:
        scene = Scene(num_tokens=9)
        scene.machine.is_idle = False
        scope = {"type": "http", "headers": []}
        CONTEXT.set(RequestContext(scope, num_bytes=MAX_BYTES // 4))
        for name in range(10):
            scene.end(scene.ask(name))
        CONTEXT.set(RequestContext(scope, num_bytes=2 * MAX_BYTES))
        scene.end(scene.ask(0, salt="more than all"))
        scene.machine.is_idle = True
        await scene.settle()
        assert set(scene.names) == {7, 8, 9}

    run(act)


def test_a_long_chunk_is_aborted_when_a_request_arrives() -> None:
    async def act() -> None:
        scene = Scene(num_tokens=9)
        machine = scene.machine
        machine.by_hand = True
        scene.end(scene.ask(1))
        await asyncio.sleep(3 * LEAST_SECONDS)
        assert len(machine.waiting) == 1, "nothing else is to be computed"
        machine.is_idle = False
        await asyncio.sleep(3 * LEAST_SECONDS)
        assert not machine.waiting
        machine.is_idle, machine.by_hand = True, False
        machine.freed.set()
        await scene.settle()
        assert scene.names == [1, 1]
        assert scene.idle.ends["ready"] == scene.idle.num_chunks == 1

    run(act)


def test_a_chunk_may_end_behind_an_image_within_a_page() -> None:
    async def act() -> list[Request]:
        scene = Scene(num_tokens=61)
        scene.images = (PromptImage(key=b"k" * 32, runs=((10, 8),), inputs=()),)
        scene.end(scene.ask(1))
        await scene.settle()
        assert scene.idle.ends["ready"] == 1
        return scene.machine.requests

    assert next(len(each.tokens) for each in run(act)) == 19


def test_a_model_that_resumes_from_states_has_next_turns() -> None:
    async def act() -> None:
        scene = Scene(num_tokens=61)
        scene.machine.state_lag = PAGE
        scene.end(scene.ask(1))
        await scene.settle()
        assert scene.idle.ends["ready"] == 1

    run(act)


def test_a_failure_that_was_not_foreseen_ends_that_turn_alone(caplog: Any) -> None:
    async def act() -> None:
        scene = Scene(num_tokens=9)
        scene.refused = KeyError("a fault")
        scene.end(scene.ask(1))
        await scene.settle()
        scene.refused = None
        scene.end(scene.ask(2))
        await scene.settle()
        assert scene.idle.ends == {"ready": 1, "needless": 0, "dropped": 0, "failed": 1}

    run(act)
    assert "a fault" in caplog.text


def test_a_prompt_that_is_too_long_is_no_failure_of_the_template() -> None:
    async def act() -> None:
        scene = Scene()
        scene.refused = PromptTooLong(10, 9)
        for name in range(MAX_FAILURES + 1):
            assert scene.end(scene.ask(name))
            await scene.settle()

    run(act)


@pytest.mark.parametrize("session", ["s", None])
def test_pages_that_may_be_lost_need_room_as_well(session: str | None) -> None:
    async def act() -> None:
        scene = Scene(num_tokens=37)
        scene.machine.room = 8
        said = {"role": "assistant", "content": "ok"}
        chat = scene.ask(1)
        chat = ChatInput(messages=[*chat.messages, said], params=chat.params)
        known = Choice(index=0, finish_reason="stop", token_ids=[*range(102, 110), 7])
        request = SimpleNamespace(
            tokens=array("q", [1, 100, 101]),
            prompt_len=3,
            cache=CacheOptions(session=session),
            usage=Usage(),
        )
        scene.idle.after(chat, request)(known)  # type: ignore[arg-type]
        await scene.settle()
        assert scene.idle.ends["ready" if session else "dropped"] == 1

    run(act)


def test_a_session_that_ends_while_its_answer_runs_has_no_next_turn() -> None:
    async def act() -> None:
        scene = Scene()
        begin = {}
        for name, session in enumerate(["s", "t", "s"]):
            request = SimpleNamespace(
                tokens=array("q", [1, 2, 3]),
                prompt_len=3,
                cache=CacheOptions(session=session),
                transfer=NO_TRANSFER,
                usage=Usage(),
            )
            if name == 2:
                scene.machine.session_ends.tell("s")
            begin[name] = scene.idle.after(scene.ask(name), request)  # type: ignore[arg-type]
        marked = SimpleNamespace(cache=CacheOptions(session="u"))
        begin[3] = scene.idle.after(scene.ask(3), marked)  # type: ignore[arg-type]
        # A front marks its running requests, even if a replica fails to end the session.
        marked.cache = CacheOptions(session="u", ends_session=True)
        for take in begin.values():
            take(ENDED)
        await scene.settle()
        assert set(scene.names) == {1, 2}, "the last one began after the end of its session"
        begin.clear()
        del take
        assert not scene.idle._answers, "nothing is left of answers that have ended"

    run(act)


@pytest.mark.parametrize(("salts", "num_left"), [((), 0), (("a",), 1), (("b",), 2)])
def test_a_flush_ends_those_of_its_salts(salts: tuple[str, ...], num_left: int) -> None:
    async def act() -> None:
        scene = Scene(num_tokens=9)
        scene.machine.is_idle = False
        scene.end(scene.ask(1, salt="a"))
        scene.end(scene.ask(2))
        scene.idle.flush(*salts)
        scene.machine.is_idle = True
        await scene.settle()
        assert len(set(scene.names)) == num_left

    run(act)


def test_the_end_of_the_session_ends_it() -> None:
    async def act() -> None:
        scene = Scene()
        scene.machine.is_idle = False
        scene.end(scene.ask(1), session="s")
        scene.end(scene.ask(2), session="t")
        scene.machine.session_ends.tell("s")
        scene.machine.is_idle = True
        await scene.settle()
        assert set(scene.names) == {2}

    run(act)


def test_a_template_that_fails_again_and_again_is_not_asked_again(caplog: Any) -> None:
    async def act() -> None:
        scene = Scene()
        scene.refused = REFUSED
        for name in range(MAX_FAILURES - 1):
            assert scene.end(scene.ask(name))
            await scene.settle()
        assert not caplog.records
        scene.refused = None
        assert scene.end(scene.ask(7))
        await scene.settle()
        assert scene.idle.ends["ready"] == 1
        scene.refused = REFUSED
        for name in range(MAX_FAILURES):
            assert scene.end(scene.ask(name))
            await scene.settle()
        assert not scene.end(scene.ask(8))
        assert scene.end(scene.ask(8, salt="other"))
        await scene.settle()
        assert len(caplog.records) == 1
        assert scene.idle.ends["failed"] == 2 * MAX_FAILURES

    run(act)


@pytest.mark.parametrize(
    ("num_free", "end"), [(9, "ready"), (8, "dropped")], ids=["just enough", "too few"]
)
def test_pinned_pages_are_left_alone(num_free: int, end: str) -> None:
    async def act() -> None:
        scene = Scene(num_tokens=37)
        scene.machine.room = num_free
        scene.end(scene.ask(1))
        await scene.settle()
        assert scene.idle.ends[end] == 1
        asked = [each.tokens for each in scene.machine.asked]
        computed = [each.tokens for each in scene.machine.requests]
        assert asked == computed if end == "ready" else len(asked) == 1

    run(act)


def test_it_ends_when_its_chunks_are_evicted() -> None:
    async def act() -> None:
        scene = Scene(num_tokens=400)
        scene.machine.keeps = False
        scene.end(scene.ask(1))
        await scene.settle()
        assert len(scene.machine.requests) == 2
        assert scene.idle.ends["dropped"] == 1

    run(act)


def test_a_closed_engine_ends_it() -> None:
    async def act() -> None:
        scene = Scene()
        scene.machine.by_hand = True
        scene.end(scene.ask(1))
        scene.end(scene.ask(2))
        await scene.settle()
        scene.machine.ready = False
        scene.machine.waiting.pop().push(Delta(error=EngineDead("the engine was closed")))
        await scene.settle()
        assert len(scene.machine.requests) == 1
        assert sum(scene.idle.ends.values()) == 2
        assert scene.idle._task is not None
        assert scene.idle._task.done()

    run(act)


@pytest.mark.parametrize(
    ("is_on", "fields", "cache", "is_wanted"),
    [
        (True, {}, {}, True),
        (False, {}, {}, False),
        (False, {"warms_next": True}, {}, True),
        (True, {}, {"ends_session": True}, False),
        (True, {"warms_next": True}, {"hands_over": True}, False),
        (True, {"cache": CacheOptions(write=False)}, {}, False),
        (True, {"template": {"continue_final_message": True}}, {}, False),
        (True, {"cache": CacheOptions(read=False), "warms_next": True}, {}, False),
    ],
)
def test_which_conversations_are_computed(
    is_on: bool, fields: dict[str, Any], cache: dict[str, bool], is_wanted: bool
) -> None:
    async def act() -> None:
        scene = Scene(is_on=is_on)
        assert scene.end(scene.ask(1, **fields), **cache) == is_wanted
        await scene.settle()
        assert bool(scene.names) == is_wanted

    run(act)


@pytest.mark.parametrize(
    ("messages", "choice", "is_computed"),
    [
        ([], ENDED, False),
        ([{"role": "assistant", "content": "before"}], ENDED, True),
        ([], Choice(index=0, text="cut", finish_reason="abort"), False),
    ],
)
def test_without_a_session_a_conversation_must_have_begun(
    messages: Sequence[dict[str, str]], choice: Choice, is_computed: bool
) -> None:
    async def act() -> None:
        scene = Scene()
        asked = scene.ask(1)
        chat = ChatInput(messages=[*asked.messages, *messages], params=asked.params)
        scene.end(chat, choice, session=None)
        await scene.settle()
        assert bool(scene.names) == is_computed

    run(act)


@pytest.mark.parametrize("has_call", [False, True])
def test_a_first_turn_with_tools_goes_on_if_it_calls_one(has_call: bool) -> None:
    async def act() -> None:
        scene = Scene()
        call = ToolCall(id="c", name="find", arguments="{}")
        choice = Choice(index=0, finish_reason="stop", tool_calls=[call] if has_call else [])
        chat = scene.ask(1, tools=[Tool(name="find", parameters={})])
        assert scene.end(chat, choice, session=None)
        await scene.settle()
        assert bool(scene.names) == has_call
        assert not scene.end(scene.ask(1), choice, session=None)

    run(act)


def test_batches_have_none() -> None:
    async def act() -> None:
        scene = Scene()
        scope = {"type": "http", "headers": []}
        CONTEXT.set(RequestContext(scope, in_batch=True))
        assert not scene.end(scene.ask(1))
        assert not scene.end(scene.ask(1, warms_next=True))

    run(act)


def test_chunks_grow_while_they_are_quick_and_shrink_when_they_are_slow() -> None:
    size = ChunkSize(PAGE)
    assert size.seconds == LEAST_SECONDS
    size.observe_chunk(16, LEAST_SECONDS / 10)
    assert size.tokens == 32
    size.observe_chunk(32, LEAST_SECONDS)
    assert size.tokens == 32
    size.observe_chunk(32, LEAST_SECONDS * 10)
    assert size.tokens == 16
    size.observe_chunk(16, LEAST_SECONDS * 10)
    assert size.tokens == 16
    assert ChunkSize(64).tokens == 64


def test_a_slow_machine_has_longer_chunks() -> None:
    size = ChunkSize(PAGE)
    usage = Usage(verify_steps=11, total_time=3.0, time_to_first_token=1.0)
    size.observe_answer(usage)
    assert size.seconds == pytest.approx(0.3)
    for _ in range(100):
        size.observe_answer(Usage(verify_steps=2, total_time=9.0, time_to_first_token=1.0))
    assert size.seconds > 0.6
