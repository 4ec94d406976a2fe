"""The routes that verify answers: verdicts, batches, and errors that name their field."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from support.plain_http import metrics, post
from support.server_process import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a loop"}]
LONG = [{"role": "user", "content": "a b " * 300}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 20, "seed": 4, "temperature": 2, "n": 2}),
    (TEXT, {"prompt": ["def a():", "def b():"], "max_tokens": 20, "seed": 4, "n": 2}),
]
both = pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "text"])


@pytest.fixture(scope="module", params=["engine", "front"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with an engine of its own, and one that is a front with a replica."""
    options = ["--kv-tokens", "4096", "--max-model-len", "256", "--threads", "1"]
    options += ["--prices", json.dumps({"input": 2, "cached": 0.5, "write": 3, "output": 8})]
    with running(options, is_front=request.param == "front") as server:
        yield server.url


def choices(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = post(url, path, {**body, "return_token_ids": True})
    assert answer.status == 200, answer.content
    return answer.json["choices"]


def verdict(url: str, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = post(url, f"{path}/verify", {**body, **more})
    assert answer.status == 200, answer.content
    return answer.json


@both
def test_each_choice_is_verified(url: str, path: str, body: dict[str, Any]) -> None:
    for choice in choices(url, path, body):
        ids, reason = choice["token_ids"], choice["finish_reason"]
        given = {"token_ids": ids, "finish_reason": reason}
        # A recorded request may ask for a stream: the verdict is one body in any case.
        found = verdict(url, path, body, answer=given, index=choice["index"], stream=True)
        assert found["object"] == "verification"
        assert found["id"].startswith("verify-")
        assert (found["verified"], found["exact"], found["finish_reason"]) == (True, True, reason)
        assert (found["checked_tokens"], found["different_tokens"]) == (len(ids), 0)
        assert found["first_difference"] is None
        assert "token_ids" not in found
        usage = found["usage"]
        assert usage["completion_tokens"] == 0
        asked = post(url, path, {**body, "max_tokens": 1}).json["usage"]["prompt_tokens"]
        num_prompts = len(body["prompt"]) if path == TEXT else 1
        assert usage["prompt_tokens"] == asked // num_prompts + len(ids)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        cost = 2 * (usage["prompt_tokens"] - cached) + 0.5 * cached
        assert usage["cost"] == pytest.approx(cost / 1e6)
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        given = {"text": text, "finish_reason": reason}
        found = verdict(url, path, body, answer=given, index=choice["index"], return_token_ids=True)
        assert (found["verified"], found["token_ids"]) == (True, ids)


@both
def test_a_difference_has_both_tokens(url: str, path: str, body: dict[str, Any]) -> None:
    choice = choices(url, path, body)[1]
    ids = choice["token_ids"]
    given = [*ids[:7], ids[7] + 1, *ids[8:]]
    found = verdict(url, path, body, answer={"token_ids": given}, index=choice["index"])
    first = found["first_difference"]
    assert (found["verified"], found["checked_tokens"]) == (False, len(ids))
    assert found["different_tokens"] >= 1
    assert found["usage"]["verify_steps"] >= 1
    assert (first["position"], first["given"]["id"], first["own"]["id"]) == (7, given[7], ids[7])
    assert first["given"]["logprob"] < 0
    assert first["margin"] > 0
    assert first["excluded_by"] is None
    own = {"answer": {"token_ids": ids, "finish_reason": choice["finish_reason"]}}
    rest = verdict(url, path, body, **own, checked_from=12, index=choice["index"])
    assert (rest["verified"], rest["checked_from"]) == (True, 12)
    assert rest["checked_tokens"] == len(ids) - 12
    assert rest["agreement"]["large_margins"] == 0
    assert rest["agreement"]["same_model"] is True


def num_prompt_tokens(url: str) -> float:
    """Return the prompt tokens of all requests so far, as the metrics count them."""
    found = re.findall(r"^foretoken:prompt_tokens_total\S* (\S+)$", metrics(url), re.MULTILINE)
    return sum(map(float, found))


@both
def test_the_usage_is_that_of_all_requests_of_the_engine(
    url: str, path: str, body: dict[str, Any]
) -> None:
    one = {**body, "n": 1, "prompt": "def a():"} if path == TEXT else {**body, "n": 1}
    (choice,) = choices(url, path, one)
    num_asked = post(url, path, {**one, "max_tokens": 1}).json["usage"]["prompt_tokens"]
    before = num_prompt_tokens(url)
    given = {"token_ids": [*choice["token_ids"], 5]}
    found = verdict(url, path, one, answer=given)
    assert (found["verified"], found["first_difference"]["given"]["id"]) == (False, 5)
    usage, num_tokens = found["usage"], num_asked + len(given["token_ids"])
    assert usage["prompt_tokens"] == num_prompt_tokens(url) - before == 2 * num_tokens
    assert usage["total_tokens"] == 2 * num_tokens
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    cost = 2 * (usage["prompt_tokens"] - cached) + 0.5 * cached
    assert usage["cost"] == pytest.approx(cost / 1e6)
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    found = verdict(url, path, one, answer={"text": f"{text[:9]}~~"})
    assert not found["verified"]
    assert found["usage"]["prompt_tokens"] > 3 * num_asked, "compared, generated and explained"
    assert found["usage"]["verify_steps"] >= 3


@both
def test_bad_answers_get_400_with_their_field(url: str, path: str, body: dict[str, Any]) -> None:
    unseeded = {name: value for name, value in body.items() if name != "seed"}
    for wrong, param in (
        ({**body, "answer": {"token_ids": []}}, "answer.token_ids"),
        ({**body, "answer": {"token_ids": [10**7]}}, "answer.token_ids"),
        ({**body, "answer": {"token_ids": [-3]}}, "answer.token_ids"),
        ({**body, "answer": {"token_ids": [5] * 255}}, "answer.token_ids"),
        ({**body, "answer": {"token_ids": ["a"]}}, "answer.token_ids[0]"),
        ({**body, "answer": {"text": ""}}, "answer.text"),
        ({**body, "answer": {"text": 5}}, "answer.text"),
        ({**body, "answer": {}}, "answer"),
        ({**body, "answer": {"text": "a", "token_ids": [5]}}, "answer"),
        ({**body, "answer": {"text": "a", "finish_reason": "x"}}, "answer.finish_reason"),
        ({**body, "answer": {"text": "a", "words": 1}}, "answer.words"),
        ({**body, "answer": {"text": "a", "finish_reason": "tool_calls"}}, "answer.text"),
        ({**body, "answer": {"text": "a", "tool_calls": []}}, "answer.tool_calls"),
        ({**body, "answer": {"text": "a"}, "index": 4}, "index"),
        ({**body, "answer": {"text": "a"}, "index": -1}, "index"),
        ({**unseeded, "answer": {"text": "a"}}, "seed"),
        ({**body, "answer": {"text": "a"}, "checked_from": 1}, "checked_from"),
        ({**body, "answer": {"token_ids": [5]}, "checked_from": 1}, "checked_from"),
    ):
        answer = post(url, f"{path}/verify", wrong)
        assert (answer.status, answer.error["param"]) == (400, param), wrong
    name, long = ("prompt", "a b " * 300) if path == TEXT else ("messages", LONG)
    answer = post(url, f"{path}/verify", {**body, name: long, "answer": {"token_ids": [5]}})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == name
    answer = post(url, f"{path}/verify", body)
    assert (answer.status, "answer" in answer.error["message"]) == (400, True)


@both
def test_after_a_token_that_a_form_excludes_nothing_is_compared(
    url: str, path: str, body: dict[str, Any]
) -> None:
    ids = [803] * 150  # several steps
    one = {**body, "n": 1, "regex": "[a-c]+", "max_tokens": 150, "answer": {"token_ids": ids}}
    found = verdict(url, path, one)
    assert (found["verified"], found["checked_tokens"]) == (False, 1)
    assert found["first_difference"]["excluded_by"] == "regex"
    late = post(url, f"{path}/verify", {**one, "checked_from": 100})
    assert (late.status, late.error["param"]) == (400, "answer"), late.content


def test_batches_verify_answers(url: str) -> None:
    path, body = BODIES[0]
    lines = []
    for choice in choices(url, path, body):
        given = {"token_ids": choice["token_ids"], "finish_reason": choice["finish_reason"]}
        number = choice["index"]
        own = {**body, "answer": given, "index": number}
        lines += [(f"right-{number}", own), (f"wrong-{number}", {**own, "seed": 5})]
    file = "\n".join(
        json.dumps({"custom_id": name, "method": "POST", "url": f"{path}/verify", "body": own})
        for name, own in lines
    )
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        given = client.files.create(file=("in.jsonl", file.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=given.id,
            endpoint=f"{path}/verify",  # type: ignore[arg-type]
            completion_window="24h",
        )
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch.errors
        assert batch.output_file_id is not None
        found = [
            json.loads(line)
            for line in client.files.content(batch.output_file_id).text.splitlines()
        ]
    verdicts = {each["custom_id"]: each["response"]["body"]["verified"] for each in found}
    assert verdicts == {name: name.startswith("right") for name, _ in lines}


SCRIPTED = Path(__file__).parents[1] / "support" / "scripted_server.py"
THOUGHT, WORDS = "The user wants a greeting, a short one.", "Hello to you, and to all of you."


def test_the_content_after_a_thought_is_verified() -> None:
    flags = ["--port", "0", "--kv-tokens", "4096", "--reasoning-parser", "think"]
    asked = {"role": "user", "content": f"[[<think>\n{THOUGHT}\n</think>\n{WORDS}]]"}
    body = {"messages": [asked], "max_tokens": 200, "temperature": 0}
    with running(started_by=[sys.executable, str(SCRIPTED), *flags]) as server:
        (choice,) = choices(server.url, CHAT, body)
        message, reason = choice["message"], choice["finish_reason"]
        assert message["reasoning_content"].strip() == THOUGHT
        given = {"text": message["content"], "finish_reason": reason}
        found = verdict(server.url, CHAT, body, answer=given, return_token_ids=True)
        assert (found["verified"], found["finish_reason"]) == (True, reason)
        assert found["token_ids"] == choice["token_ids"]
        given["text"] = message["content"].replace("all", "some")
        found = verdict(server.url, CHAT, body, answer=given)
        at = found["first_difference"]["position"]
        ids = {"token_ids": choice["token_ids"][:at], "finish_reason": None}
        part = verdict(server.url, CHAT, body, answer=ids)
        assert (part["verified"], part["checked_tokens"]) == (True, at)
        own = found["first_difference"]["own"]
        assert own["id"] == choice["token_ids"][at]
        assert "all".startswith(own["text"].strip())


def test_openais_client_verifies_its_own_answers(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": "foretoken-builtin", "seed": 5, "max_tokens": 20}
        asked["messages"] = MESSAGES
        said = client.chat.completions.create(**asked).choices[0]
        for content in (said.message.content, f"{said.message.content} more"):
            given = {"text": content, "finish_reason": said.finish_reason}
            found = client.post(
                "/chat/completions/verify",
                body={**asked, "answer": given},
                cast_to=dict[str, Any],
            )
            assert found["verified"] == (content == said.message.content)
