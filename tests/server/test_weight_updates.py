"""Promises of docs/rollouts.md about `AsyncLLM`: updates in place, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import AsyncLLM, InvalidRequest, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.build.updates.refusal import UpdateConflict, WeightsRefused
from foretoken.api.build.updates.weight_exchange import WeightExchange
from support.new_weights import FILE, Change, digest, retrained

TARGET = BUILTIN / "target"
OPTIONS: dict[str, Any] = {
    "kv_tokens": 4096,
    "max_model_len": 512,
    "threads": 1,
    "speculation": "off",
    "allow_weight_updates": True,
}
PROMPTS = [f"def function_{number}(items, other):\n    return" for number in range(6)]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, seed=number, temperature=0.8 * (number % 2))
    for number in range(6)
]
NORM = "model.norm.weight"
HEAD = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return retrained(TARGET, tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def answers(llm: AsyncLLM, **fields: Any) -> list[list[int]]:
    found = await llm.generate(PROMPTS, PARAMS, **fields)
    return [each.token_ids for each in found]


@pytest.fixture(scope="module")
def expected(loop: asyncio.Runner, new: Path) -> list[list[int]]:
    """Answers of an engine that was started on the new weights."""

    async def ask() -> list[list[int]]:
        async with AsyncLLM(new, **{**OPTIONS, "allow_weight_updates": False}) as llm:
            return await answers(llm)

    return loop.run(ask())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"draft": "self", "speculation": 3},
        {"draft": "auto", "speculation": 3},
        {"draft": str(BUILTIN / "draft"), "speculation": 2, "exact": "batch"},
    ],
    ids=["plain", "self-draft", "auto", "draft model"],
)
def test_after_an_update_answers_are_those_of_an_engine_started_on_the_weights(
    loop: asyncio.Runner, new: Path, expected: list[list[int]], more: dict[str, Any]
) -> None:
    before = digest(TARGET / FILE)

    async def update() -> list[list[int]]:
        async with AsyncLLM(TARGET, **{**OPTIONS, **more}) as llm:
            old = await answers(llm)
            assert await llm.update_weights(new, sha256={FILE: digest(new / FILE)}) == "1"
            found = await answers(llm)
            assert found != old
            await llm.update_weights(TARGET)
            assert await answers(llm) == old
            await llm.update_weights(new, weight_version="last")
            assert llm.weight_version == "last"
            assert await answers(llm) == found
            return found

    assert loop.run(update()) == expected
    assert digest(TARGET / FILE) == before, "the served files are only read"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_packed_weights_follow(loop: asyncio.Runner, new: Path, quantize: str) -> None:
    options = {**OPTIONS, "quantize": quantize}

    async def ask(model: Path, update: Path | None) -> list[list[int]]:
        async with AsyncLLM(model, **options) as llm:
            if update is not None:
                await llm.update_weights(update)
            return await answers(llm)

    assert loop.run(ask(TARGET, new)) == loop.run(ask(new, None))


# -- a running engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    with ExitStack() as stack:
        llm = loop.run(AsyncLLM(TARGET, **OPTIONS).__aenter__())
        stack.callback(lambda: loop.run(llm.close()))
        yield llm


def lacking(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


def extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(2)


def misshapen(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def retyped(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM].double().half()


def nan(tensors: dict[str, Tensor]) -> None:
    tensors[NORM][0] = float("nan")


def infinite(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD][3, 1] = float("inf")


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (lacking, NORM, "lack tensors"),
        (extra, "model.extra.weight", "does not have tensors"),
        (misshapen, NORM, "another shape"),
        (retyped, NORM, "another dtype"),
        (nan, NORM, "NaN or infinite"),
        (infinite, HEAD, "NaN or infinite"),
    ],
)
def test_bad_tensors_are_refused_by_name_and_the_old_weights_stay(
    loop: asyncio.Runner, llm: AsyncLLM, tmp_path: Path, change: Change, name: str, message: str
) -> None:
    before, version = loop.run(answers(llm)), llm.weight_version
    bad = retrained(TARGET, tmp_path / "bad", change)
    with pytest.raises(WeightsRefused, match=f"{message}.*{re.escape(name)}") as refused:
        loop.run(llm.update_weights(bad))
    assert refused.value.tensors == (name,)
    assert llm.weight_version == version
    assert loop.run(answers(llm)) == before


def test_a_wrong_digest_a_damaged_file_and_a_missing_folder_are_refused(
    loop: asyncio.Runner, llm: AsyncLLM, new: Path, tmp_path: Path
) -> None:
    version = llm.weight_version
    wrong = {FILE: digest(TARGET / FILE)}
    with pytest.raises(WeightsRefused, match="has the SHA-256"):
        loop.run(llm.update_weights(new, sha256=wrong))
    with pytest.raises(WeightsRefused, match="64 hexadecimal digits"):
        loop.run(llm.update_weights(new, sha256={FILE: "no digest"}))
    with pytest.raises(WeightsRefused, match="has no file other"):
        loop.run(llm.update_weights(new, sha256={"other": "0" * 64}))
    with pytest.raises(WeightsRefused, match="has neither"):
        loop.run(llm.update_weights(tmp_path))
    (tmp_path / FILE).write_bytes((new / FILE).read_bytes()[:-7])
    with pytest.raises(WeightsRefused, match="damaged"):
        loop.run(llm.update_weights(tmp_path))
    with pytest.raises(WeightsRefused, match="1 to 256"):
        loop.run(llm.update_weights(new, weight_version=""))
    assert llm.weight_version == version


def test_a_second_update_at_once_is_refused(loop: asyncio.Runner, llm: AsyncLLM, new: Path) -> None:
    async def both() -> tuple[object, ...]:
        calls = [llm.update_weights(new), llm.update_weights(TARGET)]
        return (*await asyncio.gather(*calls, return_exceptions=True),)

    first, second = loop.run(both())
    assert (first, type(second)) == (llm.weight_version, UpdateConflict)
    loop.run(llm.update_weights(TARGET))


async def begun(llm: AsyncLLM, number: int) -> asyncio.Task[list[int]]:
    """A stream that has its first token, and the task that reads the rest."""
    stream = llm.stream(PROMPTS[number], SamplingParams(max_tokens=200, ignore_eos=True, seed=1))
    first = await anext(stream)

    async def rest() -> list[int]:
        tokens = [*first.token_ids]
        async for delta in stream:
            tokens += delta.token_ids
        return tokens

    return asyncio.create_task(rest())


def test_no_stream_is_lost_by_updates_under_load(
    loop: asyncio.Runner, llm: AsyncLLM, new: Path
) -> None:
    async def load() -> list[list[int]]:
        tasks = [await begun(llm, number) for number in range(len(PROMPTS))]
        await llm.pause("keep")
        assert llm.is_paused
        await llm.update_weights(new)
        await llm.resume()
        await llm.update_weights(TARGET)  # without a pause
        return [await task for task in tasks]

    found = loop.run(load())
    assert [len(tokens) for tokens in found] == [200] * len(PROMPTS)


def test_usage_lists_the_versions_and_old_pages_do_not_hit(
    loop: asyncio.Runner, llm: AsyncLLM, new: Path
) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    text = "import collections\n\n\nclass Queue:\n    def __init__(self, items):\n" * 3

    async def ask() -> Any:
        return (await llm.generate(text, params)).usage

    loop.run(ask())
    assert loop.run(ask()).cached_tokens > 0
    loop.run(llm.update_weights(new, weight_version="b"))
    usage = loop.run(ask())
    assert (usage.cached_tokens, usage.weight_versions) == (0, [(0, "b")])
    assert loop.run(ask()).cached_tokens > 0
    loop.run(llm.update_weights(TARGET))


def test_updates_need_the_option_and_a_model_that_supports_them(
    loop: asyncio.Runner, new: Path
) -> None:
    async def refused(**more: Any) -> str:
        with pytest.raises(InvalidRequest) as error:
            async with AsyncLLM(TARGET, **{**OPTIONS, **more}) as llm:
                await llm.update_weights(new)
        return str(error.value)

    assert "need the option" in loop.run(refused(allow_weight_updates=False))
    assert "load_format random" in loop.run(refused(load_format="random"))
    assert "own decoder" in loop.run(refused(model_impl="transformers"))
    assert "torch backend" in loop.run(refused(backend="torch"))
    assert "KV tiers" in loop.run(refused(kv_host="16MiB"))


def test_a_self_draft_that_cannot_follow_stops_no_later_update(
    loop: asyncio.Runner, new: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(_exchange: WeightExchange) -> None:
        raise MemoryError

    monkeypatch.setattr(WeightExchange, "prepare_draft", fail)

    async def update_twice() -> list[str]:
        async with AsyncLLM(TARGET, **OPTIONS) as llm:
            first = await llm.update_weights(new)
            await llm.weight_checksums()
            return [first, await llm.update_weights(TARGET)]

    assert loop.run(update_twice()) == ["1", "2"]
    assert "the self-draft keeps the weights of an earlier version" in caplog.text


def test_a_paused_engine_that_is_closed_lets_its_calls_end(loop: asyncio.Runner) -> None:
    async def close_paused() -> list[int]:
        llm = AsyncLLM(TARGET, **OPTIONS)
        await llm.start()
        task = await begun(llm, 0)
        await llm.pause("keep")
        verifying = asyncio.create_task(llm.verify(PROMPTS[1], [40, 41], PARAMS[1]))
        while not llm._num_calls:  # noqa: ASYNC110 - it begins in this loop
            await asyncio.sleep(0)
        await llm.close(drain_seconds=60)
        assert not (await verifying).verified
        return await task

    assert len(loop.run(close_paused())) == 200
