"""Vectors and scores of real tiny models: transformers' own, by the SDK and over HTTP."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from foretoken import LLM, InvalidRequest, PromptTooLong
from foretoken.api.build.built import Built
from foretoken.api.build.engine_builder import build
from foretoken.core.engine.engine import Engine
from support.embedders import (
    CUTS,
    TinyModel,
    is_near,
    tiny_config,
    unit_vector,
    write_embedder,
    write_reranker,
)

SHORT = "how long is a marathon?"
INSTRUCT = "Instruct: find the passage that answers the question.\nQuery: "
TEXTS = [f"{INSTRUCT}{animal} {number}?" for number in range(16) for animal in
         ("which bats sleep", "do bears fly", "hedgehogs, swallows", "yes")]  # fmt: skip


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("embedder")
    return TinyModel(folder, *write_embedder(folder))


@pytest.fixture
def built(embedder: TinyModel) -> Built[Engine]:
    """The engine of the fixtures `llm` and `server`."""
    return build(embedder.folder, tiny_config(page_size=4))


# -- vectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 64])
def test_vectors_are_transformers_own_cold_and_cached(
    llm: LLM, embedder: TinyModel, count: int
) -> None:
    texts = TEXTS[:count]
    wanted = [embedder.vector(text) for text in texts]
    cold, cached = llm.embed(texts), llm.embed(texts)
    for each, again, text, vector in zip(cold, cached, texts, wanted, strict=True):
        assert is_near(each.embedding, vector)
        assert is_near(again.embedding, vector)
        assert each.prompt_token_ids == embedder.tokenizer(text).input_ids
        assert again.usage.cached_tokens == (len(each.prompt_token_ids) - 1) // 4 * 4
    shared = (len(embedder.tokenizer(INSTRUCT).input_ids) - 2) // 4 * 4
    assert shared > 0
    assert [each.usage.cached_tokens >= shared for each in cold] == [False] + [True] * (count - 1)


def test_token_ids_are_taken_as_they_are(llm: LLM, embedder: TinyModel) -> None:
    ids = embedder.tokenizer(SHORT, add_special_tokens=False).input_ids
    assert is_near(llm.embed(ids).embedding, embedder.vector(ids))
    both = llm.embed([ids, SHORT])
    assert is_near(both[0].embedding, embedder.vector(ids))
    assert is_near(both[1].embedding, embedder.vector(SHORT))


def test_chunks_of_16_and_a_prompt_that_fills_the_context(embedder: TinyModel) -> None:
    text = " ".join(TEXTS[:7])
    ids = embedder.tokenizer(text).input_ids[:96]
    options = {"max_batch_tokens": 16, "max_model_len": 96, "page_size": 16}
    with LLM(embedder.folder, draft="none", threads=1, kv_tokens=96, **options) as llm:
        for _ in range(2):
            found = llm.embed([ids, ids[:47], ids[:48], ids[:1]])
            for each, length in zip(found, (96, 47, 48, 1), strict=True):
                assert is_near(each.embedding, embedder.vector(ids[:length]))
        with pytest.raises(PromptTooLong) as caught:
            llm.embed([[5], [*ids, 5]])
        assert (caught.value.num_tokens, caught.value.limit) == (97, 96)
        assert caught.value.param == "inputs[1]"


def test_int8_weights_cost_what_they_round(embedder: TinyModel) -> None:
    with LLM(embedder.folder, draft="none", threads=1, quantize="int8", kv_tokens=1024) as llm:
        for text, each in zip(TEXTS[:4], llm.embed(TEXTS[:4]), strict=True):
            wanted = embedder.vector(text)
            cosine = sum(a * b for a, b in zip(each.embedding, wanted, strict=True))
            assert 0.995 < cosine < 1 - 1e-9


def test_drafts_and_answers_leave_vectors_as_they_are(embedder: TinyModel) -> None:
    with LLM(embedder.folder, draft="radix,suffix", threads=1, kv_tokens=2048) as llm:
        llm.generate(SHORT)
        found = llm.embed(SHORT)
        assert is_near(found.embedding, embedder.vector(SHORT))
        assert (found.usage.proposed_tokens, found.usage.completion_tokens) == (0, 0)


def test_dimensions_cut_before_the_length_becomes_1(llm: LLM, embedder: TinyModel) -> None:
    for dimensions in (*CUTS, 64):
        found = llm.embed(SHORT, dimensions=dimensions).embedding
        assert is_near(found, embedder.vector(SHORT, dimensions))
        assert sum(number**2 for number in found) == pytest.approx(1)
    for bad, reason in (
        (65, "at most 64"),
        (33, "one of 16, 32, 64"),
        (0, "from 1"),
        (True, "integer"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            llm.embed(SHORT, dimensions=bad)
        assert caught.value.param == "dimensions"


def test_salts_share_no_prefix(llm: LLM) -> None:
    assert llm.embed(TEXTS[0], cache_salt="a").usage.cached_tokens == 0
    assert llm.embed(TEXTS[0], cache_salt="b").usage.cached_tokens == 0
    assert llm.embed(TEXTS[0], cache_salt="a").usage.cached_tokens > 0


@pytest.mark.parametrize(
    ("inputs", "param"),
    [("", "inputs"), (["a", ""], "inputs[1]"), ([[]], "inputs"), ([1, -1], "inputs"),
     ([[1], [10**6]], "inputs[1]"), (3, "inputs"), (["a", None], "inputs[1]")],
)  # fmt: skip
def test_a_bad_input_is_named(llm: LLM, inputs: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.embed(inputs)
    assert caught.value.param == param


def test_a_model_that_is_not_made_for_vectors_embeds_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = TinyModel(tmp_path, *write_reranker(tmp_path))
    with LLM(tmp_path, draft="none", threads=1, kv_tokens=1024) as llm:
        found = llm.embed([SHORT, SHORT])
        llm.embed(SHORT)
        with pytest.raises(InvalidRequest, match=r"64 or left out, not 32.*truncation"):
            llm.embed(SHORT, dimensions=32)
    wanted = unit_vector(chat.model.model, chat.tokenizer(SHORT).input_ids)
    assert is_near(found[0].embedding, wanted)
    warnings = [each.message for each in caplog.records if "low quality" in each.message]
    assert warnings == [
        f"{tmp_path.name} is not marked as an embedding model (no pooling in modules.json): its "
        "embeddings may be of low quality"
    ]


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_s_client_reads_both_encodings(client: openai.OpenAI, embedder: TinyModel) -> None:
    name = embedder.folder.name
    texts = [TEXTS[0], TEXTS[5]]
    packed = client.embeddings.create(model=name, input=texts)  # asks for base64
    plain = client.embeddings.create(model=name, input=texts, encoding_format="float", user="me")
    assert [each.embedding for each in packed.data] == [each.embedding for each in plain.data]
    for index, (each, text) in enumerate(zip(plain.data, texts, strict=True)):
        assert (each.index, each.object) == (index, "embedding")
        assert is_near(each.embedding, embedder.vector(text))
    assert (plain.object, plain.model) == ("list", name)
    num_tokens = sum(len(embedder.tokenizer(text).input_ids) for text in texts)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == num_tokens
    details = plain.usage.prompt_tokens_details  # type: ignore[attr-defined]
    assert num_tokens - 32 <= details["cached_tokens"] < num_tokens


def test_ollamas_route_cuts_a_text_that_is_too_long(server: Any, embedder: TinyModel) -> None:
    text = "a b" * 2000
    body = {"model": embedder.folder.name, "input": [SHORT, text]}
    answer = httpx.post(f"{server.url}/api/embed", json=body).raise_for_status().json()
    ids = embedder.tokenizer(text).input_ids
    assert len(ids) > 512
    assert ids[-1] == embedder.tokenizer("").input_ids[-1], "the token whose row is the vector"
    assert is_near(answer["embeddings"][0], embedder.vector(SHORT))
    assert is_near(answer["embeddings"][1], embedder.vector([*ids[:511], ids[-1]]))
    refused = httpx.post(f"{server.url}/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400
    assert "prompt is too long" in refused.json()["error"]
    old = httpx.post(f"{server.url}/api/embeddings", json={"prompt": SHORT}).json()
    assert is_near(old["embedding"], embedder.vector(SHORT))


@pytest.mark.parametrize("order", ["little", "big", "native", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
def test_base64_has_the_type_and_the_order_that_are_asked_for(
    server: Any, dtype: str | None, order: str | None
) -> None:
    plain = httpx.post(f"{server.url}/v1/embeddings", json={"input": SHORT}).json()
    body = {
        "input": SHORT, "encoding_format": "base64", "embed_dtype": dtype, "endianness": order,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body).raise_for_status().json()
    data = base64.b64decode(answer["data"][0]["embedding"])
    sign = {"big": ">", "native": "="}.get(order or "little", "<")
    if dtype == "bfloat16":  # the upper half of a float32
        halves = struct.unpack(f"{sign}64H", data)
        found = struct.unpack("<64f", struct.pack("<64I", *(half << 16 for half in halves)))
        near = 2**-8
    else:
        found = struct.unpack(f"{sign}64{'e' if dtype == 'float16' else 'f'}", data)
        near = 2**-11 if dtype == "float16" else 0
    for number, exact in zip(found, plain["data"][0]["embedding"], strict=True):
        assert abs(number - exact) <= near * abs(exact) + 2**-25


@pytest.mark.parametrize(
    "given", ["text", "ids", "texts", "lists"], ids=["text", "ids", "texts", "lists of ids"]
)
def test_all_forms_of_input(server: Any, embedder: TinyModel, given: str) -> None:
    ids = [embedder.tokenizer(text).input_ids for text in TEXTS[:2]]
    value = {"text": TEXTS[0], "ids": ids[0], "texts": TEXTS[:2], "lists": ids}[given]
    body = {"input": value, "encoding_format": "base64", "dimensions": 32, "stream": True, "n": 3}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body).raise_for_status().json()
    assert len(answer["data"]) == (1 if given in ("text", "ids") else 2)
    assert set(answer) == {"object", "data", "model", "usage"}
    for each, text in zip(answer["data"], TEXTS[:2], strict=False):
        found = struct.unpack("<32f", base64.b64decode(each["embedding"]))
        assert is_near(found, embedder.vector(text, 32))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": [""]}, "input", None),
        ({"input": ["a", ""]}, "input[1]", None),
        ({"input": ["a", [1]]}, "input", None),
        ({"input": ["a"] * 2049}, "input", None),
        ({"input": [10**6]}, "input", None),
        ({"input": ["a", "a b" * 2000]}, "input[1]", "context_length_exceeded"),
        ({"input": [5] * 513}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 63}, "dimensions", None),
        ({"input": "a", "dimensions": 0}, "dimensions", None),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", None),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype", None),
        ({"input": "a", "endianness": "middle"}, "endianness", None),
        ({"input": {"a": 1}}, "input", None),
        ({}, "input", None),
        ({"input": "a", "priority": 10**6}, "priority", None),
        ({"input": "a", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens", None),
        ({"input": "a", "max_tokens_per_doc": 8}, "max_tokens_per_doc", None),
        ({"input": "a", "messages": []}, "messages", None),
        ({"input": "a", "normalize": False}, "normalize", None),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", None),
    ],
)
def test_bad_bodies_are_refused_with_the_field(
    server: Any, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"


def test_a_text_that_is_not_to_be_cached_is_not(server: Any) -> None:
    body = {"input": TEXTS[0], "cache": {"write": False}, "normalize": True}
    for more in ({}, {}, {"cache": None}):
        usage = httpx.post(f"{server.url}/v1/embeddings", json=body | more).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    usage = httpx.post(f"{server.url}/v1/embeddings", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    unread = body | {"cache": {"read": False}}
    usage = httpx.post(f"{server.url}/v1/embeddings", json=unread).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_list_of_ids_may_be_longer_than_a_list_of_messages(serve: Any) -> None:
    server = serve(max_messages=4)
    ids = {"input": [5, 6, 7, 8, 9]}
    assert httpx.post(f"{server.url}/v1/embeddings", json=ids).status_code == 200


def test_keys_models_and_counters_hold_as_for_other_routes(serve: Any) -> None:
    server = serve(api_keys=("secret",))
    url, body = f"{server.url}/v1/embeddings", {"input": SHORT}
    assert httpx.post(url, json=body).status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert httpx.post(url, json=body | {"model": "x"}, headers=headers).status_code == 404
    usage = httpx.post(url, json=body, headers=headers).raise_for_status().json()["usage"]
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts["foretoken:prompt_tokens_total"]) == usage["prompt_tokens"]
    assert counts['foretoken:request_success_total{finished_reason="stop"}'] == "1.0"
    assert counts["foretoken:generation_tokens_total"] == "0.0"
    where = 'foretoken:http_requests_total{method="POST",route="/v1/embeddings",status="200"}'
    assert counts[where] == "1.0"
