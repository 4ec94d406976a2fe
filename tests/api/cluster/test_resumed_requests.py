"""A request goes on behind its output so far as if nothing had happened: same tokens, same end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from foretoken.api.build.engine_builder import build
from foretoken.api.cluster.replica.engine_host import EngineHost
from foretoken.api.runtime.preprocess import closing_limit
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.config import EngineConfig
from support.hand_front import HandFront, Heard, MemoryLink, submit

T = TypeVar("T")
PROMPT = "import collections\n\n\nclass Queue:\n    def __init__(self, items):\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "tags"],
}  # fmt: skip


class House:
    """A replica in this process, and a front by hand that it has joined."""

    def __init__(self) -> None:
        config = EngineConfig(kv_tokens=8192, max_model_len=512, threads=1)
        self.built = build("builtin", config, wants_keys=True)
        self.tokenizer = Tokenizer.load(self.built.path, max_model_len=512)
        self.prompt = self.tokenizer.encode_word(PROMPT)
        self.link = MemoryLink()
        self.host = EngineHost(
            self.built, self.tokenizer, lambda: self.link, address="memory", config=config
        )
        self.front = HandFront(self.link.say)
        self._runner = asyncio.Runner()
        self._ids = map(str, itertools.count())
        self.do(self._start())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _start(self) -> None:
        await self.host.start()
        self._running = asyncio.create_task(self.host.run())
        self._hearing = asyncio.create_task(self._hear())
        self.front.beat()

    async def _hear(self) -> None:
        while (message := await self.link.hear()) is not None:
            await self.front.take(message)
            self.front.beat()

    async def serve(self, params: SamplingParams, **more: Any) -> Heard:
        limit = closing_limit(params, 512 - len(self.prompt), is_forced=False)
        message = submit(next(self._ids), self.prompt, params, limit=limit, **more)
        return await self.front.serve(message)

    def close(self) -> None:
        async def close() -> None:
            await self.host.close()
            await self._running
            await self._hearing

        self.do(close())
        self._runner.close()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 11, "temperature": 0.8, **given})


def cuts(num_tokens: int) -> Sequence[int]:
    """Places to cut at: behind the first token, in the middle, before the last one."""
    return sorted({1, num_tokens // 3, num_tokens // 2, num_tokens - 2, num_tokens - 1} - {0, -1})


async def check_resumed(
    house: House, given: SamplingParams, places: Callable[[int], Sequence[int]] = cuts, **more: Any
) -> Heard:
    """Compare an undisturbed run with its resumed ones, drafted differently; returns it."""
    whole = await house.serve(given, **more)
    length = len(whole.token_ids)
    assert whole.last.error is None
    assert length > 4
    other = replace(given, speculation="off" if given.speculation != "off" else 4)

    async def resume(cut: int, own: SamplingParams) -> tuple[int, Heard]:
        return cut, await house.serve(own, output=whole.token_ids[:cut], **more)

    runs = [resume(cut, own) for cut in places(length) for own in (given, other)]
    for cut, heard in await asyncio.gather(*runs):
        assert heard.token_ids == whole.token_ids[cut:], cut
        assert heard.logprobs == whole.logprobs[cut:], cut
        assert heard.last.error is None
        assert heard.last.finish_reason == whole.last.finish_reason, cut
        assert heard.last.stop_reason == whole.last.stop_reason, cut
        assert heard.usages[-1].completion_tokens == length - cut
    return whole


ORDINARY = {
    "plain": {},
    "greedy": {"temperature": 0, "speculation": "off"},
    "penalties": {
        "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3,
    },
    "min_tokens": {"min_tokens": 20, "logit_bias": {0: 9.0, 2: 9.0}},
    "regex": {"regex": r"[a-z]{4,9}( [a-z]{2,9}){3,8}\."},
    "logprobs": {"logprobs": 2, "top_p": 0.9, "top_k": 30},
    "the end token": {"logit_bias": {2: 3.5}, "max_tokens": 60},
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_a_resumed_request_has_the_tokens_of_the_undisturbed_one(house: House, name: str) -> None:
    house.do(check_resumed(house, params(**ORDINARY[name])))


def test_a_stop_string_is_found_wherever_it_is_cut(house: House) -> None:
    async def run() -> None:
        plain = await house.serve(params())
        text = house.tokenizer.decode(plain.token_ids)
        stop = text[len(text) // 2 : len(text) // 2 + 6]
        whole = await check_resumed(
            house, params(stop=[stop], min_tokens=2), lambda length: range(1, length)
        )
        assert whole.last.stop_reason == stop

    house.do(run())


def test_json_that_is_closed_early_is_closed_by_the_same_tokens(house: House) -> None:
    async def run() -> None:
        given = params(json_schema=SCHEMA, max_tokens=30)
        whole = await check_resumed(house, given, lambda length: range(1, length))
        assert whole.closed_early
        assert whole.usages[-1].closed_early

    house.do(run())


def test_siblings_go_on_with_their_own_seeds(house: House) -> None:
    async def run() -> None:
        runs = [check_resumed(house, params(n=3), index=index) for index in range(3)]
        ids = [tuple(each.token_ids) for each in await asyncio.gather(*runs)]
        assert len({*ids}) == 3

    house.do(run())


def test_a_prediction_goes_on_serving_drafts(house: House) -> None:
    async def run() -> None:
        plain = await house.serve(params())
        whole = await check_resumed(house, params(), prediction=plain.token_ids)
        assert whole.token_ids == plain.token_ids

    house.do(run())


def test_log_probabilities_of_the_prompt_are_sent_once(house: House) -> None:
    async def run() -> None:
        given = params(prompt_logprobs=1, max_tokens=6)
        whole = await house.serve(given)
        wanted = len(house.prompt) - 1
        assert len(whole.prompt_logprobs) == wanted
        for num_sent in (0, 5, wanted):
            output = whole.token_ids[:2] if num_sent == wanted else ()
            rest = await house.serve(given, output=output, num_prompt_logprobs=num_sent)
            assert rest.prompt_logprobs == whole.prompt_logprobs[num_sent:]
            assert rest.token_ids == whole.token_ids[len(output) :]

    house.do(run())


@pytest.mark.parametrize(
    ("word", "given", "problem"),
    [
        ("", {"max_tokens": 2}, "already complete"),
        ("", {"stop_token_ids": [7]}, "already complete"),
        ("def f", {"stop": ["def"]}, "stop string"),
    ],
)
def test_an_output_that_has_ended_is_refused(
    house: House, word: str, given: dict[str, Any], problem: str
) -> None:
    output = [*house.tokenizer.encode_word(word), 9, 7]
    heard = house.do(house.serve(params(**given), output=output))
    assert heard.last.error is not None
    assert problem in str(heard.last.error)


def test_a_deadline_that_has_passed_ends_a_resumed_request_as_one_that_ran(house: House) -> None:
    heard = house.do(house.serve(params(), output=[9, 7], deadline=-1.0))
    assert (heard.last.finish_reason, heard.last.stop_reason) == ("abort", "deadline")


def test_the_front_knows_each_page_of_the_cache(house: House) -> None:
    async def run() -> None:
        await house.serve(params(cache_salt="mine"))
        keys = house.built.keys
        assert keys is not None
        await house.front.until(lambda: house.front.pages == {key[:8] for key in keys.cached()})
        assert house.front.pages

    house.do(run())
