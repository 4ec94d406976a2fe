"""``serve --ray``: Ray Serve starts the replicas, replaces lost ones, changes them on request."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.server_process import Server, running

pytest.importorskip("ray", reason="the extra ray is not installed")
SECONDS = 90.0
FLAGS = ["--ray", "--replicas", "2", "--replica-cpus", "0.5", "--kv-tokens", "16384"]
NUM_GROUPS, NUM_PROMPTS = 4, 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    code = [sys.executable, "-m", "foretoken.api.cli.commands"]
    args = [*code, "serve", "builtin", "--port", "0", *FLAGS]
    with running(started_by=args) as found:
        until(lambda: len(pids(found)) == 2)
        yield found
        found.stop()


def asked(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def pids(server: Server) -> set[int]:
    return {each["pid"] for each in asked(server, "/replicas")["replicas"]}


def until(holds: Callable[[], bool]) -> None:
    """Wait for other processes."""
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def completion(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "builtin", "prompt": prompt, "temperature": 0.8, "seed": 3, **more}
    return asked(server, "/v1/completions", body)


def test_prompts_of_a_few_groups_are_answered_out_of_the_cache(server: Server) -> None:
    def one(index: int) -> dict[str, Any]:
        shared = [20 + index % NUM_GROUPS, *range(100, 355)]
        usage: dict[str, Any] = completion(server, [*shared, 30 + index], max_tokens=4)["usage"]
        return usage

    with ThreadPoolExecutor(4) as pool:
        usages = list(pool.map(one, range(NUM_PROMPTS)))
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    assert cached >= 0.7 * sum(each["prompt_tokens"] for each in usages)


def test_a_killed_replica_costs_no_answer_and_is_replaced(server: Server) -> None:
    wanted = completion(server, list(range(50, 80)), max_tokens=600, ignore_eos=True)
    before, answers = pids(server), list[dict[str, Any]]()
    prompt = list(range(50, 80))
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                completion(server, prompt, max_tokens=600, ignore_eos=True, speculation="off")
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: any(each["running"] for each in asked(server, "/replicas")["replicas"]))
    busy = max(asked(server, "/replicas")["replicas"], key=lambda each: each["requests"])
    os.kill(busy["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(SECONDS)
    assert [each["choices"] for each in answers] == [wanted["choices"]] * 4
    until(lambda: len(pids(server)) == 2 and pids(server) != before)


def test_options_replace_all_replicas_under_load_and_no_request_fails(server: Server) -> None:
    wanted = completion(server, list(range(60, 90)), max_tokens=64)["choices"]
    before, ended, answers = pids(server), threading.Event(), list[Any]()

    def load() -> None:
        while not ended.is_set():
            answers.append(completion(server, list(range(60, 90)), max_tokens=64)["choices"])

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    asked(server, "/replicas", {"options": {"kv_tokens": 8192}})
    until(lambda: len(pids(server)) == 2 and not before & pids(server))
    ended.set()
    for thread in threads:
        thread.join(SECONDS)
    assert answers
    assert all(each == wanted for each in answers)
    assert {each["total_pages"] for each in asked(server, "/replicas")["replicas"]} == {512}


def test_the_number_of_replicas_changes_on_request(server: Server) -> None:
    asked(server, "/replicas", {"replicas": 1})
    until(lambda: len(pids(server)) == 1)
    assert completion(server, [50, 51, 52], max_tokens=4)["choices"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"replicas": 0}, 400),
        ({"min": 2, "max": 1}, 400),
        ({"options": {"kv_token": 1}}, 400),
        ({"replicas": 500}, 503),
    ],
)
def test_bad_changes_are_refused(server: Server, body: dict[str, Any], status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        asked(server, "/replicas", body)
    assert refused.value.code == status
    refused.value.close()
