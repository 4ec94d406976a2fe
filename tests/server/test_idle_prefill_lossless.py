"""Answers of a model with idle prefill and without: token by token the same, in every API, and
computed where the session lives.

The chat template writes the number of messages at the beginning, and marks earlier answers, so each
turn has another prompt than the one before, and idle time computes all of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.plain_http import get, metrics
from support.server_process import running, running_front

MODEL = "foretoken-builtin"
TEMPLATE = Path(__file__).parents[1] / "builtin" / "target" / "chat_template.jinja"
COUNTED = "{{ '<|im_start|>system\nOf ' ~ (messages | length) ~ ' messages.<|im_end|>\n' -}}"
FLAGS = ["--page-size", "8", "--kv-tokens", "8192"]
TURNS = 3
SECONDS = 60
ASK = "Which animals sleep in winter, and where do they find their food in spring?"
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
}
FUNCTION = {"name": "find", "description": "Find an animal.", "parameters": PARAMETERS}
SAMPLED = {"temperature": 1.0, "seed": 7}
Post = Callable[[str, dict[str, Any]], dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(post: Post, **fields: Any) -> Iterator[object]:
    messages = [user(ASK)]
    for turn in range(TURNS):
        body = {"messages": messages, "max_tokens": 40, "logprobs": True, **SAMPLED, **fields}
        (choice,) = post("/v1/chat/completions", body)["choices"]
        said = choice["message"]
        calls = said.get("tool_calls") or []
        names = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        yield said["content"], names, choice["logprobs"], choice["finish_reason"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": ASK} for call in calls]
        messages = [*messages, said, *(results or [user(f"And {turn}?")])]


def chat_with_tools(post: Post) -> Iterator[object]:
    tools = [{"type": "function", "function": FUNCTION}]
    return chat(post, tools=tools, tool_choice="required", parallel_tool_calls=True, max_tokens=90)


def chat_with_json(post: Post) -> Iterator[object]:
    return chat(post, json_schema=PARAMETERS)


def chat_with_drafts(post: Post) -> Iterator[object]:
    return chat(post, speculation=4)


def branches(post: Post) -> Iterator[object]:
    """Conversations that continue one answer, which idle time has prepared for each of them."""
    root = [user(ASK)]
    fields = {"max_tokens": 20, "logprobs": True, **SAMPLED}
    for said in ("Bears do.", "Others."):
        for turn in ("Why?", "When?"):
            messages = [*root, {"role": "assistant", "content": said}, user(turn)]
            (choice,) = post("/v1/chat/completions", {"messages": messages, **fields})["choices"]
            yield choice["message"]["content"], choice["logprobs"]


def anthropic(post: Post) -> Iterator[object]:
    messages: list[dict[str, Any]] = [user(ASK)]
    tools = [{"name": "find", "input_schema": PARAMETERS}]
    choice = {"type": "any"}
    for _ in range(TURNS):
        body = {"model": MODEL, "messages": messages, "max_tokens": 90, "temperature": 1.0,
                "seed": 7, "tools": tools, "tool_choice": choice}  # fmt: skip
        content = post("/v1/messages", body)["content"]
        calls = [part for part in content if part["type"] == "tool_use"]
        yield [part.get("text") or part.get("input") for part in content]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": ASK} for call in calls
        ]
        messages = [*messages, {"role": "assistant", "content": content}, user(results)]  # type: ignore[arg-type]


def responses(post: Post) -> Iterator[object]:
    body: dict[str, Any] = {"input": ASK, "max_output_tokens": 40, **SAMPLED}
    for turn in range(TURNS):
        found = post("/v1/responses", body)
        yield [item["content"] for item in found["output"]]
        body |= {"previous_response_id": found["id"], "input": f"And {turn}?"}


def ollama(post: Post) -> Iterator[object]:
    messages = [user(ASK)]
    for turn in range(TURNS):
        options = {"num_predict": 40, **SAMPLED}
        body = {"model": MODEL, "messages": messages, "stream": False, "options": options}
        said = post("/api/chat", body)["message"]
        yield said["content"]
        messages = [*messages, said, user(f"And {turn}?")]


def gemini(post: Post) -> Iterator[object]:
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": ASK}]}]
    for turn in range(TURNS):
        config = {"maxOutputTokens": 40, **SAMPLED}
        body = {"contents": contents, "generationConfig": config}
        found = post(f"/v1beta/models/{MODEL}:generateContent", body)
        said = found["candidates"][0]["content"]
        yield said
        contents = [*contents, said, {"role": "user", "parts": [{"text": f"And {turn}?"}]}]


TALKS = [
    chat, chat_with_tools, chat_with_json, chat_with_drafts, branches, anthropic, responses, ollama,
    gemini,
]  # fmt: skip


def counts(url: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    found = re.findall(rf"^foretoken:idle_prefill_{name}\S* (\S+)$", metrics(url), re.MULTILINE)
    return sum(map(float, found))


def poster(url: str, session: str, *, is_on: bool) -> Post:
    """Return a function that sends a request of a session, and lets the idle work behind it end."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        num_ended = counts(url, "turns_total")
        headers = {"x-session-id": session}
        answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=SECONDS)
        found: dict[str, Any] = answer.raise_for_status().json()
        deadline = time.monotonic() + SECONDS
        while is_on and counts(url, "turns_total") == num_ended:
            assert time.monotonic() < deadline, metrics(url)
        return found

    return post


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "counted.jinja"
    path.write_text(COUNTED + TEMPLATE.read_text())
    return path


