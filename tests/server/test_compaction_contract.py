"""Compaction on a real engine: what the cache reads before and after it, and what a disconnect
leaves.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.plain_http import opened, post
from support.server_process import Server, running

SCRIPTED = Path(__file__).resolve().parents[1] / "support" / "scripted_server.py"
PAGE_SIZE = 8
FLAGS = ["--page-size", str(PAGE_SIZE), "--kv-tokens", "8192", "--port", "0"]
RULES = " ".join(f"Rule {number} of the house holds." for number in range(20))
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "My cat is Tom, and it sleeps on the red sofa by the window."},
    {"role": "assistant", "content": "Noted: the cat Tom, the red sofa, the window."},
    {"role": "user", "content": "My dog is Rex, and it sleeps on the blue rug by the door."},
    {"role": "assistant", "content": "Noted: the dog Rex, the blue rug, the door."},
]
QUESTION = {"role": "user", "content": "Who sleeps where?"}
NEXT = {"role": "user", "content": "And who is awake?"}
EDIT = "compact_20260112"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(started_by=[sys.executable, str(SCRIPTED), *FLAGS]) as server:
        yield server


def pages(num_tokens: int) -> int:
    """The tokens of the whole pages of a prompt, of which the last token is computed."""
    return (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never held")


class Responses:
    """Requests of one conversation, in a namespace of its own."""

    def __init__(self, server: Server, salt: str) -> None:
        self._url, self._more = server.url, {"cache_salt": salt, "instructions": RULES}

    def ask(self, items: list[Any], path: str = "", **fields: Any) -> dict[str, Any]:
        body = {"input": items, **self._more, **fields}
        answer = post(self._url, f"/v1/responses{path}", body)
        assert answer.status == 200, answer.content
        return dict(answer.json)

    def count(self, items: list[Any]) -> int:
        return int(self.ask(items, "/input_tokens")["input_tokens"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["input_tokens_details"]["cached_tokens"])


def test_a_summary_reads_the_conversation_and_later_turns_read_what_stayed(server: Server) -> None:
    talk = Responses(server, "compact")
    first = talk.ask([*TALK, QUESTION])
    turn = [*TALK, QUESTION, *first["output"]]
    said = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    done = talk.ask(turn, "/compact")
    assert cached(done) >= pages(said - 1) - PAGE_SIZE, "the summary computes only its request"
    assert done["usage"]["input_tokens"] - cached(done) < 150
    begun = [*done["output"], NEXT]
    after = talk.ask(begun)
    fixed = talk.count([TALK[0]]) - 8  # up to the first user message, which stays
    assert cached(after) >= pages(fixed), "the instructions and the first message stayed"
    assert after["usage"]["input_tokens"] == talk.count(begun)
    later = talk.ask([*begun, *after["output"], QUESTION])
    assert cached(later) >= pages(after["usage"]["input_tokens"]), "all of the compacted turn"


def test_a_threshold_compacts_behind_the_same_prefix(server: Server) -> None:
    talk = Responses(server, "threshold")
    talk.ask(TALK[:3])
    managed = [{"type": "compaction", "compact_threshold": 100}]
    answer = talk.ask([*TALK, QUESTION], context_management=managed)
    assert [item["type"] for item in answer["output"]] == ["compaction", "message"]
    report = answer["usage"]["compaction"]
    assert report["cached_tokens"] >= pages(talk.count(TALK[:3])) - PAGE_SIZE
    assert report["compacted_input_tokens"] == answer["usage"]["input_tokens"]
    assert report["original_input_tokens"] == talk.count([*TALK, QUESTION])
    fixed = talk.count([{"role": "user", "content": "x"}]) - 8
    assert cached(answer) >= pages(fixed), "the instructions stayed"
    later = talk.ask([*answer["output"], NEXT])
    assert cached(later) >= pages(answer["usage"]["input_tokens"])


def body_of(said: str) -> dict[str, Any]:
    """A body of /v1/messages whose conversation is compacted to what is ``said``."""
    trigger = {"type": "input_tokens", "value": 100}
    edit = {"type": EDIT, "trigger": trigger, "instructions": f"[[{said}]]"}
    return {
        "max_tokens": 20,
        "system": RULES,
        "messages": [*TALK, QUESTION],
        "stream": True,
        "context_management": {"edits": [edit]},
    }


def test_a_client_that_leaves_during_the_summary_costs_no_page(server: Server) -> None:
    body = body_of("word after word " * 300)
    running_now = lambda: post(server.url, "/debug/audit").json["requests"]["running"]  # noqa: E731
    with opened(server.url, "POST", "/v1/messages", body):
        wait_until(lambda: running_now() == 1)
    wait_until(lambda: running_now() == 0)
    audit = post(server.url, "/debug/audit").json
    assert audit["ok"], audit
    pool = audit["pages"]
    assert pool["free"] + pool["tree"] == pool["total"], pool
    events = [
        json.loads(line[6:])
        for line in post(server.url, "/v1/messages", body_of("Tom, Rex.")).content.splitlines()
        if line.startswith(b"data: ")
    ]
    summaries = [e["delta"]["content"] for e in events if "content" in e.get("delta", {})]
    assert summaries == ["Tom, Rex."]
