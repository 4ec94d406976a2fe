"""The exact bytes of answers and streams of every dialect, from the scripted model.

Each case is a file of `golden/`: the request line, the status, the content type and the body. Ids
are numbered in their order, moments, durations and a model's digest are zeros, long
fractions are halves. `GOLDEN=write` in the environment writes the files anew, for a change that
is meant.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken.api.build import engine_builder
from foretoken.api.serving.settings import Settings
from fuzz.inprocess import App
from support.scripted_server import build_scripted

FOLDER = Path(__file__).parent / "golden"
MODEL = "foretoken-builtin"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "weather", "description": "Tells it"}
TOOL = {"type": "function", "function": ABOUT | {"parameters": WEATHER}}
FLAT_TOOL = {"type": "function"} | ABOUT | {"parameters": WEATHER}
CALL = '[[<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>]]'
TWO_CALLS = f"[[Wait.\n{CALL[2:-2]}\n{CALL[2:-2]}]]"
THOUGHT = "[[<think>\nTwo and two.\n</think>\n\nFour.]]"
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER, "strict": True}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TWICE = {"n": 2, "temperature": 0}


def said(content: str, /, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 60} | fields


def asked(content: str, /, **fields: Any) -> dict[str, Any]:
    return {"input": content, "max_output_tokens": 60} | fields


def ollama(content: str, /, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]} | fields


def gemini(text: str, /, **fields: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": text}]}]} | fields


CHAT: dict[str, dict[str, Any]] = {
    "text": said("[[Hello, you.]]"),
    "length": said("[[One two three four five six]]", max_tokens=3),
    "stop": said("[[One, two. Three.]]", stop=[" two"]),
    "cut-call": said(CALL, tools=[TOOL], max_tokens=24),
    "thought": said(THOUGHT),
    "call": said(CALL, tools=[TOOL]),
    "calls": said(TWO_CALLS, tools=[TOOL], max_tokens=90),
    "one-call": said(TWO_CALLS, tools=[TOOL], max_tokens=90, parallel_tool_calls=False),
    "named-call": said(
        CALL, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    ),
    "no-call": said(CALL, tools=[TOOL], tool_choice="none"),
    "schema": said('[[{"city": "Rome"}]]', response_format=CITY),
    "two": said("[[Hello, you.]]", **TWICE),
    "logprobs": said("[[Yes.]]", logprobs=True, top_logprobs=0),
    "error": said("hi", temperature=9),
    "unknown": said("hi", no_such_field=1),
    "model": said("hi", model="no-such-model"),
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "[[Hello, you.]]", "max_tokens": 20},
    "echo": {"prompt": "[[Hello.]]", "max_tokens": 20, "echo": True},
    "two": {"prompt": "[[Hello.]]", "max_tokens": 20} | TWICE,
    "prompts": {"prompt": ["[[One.]]", "[[Two.]]"], "max_tokens": 20},
    "stop": {"prompt": "[[One, two.]]", "max_tokens": 20, "stop": " two"},
    "error": {"prompt": "hi", "max_tokens": -1},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": asked("[[Hello, you.]]"),
    "length": asked("[[One two three four five six]]", max_output_tokens=3),
    "thought": asked(THOUGHT),
    "calls": asked(TWO_CALLS, tools=[FLAT_TOOL], max_output_tokens=90),
    "schema": asked(
        '[[{"city": "Rome"}]]', text={"format": CITY["json_schema"] | {"type": CITY["type"]}}
    ),
    "error": asked("hi", temperature=9),
    "previous": asked("hi", previous_response_id="resp_none"),
}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": said("[[Hello, you.]]"),
    "length": said("[[One two three four five six]]", max_tokens=3),
    "stop": said("[[One, two. Three.]]", stop_sequences=[" two"]),
    "thought": said(THOUGHT),
    "calls": said(TWO_CALLS, tools=[ABOUT | {"input_schema": WEATHER}], max_tokens=90),
    "error": said("hi", temperature=9),
}
OLLAMA: dict[str, dict[str, Any]] = {
    "text": ollama("[[Hello, you.]]"),
    "thought": ollama(THOUGHT, think=True),
    "calls": ollama(TWO_CALLS, tools=[TOOL]),
    "schema": ollama('[[{"city": "Rome"}]]', format=WEATHER),
    "stop": ollama("[[One, two. Three.]]", options={"stop": [" two"]}),
    "error": ollama("hi", options={"temperature": 9}),
}
GENERATE: dict[str, dict[str, Any]] = {
    "text": {"model": MODEL, "prompt": "[[Hello, you.]]"},
    "raw": {"model": MODEL, "prompt": "[[Hello, you.]]", "raw": True},
    "error": {"model": MODEL, "prompt": "hi", "options": {"top_p": 7}},
}
STREAMED = {
    "chat": ("/v1/chat/completions", CHAT, USAGE),
    "completions": ("/v1/completions", COMPLETIONS, USAGE),
    "responses": ("/v1/responses", RESPONSES, {"stream": True}),
    "messages": ("/v1/messages", MESSAGES, {"stream": True}),
    "ollama": ("/api/chat", OLLAMA, {"stream": True}),
    "generate": ("/api/generate", GENERATE, {"stream": True}),
}
WHOLE: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "tokenize": ("POST", "/tokenize", {"prompt": "Hello, you."}),
    "tokenize-chat": ("POST", "/tokenize", {"messages": said("Hello")["messages"]}),
    "tokenize-error": ("POST", "/tokenize", {"prompt": 3}),
    "detokenize": ("POST", "/detokenize", {"tokens": [72, 101]}),
    "count-tokens": ("POST", "/v1/messages/count_tokens", {"messages": said("Hello")["messages"]}),
    "input-tokens": ("POST", "/v1/responses/input_tokens", {"input": "Hello"}),
    "render-chat": ("POST", "/v1/chat/completions/render", said("Hello", tools=[TOOL])),
    "render-messages": ("POST", "/v1/messages/render", said("Hello")),
    "render-responses": ("POST", "/v1/responses/render", asked("Hello")),
    "embeddings": ("POST", "/v1/embeddings", {"input": "hi"}),
    "rerank": ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    "embed": ("POST", "/api/embed", {"model": MODEL, "input": "hi"}),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", f"/v1/models/{MODEL}", None),
    "no-model": ("GET", "/v1/models/none", None),
    "tags": ("GET", "/api/tags", None),
    "show": ("POST", "/api/show", {"model": MODEL}),
    "no-response": ("GET", "/v1/responses/resp_none", None),
    "no-file": ("GET", "/v1/files/file-none", None),
    "no-batch": ("GET", "/v1/batches/batch_none", None),
    "batch-error": ("POST", "/v1/batches", {"endpoint": "/v1/no", "input_file_id": "file-none"}),
    "no-route": ("GET", "/v1/none", None),
    "no-method": ("GET", "/v1/chat/completions", None),
    "health": ("GET", "/health", None),
    "ready": ("GET", "/ready", None),
}


GEMINI_URL = f"/v1beta/models/{MODEL}"
GEMINI: dict[str, dict[str, Any]] = {
    "text": gemini("[[Hello, you.]]"),
    "thought": gemini(THOUGHT, generationConfig={"thinkingConfig": {"includeThoughts": True}}),
    "calls": gemini(TWO_CALLS, tools=[{"functionDeclarations": [ABOUT | {"parameters": WEATHER}]}]),
    "length": gemini("[[One two three four five]]", generationConfig={"maxOutputTokens": 3}),
    "two": gemini("[[Hello.]]", generationConfig={"candidateCount": 2, "temperature": 0}),
    "error": gemini("hi", generationConfig={"temperature": 900}),
}
WHOLE |= {
    "gemini-models": ("GET", "/v1beta/models", None),
    "gemini-model": ("GET", "/v1beta/models/none", None),
    "gemini-count": ("POST", f"{GEMINI_URL}:countTokens", gemini("hi")),
    "gemini-stream-error": ("POST", f"{GEMINI_URL}:streamGenerateContent", gemini("hi")),
}


def _cases() -> Iterator[tuple[str, str, str, dict[str, Any] | None]]:
    for dialect, (path, bodies, stream) in STREAMED.items():
        for name, body in bodies.items():
            yield f"{dialect}-{name}", "POST", path, body | {"stream": False}
            yield f"{dialect}-{name}-stream", "POST", path, body | stream
    for name, body in GEMINI.items():
        yield f"gemini-{name}", "POST", f"{GEMINI_URL}:generateContent", body
        streamed = f"{GEMINI_URL}:streamGenerateContent?alt=sse"
        yield f"gemini-{name}-stream", "POST", streamed, body
    for name, (method, path, body) in WHOLE.items():
        yield name, method, path, body


CASES = {name: asked for name, *asked in _cases()}
IDS = re.compile(r'"((?:[a-z]{2,9}[-_])+)([0-9a-f]{8,}|[A-Za-z0-9]{24,})"')
# Ollama's digest of a model covers when its file was written.
DIGESTS = re.compile(r'(?<="digest":")[0-9a-f]{64}')
ROUNDED = re.compile(r"-?\d\.\d{4,}(?:e-?\d+)?|-?\d(?:\.\d+)?e-\d+")  # by the kernels of this CPU
MOMENTS = re.compile(
    r'("(?:created|created_at|completed_at|expires_at|modified_at|\w+_duration|started_at)":)'
    r'(\d[\d.e+-]*|"[^"]*")'
)


def _steady(text: str) -> str:
    """The text without what changes from run to run."""
    known: dict[str, str] = {}
    text = text.replace(foretoken.__version__, "VERSION")
    numbered = IDS.sub(
        lambda found: known.setdefault(found[0], f'"{found[1]}{len(known) + 1}"'), text
    )
    undated = DIGESTS.sub("0" * 64, MOMENTS.sub(r"\g<1>0", numbered))
    return ROUNDED.sub("0.5", undated)


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_builder, "build", build_scripted)
        settings = Settings(reasoning_parser="think", tool_parser="hermes", idle_prefill="off")
        app = App(settings=settings, speculation=0, max_model_len=512)
    yield app
    app.close()


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_that_were_recorded(app: App, name: str) -> None:
    method, path, body = CASES[name]
    app.post("/cache/flush", {})
    answer = app.ask(method, path, None if body is None else json.dumps(body).encode())
    kind = answer.headers["content-type"]
    found = f"{method} {path}\n{answer.status_code} {kind}\n\n{_steady(answer.text)}\n"
    file = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def test_every_file_is_of_a_case() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {*CASES}
