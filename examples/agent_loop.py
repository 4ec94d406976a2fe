"""An agent: the model calls tools, reads their results, and answers.

    pip install openai
    foretoken serve MODEL          # a model that calls tools, such as Qwen/Qwen3-0.6B
    python examples/agent_loop.py [URL]

Qwen2.5-Coder-1.5B-Instruct (GGUF, Q4_K_M) lists the files, reads them and answers by itself.
SmolLM2, which `make serve` serves, was not trained to call tools. This example therefore forces its
first two calls: a grammar makes them valid, and the last turn repeats a result.

The conversation only grows, so each turn computes nothing but its new tokens.
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
UNTRAINED = ("smollm2", "foretoken-builtin")  # models that were not trained to call tools
Choice = Literal["auto", "none"] | dict[str, Any]
FREE: list[Choice] = ["auto"] * 8


def list_files() -> str:
    """Return the names of the files."""
    return "\n".join(FILES)


def read_file(name: str) -> str:
    """Return the text of a file."""
    return FILES.get(name, "no such file")


FUNCTIONS: dict[str, Callable[..., str]] = {"list_files": list_files, "read_file": read_file}


def tool(name: str, description: str, /, **parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a function's entry in ``tools``; all parameters are required."""
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("list_files", "List the files."),
    tool("read_file", "Read a file.", name={"type": "string", "enum": list(FILES)}),
    # With such a tool small models end reliably; without it they repeat calls.
    tool("final_answer", "Answer the user, once the files have told you.", text={"type": "string"}),
]


def named(tool: str) -> Choice:
    """Return the choice that forces a call of this tool."""
    return {"type": "function", "function": {"name": tool}}


def choices(model: str) -> Sequence[Choice]:
    """Return the tool choice of each turn; the last turn must answer."""
    if model in UNTRAINED:
        return [named("list_files"), named("read_file"), "none"]
    return [*FREE, "none"]


def run(client: OpenAI, question: str) -> str:
    """Run turns until the model answers, and return its answer."""
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
        (call,) = message.tool_calls
        name, arguments = call.function.name, json.loads(call.function.arguments)
        if name == "final_answer":
            return str(arguments["text"])
        result = FUNCTIONS[name](**arguments)
        print(f"{name}({json.dumps(arguments)}) -> {result!r}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return text


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else URL
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        print(run(client, "What is the cat called? Look into the files."))
