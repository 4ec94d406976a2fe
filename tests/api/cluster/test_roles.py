"""Roles of replicas: a long prompt goes to one for prompts, and its answer comes from another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from foretoken.api.cluster.front.dispatcher import PREFILL_TOKENS
from foretoken.api.cluster.front.replicas import Replicas
from foretoken.api.cluster.wire.forms import ids_of
from foretoken.api.cluster.wire.messages import Abort, Drop, Fetch, Submit, body_form
from foretoken.core.errors import EngineDead, ForetokenError, QueueFull
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason
from support.scripted_replica import (
    ScriptedReplica,
    front_of,
    in_idle_time,
    read,
    request,
    step,
    until,
)

LONG = [5] * PREFILL_TOKENS
TOP = TokenLogprob(token_id=10, logprob=-1.0, top=[])
HANDED = b'{"remote_request_id": "x"}'


@contextlib.asynccontextmanager
async def with_roles(front: Replicas, *roles: str | None) -> AsyncIterator[list[ScriptedReplica]]:
    """Replicas with these roles, which have joined."""
    made = []
    try:
        for role in roles:
            settings = {"kv_transfer": "nixl", "role": role} if role else {}
            one = ScriptedReplica(
                front, settings=body_form(settings), max_model_len=2048, page_size=16, num_pages=999
            )
            made.append(one)
            await one.join()
        yield made
    finally:
        for each in made:
            each.die()


@contextlib.asynccontextmanager
async def prompt_apart() -> AsyncIterator[
    tuple[Replicas, ScriptedReplica, ScriptedReplica, AsyncIterator[Delta]]
]:
    """A front, a replica that computes the prompt of "r", one for its answer, and that stream."""
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (p, d):
        stream = front.submit(request(prompt=LONG))
        await p.submitted()
        yield front, p, d, stream


async def finish(replica: ScriptedReplica, stream: AsyncIterator[Delta]) -> None:
    """Answer "r" with one token, which must come out of the front as the whole answer."""
    replica.finish("r", 10)
    assert (await read(stream)).token_ids == [10]


def hand_over(replica: ScriptedReplica, handed: bytes | None = HANDED) -> None:
    """End a prompt, and say where its pages are."""
    done = step("r", [9], finish_reason=FinishReason.LENGTH)
    replica.send(msgspec.structs.replace(done, handed={} if handed is None else {"r": handed}))


async def test_a_long_prompt_is_computed_apart_and_its_token_is_not_served() -> None:
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (p, d):
        wanted = request(prompt=LONG, temperature=0.5, logprobs=2, stop=["x"])
        stream = front.submit(wanted)
        sent = await p.submitted()
        assert (sent.hands_over, sent.transfer, sent.params["max_tokens"]) == (True, None, 1)
        assert sent.params.keys().isdisjoint({"logprobs", "stop"})
        hand_over(p)
        sent = await d.submitted()
        assert (sent.hands_over, sent.transfer, sent.output) == (False, HANDED, b"")
        assert (sent.params["max_tokens"], sent.params["logprobs"]) == (8, 2)
        assert wanted.num_output == 0
        d.finish("r", 10, logprobs=[TOP])
        whole = await read(stream)
        assert whole.token_ids == [10]
        assert (wanted.usage.moves, wanted.usage.completion_tokens) == (0, 1)
        assert front._dispatcher.idle.is_set()


async def test_a_prompt_that_fills_the_context_is_computed_apart_without_a_token() -> None:
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (p, d):
        stream = front.submit(request(prompt=[5] * 2048, prompt_only=True))
        assert (await p.submitted()).params["max_tokens"] == 0
        done = step("r", finish_reason=FinishReason.LENGTH)
        p.send(msgspec.structs.replace(done, handed={"r": HANDED}))
        sent = await d.submitted()
        assert (sent.transfer, sent.params["max_tokens"]) == (HANDED, 0)
        d.finish("r", finish_reason=FinishReason.LENGTH)
        whole = await read(stream)
        assert (whole.token_ids, whole.finish_reason) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("roles", "options"),
    [
        (("prefill", "decode"), {"prompt": LONG[1:]}),
        (("prefill", "decode"), {"prompt": LONG, "prompt_logprobs": 0}),
        (("prefill", "decode"), {"prompt": LONG, "cache": CacheOptions(read=False)}),
        (("prefill", None), {"prompt": LONG}),
        (("both", "decode"), {"prompt": LONG}),
        ((None, None), {"prompt": LONG}),
    ],
    ids=str,
)
async def test_what_gains_nothing_is_sent_whole(roles: Any, options: dict[str, Any]) -> None:
    async with front_of(2) as front, with_roles(front, *roles) as (first, second):
        cache = options.pop("cache", CacheOptions())
        wanted = request(**options)
        wanted.cache = cache
        stream = front.submit(wanted)
        one = second if roles[0] == "prefill" else first
        sent = await one.submitted()
        assert (sent.hands_over, sent.transfer) == (False, None)
        await finish(one, stream)


async def test_idle_time_is_spent_where_the_answer_was_computed() -> None:
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (_, d):
        stream = front.submit(in_idle_time(LONG))
        sent = await d.submitted()
        assert (sent.hands_over, sent.transfer, sent.is_idle_prefill) == (False, None, True)
        d.finish("idle")
        await read(stream)


@pytest.mark.parametrize("fault", ["dies", "is full", "fails", "holds nothing", "ends it unasked"])
async def test_a_replica_for_prompts_that_fails_costs_no_answer(fault: str) -> None:
    async with prompt_apart() as (_, p, d, stream):
        match fault:
            case "dies":
                p.die()
            case "is full":
                p.say("r", error=QueueFull("full"))
            case "fails":
                p.say("r", error=ForetokenError("a step failed"))
            case "holds nothing":
                hand_over(p, None)
            case _:
                p.finish("r", finish_reason=FinishReason.ABORT)
        sent = await d.submitted()
        assert (sent.hands_over, sent.transfer) == (False, None)
        await finish(d, stream)


async def test_a_request_that_is_aborted_while_its_prompt_is_computed_ends() -> None:
    async with prompt_apart() as (front, p, d, stream):
        front.abort("r")
        assert (await p.next(Abort)).request_id == "r"
        hand_over(p)  # it was done already
        assert (await read(stream)).finish_reason is FinishReason.ABORT
        assert (await p.next(Drop)).name == "x"
        again = front.submit(request(prompt=[7]))
        assert isinstance(await d.submitted(), Submit)
        d.finish("r", 10)
        assert (await read(again)).token_ids == [10]


async def test_without_the_replica_for_its_answer_the_other_one_serves_it_whole() -> None:
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (p, d):
        wanted = request(prompt=LONG)
        stream = front.submit(wanted)
        await p.submitted()
        hand_over(p)
        assert (await d.submitted()).transfer == HANDED
        d.say("r", 10)
        await until(lambda: wanted.num_output == 1)
        d.die()
        sent = await p.submitted()
        assert (sent.hands_over, sent.transfer) == (False, None), "parameters are good once"
        p.finish("r", 11)
        assert (await read(stream)).token_ids == [10, 11]
        assert wanted.usage.moves == 1


async def test_a_prompt_that_is_done_waits_for_room() -> None:
    async with front_of(2) as front, with_roles(front, "prefill") as (p,):
        full = ScriptedReplica(
            front,
            settings=body_form({"kv_transfer": "nixl", "role": "decode"}),
            max_running=1, max_queued=0, max_model_len=2048, page_size=16, num_pages=999,
        )  # fmt: skip
        await full.join()
        stream = front.submit(request(prompt=LONG))
        await p.submitted()
        other = front.submit(request("other"))
        await full.submitted()
        hand_over(p)
        await until(lambda: not front._dispatcher.live["r"].is_prefilling)
        full.finish("other", 3)
        assert (await read(other)).token_ids == [3]
        assert (await full.submitted()).transfer == HANDED
        full.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        full.die()


async def test_pages_of_a_prompt_that_ends_before_it_is_read_are_freed() -> None:
    """Pages were held for half a minute."""
    async with prompt_apart() as (front, p, d, stream):
        [link] = [each for each in front._roster.links.values() if each.role == "decode"]
        link.hello = msgspec.structs.replace(link.hello, max_running=1, max_queued=0)
        front.submit(request("other"))
        await d.submitted()
        hand_over(p)
        await until(lambda: "r" in front._dispatcher._waiting)
        front.abort("r")
        assert (await read(stream)).finish_reason is FinishReason.ABORT
        assert (await p.next(Drop)).name == "x"


async def test_a_replica_that_cannot_be_reached_costs_no_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one gets it."""
    async with (
        front_of(3) as front,
        with_roles(front, "prefill", "decode", "decode") as (p, *others),
    ):
        stream = front.submit(request(prompt=LONG))
        await p.submitted()
        is_refused, send = list[bytes](), front._roster.socket.send

        def send_the_second(peer: bytes, message: Any) -> bool:
            if isinstance(message, Submit) and not is_refused:
                is_refused.append(peer)
                return False
            return send(peer, message)

        monkeypatch.setattr(front._roster.socket, "send", send_the_second)
        hand_over(p)
        await until(lambda: len(front._roster.links) == 2)
        [number] = [each.number for each in front._roster.links.values() if each.number > 1]
        one = others[number - 2]
        assert (await one.submitted()).transfer == HANDED
        await finish(one, stream)