@pytest.fixture(scope="module")
def urls(template: Path) -> Iterator[tuple[str, str]]:
    """A server without idle prefill, and one with it."""
    flags = [*FLAGS, "--chat-template", str(template)]
    with running([*flags, "--idle-prefill", "off"]) as off, running(flags) as on:
        yield off.url, on.url


@pytest.mark.parametrize("talk", TALKS)
def test_every_turn_has_the_same_answer(
    urls: tuple[str, str], talk: Callable[[Post], Iterator[object]]
) -> None:
    off, on = urls
    num_idle = counts(on, "tokens_total")
    wanted = list(talk(poster(off, talk.__name__, is_on=False)))
    assert list(talk(poster(on, talk.__name__, is_on=True))) == wanted
    assert counts(on, "tokens_total") > num_idle + 8, "else nothing is compared"
    assert counts(off, "tokens_total") == 0


# -- replicas -------------------------------------------------------------------------------------


def prefilled(url: str) -> dict[str, float]:
    """Return the number of prompt tokens that each replica has computed, by its number."""
    pattern = r'^foretoken:step_tokens_total{kind="prefill",replica="(\d+)"} (\S+)$'
    text = get(url, "/metrics").content.decode()
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.parametrize("route", ["kv", "session", "even"])
def test_the_replica_of_the_answer_computes_the_next_turn(tmp_path: Path, route: str) -> None:
    """The clients are told apart by their keys; they have no sessions. Answers are marked later."""
    (template := tmp_path / "marked.jinja").write_text(
        TEMPLATE.read_text().replace(
            "+ message['content'] + '<|im_end|>\\n'",
            "+ message['content'] + (' of ' ~ (messages | length) if message['role'] == 'assistant'"
            " else '') + '<|im_end|>\\n'",
        )
    )
    flags = [*FLAGS, "--chat-template", str(template), "--route", route]
    with running_front([*flags, "--threads", "1"], num_replicas=2) as (server, _):
        url = server.url
        for name in ("a", "b", "c", "d"):
            messages = [user(f"{name}: {ASK}"), {"role": "assistant", "content": ASK}, user("Why?")]
            before, num_idle = prefilled(url), counts(url, "tokens_total")
            answered, usage = _computed(url, name, messages)
            assert len(answered) == 1
            deadline = time.monotonic() + SECONDS
            while counts(url, "turns_total") < ord(name) - ord("a") + 1:
                assert time.monotonic() < deadline, metrics(url)
            # The request itself counts, too: idle work may begin before the answer has been read.
            assert {each for each, num in prefilled(url).items() if num > before[each]} == answered
            assert counts(url, "tokens_total") > num_idle
            if route == "even":  # the next turn may go to the other replica
                continue
            messages = [*messages, {"role": "assistant", "content": usage["said"]}, user("When?")]
            replied, usage = _computed(url, name, messages, max_tokens=1, cache={"write": False})
            assert replied == answered
            assert usage["prompt_tokens"] - usage["cached"] < 24


def _computed(
    url: str, key: str, messages: list[dict[str, Any]], **fields: Any
) -> tuple[set[str], dict[str, Any]]:
    """Return the replicas that computed prompt tokens for a request, and its usage and answer."""
    before = prefilled(url)
    body = {"messages": messages, "max_tokens": 20, **SAMPLED, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)
    found = answer.raise_for_status().json()
    usage = found["usage"]
    return (
        {each for each, number in prefilled(url).items() if number > before.get(each, 0)},
        {
            "prompt_tokens": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "said": found["choices"][0]["message"]["content"],
        },
    )
