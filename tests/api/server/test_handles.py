"""Handles of earlier answers that are wrong, forged, stale or another's: 400, with the field named.

A handle is never guessed and never passed over: what it cannot stand for is the caller's to mend.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}
WORDS = "hello world"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS = "/v1/completions"
ALICE, BOB = "alice", "bob"


@pytest.fixture
def ids(engine, tokenizer) -> list[int]:
    """The ids of each answer: one token for each character."""
    found = [each for character in WORDS for each in tokenizer.encode_word(character)]
    engine.answers = lambda request: [*found, tokenizer.vocab["<|im_end|>"]]
    return found


@pytest.fixture
def url(serve) -> str:
    found: str = serve(api_keys=(ALICE, BOB)).url
    return found


def send(url: str, path: str, key: str = ALICE, **fields: Any) -> httpx.Response:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(url + path, json={limit: 50, **fields}, headers=headers, timeout=20)


def refused(answer: httpx.Response, param: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (error.get("param") or error["message"])


def wrong_ids(ids: list[int], tokenizer: Any) -> dict[str, object]:
    control = tokenizer.vocab["<|im_start|>"]
    return {
        "wrong: of another text": [*ids, *ids],
        "wrong: of less": ids[:-1],
        "wrong: none": [],
        "forged: a turn of its own": [*ids, control, *ids],
        "forged: an end and more": [tokenizer.vocab["<|im_end|>"], *ids],
        "forged: beyond the vocabulary": [*ids, 10**7],
        "forged: negative": [-1, *ids],
        "forged: no numbers": [*map(str, ids)],
        "stale: of a model with another vocabulary": [each + 1 for each in ids],
    }


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_ids_that_are_not_the_message_s_are_refused(url, ids, tokenizer, path) -> None:
    message = {"role": "assistant", "content": WORDS}
    for why, wrong in wrong_ids(ids, tokenizer).items():
        answer = send(url, path, messages=[HI, {**message, "token_ids": wrong}, ON])
        assert answer.status_code == 400, why
        error = answer.json()["error"]
        named = error.get("param") or error["message"]
        assert "messages[1].token_ids" in named, why
    assert send(url, path, messages=[HI, {**message, "token_ids": ids}, ON]).status_code == 200


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_ids_are_the_caller_s_own_and_stand_under_any_key_and_salt(url, ids, engine, path) -> None:
    """The check needs nothing but them, and opens no memory of another's."""
    message = {"role": "assistant", "content": WORDS, "token_ids": ids}
    prompts = []
    for key, salt in ((ALICE, "a"), (BOB, "b")):
        answer = send(url, path, key, messages=[HI, message, ON], cache_salt=salt)
        assert answer.status_code == 200, answer.text
        request = engine.requests[-1]
        prompts.append(list(request.tokens[: request.prompt_len]))
        assert request.namespace == salt
    assert prompts[0] == prompts[1]


def test_ids_of_a_completion_s_prompt_are_checked(url, ids, tokenizer) -> None:
    for wrong in ([*ids, 10**7], [*ids, -1], [*ids, True], [ids, [10**7]]):
        refused(send(url, COMPLETIONS, prompt=wrong), "prompt")
    assert send(url, COMPLETIONS, prompt=ids).status_code == 200


def test_a_response_of_another_salt_or_key_or_that_is_gone_is_refused(url, ids) -> None:
    first = send(url, RESPONSES, input="hi", cache_salt="a").json()["id"]
    name = "previous_response_id"
    own = {"input": "go", name: first, "cache_salt": "a"}
    assert send(url, RESPONSES, **own).status_code == 200
    refused(send(url, RESPONSES, **{**own, "cache_salt": "b"}), name)
    refused(send(url, RESPONSES, input="go", **{name: first}), name)
    refused(send(url, RESPONSES, BOB, **own), name)
    refused(send(url, RESPONSES, **{**own, name: first[:-1] + "x"}), name)
    query = {"cache_salt": "a"}
    headers = {"authorization": f"Bearer {ALICE}"}
    gone = httpx.delete(f"{url}{RESPONSES}/{first}", params=query, headers=headers)
    assert gone.status_code == 200, gone.text
    refused(send(url, RESPONSES, **own), name)


def test_ids_in_an_item_of_a_response_are_refused(url, ids) -> None:
    item = {"role": "assistant", "content": WORDS, "token_ids": ids}
    answer = send(url, RESPONSES, input=[HI, item, ON])
    refused(answer, "input[1].token_ids")
    assert "previous_response_id" in answer.json()["error"]["message"]


def test_a_flood_of_sessions_is_remembered_within_bounds(serve, ids, engine) -> None:
    """Answers, prompts and sessions: none of them grows with the callers."""
    url = serve(token_history_bytes=20_000).url
    chats = []
    for number in range(60):
        body = {"messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 50}
        headers = {"x-session-id": f"s-{number}"}
        salted = {**body, "cache_salt": f"salt-{number}"}
        answer = httpx.post(url + CHAT, json=salted, headers=headers, timeout=20)
        chats.append((salted, answer.raise_for_status().json()["choices"][0]["message"]))

    def spliced(number: int) -> int:
        body, said = chats[number]
        again = {**body, "messages": [*body["messages"], said, ON]}
        usage = httpx.post(url + CHAT, json=again, timeout=20).json()["usage"]
        found: int = usage["prompt_tokens_details"]["spliced_tokens"]
        return found

    assert spliced(59) == len(ids)
    assert spliced(0) == 0, "it made room"
    assert len({request.cache.session for request in engine.requests[:60]}) == 60