async def test_a_replica_that_reads_no_pages_gets_none_and_they_are_freed() -> None:
    async with prompt_apart() as (front, p, d, stream):
        d.die()
        await until(lambda: len(front._roster.links) == 1)
        hand_over(p)
        first = await p.next(Submit | Drop)  # type: ignore[arg-type]
        second = await p.next(Submit | Drop)  # type: ignore[arg-type]
        assert isinstance(first, Submit)
        assert first.transfer is None
        assert second == Drop(name="x")
        await finish(p, stream)


async def test_what_names_no_transfer_is_no_message() -> None:
    async with prompt_apart() as (_, p, d, stream):
        hand_over(p, b"[]")
        assert "an invalid message" in await p.refusal()
        assert (await d.submitted()).transfer is None
        await finish(d, stream)


async def test_an_engine_that_ends_while_it_computes_a_prompt_is_lost() -> None:
    async with prompt_apart() as (_, p, d, stream):
        p.say("r", error=EngineDead("steps failed"))
        assert "the replica's engine ended" in await p.refusal()
        await d.submitted()
        await finish(d, stream)


# -- parts of a prompt that is still computed ------------------------------------------------------


def part_of(name: str, num_pages: int) -> bytes:
    """Name the pages that are computed so far."""
    body = {"remote_request_id": name, "remote_block_ids": [*range(num_pages)]}
    return msgspec.json.encode(body)


