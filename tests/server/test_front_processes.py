"""A front and its replicas as processes: replicas are killed, no client sees it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.forked import Forked, command
from support.plain_http import get, opened, payloads, post
from support.server_process import (
    Server,
    free_port,
    front_at,
    running_front,
    split_flags,
    start_replica,
)

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHARED = "import sys\n\n\nclass Queue:\n    def __init__(self):\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 6}},
            "required": ["words"],
        },
    },
}
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TEXT, {"prompt": SHARED, "max_tokens": 160}),
    "hot": (TEXT, {"prompt": SHARED, "max_tokens": 160, "temperature": 0.8, "top_p": 0.9}),
    "endless": (TEXT, {"prompt": SHARED, "max_tokens": 900, "ignore_eos": True, "temperature": 1.0,
                       "speculation": "off"}),
    "long": (TEXT, {"prompt": SHARED * 14, "max_tokens": 60}),
    "stop": (TEXT, {"prompt": SHARED, "max_tokens": 160, "stop": ["is nowhere", "\n\n\n"]}),
    "penalties": (TEXT, {"prompt": SHARED, "max_tokens": 120, "frequency_penalty": 0.5,
                         "min_tokens": 100, "temperature": 0.7}),
    "four": (TEXT, {"prompt": SHARED, "max_tokens": 90, "n": 4, "temperature": 0.9}),
    "logprobs": (TEXT, {"prompt": SHARED, "max_tokens": 120, "logprobs": 2}),
    "json": (TEXT, {"prompt": SHARED, "max_tokens": 260, "json_schema": LIST}),
    "tool": (CHAT, {"messages": [{"role": "user", "content": "Find the words."}],
                    "max_tokens": 200, "tools": [TOOL], "tool_choice": "required"}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": SHARED}], "max_tokens": 160,
                    "logprobs": True, "top_logprobs": 2}),
}  # fmt: skip
FLAGS = (
    "--kv-tokens", "8192", "--max-model-len", "1024", "--threads", "1", "--max-running", "4",
    "--resume-seconds", "60",
)  # fmt: skip


class Read:
    """All of a stream, choice by choice; equal for equal answers."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, Any] = {}
        self.calls = ""
        self.usage: tuple[int, int] | None = None
        self.moves = 0

    def add(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta") or choice
            text = (delta.get("content") or "") + (delta.get("text") or "")
            self.texts[index] = self.texts.get(index, "") + text
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                self.calls += (function.get("name") or "") + (function.get("arguments") or "")
            if (logprobs := choice.get("logprobs")) is not None:
                self.logprobs.setdefault(index, []).extend(_values(logprobs))
            if choice.get("finish_reason") is not None:
                self.reasons[index] = (choice["finish_reason"], choice.get("stop_reason"))
        if usage := chunk.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
            self.moves = usage["moves"]

    @property
    def answer(self) -> tuple[Any, ...]:
        return self.texts, self.logprobs, self.reasons, self.calls, self.usage


def _values(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return [json.dumps(each, sort_keys=True) for each in logprobs["content"] or ()]
    return [*zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    path, body = ASKED[name]
    options = {"include_usage": True}
    return path, {"seed": 5, "temperature": 0.0, **body, "stream": True, "stream_options": options}


def read(url: str, name: str, began: threading.Semaphore | None = None) -> Read:
    path, body = body_of(name)
    whole = Read()
    with opened(url, "POST", path, body) as response:
        assert response.status == 200, response.read()
        for line in response:
            if line == b"data: [DONE]\n":
                return whole
            if line.startswith(b"data: "):
                whole.add(json.loads(line[6:]))
                if began is not None:
                    began.release()
    raise AssertionError("the stream was cut")


@contextlib.contextmanager
def fronts(num_replicas: int) -> Iterator[tuple[Server, list[Forked]]]:
    with running_front(FLAGS, num_replicas=num_replicas) as pair:
        yield pair


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[Any, ...]]:
    with fronts(1) as (server, _):
        return {name: read(server.url, name).answer for name in ASKED}


def replicas(url: str) -> list[dict[str, Any]]:
    return list(get(url, "/replicas").json["replicas"])


def test_replicas_that_are_killed_under_streams_change_no_answer(
    undisturbed: dict[str, tuple[Any, ...]],
) -> None:
    """Two of three, one after the other: some requests wait, some are in their prompt."""
    names = [*ASKED] * 2
    with fronts(3) as (server, processes), ThreadPoolExecutor(len(names)) as pool:
        assert len(replicas(server.url)) == 3
        began = threading.Semaphore(0)
        reading = [pool.submit(read, server.url, name, began) for name in names]
        for process, num_chunks in zip(processes, (20, 60), strict=False):
            for _ in range(num_chunks):
                assert began.acquire(timeout=60)
            process.send_signal(signal.SIGKILL)
        found = [each.result() for each in reading]
        for name, each in zip(names, found, strict=True):
            assert each.answer == undisturbed[name], name
        assert sum(each.moves for each in found) > 0
        assert len(replicas(server.url)) == 1
        assert post(server.url, "/debug/audit").json["ok"]
        metrics = get(server.url, "/metrics").content
        assert b'replicas_lost_total{cause="closed"} 2.0' in metrics
        assert b'replica="' in metrics
        assert server.stop() == 0


def test_a_stream_that_is_resumed_goes_on_over_a_lost_replica(
    undisturbed: dict[str, tuple[Any, ...]],
) -> None:
    with fronts(2) as (server, processes):
        path, body = body_of("endless")
        whole, last = Read(), ""
        with opened(server.url, "POST", path, body) as response:
            for line in response:
                if line.startswith(b"id: "):
                    last = line[4:].decode().strip()
                if line.startswith(b"data: "):
                    whole.add(json.loads(line[6:]))
                    if len(whole.texts[0]) > 20 and last:
                        break
        first = next(each for each in replicas(server.url) if each["requests"])
        next(each for each in processes if each.pid == first["pid"]).send_signal(signal.SIGKILL)
        with opened(server.url, "POST", path, body, {"last-event-id": last}) as response:
            for line in response:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    whole.add(json.loads(line[6:]))
        assert whole.answer == undisturbed["endless"]


def test_replicas_outlive_their_front_and_the_next_one_knows_their_cache() -> None:
    own, engine = split_flags(FLAGS)
    address, (path, body) = f"tcp://127.0.0.1:{free_port()}", body_of("long")
    processes = [start_replica(address, engine) for _ in range(2)]
    try:
        with front_at(address, own, num_replicas=2) as first:
            answer = read(first.url, "long").answer
            pids = {each["pid"] for each in replicas(first.url)}
            endless_path, endless = body_of("endless")
            with opened(first.url, "POST", endless_path, endless) as response:
                assert response.readline()
                first.process.send_signal(signal.SIGKILL)
                first.process.wait(60)
        with front_at(address, own, num_replicas=2) as second:
            _wait(lambda: {each["pid"] for each in replicas(second.url)} == pids)
            _wait(lambda: post(second.url, "/debug/audit").json["requests"]["running"] == 0)
            assert post(second.url, "/debug/audit").json["ok"]
            assert read(second.url, "long").answer == answer
            usage = post(second.url, path, body | {"stream": False, "stream_options": None}).json[
                "usage"
            ]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0.9 * usage["prompt_tokens"]
            metrics = get(second.url, "/metrics").content
            (hits,) = re.findall(rb"^foretoken:route_hit_tokens_total (\S+)", metrics, re.M)
            assert float(hits) >= 2 * cached  # both requests went to what the first front had sent
            assert second.stop() == 0
        for each in processes:  # no front is there
            each.send_signal(signal.SIGTERM)
        assert [each.wait(60) for each in processes] == [0, 0]
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_without_any_replica_the_front_answers_503_and_lives() -> None:
    with fronts(1) as (server, (process,)):
        assert get(server.url, "/ready").status == 200
        process.send_signal(signal.SIGKILL)
        _wait(lambda: get(server.url, "/ready").status == 503)
        refused = post(server.url, TEXT, {"prompt": "x", "max_tokens": 1})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert get(server.url, "/health").status == 200
        assert replicas(server.url) == []
        assert server.stop() == 0


def test_a_front_listens_at_once_and_answers_503_until_its_replicas_come() -> None:
    port, front = free_port(), f"tcp://127.0.0.1:{free_port()}"
    with open(os.devnull, "w+") as nothing:
        streams = {"stdin": nothing, "stdout": nothing, "stderr": nothing}
        words = ("serve", "builtin", "--port", str(port), "--front", front, "--replicas", "2")
        process = Forked(command, *words, env=dict(os.environ), **streams)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _listens(url))
        assert get(url, "/health").status == 200
        for refused in (
            get(url, "/ready"), get(url, "/v1/models"), post(url, CHAT, body_of("chat")[1]),
        ):  # fmt: skip
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.error["message"] == "waiting for replicas: 0 of 2 are connected"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _listens(url: str) -> bool:
    try:
        return get(url, "/version").status == 200
    except ConnectionRefusedError:
        return False


def test_a_batch_waits_for_a_replica_that_is_lost_and_can_be_cancelled_meanwhile() -> None:
    _, engine = split_flags(FLAGS)
    address = f"tcp://127.0.0.1:{free_port()}"
    replica = start_replica(address, engine)
    try:
        with front_at(address, ["--failover-seconds", "0.1"]) as server:
            going_on, cancelled = _batch(server.url, 24), _batch(server.url, 24)
            _wait(lambda: _state(server.url, going_on)["request_counts"]["completed"])
            replica.kill()
            _wait(lambda: not replicas(server.url))
            assert _state(server.url, going_on)["status"] == "in_progress"
            answer = post(server.url, f"/v1/batches/{cancelled}/cancel")
            assert (answer.status, answer.json["status"]) == (200, "cancelling")
            _wait(lambda: _state(server.url, cancelled)["status"] == "cancelled")
            replica.wait()
            replica = start_replica(address, engine)
            _wait(lambda: _state(server.url, going_on)["status"] == "completed")
            counts = _state(server.url, going_on)["request_counts"]
            assert counts == {"total": 24, "completed": 24, "failed": 0}
    finally:
        replica.kill()
        replica.wait()


def _state(url: str, batch: str) -> dict[str, Any]:
    state: dict[str, Any] = get(url, f"/v1/batches/{batch}").json
    return state


def _batch(url: str, count: int) -> str:
    """Begin a batch of short completions; its id."""
    body = {"prompt": SHARED, "max_tokens": 30, "temperature": 1.0}
    lines = [
        {"custom_id": str(n), "url": TEXT, "method": "POST", "body": body} for n in range(count)
    ]
    content = "".join(json.dumps(each) + "\n" for each in lines)
    form = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{url}/v1/files", **form).json()["id"]
    asked = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
    created: str = post(url, "/v1/batches", asked).json["id"]
    return created


def test_the_live_page_shows_the_steps_and_the_paths_of_each_replica() -> None:
    def ask(number: int) -> int:
        body = {"prompt": f"{number} words", "max_tokens": 40, "ignore_eos": True}
        return post(server.url, TEXT, body).status

    with (
        fronts(2) as (server, _),
        opened(server.url, "GET", "/ui/events") as watching,
        ThreadPoolExecutor(4) as pool,
    ):
        events = map(json.loads, payloads(watching))
        assert "latest_steps" not in next(events)
        asked = [pool.submit(ask, number) for number in range(24)]
        with_steps: set[int] = set()
        with_paths: set[int] = set()
        while not with_steps == with_paths == {1, 2}:
            now = next(events)
            if "latest_steps" in now:
                assert len(now["latest_steps"]) == len(now["replicas"])
                with_steps |= {*now["replicas"]}
            else:
                with_paths |= {each["replica"] for each in now["requests"] if each["boxes"]}
        assert {each.result() for each in asked} == {200}


def test_a_signal_writes_a_dump_of_the_front_and_of_each_replica_by_itself(tmp_path: Path) -> None:
    with running_front([*FLAGS, "--dump-dir", str(tmp_path)], num_replicas=2) as (
        server,
        processes,
    ):
        for process in (server.process, processes[0]):
            process.send_signal(signal.SIGUSR1)
        _wait(lambda: len([*tmp_path.iterdir()]) == 2)
        dumps = {each["pid"]: each for each in map(_json_in, tmp_path.iterdir())}
        of_front = dumps.pop(server.process.pid)
        assert {each["pid"] for each in of_front["replicas"]} == {each.pid for each in processes}
        (of_replica,) = dumps.values()
        assert of_replica["pid"] == processes[0].pid
        assert of_replica["audit"]["ok"]
        assert {of_front["reason"], of_replica["reason"]} == {"SIGUSR1"}
        assert len(replicas(server.url)) == 2


def _json_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _wait(holds: Any) -> None:
    for _ in range(600):
        if holds():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never held")
