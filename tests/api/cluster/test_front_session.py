"""A replica and its front: what is said on a connection, and how each side may end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from foretoken.api.cluster.replica import engine_host, front_session, hosted_engine
from foretoken.api.cluster.replica.engine_host import EngineHost, RefusedError
from foretoken.api.cluster.replica.page_log import PART_KEYS, PageLog
from foretoken.api.cluster.wire.forms import WireError, ids_form
from foretoken.api.cluster.wire.messages import (
    Audit,
    Beat,
    CacheInfo,
    Drop,
    Fetch,
    FlushCache,
    FlushPrefix,
    Hello,
    Leaving,
    Metrics,
    Overview,
    Report,
    Step,
    Submit,
    body_of,
    page_keys,
)
from foretoken.api.serving.errors import INTERNAL
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ForetokenError, InvalidRequest, QueueFull
from foretoken.core.interface.extras.request_extras import NO_TRANSFER, Transfer
from foretoken.core.interface.request import Request
from foretoken.core.tiers.keys import PageKeys, StoredPages
from support.fake_engine import FakeEngine, ends_of, make_built
from support.hand_front import SECONDS, HandFront, MemoryLink, submit
from support.wire_samples import described

PARAMS = SamplingParams(max_tokens=3, seed=0)
ENDLESS = SamplingParams(max_tokens=200, seed=0)


class Replica:
    """A host of a fake engine, with the fronts that it has dialled, by hand."""

    def __init__(self, folder: Path, config: EngineConfig | None = None) -> None:
        self.engine = FakeEngine()
        self.tokenizer = Tokenizer.load(folder, max_model_len=256)
        vocab = self.tokenizer.vocab
        self.built: Any = make_built(self.engine, folder, *ends_of(vocab), vocab_size=len(vocab))
        self.links: list[MemoryLink] = []
        self.fronts: list[HandFront] = []
        self.host = EngineHost(
            self.built, self.tokenizer, self._dial, address="here", config=config or EngineConfig()
        )
        self._dialled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _dial(self) -> MemoryLink:
        link = MemoryLink()
        front = HandFront(link.say)
        self.links.append(link)
        self.fronts.append(front)
        self._tasks.append(asyncio.create_task(self._hear(link, front)))
        self._dialled.set()
        return link

    async def _hear(self, link: MemoryLink, front: HandFront) -> None:
        while (message := await link.hear()) is not None:
            await front.take(message)
        await front.take(None)

    async def dialled(self) -> HandFront:
        """The next front that is dialled."""
        async with asyncio.timeout(SECONDS):
            await self._dialled.wait()
        self._dialled.clear()
        return self.fronts[-1]

    async def submitted(self, count: int = 1) -> None:
        """Wait until the engine has had so many requests."""
        while len(self.engine.requests) < count:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0)

    async def joined(self) -> HandFront:
        """The next front that is dialled, once it has taken the replica."""
        front = await self.dialled()
        front.beat()
        return front


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Replica, asyncio.Task[None]]]:
    replica = Replica(folder)
    await replica.host.start()
    task = asyncio.create_task(replica.host.run())
    try:
        yield replica, task
    finally:
        await replica.host.close()
        await asyncio.gather(task, *replica._tasks, return_exceptions=True)


@pytest.fixture
def within(byte_level_folder: Path) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Run a test with a replica, and the task that ends with its last connection."""

    def run(test: Callable[..., Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(SECONDS), running(byte_level_folder) as (replica, task):
                await test(replica, task)

        asyncio.run(main())

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_session, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(engine_host, "REDIAL_SECONDS", 0.02)
    monkeypatch.setattr(engine_host, "REFUSED_SECONDS", 0.02)


def test_openings_are_those_of_the_template_that_the_front_renders(
    byte_level_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% if add_generation_prompt %}{{ who }}>{% endif %}")
    config = EngineConfig(chat_template=str(file), default_chat_template_kwargs={"who": "me"})
    found: list[array[int]] = []

    async def main() -> None:
        replica = Replica(byte_level_folder, config)
        replica.built.set_openings = found.extend
        await replica.host.start()
        await replica.host.close()

    tokenizer = Tokenizer.load(byte_level_folder, max_model_len=256)
    try:
        asyncio.run(main())
        assert [list(ids) for ids in found] == [tokenizer.encode_word("me>")]
    finally:
        tokenizer.close()


# -- what is said ----------------------------------------------------------------------------------


def test_the_first_words_are_the_model_and_the_load(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.dialled()
        await front.until(lambda: len(front.messages) >= 2)
        hello, beat = front.messages[:2]
        assert isinstance(hello, Hello)
        assert (hello.name, hello.num_pages) == ("tiny/model", 10)
        assert hello.tokenizer == replica.tokenizer.fingerprint()
        assert isinstance(beat, Beat)
        assert beat.load is not None
        assert beat.load.kv_usage == 0.5

    within(test)


def test_pages_that_no_other_replica_reads_are_freed(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        freed: list[str] = []
        front = await replica.joined()
        front.say(Drop(name="nothing is held"))
        await front.ask(CacheInfo())  # it was heard
        replica.built.transfers = SimpleNamespace(release=freed.append)
        front.say(Drop(name="t"))
        await front.ask(CacheInfo())
        assert freed == ["t"]

    within(test)


def test_a_part_of_a_prompt_leaves_with_the_news_of_its_pages(
    within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_engine, "PART_TOKENS", 64)

    async def test(replica: Replica, _task: object) -> None:
        held = SimpleNamespace(name="t")
        replica.engine.by_hand = True
        replica.built.transfers = SimpleNamespace(
            hold_part=lambda _: held,
            is_held=lambda part: part is held,
            write=lambda request, part=None: {"remote_request_id": part.name},
            read=lambda _: NO_TRANSFER,
        )
        front = await replica.joined()
        wanted, plain = submit("r", [5] * 200, PARAMS), submit("q", [6] * 200, PARAMS)
        front.begin(msgspec.structs.replace(wanted, hands_over=True))
        front.begin(plain)
        await replica.submitted(2)
        for num_computed, parts in ((50, 0), (100, 1), (199, 1)):
            for request in replica.engine.requests:
                request.num_computed = num_computed
            replica.host._hosted.pages.stored(SimpleNamespace(keys=[b"k" * 32]))  # type: ignore[arg-type]
            seen = len(front.messages)
            await front.until(lambda seen=seen: any(news(each) for each in front.messages[seen:]))
            handed = [each.handed for each in front.messages if isinstance(each, Step)]
            assert [each for each in handed if each] == [
                {"r": b'{"remote_request_id":"t"}'}
            ] * parts

    within(test)


def test_a_part_without_room_is_tried_again_only_when_more_is_computed(
    within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_engine, "PART_TOKENS", 64)
    tried: list[int] = []

    def hold_part(request: Request) -> None:
        tried.append(request.num_computed)

    async def test(replica: Replica, _task: object) -> None:
        replica.engine.by_hand = True
        replica.built.transfers = SimpleNamespace(hold_part=hold_part)
        front = await replica.joined()
        front.begin(msgspec.structs.replace(submit("r", [5] * 200, PARAMS), hands_over=True))
        await replica.submitted(1)
        for num_computed in (100, 101, 120, 163, 164):
            replica.engine.requests[0].num_computed = num_computed
            replica.host._hosted.pages.stored(SimpleNamespace(keys=[b"k" * 32]))  # type: ignore[arg-type]
            seen = len(front.messages)
            await front.until(lambda seen=seen: any(news(each) for each in front.messages[seen:]))
        assert tried == [100, 164]

    within(test)


def news(message: object) -> bool:
    return isinstance(message, Step) and bool(message.pages)


def test_a_prompt_is_fetched_without_a_request(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        offer = SimpleNamespace(page_ids=[1])
        replica.built.transfers = SimpleNamespace(
            read=lambda params: Transfer(offer=offer if params else None),  # type: ignore[arg-type]
            check=lambda *_: True,
        )
        front = await replica.joined()
        message = msgspec.structs.replace(submit("r/1", [5, 6, 7], PARAMS), transfer=b'{"a": 1}')
        front.say(Fetch(submit=message))
        front.say(Fetch(submit=msgspec.structs.replace(message, transfer=b"{}")))
        front.say(Fetch(submit=msgspec.structs.replace(message, output=ids_form([1] * 9))))
        while not replica.engine.fetched:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0)
        await front.ask(CacheInfo())
        assert [each.transfer.offer for each in replica.engine.fetched] == [offer]
        assert replica.engine.requests == []

    within(test)


def end_before_it_is_made(replica: Replica, front: HandFront, message: Submit) -> None:
    front.begin(message)
    front.abort(message.request_id)


def go_on_behind_the_end(replica: Replica, front: HandFront, message: Submit) -> None:
    front.begin(msgspec.structs.replace(message, output=ids_form([1] * 9)))


def fetch_behind_the_end(replica: Replica, front: HandFront, message: Submit) -> None:
    front.say(Fetch(submit=msgspec.structs.replace(message, output=ids_form([1] * 9))))


def ask_a_full_engine(replica: Replica, front: HandFront, message: Submit) -> None:
    replica.engine.refusal = QueueFull("full")
    front.begin(message)


@pytest.mark.parametrize(
    "fail", [end_before_it_is_made, go_on_behind_the_end, fetch_behind_the_end, ask_a_full_engine]
)
def test_pages_that_a_request_names_are_let_go_at_once_where_it_fails(
    within, fail: Callable[[Replica, HandFront, Submit], None]
) -> None:
    """Pages were held by their replica until their time was over."""

    async def test(replica: Replica, _task: object) -> None:
        offer, ended = SimpleNamespace(page_ids=[1]), list[object]()
        replica.built.transfers = SimpleNamespace(
            read=lambda _: Transfer(offer=offer),  # type: ignore[arg-type]
            check=lambda *_: True,
            end=ended.append,
        )
        front = await replica.joined()
        message = msgspec.structs.replace(submit("r", [5, 6, 7], PARAMS), transfer=b"{}")
        fail(replica, front, message)
        for _ in range(2):  # it was heard, and begun
            await front.ask(CacheInfo())
        assert ended == [offer]
        assert replica.engine.requests == replica.engine.fetched == []

    within(test)


def test_pages_of_a_fetch_that_ends_before_it_begins_are_let_go_at_once(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        offer, ended = SimpleNamespace(page_ids=[1]), list[object]()
        replica.built.transfers = SimpleNamespace(
            read=lambda _: Transfer(offer=offer),  # type: ignore[arg-type]
            end=ended.append,
        )
        front = await replica.joined()
        message = msgspec.structs.replace(submit("r", [5, 6, 7], PARAMS), transfer=b"{}")
        await front.ask(CacheInfo())
        session = replica.host._session
        assert session is not None
        session._take(Fetch(submit=message))
        session._end([])
        while not ended:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0)
        assert ended == [offer]
        assert replica.engine.fetched == []

    within(test)


def test_a_request_whose_pages_are_named_by_no_json_fails_alone(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        replica.built.transfers = SimpleNamespace(read=lambda _: NO_TRANSFER)
        bad = msgspec.structs.replace(submit("r", [5, 6, 7], PARAMS), transfer=b"[]")
        assert (await front.serve(bad)).last.error is not None
        replica.built.transfers = None
        assert (await front.serve(submit("s", [5, 6, 7], PARAMS))).last.error is None

    within(test)


def test_deltas_of_a_step_leave_in_one_message(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        heard = [front.begin(submit(str(i), [5, 6, 7], PARAMS)) for i in range(3)]
        await replica.submitted(3)
        for _ in range(3):
            replica.engine.step()
            await asyncio.sleep(0)  # each reader takes its delta before the next step
            await asyncio.sleep(0)
        await front.until(lambda: all(each.has_ended for each in heard))
        steps = [each for each in front.messages if isinstance(each, Step)]
        assert [len(each.deltas) for each in steps] == [3, 3, 3]
        assert [sorted(each.usages) for each in steps] == [["0", "1", "2"], [], ["0", "1", "2"]]
        assert [each.usages[-1].completion_tokens for each in heard] == [3, 3, 3]

    within(test)


def test_usage_is_sent_now_and_then_in_a_long_answer(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        heard = await front.serve(submit("a", [5, 6, 7], ENDLESS))
        assert heard.usages[-1].completion_tokens == len(heard.deltas) == 200
        assert len(heard.usages) == 2 + (len(heard.deltas) - 1) // 32

    within(test)


def test_a_stop_string_ends_the_request_in_the_replica(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        prompt = replica.tokenizer.encode_word("Hello world, hello there. Stop here.")
        replica.engine.answers = lambda request: prompt
        params = SamplingParams(max_tokens=200, stop=["there. S"])
        whole = await front.serve(submit("a", prompt, params))
        assert (whole.last.finish_reason, whole.last.stop_reason) == ("stop", "there. S")
        count = len(whole.token_ids) - 1
        replica.engine.answers = lambda request: prompt[count:]
        rest = await front.serve(submit("b", prompt, params, output=prompt[:count]))
        assert whole.token_ids[:count] + rest.token_ids == whole.token_ids
        assert rest.last.stop_reason == "there. S"

    within(test)


def test_each_question_has_its_answer(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        await front.serve(submit("a", [5, 6, 7], PARAMS))
        assert (await front.ask(FlushCache(namespaces=[None, "mine"]))).result == 3
        assert (await front.ask(FlushPrefix(tokens=ids_form([1])))).result == 2
        assert replica.engine.flushed == [(None, "mine"), (None,)]
        assert (await front.ask(Metrics())).result == b"foretoken:x 1\n"
        for question, key, value in (
            (CacheInfo(), "total_pages", 10),
            (Overview(), "requests", ["a"]),
            (Audit(), "ok", True),
            (Report(reason="asked"), "reason", "asked"),
        ):
            result = (await front.ask(question)).result
            assert isinstance(result, bytes)
            assert body_of(result)[key] == value

    within(test)


def test_a_question_that_fails_is_answered_by_an_error_without_its_text(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()

        async def fail(*_: object) -> int:
            raise RuntimeError("secret")

        replica.engine.flush_cache = fail  # type: ignore[method-assign]
        assert described((await front.ask(FlushCache())).error) == (ForetokenError, INTERNAL, {})
        answer = await front.ask(FlushPrefix(tokens=b"odd"))
        assert type(answer.error) is ForetokenError
        assert "token ids" in str(answer.error)

    within(test)


# -- requests that fail ----------------------------------------------------------------------------


def test_errors_of_a_request_end_it_alone(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        replica.engine.refusal = QueueFull("full", retry_after=2.5)
        full = await front.serve(submit("full", [5], PARAMS))
        replica.engine.refusal = None
        wrong = await front.serve(submit("wrong", [5], SamplingParams(regex="(")))
        replica.engine.submit = lambda _: 1 / 0  # type: ignore[method-assign,assignment]
        odd = await front.serve(submit("odd", [5], PARAMS))
        del replica.engine.submit
        good = await front.serve(submit("good", [5], PARAMS))
        assert described(full.last.error) == (QueueFull, "full", {"retry_after": 2.5})
        assert isinstance(wrong.last.error, InvalidRequest)
        assert wrong.last.error.param == "regex"
        assert described(odd.last.error) == (ForetokenError, INTERNAL, {})
        assert (good.last.finish_reason, good.last.error) == ("length", None)

    within(test)


def test_an_aborted_request_ends_with_a_delta(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        heard = front.begin(submit("a", [5, 6], ENDLESS))
        await replica.submitted()
        front.abort("a")
        front.abort("unknown")
        await front.until(lambda: heard.has_ended)
        assert heard.last.finish_reason == "abort"
        assert len(heard.usages) == 1

    within(test)


def test_a_request_is_aborted_while_its_grammar_is_compiled(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        begun, compiled = asyncio.Event(), asyncio.Event()

        async def wait(_params: SamplingParams) -> None:
            begun.set()
            await compiled.wait()

        replica.host._hosted.grammars.compile = wait  # type: ignore[method-assign]
        heard = front.begin(submit("a", [5, 6], SamplingParams(regex="a+")))
        await begun.wait()
        front.abort("a")
        await front.until(lambda: heard.has_ended)
        assert heard.last.finish_reason == "abort"
        compiled.set()
        await front.serve(submit("b", [5, 6], PARAMS))
        assert [each.request_id for each in replica.engine.requests] == ["b"]

    within(test)


def test_a_request_takes_the_place_of_an_earlier_one_of_its_id(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        front.begin(submit("a", [5, 6], ENDLESS))
        await replica.submitted()
        replica.engine.by_hand = False
        later = await front.serve(submit("a", [7], PARAMS))
        assert later.token_ids == [7, 7, 7]

    within(test)


# -- the end of a connection -----------------------------------------------------------------------


def test_a_closed_connection_aborts_what_runs_and_is_dialled_anew(within, caplog) -> None:
    caplog.set_level(logging.INFO)

    async def test(replica: Replica, _task: object) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        front.begin(submit("a", [5, 6], ENDLESS))
        await replica.submitted()
        replica.links[0].fail(None)
        later = await replica.joined()
        assert replica.links[0].is_closed
        heard = later.begin(submit("a", [7], PARAMS))
        await replica.submitted(2)
        replica.engine.by_hand = False
        replica.engine._work.set()
        await later.until(lambda: heard.has_ended)
        assert isinstance(later.messages[0], Hello)
        assert heard.token_ids == [7, 7, 7]
        assert replica.engine.aborted == ["a"]

    within(test)
    lines = [each.getMessage() for each in caplog.records if each.name == engine_host.__name__]
    assert lines == [
        "the front at here accepted this replica",
        "lost the front at here: it closed the connection; reconnecting",
        "the front at here is connected again",
    ]


def test_a_request_that_has_ended_is_not_aborted_with_its_connection(within, monkeypatch) -> None:
    async def test(replica: Replica, _task: object) -> None:
        aborted: list[str] = []  # the engine itself ignores those that it does not have
        monkeypatch.setattr(replica.engine, "abort", aborted.append)
        front = await replica.joined()
        await front.serve(submit("a", [5, 6], PARAMS))
        replica.links[0].fail(None)
        await replica.dialled()
        assert aborted == []

    within(test)


def test_a_replica_that_leaves_is_not_refused_by_the_answer_to_it(within) -> None:
    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        await replica.joined()
        await replica.host.joined.wait()
        replica.host.stop()
        replica.fronts[-1].say(Leaving(reason="it leaves"))
        await task

    within(test)


def test_a_silent_front_is_lost(within, quick) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        later = await replica.dialled()
        assert front.is_closed
        beats = [each for each in front.messages if isinstance(each, Beat)]
        assert len(beats) == 1 + front_session.MOST_SILENT
        await later.until(lambda: later.hello)

    within(test)


def test_a_front_that_beats_is_kept(within, quick) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        for count in range(2, 12):
            await front.until(lambda: len(front.messages) > count)  # noqa: B023
            front.beat()
        assert len(replica.links) == 1

    within(test)


def test_a_front_that_does_not_read_is_lost(within, quick, caplog) -> None:
    async def test(replica: Replica, _task: object) -> None:
        await replica.joined()
        replica.links[0].is_full = True
        await replica.dialled()

    within(test)
    assert "lost the front at here: it does not read its messages" in caplog.text


def test_a_front_that_was_never_heard_is_dialled_anew(within, quick, caplog) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.dialled()
        await replica.dialled()
        await replica.dialled()
        assert [type(each) for each in front.messages] == [Hello, Beat]

    within(test)
    assert caplog.text.count("running with the same FORETOKEN_CLUSTER_KEY") == 1


@pytest.mark.parametrize("says", [Leaving(reason="another model"), WireError("no message")])
def test_a_front_that_has_not_taken_the_replica_may_refuse_it(within, says) -> None:
    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        await replica.dialled()
        refuse = replica.links[0]
        refuse.say(says) if isinstance(says, Leaving) else refuse.fail(says)
        with pytest.raises(RefusedError, match=r"another model|no message"):
            await task

    within(test)


def test_a_front_that_has_taken_the_replica_may_drop_it(within) -> None:
    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        front = await replica.joined()
        front.say(Leaving(reason="the replica sent tokens for a request that it does not serve"))
        with pytest.raises(RefusedError, match="tokens for a request"):
            await task
        assert len(replica.links) == 1

    within(test)


def test_a_later_front_that_refuses_the_replica_is_dialled_until_one_takes_it(
    within, quick, caplog
) -> None:
    caplog.set_level("INFO")

    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        await replica.joined()
        replica.links[0].fail(None)
        for _ in range(2):
            later = await replica.dialled()
            later.say(Leaving(reason="it has another model"))
        fitting = await replica.joined()
        heard = await fitting.serve(submit("a", [5, 6], PARAMS))
        assert heard.token_ids == [5, 6, 5]
        assert not task.done()

    within(test)
    lines = [each.getMessage() for each in caplog.records if each.name == engine_host.__name__]
    assert lines == [
        "the front at here accepted this replica",
        "lost the front at here: it closed the connection; reconnecting",
        "the front at here refused this replica: it has another model; retrying",
        "the front at here is connected again",
    ]


def test_a_replica_stops_while_it_waits_for_a_front(within, monkeypatch) -> None:
    monkeypatch.setattr(engine_host, "REFUSED_SECONDS", 10 * SECONDS)

    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        await replica.joined()
        replica.links[0].fail(None)
        later = await replica.dialled()
        later.say(Leaving(reason="it has another model"))
        await later.until(lambda: later.is_closed)  # the next one is dialled in a while
        replica.host.stop()
        await task
        assert len(replica.links) == 2

    within(test)


def test_what_is_no_message_of_a_known_front_ends_the_connection(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        await front.until(lambda: front.hello)
        replica.links[0].fail(WireError("no message"))
        await replica.dialled()
        await front.until(lambda: front.is_closed)
        assert front.left is not None
        assert "no message" in front.left

    within(test)


def test_a_replica_that_stops_leaves_before_its_requests_end(within) -> None:
    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        heard = front.begin(submit("a", [5, 6], ENDLESS))
        await replica.submitted()
        replica.engine.step()
        await asyncio.sleep(0)  # its reader has the delta, and nothing is sent yet
        await replica.host.close(drain_seconds=5.0)
        await task
        await front.until(lambda: front.is_closed)
        assert front.left == engine_host.STOPPED
        assert not front.has_failed
        assert heard.token_ids == [5]
        assert not heard.has_ended
        assert replica.engine.aborted == ["a"]

    within(test)


def test_a_dead_engine_leaves_and_fails_no_request(within) -> None:
    async def test(replica: Replica, task: asyncio.Task[None]) -> None:
        replica.engine.by_hand = True
        front = await replica.joined()
        heard = front.begin(submit("a", [5, 6], ENDLESS))
        await replica.submitted()
        replica.engine.die()
        await task
        await front.until(lambda: front.is_closed)
        assert front.left == "steps failed; the engine stopped"
        assert front.has_failed
        assert heard.deltas == []

    within(test)


# -- news of pages ---------------------------------------------------------------------------------


def stored(*keys: bytes) -> StoredPages:
    return StoredPages(None, array("q", range(len(keys))), list(keys), None, array("q"))


def test_news_of_pages_keep_their_order() -> None:
    log, one, two, three = PageLog(None), b"1" * 32, b"2" * 32, b"3" * 32
    log.stored(stored(one))
    log.stored(stored(two))
    log.dropped(None, [one], "evicted")
    log.stored(stored(one, three))
    news = log.take()
    assert [each.is_stored for each in news] == [True, False, True]
    assert [page_keys(each) for each in news] == [
        [b"1" * 8, b"2" * 8], [b"1" * 8], [b"1" * 8, b"3" * 8],
    ]  # fmt: skip
    assert log.take() == []


def test_all_pages_are_told_in_parts_and_no_news_twice() -> None:
    num_pages = PART_KEYS + 5
    keys = PageKeys(b"f" * 32, num_pages, 1)
    log = PageLog(keys)
    for page_id in range(num_pages):
        keys._set(page_id, page_id.to_bytes(8) + b"x" * 24)
    log.stored(stored(keys.key(0)))
    parts = [page_keys(news) for part in log.take_all() for news in part]
    assert [len(each) for each in parts] == [PART_KEYS, 5]
    assert {key for part in parts for key in part} == {key[:8] for key in keys.cached()}
    assert log.take() == []


def test_a_front_is_told_the_pages_that_were_there_before_it(within) -> None:
    keys = PageKeys(b"f" * 32, 3, 1)
    for page_id in range(3):
        keys._set(page_id, bytes([page_id + 1]) * 32)

    async def test(replica: Replica, _task: object) -> None:
        replica.host._hosted.pages = PageLog(keys)
        front = await replica.joined()
        await front.until(lambda: front.pages == {b"\x01" * 8, b"\x02" * 8, b"\x03" * 8})
        replica.links[0].fail(None)
        later = await replica.joined()
        await later.until(lambda: len(later.pages) == 3)

    within(test)


def test_news_of_pages_leave_without_deltas_too(within) -> None:
    async def test(replica: Replica, _task: object) -> None:
        front = await replica.joined()
        await front.until(lambda: front.hello)
        replica.host._hosted.pages.stored(stored(b"1" * 32))
        await front.until(lambda: front.pages == {b"1" * 8})

    within(test)
