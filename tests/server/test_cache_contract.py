"""The cache as a contract, through the real SDK against a real server with the built-in pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.plain_http import metrics
from support.server_process import running

MODEL = "foretoken-builtin"
PAGE_SIZE = 8
FLAGS = ["--page-size", str(PAGE_SIZE), "--kv-tokens", "4096", "--max-running", "8"]
WARM_TEXT = "These rules are read before anybody asks: be brief, be kind, be right. " * 2
KEY = {"authorization": "Bearer me"}
RULES = "You answer in one word, and you never explain yourself, whatever is asked of you."


@pytest.fixture(scope="module")
def prewarm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prewarm") / "prompts.jsonl"
    system = [{"role": "system", "content": WARM_TEXT}]
    lines = [{"messages": system, "ttl": 3600}, {"prompt": WARM_TEXT, "cache_salt": "warm"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def url(prewarm_file: Path) -> Iterator[str]:
    with running([*FLAGS, "--prewarm", str(prewarm_file)]) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="me", max_retries=0) as client:
        yield client


def chat(client: OpenAI, messages: list[dict[str, str]], salt: str, **extra: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=8,
        temperature=0,
        extra_body={"cache_salt": salt, **extra},
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def cached(completion: Any) -> int:
    return completion.usage.prompt_tokens_details.cached_tokens


def written(completion: Any) -> int:
    return completion.usage.prompt_tokens_details.cache_write_tokens


def test_each_turn_of_a_conversation_computes_only_its_new_tokens(client: OpenAI) -> None:
    messages = [{"role": "system", "content": RULES}]
    told = 0  # tokens that the server has seen or said
    for turn in range(10):
        messages.append(user(f"Question {turn}: which number follows {turn}?"))
        completion = chat(client, messages, "turns")
        usage, answer = completion.usage, completion.choices[0].message.content
        if turn:
            new = usage.prompt_tokens - told
            assert usage.prompt_tokens - cached(completion) <= new + PAGE_SIZE
            assert new < 60
        told = usage.prompt_tokens + usage.completion_tokens
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("returns_ids", [False, True])
def test_each_turn_of_a_sampled_conversation_hits_all_but_a_page(
    client: OpenAI, returns_ids: bool
) -> None:
    messages, known, num_answered = [user("Write a story about a fox.")], 0, 0
    for turn in range(6):
        completion = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=48,
            temperature=0.7,
            seed=turn,
            extra_body={"cache_salt": f"sampled-{returns_ids}", "return_token_ids": True},
        )
        usage, choice = completion.usage, completion.choices[0]
        assert cached(completion) > known - PAGE_SIZE
        assert usage.prompt_tokens_details.spliced_tokens == num_answered
        known = usage.prompt_tokens + usage.completion_tokens - 1
        num_answered += len(choice.message.token_ids)
        said = choice.message.model_dump(exclude_none=True)
        if not returns_ids:
            del said["token_ids"]
        messages += [said, user(f"Go on, part {turn}.")]


def test_read_and_write_are_chosen_by_request(client: OpenAI) -> None:
    prompt = [user("A secret that nobody but the model shall keep, and not even the model.")]
    hidden = chat(client, prompt, "rw", cache={"write": False})
    assert (cached(hidden), written(hidden)) == (0, 0)
    first = chat(client, prompt, "rw")
    assert cached(first) == 0
    assert written(first) == first.usage.prompt_tokens // PAGE_SIZE * PAGE_SIZE
    assert cached(chat(client, prompt, "rw", cache={"read": False})) == 0
    assert cached(chat(client, prompt, "rw")) == (first.usage.prompt_tokens - 1) // PAGE_SIZE * 8


def test_prompts_of_the_prewarm_file_are_cached_and_pinned_from_the_start(
    client: OpenAI, url: str
) -> None:
    asked = [{"role": "system", "content": WARM_TEXT}, user("Why?")]
    completion = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=1)
    assert cached(completion) > 30
    text = client.completions.create(
        model=MODEL, prompt=WARM_TEXT + "So", max_tokens=1, extra_body={"cache_salt": "warm"}
    )
    assert text.usage.prompt_tokens_details.cached_tokens > 30
    info = httpx.get(f"{url}/cache").json()
    assert [pin["ttl_seconds"] for pin in info["pins"]] == [3600]
    assert info["pinned_pages"] >= info["pins"][0]["tokens"] // PAGE_SIZE
    assert httpx.get(f"{url}/cache", params={"cache_salt": "warm"}).json()["pins"] == []
    pinned = f"foretoken:kv_cache_pinned_pages {info['pinned_pages']:.1f}"
    assert pinned in metrics(url)


def test_a_session_pins_its_last_turn_alone(client: OpenAI, url: str) -> None:
    def pins() -> list[dict[str, Any]]:
        return httpx.get(f"{url}/cache", params={"cache_salt": "session"}).json()["pins"]

    messages = [user("Tell me of the sea.")]
    for turn in range(3):
        completion = chat(client, messages, "session", prompt_cache_key="mine")
        usage = completion.usage
        (pin,) = pins()
        assert usage.prompt_tokens < pin["tokens"] + PAGE_SIZE
        assert (pin["ttl_seconds"], pin["num_sessions"]) == (300, 1)
        said = {"role": "assistant", "content": completion.choices[0].message.content}
        messages += [said, user(f"Go on, part {turn}.")]
    chat(client, messages, "session", prompt_cache_key="another")
    assert sorted(pin["num_sessions"] for pin in pins()) == [1, 1]
    assert httpx.get(f"{url}/cache").json()["num_sessions"] == 2
    assert "foretoken:kv_cache_sessions 2.0" in metrics(url)


def test_a_session_s_pin_is_fitted_to_its_waits_until_it_is_ended(client: OpenAI, url: str) -> None:
    def pins() -> list[dict[str, Any]]:
        found = httpx.get(f"{url}/cache", params={"cache_salt": "fitted"}).json()["pins"]
        return list(found)

    messages, ttls = [user(RULES)], []
    for _ in range(6):
        completion = chat(client, messages, "fitted", prompt_cache_key="fitted")
        messages += [completion.choices[0].message.model_dump(exclude_none=True), user("And?")]
        ttls.append(max((pin["ttl_seconds"] for pin in pins()), default=0.0))
    assert ttls[-1] < 300, "the next turn always came within seconds"
    key = {"authorization": "Bearer me"}
    chat(client, messages, "fitted", prompt_cache_key="ended")
    ended = httpx.delete(f"{url}/v1/sessions/ended", headers=key)
    assert ended.json() == {"id": "ended", "object": "session.deleted", "deleted": True}
    again = httpx.delete(f"{url}/v1/sessions/ended", headers=key)
    assert not again.json()["deleted"]


def test_retention_pins_a_prompt(client: OpenAI, url: str) -> None:
    chat(
        client,
        [user("Keep this for a day, please, all of it.")],
        "day",
        prompt_cache_retention="24h",
    )
    (pin,) = httpx.get(f"{url}/cache", params={"cache_salt": "day"}).json()["pins"]
    assert pin["ttl_seconds"] == 24 * 3600
    assert 0 < pin["expires_in_seconds"] <= 24 * 3600
    chat(client, [user("And this for half an hour.")], "ttl", prompt_cache_options={"ttl": "30m"})
    (pin,) = httpx.get(f"{url}/cache", params={"cache_salt": "ttl"}).json()["pins"]
    assert pin["ttl_seconds"] == 1800


def test_a_prefix_is_flushed_and_its_neighbours_stay(client: OpenAI, url: str) -> None:
    texts = {name: f"{name} " * 20 for name in ("apple", "pear")}
    for text in texts.values():
        complete(client, text, "flush")
    body = {"prefix": texts["apple"], "cache_salt": "flush"}
    assert httpx.post(f"{url}/cache/flush", json=body).json()["flushed_pages"] > 1
    assert complete(client, texts["apple"], "flush") == 0
    assert complete(client, texts["pear"], "flush") > 0


def test_a_prefix_may_be_messages_or_token_ids(client: OpenAI, url: str) -> None:
    messages = [user("Some words that will have to be forgotten again, one by one.")]
    chat(client, messages, "ids")
    body: dict[str, Any] = {"prefix": messages, "cache_salt": "ids"}
    assert httpx.post(f"{url}/cache/flush", json=body).json()["flushed_pages"] > 0
    chat(client, messages, "ids")
    ids = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
    body = {"prefix": ids, "cache_salt": "ids"}
    assert httpx.post(f"{url}/cache/flush", json=body).json()["flushed_pages"] > 0


@pytest.mark.parametrize("prefix", ["x", [1, {"role": "user", "content": "x"}], [-1], 7])
def test_a_prefix_that_cannot_be_flushed_is_a_400_and_drops_nothing(url: str, prefix: Any) -> None:
    answer = httpx.post(f"{url}/cache/flush", json={"prefix": prefix})
    assert answer.status_code == 400
    assert "prefix" in answer.json()["error"]["param"]


def complete(client: OpenAI, text: str, salt: str) -> int:
    """Cached tokens of a plain completion."""
    completion = client.completions.create(
        model=MODEL, prompt=text, max_tokens=1, extra_body={"cache_salt": salt}
    )
    return completion.usage.prompt_tokens_details.cached_tokens


def test_a_miss_is_explained_in_the_answer_and_later(client: OpenAI, url: str) -> None:
    before = [{"role": "system", "content": RULES}, user("It is Monday. What now?")]
    after = [{"role": "system", "content": RULES}, user("It is Sunday. What now?")]
    first = chat(client, before, "why", explain_cache=True)
    assert first.usage.cache_explanation["cause"] == "first_seen"
    second = chat(client, after, "why", explain_cache=True)
    told = second.usage.cache_explanation
    assert (told["cause"], told["compared_with"]) == ("changed", first.id)
    assert told["first_difference"]["path"] == "messages[1].content"
    assert "Monday" in told["first_difference"]["before"]
    assert told["cached_tokens"] == cached(second)
    asked = {"response_id": second.id, "cache_salt": "why"}
    assert httpx.get(f"{url}/cache/explain", params=asked, headers=KEY).json() == told
    assert httpx.get(f"{url}/cache/explain", params=asked).status_code == 404, "of another key"
    assert "cache_explanation" not in chat(client, after, "why").usage.model_extra


def test_a_flush_is_the_explanation_of_the_next_miss(client: OpenAI, url: str) -> None:
    messages = [user("Remember me when the cache is emptied, will you?")]
    chat(client, messages, "gone")
    httpx.post(f"{url}/cache/flush", json={"cache_salt": "gone"})
    told = chat(client, messages, "gone", explain_cache=True).usage.cache_explanation
    assert told["cause"] == "flushed"
    assert told["seconds_ago"] >= 0


def test_explanations_are_told_to_who_knows_the_salt_alone(client: OpenAI, url: str) -> None:
    mine = chat(client, [user("Mine, and nobody else's, whatever happens.")], "mine")
    for params in ({"response_id": mine.id}, {"response_id": mine.id, "cache_salt": "yours"}):
        assert httpx.get(f"{url}/cache/explain", params=params, headers=KEY).status_code == 404
    assert httpx.get(f"{url}/cache/explain").status_code == 400


def test_concurrent_questions_compute_what_they_share_once(client: OpenAI, url: str) -> None:
    rules = {"role": "system", "content": RULES * 2}

    def ask(index: int) -> dict[str, Any]:
        body = {"messages": [rules, user(f"Topic {index}")], "max_tokens": 6, "cache_salt": "fork"}
        return dict(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"])

    with ThreadPoolExecutor(5) as pool:
        usages = [*pool.map(ask, range(5))]
    computed = sum(u["prompt_tokens"] - cached_of(u) for u in usages)
    assert computed < min(u["prompt_tokens"] for u in usages) + 5 * 3 * PAGE_SIZE


def cached_of(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]
