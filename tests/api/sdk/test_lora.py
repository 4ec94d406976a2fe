"""Adapters by the Python interface: the tokens of transformers with each in its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from foretoken import LLM, AsyncLLM, InvalidRequest, ModelLoadError, SamplingParams
from support.lora_models import RANKS, AdaptedModel

NUM_NEW = 12
PROMPT = "which animals sleep in winter? Bears, bats and hedgehogs"
OPTIONS = {"threads": 1, "kv_tokens": 4096, "draft": "radix,suffix", "page_size": 4}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    torch.set_num_threads(1)
    return AdaptedModel(tmp_path_factory.mktemp("adapted"))


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, **more)  # type: ignore[arg-type]


def wanted(adapted: AdaptedModel, name: str | None, *, version: int = 0) -> list[int]:
    ids = adapted.tokenizer(PROMPT).input_ids
    return adapted.answer(name, ids, NUM_NEW, version=version)


@pytest.mark.parametrize("draft", ["none", "radix,suffix"])
def test_one_call_mixes_adapters_and_the_base(adapted: AdaptedModel, draft: str) -> None:
    names: list[str | None] = [*RANKS, None, *RANKS, None]
    lora = {name: adapted.path(name) for name in RANKS}
    with LLM(adapted.base, lora=lora, **OPTIONS | {"draft": draft}) as llm:
        params = [greedy(lora=name) for name in names]
        for found, name in zip(llm.generate([PROMPT] * 8, params), names, strict=True):
            assert found.token_ids == wanted(adapted, name), name
        # again: all of them hit the cache, each its own
        for found, name in zip(llm.generate([PROMPT] * 8, params), names, strict=True):
            assert found.token_ids == wanted(adapted, name), name
            assert found.usage.cached_tokens > 0
        assert llm.generate(PROMPT, greedy(), lora="sql").token_ids == wanted(adapted, "sql")
        deltas = llm.stream(PROMPT, greedy(), lora="poems")
        assert [token for delta in deltas for token in delta.token_ids] == wanted(adapted, "poems")
        base, own = llm.embed(PROMPT).embedding, llm.embed(PROMPT, lora="legal").embedding
        assert max(abs(a - b) for a, b in zip(base, own, strict=True)) > 0.01
        with pytest.raises(InvalidRequest, match="no adapter other is loaded") as refused:
            llm.generate(PROMPT, greedy(), lora="other")
        assert refused.value.param == "lora"
        with pytest.raises(InvalidRequest, match="no adapter other is loaded"):
            llm._run(llm._llm.check(PROMPT, greedy(lora="other")))


async def test_an_adapter_loaded_again_reads_nothing_of_before(adapted: AdaptedModel) -> None:
    async with AsyncLLM(adapted.base, **OPTIONS) as llm:
        held = []  # so that what was computed stays in the cache
        for version in (0, 1, 0):
            adapted.write("sql", "again", version=version)
            await llm.adapters.load("sql", adapted.folder / "again")
            held.append(await llm.open(PROMPT, greedy(cache_salt="s", lora="sql")))
            first = await held[-1].collect()
            assert first.usage.cached_tokens == 0
            assert first.token_ids == wanted(adapted, "sql", version=version)
        for answer in held:
            llm.forget(answer)
        audit = await llm.engine.audit()
        assert audit["ok"]


async def test_a_request_goes_on_while_its_adapter_is_unloaded(adapted: AdaptedModel) -> None:
    async with AsyncLLM(adapted.base, lora={"sql": adapted.path("sql")}, **OPTIONS) as llm:
        answer = await llm.open(PROMPT, greedy(lora="sql"))
        unloading = asyncio.create_task(llm.adapters.unload("sql"))
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        assert not unloading.done()
        assert "sql" not in llm.adapters
        assert llm.adapters.num_loaded == 1
        with pytest.raises(InvalidRequest, match="no adapter sql"):
            await llm.generate(PROMPT, greedy(), lora="sql")
        done = await llm.finish(answer)
        assert done.token_ids == wanted(adapted, "sql")
        await unloading
        assert llm.adapters.num_loaded == 0
        info = await llm.engine.cache_info()
        assert info["free_pages"] == info["total_pages"]


async def test_an_aborted_request_lets_its_adapter_go(adapted: AdaptedModel) -> None:
    async with AsyncLLM(adapted.base, lora={"sql": adapted.path("sql")}, **OPTIONS) as llm:
        answer = await llm.open(PROMPT, greedy(lora="sql", n=2))
        await anext(answer.deltas())  # so it has pages
        adapter = answer.adapter
        assert adapter is not None
        llm.forget(answer)
        llm.forget(answer)
        assert not answer.ended  # the engine has not read the abort yet
        assert not adapter.unused.is_set(), "it would be flushed before its pages are cached"
        await llm.adapters.unload("sql")
        assert answer.ended
        assert llm.adapters.num_loaded == 0
        info = await llm.engine.cache_info()
        assert info["free_pages"] == info["total_pages"]
        assert (await llm.generate(PROMPT, greedy())).token_ids == wanted(adapted, None)


async def test_many_loads_leave_no_adapter_behind(adapted: AdaptedModel) -> None:
    import gc
    import weakref

    async with AsyncLLM(adapted.base, **OPTIONS) as llm:
        seen = []
        for index in range(40):
            served = await llm.adapters.load("sql", Path(adapted.path("sql")))
            seen.append(weakref.ref(served.loaded.weights))
            del served
            if index % 4 == 0:
                await llm.generate(PROMPT, greedy(), lora="sql")
            if index % 2:
                await llm.adapters.unload("sql")
        await llm.generate(PROMPT, greedy())
        gc.collect()
        assert [ref() for ref in seen if ref() is not None] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora": ["sql"]}, "lora must be NAME=PATH"),
        ({"lora": ["=x"]}, "lora must be NAME=PATH"),
        ({"lora": ["a=x", "a=y"]}, "lora has two adapters with the same name"),
        ({"lora": {"a": "x", "b": "y"}, "max_loras": 1}, "lora has 2 adapters"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        AsyncLLM("builtin", **options)


def test_a_salt_cannot_pass_for_an_adapter() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt must not begin with a NUL"):
        SamplingParams(cache_salt='\0lora[null, "sql", 1, ""]')


def test_an_adapter_above_the_limit_is_refused_at_the_start(adapted: AdaptedModel) -> None:
    lora = {"legal": adapted.path("legal")}
    with pytest.raises(ModelLoadError, match="has rank 8, above --max-lora-rank 4"):
        LLM(adapted.base, lora=lora, max_lora_rank=4, **OPTIONS)
