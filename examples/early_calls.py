"""An agent that starts its tools while the model still writes.

    pip install httpx
    foretoken serve MODEL          # a model that calls several tools in an answer
    python examples/early_calls.py [URL [QUESTION]]

The server sends an event `tool_call.ready` as soon as the arguments of a call are complete, even if
further calls follow. Tools that only read may start then. The program asks the same question twice,
and starts the tools at the end of the answer the first time, as most agents do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
QUESTION = "Read a.txt, b.txt and c.txt at once, then compare them."
TOOL_SECONDS = 0.5  # how long a tool takes
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}


def read_file(path: str) -> str:
    """Return the text of a file, after some time."""
    time.sleep(TOOL_SECONDS)
    return f"the text of {path}"


def ready_calls(url: str, question: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of an answer, each as soon as it is complete; end with the answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 512,
        "stream": True,
        "stream_options": {"include_ready_calls": True},
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "tool_call.ready":
                yield json.loads(line.removeprefix("data: "))["tool_call"]
            elif not line:
                name = ""


def run(url: str, question: str, *, is_early: bool) -> float:
    """Ask the question and run the tools. Return the seconds until all results are there."""
    began = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        results: list[Future[str]] = []
        calls = ready_calls(url, question)
        for call in calls if is_early else list(calls):
            arguments = json.loads(call["function"]["arguments"])
            results.append(pool.submit(read_file, **arguments))
        for result in results:
            print(" ", result.result())
    return time.perf_counter() - began


if __name__ == "__main__":
    url, question = (*sys.argv[1:], *(URL, QUESTION)[len(sys.argv) - 1 :])
    list(ready_calls(url, question))  # both runs then find the prompt in the cache
    for is_early in (False, True):
        print("tools start", "early" if is_early else "at the end of the answer")
        print(f"  {run(url, question, is_early=is_early):.2f} s")
