"""An agent: the model calls tools, is told what came of it, and answers in the end.

    pip install openai
    python examples/agent_loop.py [URL]    (or FORETOKEN_URL; the default is `make serve`)

A model that is trained for tools chooses by itself ("auto"). The two small ones that come with
foretoken are not, so each of their turns is told what to call: the call is then written under a
grammar and always valid. Their last turn repeats a result rather than words an answer.
The conversation only grows, so each turn computes no more than its new tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from openai import OpenAI

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
FILES = {"todo.txt": "buy milk\ncall home", "notes.txt": "the cat is called Tau"}
UNTRAINED = ("smollm2", "foretoken-builtin")  # in calling tools
Choice = Literal["auto", "none"] | dict[str, Any]
FREE: list[Choice] = ["auto"] * 8


def list_files() -> str:
    """What files there are."""
    return "\n".join(FILES)


def read_file(name: str) -> str:
    """What stands in one of them."""
    return FILES.get(name, "there is no such file")


FUNCTIONS: dict[str, Callable[..., str]] = {"list_files": list_files, "read_file": read_file}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "description": "List the files.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": list(FILES)}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    },
]


def named(tool: str) -> Choice:
    """A turn that must call this tool."""
    return {"type": "function", "function": {"name": tool}}


def choices(model: str) -> Sequence[Choice]:
    """What each turn may do; the last one has to answer."""
    if model in UNTRAINED:
        return [named("list_files"), named("read_file"), "none"]
    return [*FREE, "none"]


def run(client: OpenAI, question: str) -> str:
    """Let the model call until it answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    text = ""
    model = client.models.list().data[0].id
    for choice in choices(model):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            max_tokens=128,
            temperature=0,
        )
        usage: Any = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"[{usage.prompt_tokens} prompt tokens, {cached} of them cached]")
        message: Any = answer.choices[0].message
        messages.append(message)
        text = message.content or ""
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            result = FUNCTIONS[name](**json.loads(arguments))
            print(f"{name}({arguments}) -> {result!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return text


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else URL
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        print(run(client, "What is the cat called? Look into the files."))