def hand_part(replica: ScriptedReplica, name: str = "part", num_pages: int = 1) -> None:
    """Say where they are."""
    handed = {"r": part_of(name, num_pages)}
    replica.send(msgspec.structs.replace(step("r"), deltas=[], handed=handed))


async def test_the_replica_of_the_answer_reads_a_prompt_while_it_is_computed() -> None:
    async with front_of(2) as front, with_roles(front, "prefill", "decode") as (p, d):
        stream = front.submit(request(prompt=LONG, temperature=0.5))
        whole = await p.submitted()
        ids = set[str]()
        for name, num_pages, num_tokens in (("one", 3, 49), ("two", 16, 256)):
            hand_part(p, name, num_pages)
            part = (await d.next(Fetch)).submit
            assert part.transfer == part_of(name, num_pages)
            assert (part.cache, part.seed) == (whole.cache, whole.seed)
            assert ids_of(part.prompt) == ids_of(whole.prompt)[:num_tokens]
            assert not part.hands_over
            ids.add(part.request_id)
        assert len(ids | {"r"}) == 3, "each has an id of its own"
        hand_over(p)
        assert (await d.submitted()).transfer == HANDED
        hand_part(p, "too late")
        await finish(d, stream)


async def test_parts_that_no_replica_reads_are_freed() -> None:
    async with (
        front_of(3) as front,
        with_roles(front, "prefill", "decode", "decode") as (p, *others),
    ):
        stream = front.submit(request(prompt=LONG))
        await p.submitted()
        hand_part(p, "one")
        await until(lambda: front._dispatcher.live["r"].reader is not None)
        [reader] = [
            link.number
            for peer, link in front._roster.links.items()
            if peer == front._dispatcher.live["r"].reader
        ]
        others[reader - 2].die()
        assert (await p.next(Drop)).name == "one", "its reader is gone"
        hand_part(p, "two")
        other = others[1 - (reader - 2)]
        assert (await other.next(Fetch)).submit.transfer == part_of("two", 1)
        hand_over(p)
        assert (await other.submitted()).transfer == HANDED
        await finish(other, stream)


async def test_parts_of_a_prompt_that_was_aborted_are_freed() -> None:
    async with prompt_apart() as (front, p, _, stream):
        front.abort("r")
        hand_part(p)
        assert (await p.next(Drop)).name == "part"
        hand_over(p, None)
        assert (await read(stream)).finish_reason is FinishReason.ABORT
