"""Vectors and scores over the wire: what a front sends, what it takes, what a replica computes."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build.engine_builder import build
from foretoken.api.cluster.replica.engine_host import EngineHost
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import PromptTooLong
from foretoken.core.interface.request import FinishReason, Usage
from foretoken.core.interface.sampling import Pooling
from support.embedders import TinyModel, tiny_config, write_embedder
from support.hand_front import HandFront, Heard, MemoryLink, submit
from support.scripted_replica import front_of, read, replicas_of, request

VECTOR = array("f", [0.5] * 64)
PARAMS = SamplingParams(speculation="off")


@pytest.mark.parametrize(("pooling", "numbers"), [
    (Pooling(), VECTOR), (Pooling((7, 8)), array("f", [1.5, -2.0])),
])  # fmt: skip
async def test_a_front_gets_the_numbers_of_a_replica(
    pooling: Pooling, numbers: array[float]
) -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        wanted = request(pooling=pooling, max_tokens=None)
        stream = front.submit(wanted)
        sent = await replica.submitted()
        assert (sent.pooling, wanted.max_len) == (pooling, 3)
        usage = Usage(cached_tokens=2, queue_time=0.25)
        replica.finish("r", pooled=numbers, finish_reason=FinishReason.STOP, usage=usage)
        answer = await read(stream)
        assert (answer.pooled, answer.token_ids) == (numbers, [])
        assert (wanted.usage.cached_tokens, wanted.usage.completion_tokens) == (2, 0)


async def test_a_front_gets_the_end_of_a_request_for_no_tokens() -> None:
    async with front_of() as front, replicas_of(front, max_model_len=3) as (replica,):
        wanted = request(prompt_only=True)
        stream = front.submit(wanted)
        sent = await replica.submitted()
        assert (sent.params["max_tokens"], wanted.max_len) == (0, 3)
        replica.finish("r", finish_reason=FinishReason.LENGTH, usage=Usage(cached_tokens=2))
        answer = await read(stream)
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)
        assert (wanted.usage.cached_tokens, wanted.usage.completion_tokens) == (2, 0)


async def test_a_prompt_may_fill_the_context_of_the_replicas() -> None:
    async with front_of() as front, replicas_of(front, max_model_len=3):
        front.submit(request(pooling=Pooling()))
        with pytest.raises(PromptTooLong):
            front.submit(request("longer", (5, 6, 7, 8), pooling=Pooling()))
        with pytest.raises(PromptTooLong):
            front.submit(request("answer"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pooled": VECTOR[:63]}, "the replica sent 63 pooled values, not 64"),
        ({}, "does not want"),
        ({"token_ids": [5], "pooled": VECTOR}, "sent more tokens than the request may"),
        ({"pooled": VECTOR, "finish_reason": FinishReason.LENGTH}, "does not want"),
    ],
)
async def test_another_end_is_a_replica_s_lie_and_the_next_one_computes_it(
    fields: dict[str, Any], reason: str
) -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        wanted = request(pooling=Pooling(), max_tokens=None)
        stream = front.submit(wanted)
        await first.submitted()
        given = {"finish_reason": FinishReason.STOP} | fields
        first.finish("r", *given.pop("token_ids", ()), **given)
        assert reason in await first.refusal()
        again = await second.submitted()
        assert (again.output, again.pooling) == (b"", Pooling())
        second.finish("r", pooled=VECTOR, finish_reason=FinishReason.STOP)
        assert (await read(stream)).pooled == VECTOR
        assert wanted.usage.moves == 1


class Hosted:
    """A replica of a tiny embedding model in this process, and a front by hand."""

    def __init__(self, folder: Path) -> None:
        config = tiny_config(max_batch_tokens=16)
        built = build(folder, config, wants_keys=True)
        tokenizer = Tokenizer.load(folder, max_model_len=512)
        self.link = MemoryLink()
        self.host = EngineHost(built, tokenizer, lambda: self.link, address="memory", config=config)
        self.front = HandFront(self.link.say)

    async def __aenter__(self) -> HandFront:
        await self.host.start()
        self._running = asyncio.create_task(self.host.run())
        self._hearing = asyncio.create_task(self._hear())
        self.front.beat()
        return self.front

    async def _hear(self) -> None:
        while (message := await self.link.hear()) is not None:
            await self.front.take(message)
            self.front.beat()

    async def __aexit__(self, *_: object) -> None:
        await self.host.close()
        await self._running
        await self._hearing


def test_a_replica_computes_vectors_and_greets_with_their_length(tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, *write_embedder(tmp_path))
    ids = tiny.tokenizer("how long is a marathon? " * 4).input_ids

    async def body() -> list[Heard]:
        async with Hosted(tmp_path) as front:
            heard = [
                await front.serve(submit(str(index), ids, PARAMS, pooling=pooling))
                for index, pooling in enumerate((Pooling(), Pooling(), Pooling((5, 6))))
            ]
            bad = await front.serve(submit("bad", ids, PARAMS, pooling=Pooling(), output=[5]))
            assert "generates nothing" in str(bad.last.error)
            assert front.hello is not None
            assert (front.hello.pooling.dimensions, front.hello.pooling.embeds) == (64, True)
            return heard

    cold, cached, logits = asyncio.run(body())
    for heard in (cold, cached):
        assert heard.last.finish_reason is FinishReason.STOP
        assert heard.last.pooled is not None
        numbers = heard.last.pooled
        length = sum(number**2 for number in numbers) ** 0.5
        wanted = tiny.vector(ids)
        assert [number / length for number in numbers] == pytest.approx(wanted, abs=1e-5)
    assert cached.usages[-1].cached_tokens > 0 == cold.usages[-1].cached_tokens
    assert logits.last.pooled is not None
    assert len(logits.last.pooled) == 2
