"""The fake engine behind a chat template that knows tools and thoughts, and plain HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

TEMPLATE = """{%- if tools -%}
{{ '<|im_start|>system\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else '') }}
{%- for tool in tools %}{{ tool['function']['name'] + ' ' }}{% endfor -%}
{{ '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call><|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['reasoning_content'] %}{{ '<think>' + message['reasoning_content'] + '</think>' }}
{%- endif -%}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] -%}
{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif -%}
{%- endif -%}
"""
Body = dict[str, Any]


@pytest.fixture(scope="session")
def byte_level_folder(byte_level_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("messages") / "model"
    shutil.copytree(byte_level_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def post(http) -> Callable[..., httpx.Response]:
    """Send a body to /v1/messages, with what every one needs."""

    def send(path: str = "/v1/messages", **fields: Any) -> httpx.Response:
        talk = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny/model", "max_tokens": 100, "messages": talk, **fields}
        return http.post(path, json={k: v for k, v in body.items() if v is not ...})

    return send


@pytest.fixture
def stream(post) -> Callable[..., list[Body]]:
    """The events of a streamed answer; each must name its type twice."""

    def read(**fields: Any) -> list[Body]:
        answer = post(stream=True, **fields)
        assert answer.status_code == 200, answer.text
        return _events(answer.text)

    return read


def _events(text: str) -> list[Body]:
    events = []
    for chunk in text.split("\n\n")[:-1]:
        name, data = chunk.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        events.append(body)
    return events


@pytest.fixture
def prompt(engine, tokenizer) -> Callable[[], str]:
    """Return a function that reads the engine's last prompt as text."""

    def read() -> str:
        request = engine.requests[-1]
        ids = list(request.tokens[: request.prompt_len])
        return tokenizer.decode(ids, skip_special_tokens=False)

    return read
