"""Promises of docs/http.md and docs/routes.md about the OpenAI routes and their neighbours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from support.plain_http import chunks, get, post
from support.server_process import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "foretoken-builtin"
PROMPT = "def quicksort(items):\n"
LONG = "import os\n\n\nclass Walker:\n    def __init__(self, root):\n" * 4
MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "again", "name": "ann"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 4}),
    (TEXT, {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 4}),
]
SPECULATION = {
    "proposed_tokens", "accepted_tokens", "verify_steps", "tree_steps", "accepted_by_source",
    "proposed_by_source", "steps_by_accepted",
}  # fmt: skip
both = pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "text"])
METRICS = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total time_to_first_token_seconds inter_token_latency_seconds
time_per_output_token_seconds e2e_request_latency_seconds spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total request_success_total
spec_decode_num_accepted_tokens_per_pos_total prompt_tokens_total generation_tokens_total
spec_decode_num_draft_tokens_per_pos_total spec_decode_num_draft_tokens_per_source_total
spec_decode_num_accepted_tokens_per_source_total spec_decode_acceptance_length_count
"""


@pytest.fixture(scope="module", params=["engine", "front"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with an engine of its own, and one that is a front with a replica."""
    options = ["--kv-tokens", "4096", "--max-model-len", "512", "--threads", "1"]
    with running(options, is_front=request.param == "front") as server:
        yield server.url


def said(choice: dict[str, Any]) -> str:
    """The text of a choice of an answer or of a chunk."""
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def whole(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = post(url, path, body)
    assert answer.status == 200, answer.content
    return answer.json


def texts(url: str, path: str, body: dict[str, Any]) -> list[str]:
    return [said(choice) for choice in whole(url, path, body)["choices"]]


@both
def test_an_answer_has_the_shape_of_openai(url: str, path: str, body: dict[str, Any]) -> None:
    answer = post(url, path, body)
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    out, usage = answer.json, answer.json["usage"]
    assert out["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert (out["model"], out["created"] > 1e9) == (MODEL, True)
    assert out["id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")
    assert out["system_fingerprint"]
    (choice,) = out["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["finish_reason"] in ("stop", "length")
    if path == CHAT:
        assert choice["message"]["role"] == "assistant"
        assert isinstance(choice["message"]["content"], str)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)
    spec = usage["speculation"]
    assert set(spec) == SPECULATION
    assert sum(spec["accepted_by_source"].values()) == spec["accepted_tokens"]
    assert sum(spec["proposed_by_source"].values()) == spec["proposed_tokens"]
    assert sum(spec["steps_by_accepted"].values()) == spec["verify_steps"]
    served = [int(accepted) * count for accepted, count in spec["steps_by_accepted"].items()]
    assert sum(served) == spec["accepted_tokens"]
    assert set(usage["completion_tokens_details"].values()) == {0}
    assert spec["accepted_tokens"] + spec["verify_steps"] - usage["completion_tokens"] in (0, 1)


@both
@pytest.mark.parametrize("extra", [{}, {"stop": ["e", "s"]}, {"temperature": 0}], ids=str)
def test_a_stream_says_what_the_whole_says_under_one_id(
    url: str, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    events = chunks(url, path, {**body, **extra})
    (expected,) = whole(url, path, {**body, **extra})["choices"]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(said(choice) for choice in choices) == said(expected)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + [expected["finish_reason"]]
    assert all(event["choices"] and "usage" not in event for event in events)
    assert not any("error" in event for event in events)
    if path == CHAT:
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        roles = [choice["delta"].get("role") for choice in choices]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)
        assert not any("tool_calls" in choice["delta"] for choice in choices)


@both
def test_usage_is_streamed_once_at_the_end_and_only_when_asked(
    url: str, path: str, body: dict[str, Any]
) -> None:
    *events, last = chunks(url, path, {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert (
        last["usage"]["completion_tokens"] == whole(url, path, body)["usage"]["completion_tokens"]
    )
    assert {"prompt_tokens_details", "speculation"} <= set(last["usage"])
    *_, last = chunks(url, path, {**body, "stream_options": {"include_usage": False}})
    assert last["choices"]


@both
def test_choices_of_n_start_in_order_and_each_ends_once(
    url: str, path: str, body: dict[str, Any]
) -> None:
    events = chunks(url, path, {**body, "n": 3})
    out = whole(url, path, {**body, "n": 3})
    choices = [choice for event in events for choice in event["choices"]]
    assert list(dict.fromkeys(choice["index"] for choice in choices)) == [0, 1, 2]
    assert [choice["index"] for choice in out["choices"]] == [0, 1, 2]
    for expected in out["choices"]:
        own = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(said(choice) for choice in own) == said(expected)
        assert [choice["finish_reason"] is not None for choice in own].count(True) == 1
        assert own[-1]["finish_reason"] == expected["finish_reason"]
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
    one = whole(url, path, body)["usage"]
    assert out["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert out["usage"]["completion_tokens"] > one["completion_tokens"]


@both
def test_extensions_are_taken_and_speculation_changes_no_text(
    url: str, path: str, body: dict[str, Any]
) -> None:
    fields = {
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "cache_salt": "s",
        "priority": 1,
        "deadline_ms": 60_000,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {"300": 1},
        "user": "u",
    }
    off = whole(url, path, {**body, **fields, "speculation": "off"})
    assert off["usage"]["speculation"]["proposed_tokens"] == 0
    assert off["usage"]["completion_tokens"] == off["usage"]["speculation"]["verify_steps"]
    for speculation in ("auto", 0, 3):
        on = whole(url, path, {**body, **fields, "speculation": speculation})
        assert said(on["choices"][0]) == said(off["choices"][0])


@both
@pytest.mark.parametrize("n", [1, 2])
def test_a_prediction_changes_no_text_and_is_counted(
    url: str, path: str, body: dict[str, Any], n: int
) -> None:
    plain = whole(url, path, {**body, "n": n})
    text = said(plain["choices"][0])
    for guess in (text, f"{text[:5]} something else altogether", "\n"):
        prediction = {"type": "content", "content": [{"type": "text", "text": guess}]}
        fields = {**body, "n": n, "prediction": prediction}
        out = whole(url, path, fields)
        assert [said(choice) for choice in out["choices"]] == [
            said(choice) for choice in plain["choices"]
        ]
        details = out["usage"]["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        assert accepted + details["rejected_prediction_tokens"] >= n
        if guess == text:
            assert accepted > 0
        *_, last = chunks(url, path, {**fields, "stream_options": {"include_usage": True}})
        assert set(last["usage"]["completion_tokens_details"]) == set(details)


@both
def test_fields_of_other_vendors_and_nulls_are_tolerated(
    url: str, path: str, body: dict[str, Any]
) -> None:
    known = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low"}
    known |= {"reasoning_effort": "low", "parallel_tool_calls": True, "prompt_cache_key": "k"}
    nulls = dict.fromkeys(["stop", "temperature", "top_p", "n", "logprobs", "stream", "user"])
    odd = {"safety_identifier": "x", "modalities": ["text"], "logit_bias": {}, "no_such": [1]}
    assert texts(url, path, {**body, **known, **nulls, **odd}) == texts(url, path, body)


def test_max_completion_tokens_bounds_a_chat(url: str) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 3, "ignore_eos": True}
    assert whole(url, CHAT, body)["usage"]["completion_tokens"] == 3


def test_logprobs_have_one_entry_for_every_token_whole_and_streamed(url: str) -> None:
    path, body = CHAT, {**BODIES[0][1], "logprobs": True, "top_logprobs": 2}
    out = whole(url, path, body)
    rows = out["choices"][0]["logprobs"]["content"]
    assert len(rows) == out["usage"]["completion_tokens"]
    for row in rows:
        assert row["logprob"] <= 0
        assert len(row["top_logprobs"]) == 2
        assert row["bytes"] is None or bytes(row["bytes"]).decode(errors="replace") == row["token"]
    streamed = [
        row
        for event in chunks(url, path, body)
        for choice in event["choices"]
        for row in (choice["logprobs"] or {}).get("content") or []
    ]
    assert streamed == rows
    old = whole(url, TEXT, {**BODIES[1][1], "logprobs": 2})
    lists = old["choices"][0]["logprobs"]
    sizes = {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert sizes == {old["usage"]["completion_tokens"]}


def test_prompts_may_be_token_ids_and_lists_of_prompts(url: str) -> None:
    ids = post(url, "/tokenize", {"model": MODEL, "prompt": PROMPT}).json["tokens"]
    body = {**BODIES[1][1], "temperature": 0}
    (text,) = texts(url, TEXT, body)
    assert texts(url, TEXT, {**body, "prompt": ids}) == [text]
    assert texts(url, TEXT, {**body, "prompt": [PROMPT, PROMPT]}) == [text, text]
    assert texts(url, TEXT, {**body, "prompt": [ids, ids]}) == [text, text]


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve 漢字 🙂\r\n", " ", "<|im_end|>"])
def test_tokenize_and_detokenize_are_inverse(url: str, text: str) -> None:
    out = post(url, "/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}).json
    assert out["count"] == len(out["tokens"]) == len(out["token_strs"])
    assert out["token_strs"][0][:1] in (text[0], "", "\ufffd")
    assert out["max_model_len"] == 512
    assert post(url, "/detokenize", {"model": MODEL, "tokens": out["tokens"]}).json == {
        "prompt": text
    }


def test_tokenize_counts_a_conversation_as_chat_does(url: str) -> None:
    count = post(url, "/tokenize", {"model": MODEL, "messages": MESSAGES}).json["count"]
    assert whole(url, CHAT, BODIES[0][1])["usage"]["prompt_tokens"] == count


def test_a_second_prompt_is_cached_until_its_salt_is_flushed(url: str) -> None:
    def cached(salt: str) -> int:
        body = {"prompt": LONG, "max_tokens": 2, "cache_salt": salt}
        return whole(url, TEXT, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("red"), cached("blue")] == [0, 0]
    assert cached("red") == cached("blue") > 0
    assert get(url, "/cache").status == 200
    assert post(url, "/cache/flush", {"cache_salt": "red"}).status == 200
    assert cached("blue") > 0
    assert cached("red") == 0
    assert post(url, "/cache/flush").status == 200
    assert [cached("red"), cached("blue")] == [0, 0]


def test_models_are_listed_and_found(url: str) -> None:
    listed = get(url, "/v1/models").json
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", [MODEL])
    assert (listed["has_more"], listed["first_id"]) == (False, MODEL)
    one = get(url, f"/v1/models/{MODEL}").json
    assert one == listed["data"][0]
    assert (one["object"], one["type"], one["max_model_len"]) == ("model", "model", 512)
    assert (one["exact"], one["model_path"], one["lifecycle"]) == (True, "own", "active")
    assert one["drafters"] == ["radix", "suffix", "lm"]
    assert one["no_self_draft"] is None
    assert time.strptime(one["created_at"], "%Y-%m-%dT%H:%M:%SZ")


def test_health_ready_version_and_metrics_answer(url: str) -> None:
    assert [get(url, path).status for path in ("/health", "/ready")] == [200, 200]
    assert get(url, "/version").json["version"]
    whole(url, *BODIES[1])
    text = get(url, "/metrics").content.decode()
    found = {line.split("{")[0].split(" ")[0] for line in text.splitlines()}
    names = METRICS.split()
    expected = {f"foretoken:{name}{'_bucket' * name.endswith('_seconds')}" for name in names}
    assert expected - found == set()
    assert not any(name.startswith("vllm:") for name in found), "only with --metric-names vllm"


def test_the_official_client_reads_every_answer(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        chat = client.chat.completions.create(**BODIES[0][1])
        with client.chat.completions.stream(**BODIES[0][1]) as stream:
            assert [event.type for event in stream][-1] in ("content.done", "chunk")
            final = stream.current_completion_snapshot
        assert final.choices[0].message.content == chat.choices[0].message.content
        text = client.completions.create(**BODIES[1][1], extra_body={"speculation": "off"})
        with client.completions.create(**BODIES[1][1], stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[0].text


def test_the_official_async_client_reads_every_answer(url: str) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            calls = (client.chat.completions.create(**BODIES[0][1]) for _ in range(3))
            contents = {out.choices[0].message.content for out in await asyncio.gather(*calls)}
            stream = await client.chat.completions.create(**BODIES[0][1], stream=True)
            async with stream:
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert contents == {"".join(parts)}

    asyncio.run(main())
