"""Adapters of a front: its replicas load them, requests name them, none meets the base's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretoken.api.build.adapter_loader import AdapterFolder
from foretoken.api.cluster.front.replicas import Replicas
from foretoken.api.cluster.front.routing import Route
from foretoken.api.cluster.replica.front_session import FrontSession
from foretoken.api.cluster.replica.hosted_engine import HostedEngine
from foretoken.api.cluster.replica.page_log import PageLog
from foretoken.api.cluster.wire.forms import WireError
from foretoken.api.cluster.wire.messages import (
    Answer,
    Call,
    FlushCache,
    Load,
    LoadAdapter,
    RemoteAdapter,
    Step,
    Submit,
    UnloadAdapter,
    facts_form,
    fetch_of,
    page_news,
    prefill_of,
    submit_of,
)
from foretoken.api.runtime.adapters import NO_ADAPTERS, Adapters, ServedAdapter
from foretoken.api.runtime.preprocess import Prepared, PromptTokens, make_request
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import (
    InvalidRequest,
    ModelLoadError,
    Unavailable,
)
from foretoken.core.interface.extras.adapter import (
    Adapter,
    LoadedAdapter,
    adapter_group,
    adapter_namespace,
)
from foretoken.core.interface.request import Request
from foretoken.core.tiers.keys import chain_keys, root_key
from support.fake_engine import FakeEngine, make_built
from support.hand_front import MemoryLink, submit
from support.scripted_replica import (
    EOS,
    ScriptedReplica,
    front_of,
    read,
    replicas_of,
    request,
)

FILES, OTHERS = b"digest", b"another"
FOLDER = Path("adapters/sql")
ABSOLUTE = str(FOLDER.absolute())
HANDED = b'{"remote_request_id": "x"}'
PROMPT = list(range(5, 69))


def of(adapter: ServedAdapter, request_id: str = "r", **params: Any) -> Request:
    """A request of an adapter."""
    given = SamplingParams(max_tokens=8, seed=3, **params)
    prepared = Prepared(prompt=PromptTokens(PROMPT), params=given, adapter=adapter)
    return make_request(request_id, prepared, seed=3, eos_token_ids=frozenset({EOS}))


async def loads(replica: ScriptedReplica, digest: bytes = FILES) -> LoadAdapter:
    """Answer the next question, which is to load an adapter."""
    asked = await replica.answer(facts_form(LoadedAdapter(Adapter(), 4, 100, digest)))
    assert isinstance(asked.question, LoadAdapter)
    return asked.question


async def unloads(replica: ScriptedReplica) -> int:
    """Answer the next question, which is to unload an adapter; its number."""
    asked = await replica.answer(0)
    assert isinstance(asked.question, UnloadAdapter)
    return asked.question.number


def adapters_of(front: Replicas) -> Adapters:
    return Adapters(front.adapters, front.flush_cache, most=4)


async def loaded(front: Replicas, *replicas: ScriptedReplica) -> tuple[Adapters, ServedAdapter]:
    """The adapters of a front, and one that is called sql."""
    adapters = adapters_of(front)
    loading = asyncio.create_task(adapters.load("sql", FOLDER))
    for each in replicas:
        await loads(each)
    return adapters, await loading


# -- loading ---------------------------------------------------------------------------------------


async def test_all_replicas_load_and_unload_an_adapter() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        adapters = adapters_of(front)
        loading = asyncio.create_task(adapters.load("sql", FOLDER, FOLDER.parent))
        asked = [await loads(each) for each in replicas]
        served = await loading
        below = str(Path(ABSOLUTE).parent)
        wanted = ("sql", ABSOLUTE, below)
        assert {(each.name, each.path, each.below) for each in asked} == {wanted}
        assert {each.number for each in asked} == {served.number}
        loaded = served.loaded
        assert (loaded.rank, loaded.num_bytes, loaded.digest) == (4, 100, FILES)
        adapters.enter("sql")
        served.namespace("salt")
        unloading = asyncio.create_task(adapters.unload("sql"))
        served.leave()
        for each in replicas:
            flush = (await each.answer(0)).question
            assert isinstance(flush, FlushCache)
            assert flush.namespaces == [served.group, served.namespace("salt")]
        assert [await unloads(each) for each in replicas] == [served.number] * 2
        await unloading


async def test_what_one_replica_refuses_none_has() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (good, bad):
        adapters = adapters_of(front)
        loading = asyncio.create_task(adapters.load("sql", FOLDER))
        await loads(good)
        await bad.answer_error(ModelLoadError("no adapter_config.json"))
        assert await unloads(good) == await unloads(bad) == 1
        with pytest.raises(ModelLoadError, match="no adapter_config"):
            await loading
        assert adapters.served == []
        again = asyncio.create_task(adapters.load("sql", FOLDER))
        for each in (good, bad):
            assert (await loads(each)).number == 2
        await again


async def test_replicas_with_other_files_at_the_path_are_named() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (left, right):
        loading = asyncio.create_task(adapters_of(front).load("sql", FOLDER))
        await loads(left)
        await loads(right, OTHERS)
        for each in (left, right):
            await unloads(each)
        with pytest.raises(ModelLoadError, match="different files"):
            await loading


async def test_without_a_replica_nothing_is_loaded() -> None:
    async with front_of() as front:
        with pytest.raises(Unavailable):
            await adapters_of(front).load("sql", FOLDER)


# -- replicas that join later ----------------------------------------------------------------------


async def test_a_replica_that_joins_while_an_adapter_is_loaded_loads_it_too() -> None:
    async with front_of() as front, replicas_of(front) as (first,):
        loading = asyncio.create_task(adapters_of(front).load("sql", FOLDER))
        asked = await first.next(Call)
        async with replicas_of(front) as (second,):
            first.send(Answer(call_id=asked.call_id, result=_facts()))
            assert (await loads(second)).number == 1
            await loading


async def test_a_later_replica_serves_the_base_at_once_and_adapters_when_it_has_them() -> None:
    async with front_of(failover_seconds=60.0) as front:
        first = await ScriptedReplica(front).join()
        _, sql = await loaded(front, first)
        stream = front.submit(of(sql))
        assert (await first.submitted()).adapter == sql.number
        later = await ScriptedReplica(front).join()
        first.die()
        asked = await later.next(Call)
        assert isinstance(asked.question, LoadAdapter)
        base = front.submit(request("base"))  # it is not behind the one that waits
        assert (await later.submitted()).request_id == "base"
        with pytest.raises(Unavailable, match="no connected replica has loaded"):
            front.submit(of(sql, "new"))
        later.send(Answer(call_id=asked.call_id, result=_facts()))
        moved = await later.submitted()
        assert (moved.request_id, moved.adapter) == ("r", sql.number)
        for name, waiting in (("base", base), ("r", stream)):
            later.finish(name, 10)
            assert (await read(waiting)).token_ids == [10]
        later.die()


@pytest.mark.parametrize(("answer", "reason"), [
    (lambda: ModelLoadError("no such folder"), "the adapter sql: no such folder"),
    (lambda: _facts(OTHERS), "its files differ from the other replicas' files"),
])  # fmt: skip
async def test_a_later_replica_without_the_adapter_is_lost(
    answer: Callable[[], Any], reason: str
) -> None:
    async with front_of() as front, replicas_of(front) as (first,):
        await loaded(front, first)
        async with replicas_of(front) as (later,):
            asked, found = await later.next(Call), answer()
            is_facts = isinstance(found, bytes)
            later.send(
                Answer(call_id=asked.call_id, result=found)
                if is_facts
                else Answer(call_id=asked.call_id, error=found)
            )
            assert reason in await later.refusal()
            assert len(front.describe()) == 1


async def test_a_later_replica_lets_go_of_what_was_unloaded_meanwhile() -> None:
    async with front_of() as front, replicas_of(front) as (first,):
        adapters, sql = await loaded(front, first)
        async with replicas_of(front) as (later,):
            asked = await later.next(Call)
            unloading = asyncio.create_task(adapters.unload("sql"))
            assert await unloads(first) == await unloads(later) == sql.number
            await unloading
            later.send(Answer(call_id=asked.call_id, result=_facts()))
            assert await unloads(first) == await unloads(later) == sql.number


def _facts(digest: bytes = FILES) -> bytes:
    return facts_form(LoadedAdapter(Adapter(), 4, 100, digest))


# -- requests --------------------------------------------------------------------------------------


async def test_pages_of_the_base_are_no_hit_for_an_adapter() -> None:
    async with front_of(2, route=Route.KV) as front, replicas_of(front, 2) as (left, right):
        adapters, sql = await loaded(front, left, right)
        _store(left, None, 64)
        _store(right, sql.namespace(None), 48)
        flushing = asyncio.create_task(front.flush_cache("other"))
        for each in (left, right):
            await each.answer(0)
        await flushing  # so the news are there, too
        front.submit(of(adapters.enter("sql")))
        assert (await right.submitted()).request_id == "r"
        assert b"route_hit_tokens_total 48.0" in front.metrics.render()[0]
        front.submit(request("base", PROMPT))
        assert (await left.submitted()).adapter is None


def _store(replica: ScriptedReplica, namespace: str | None, num_tokens: int) -> None:
    keys = [*chain_keys(root_key(b"f" * 32, namespace), request(prompt=PROMPT).tokens, 16)]
    news = page_news(is_stored=True, keys=keys[: num_tokens // 16])
    replica.send(Step(load=Load(running=0, waiting=0, kv_usage=0.0), pages=[news]))


def test_every_message_of_a_request_names_its_adapter() -> None:
    remote = ServedAdapter("sql", 7, LoadedAdapter(RemoteAdapter(7), 4, 100, FILES))
    asked = of(remote)
    messages = (submit_of(asked), prefill_of(asked), fetch_of(asked, HANDED, page_size=16).submit)
    assert [each.adapter for each in messages] == [7, 7, 7]
    own = ServedAdapter("sql", 7, LoadedAdapter(Adapter(), 4, 100, FILES))
    with pytest.raises(WireError, match="loaded in this process"):
        submit_of(of(own))


# -- in a replica ----------------------------------------------------------------------------------


class Loader:
    """Notes what is loaded."""

    def __init__(self) -> None:
        self.weights: list[Adapter] = []

    async def load(self, name: str, number: int, folder: AdapterFolder) -> LoadedAdapter:
        self.weights.append(Adapter())
        return LoadedAdapter(self.weights[-1], 4, 100, FILES)

    async def unload(self, loaded: LoadedAdapter) -> None:
        raise AssertionError("the front counts requests")


class NoGrammars:
    async def compile(self, params: SamplingParams) -> None:
        """No request here has one."""


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def hosted(tokenizer: Any, byte_level_folder: Path, loader: Loader) -> HostedEngine:
    built: Any = make_built(FakeEngine(), byte_level_folder, EOS, vocab_size=100)
    built.adapters = loader
    grammars: Any = NoGrammars()
    return HostedEngine(built=built, tokenizer=tokenizer, grammars=grammars, pages=PageLog(None))


def asked(number: int | None, salt: str | None = None) -> Submit:
    message = submit("r", PROMPT, SamplingParams(cache_salt=salt))
    return msgspec.structs.replace(message, adapter=number)


async def test_a_replica_computes_with_the_weights_and_the_namespace_of_the_front(
    hosted: HostedEngine, loader: Loader
) -> None:
    for number, name in ((3, "sql"), (4, "legal")):
        answer = await hosted.answer(LoadAdapter(name=name, number=number, path="/files"))
        assert answer == _facts()
    request = (await hosted.make(asked(4, "salt"))).request
    assert request.extras.adapter is loader.weights[1]
    group = adapter_group("legal", 4, FILES)
    assert request.namespace == adapter_namespace(group, "salt")
    base = (await hosted.make(asked(None, "salt"))).request
    assert (base.extras.adapter, base.namespace) == (None, "salt")
    assert await hosted.answer(UnloadAdapter(number=4)) == 0
    with pytest.raises(WireError, match="not loaded"):
        await hosted.make(asked(4))


async def test_a_replica_that_takes_no_adapters_refuses_them(hosted: HostedEngine) -> None:
    built: Any = hosted.built
    built.adapters = None
    with pytest.raises(InvalidRequest, match=NO_ADAPTERS):
        await hosted.answer(LoadAdapter(name="sql", number=1, path="/files"))


async def test_adapters_end_with_the_connection_to_their_front(hosted: HostedEngine) -> None:
    link = MemoryLink()
    serving = asyncio.create_task(FrontSession(hosted, link).run())
    link.say(Call(call_id=0, question=LoadAdapter(name="sql", number=1, path="/files")))
    while not isinstance(await link.hear(), Answer):
        pass
    assert hosted.adapters.find(1) is not None
    link.fail(None)
    await serving
    with pytest.raises(WireError, match="not loaded"):
        hosted.adapters.find(1)
