"""Promises of docs/packing.md about ``--kv-evict``: usage, ``kv_budget``, the cache, bad values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.forked import command, run_forked
from support.plain_http import get, post
from support.server_process import Server, running

pytestmark = pytest.mark.slow

FLAGS = ["--kv-evict", "window:256", "--kv-tokens", "2048", "--threads", "1"]
PROMPT = "def quicksort(items):\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(FLAGS) as found:
        yield found


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": num_tokens, "seed": 3, "ignore_eos": True, **fields}


def usage(server: Server, num_tokens: int, **fields: Any) -> dict[str, Any]:
    answer = post(server.url, "/v1/completions", body(num_tokens, **fields)).json
    assert answer["usage"]["completion_tokens"] == num_tokens
    return dict(answer["usage"])


def test_usage_counts_what_was_evicted_and_the_cache_counts_all_of_it(server: Server) -> None:
    assert "evicted_tokens" not in usage(server, 384)
    assert usage(server, 400)["evicted_tokens"] == 128
    assert usage(server, 600, kv_budget=300)["evicted_tokens"] == 256
    assert "evicted_tokens" not in usage(server, 400, kv_budget=400)
    assert get(server.url, "/cache").json["evicted_answer_tokens"] == 128 + 256
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400}
    answer = post(server.url, "/v1/chat/completions", {**chat, "ignore_eos": True}).json
    assert answer["usage"]["evicted_tokens"] == 128
    assert post(server.url, "/debug/audit", {}).json["ok"] is True


@pytest.mark.parametrize(
    "fields",
    [{"kv_budget": 255}, {"kv_budget": "300"}, {"kv_budget": 300, "echo": True, "logprobs": 1}],
)
def test_a_budget_that_cannot_be_kept_is_a_400_that_names_it(
    server: Server, fields: dict[str, Any]
) -> None:
    answer = post(server.url, "/v1/completions", body(4, **fields))
    assert answer.status == 400
    assert answer.json["error"]["param"] == "kv_budget"


def test_log_probabilities_of_the_prompt_keep_everything(server: Server) -> None:
    assert "evicted_tokens" not in usage(server, 400, echo=True, logprobs=1)


@pytest.mark.parametrize("value", ["window", "window:100", "oldest:512", "triattention:512"])
def test_another_value_of_the_flag_is_exit_2(value: str) -> None:
    done = run_forked(command, "run", "builtin", "x", "--kv-evict", value)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("foretoken run: ")
    assert "kv_evict" in line.replace("-", "_")
